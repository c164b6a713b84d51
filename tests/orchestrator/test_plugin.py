"""Airflow finds the plugin once, from a checkout, from an installed package, and with both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_airflow.provider import get_provider_info

CHECKOUT = Path(__file__).parents[2]
LOAD = """
import json
from airflow import plugins_manager
plugins, errors = plugins_manager._get_plugins()
import sys
print(json.dumps({
    "plugins": [plugin.name for plugin in plugins if plugin.name == "eagle3"],
    "errors": errors,
    "modules": [name for name in ("remote_job", "stage", "params", "plugin") if name in sys.modules],
}))
"""


def pretend_installed(folder: Path) -> Path:
    """Write the metadata that an installed wheel would have."""
    metadata = folder / "eagle3_airflow-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle3-airflow\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[airflow.plugins]\neagle3 = eagle3_airflow.plugin:Eagle3Plugin\n"
        "[apache_airflow_provider]\nprovider_info = eagle3_airflow.provider:get_provider_info\n"
    )
    return folder


@pytest.mark.parametrize(("is_installed", "is_checkout"), [(False, True), (True, False), (True, True)])
def test_the_plugin_is_found_exactly_once(tmp_path: Path, is_installed: bool, is_checkout: bool) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    path = [str(CHECKOUT), str(CHECKOUT / "plugins")]
    if is_installed:
        path.append(str(pretend_installed(tmp_path / "site")))
    result = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": ":".join(path), "AIRFLOW_HOME": str(tmp_path / "home"),
             "AIRFLOW__CORE__PLUGINS_FOLDER": str(CHECKOUT / "plugins" if is_checkout else empty)},
    )  # fmt: skip
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found == {"plugins": ["eagle3"], "errors": {}, "modules": []}


def test_everything_that_the_provider_names_can_be_imported() -> None:
    info = get_provider_info()
    for kind in ("operators", "sensors", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                __import__(module)
