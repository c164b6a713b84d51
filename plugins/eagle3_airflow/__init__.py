"""The orchestrator's side: Airflow operators, sensors and triggers over SSH. No torch, no numpy."""
