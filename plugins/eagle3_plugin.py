"""The one file that Airflow scans here: it offers the plugin of a checkout.

Where the package is installed, its entry point offers the plugin; twice would be an
import error in Airflow, so this file then offers nothing.
"""

from importlib.metadata import entry_points

if "eagle3" not in entry_points(group="airflow.plugins").names:
    from eagle3_airflow.plugin import Eagle3Plugin as Eagle3Plugin  # noqa: PLC0414 - re-exported for Airflow
