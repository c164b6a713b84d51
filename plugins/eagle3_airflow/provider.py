"""What Airflow learns of this package from its entry point ``apache_airflow_provider``."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    return {
        "package-name": "eagle3-airflow",
        "name": "EAGLE-3",
        "description": "Makes EAGLE-3 draft models on a remote GPU host.",
        "integrations": [
            {
                "integration-name": "EAGLE-3",
                "external-doc-url": "https://github.com/SafeAILab/EAGLE",
                "tags": ["service"],
            }
        ],
        "operators": [
            {
                "integration-name": "EAGLE-3",
                "python-modules": ["eagle3_airflow.operators.remote_job", "eagle3_airflow.operators.stage"],
            }
        ],
        "sensors": [{"integration-name": "EAGLE-3", "python-modules": ["eagle3_airflow.sensors.host_probe"]}],
        "triggers": [
            {
                "integration-name": "EAGLE-3",
                "python-modules": [
                    "eagle3_airflow.triggers.remote_job",
                    "eagle3_airflow.triggers.host_wait",
                    "eagle3_airflow.triggers.host_probe",
                ],
            }
        ],
    }
