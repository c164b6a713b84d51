"""Airflow's folders for these tests; set before Airflow is imported, because it reads them once."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

os.environ.setdefault("AIRFLOW_HOME", str(CHECKOUT / ".tmp" / "airflow"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
os.environ.setdefault("AIRFLOW__CORE__PLUGINS_FOLDER", str(CHECKOUT / "plugins"))
os.environ.setdefault("AIRFLOW__CORE__DAGS_FOLDER", str(CHECKOUT / "dags"))
