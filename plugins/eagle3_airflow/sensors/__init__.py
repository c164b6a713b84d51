"""Sensors that ask GPU hosts."""
