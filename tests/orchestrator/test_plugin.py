"""Airflow finds the plugin once, from a checkout, from an installed package, and with both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_airflow.provider import get_provider_info

CHECKOUT = Path(__file__).parents[2]
LOAD = """
import json, sys
from pathlib import Path
import eagle3_tasks
from airflow import plugins_manager
from airflow.dag_processing.dagbag import BundleDagBag
plugins, errors = plugins_manager._get_plugins()
folder = Path(sys.argv[1])
bag = BundleDagBag(folder, bundle_path=folder, bundle_name="dags")
print(json.dumps({
    "plugins": [plugin.name for plugin in plugins if plugin.name == "eagle3"],
    "errors": errors,
    "modules": [name for name in ("remote_job", "stage", "params", "plugin") if name in sys.modules],
    "dags": sorted(bag.dags),
    "import_errors": bag.import_errors,
    "code": str(Path(eagle3_tasks.__file__).parent.parent),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the project's real wheel is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    # Built from a copy: a build leaves metadata beside the sources, which would count as installed.
    for name in ("eagle3_tasks", "plugins"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", source / "wheels", source], check=True, timeout=180
    )
    (wheel,) = (source / "wheels").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, timeout=180)
    return site


@pytest.mark.parametrize(("is_installed", "is_checkout"), [(False, True), (True, False), (True, True)])
def test_airflow_finds_plugin_and_dags_without_an_error(
    tmp_path: Path, site: Path, is_installed: bool, is_checkout: bool
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    path = [str(CHECKOUT), str(CHECKOUT / "plugins")] if is_checkout else []
    path += [str(site)] if is_installed else []
    result = subprocess.run(
        [sys.executable, "-c", LOAD, CHECKOUT / "dags"],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ":".join(path), "AIRFLOW_HOME": str(tmp_path / "home"),
             "AIRFLOW__CORE__PLUGINS_FOLDER": str(CHECKOUT / "plugins" if is_checkout else empty)},
    )  # fmt: skip
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found == {
        "plugins": ["eagle3"],
        "errors": {},
        "modules": [],
        "dags": ["eagle3_setup_host", "eagle3_train"],
        "import_errors": {},
        "code": str(CHECKOUT if is_checkout else site),
    }


def test_the_wheel_carries_the_lock_file_that_sets_up_a_host(site: Path) -> None:
    lock = (site / "eagle3_tasks/host_requirements.lock").read_text()
    assert lock == (CHECKOUT / "eagle3_tasks/host_requirements.lock").read_text()


def test_everything_that_the_provider_names_can_be_imported() -> None:
    info = get_provider_info()
    for kind in ("operators", "sensors", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                __import__(module)
