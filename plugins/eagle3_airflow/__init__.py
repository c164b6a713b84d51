"""Airflow operators, triggers and sensors that drive the pipeline over SSH."""
