"""Setting up a host: an environment from a lock file and a folder of wheels, without internet."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from eagle3_tasks.commands import setup_host
from eagle3_tasks.commands.setup_host import run_setup_host
from eagle3_tasks.contracts.errors import InvalidSettings, MissingSoftware
from eagle3_tasks.contracts.jobs import Progress, run_key
from eagle3_tasks.contracts.settings import settings_from_flat
from eagle3_tasks.contracts.stages import StageSpec
from eagle3_tasks.host.stage_context import StageContext


def make_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


class Host:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "root"
        self.package = folder / "package"
        self.package.mkdir()
        self.progress: list[Progress] = []
        monkeypatch.setattr(setup_host, "package_folder", lambda: self.package)

    def lock(self, text: str) -> None:
        (self.package / "host_requirements.lock").write_text(text)

    def set_up(self) -> dict[str, Any]:
        values = {
            "root": str(self.root),
            "conversations_path": "/data/x.jsonl",
            "target_model": "some/model",
        }
        spec = StageSpec(run_key=run_key(dag_id="tests", run_id="setup"), settings=settings_from_flat(values))
        return run_setup_host(StageContext(spec=spec, generation=1, report_progress=self.progress.append))

    def version(self, name: str) -> str:
        program = f"import {name}; print({name}.VERSION)"
        return subprocess.check_output([self.root / "env/bin/python", "-c", program], text=True).strip()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_an_environment_is_made_once_resumed_after_a_failure_and_switched_when_the_lock_changes(host: Host):
    wheels = host.root / "wheels"
    host.root.mkdir()
    make_wheel(wheels, "tiny_one", "1.0")
    host.lock("tiny_one==1.0\ntiny_two==2.0\n")
    with pytest.raises(MissingSoftware, match=r"put the wheels of that file into .*/wheels"):
        host.set_up()
    assert not (host.root / "env").exists(), "what is half built is never used"

    make_wheel(wheels, "tiny_two", "2.0")
    first = host.set_up()
    assert first["was_built"] is True
    assert (host.version("tiny_one"), host.version("tiny_two")) == ("1.0", "2.0")
    assert (host.progress[-1].done, host.progress[-1].total) == (2, 2)

    again = host.set_up()
    assert (again["was_built"], again["environment"]) == (False, first["environment"])
    assert again["seconds"] < 3

    (host.root / "env").unlink()
    (host.root / "env").mkdir()
    with pytest.raises(InvalidSettings, match="a folder that set-up did not make"):
        host.set_up()


def test_the_name_of_an_environment_depends_on_its_lock_file():
    digest = setup_host.environment_digest(b"torch==2.13.0\n")
    assert digest != setup_host.environment_digest(b"torch==2.13.1\n")
    assert digest == setup_host.environment_digest(b"torch==2.13.0\n")


def test_without_a_folder_of_wheels_the_index_is_asked(tmp_path: Path):
    assert "--no-index" not in setup_host.pip_arguments(tmp_path / "lock", tmp_path / "wheels")
    (tmp_path / "wheels").mkdir()
    assert "--no-index" in setup_host.pip_arguments(tmp_path / "lock", tmp_path / "wheels")
