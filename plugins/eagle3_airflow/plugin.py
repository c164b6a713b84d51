"""The Airflow plugin: found by its entry point in an installed package, else by ``eagle3_plugin.py``."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class Eagle3Plugin(AirflowPlugin):
    """Names the package in Airflow's list of plugins; pages and listeners hang here."""

    name = "eagle3"
