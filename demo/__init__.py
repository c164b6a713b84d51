"""The demo: a tiny world, an SSH server, an Airflow, and one run of the pipeline."""
