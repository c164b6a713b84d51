"""The separation of the two machines is lived, not only linted."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def run_python(interpreter: Path | str, program: str, *flags: str) -> str:
    done = subprocess.run(
        [interpreter, *flags, "-c", program],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "module"),
    [("orchestrator", "torch"), ("orchestrator", "transformers"), ("host", "airflow"), ("host", "paramiko")],
)
def test_neither_environment_can_import_the_other_side(environment: str, module: str) -> None:
    answer = run_python(PROJECT / f".venv/{environment}/bin/python", f"import {module}")
    assert f"No module named '{module}'" in answer


def test_the_agent_starts_under_a_python_without_any_package() -> None:
    program = (
        "import sys; sys.path.insert(0, '.'); import eagle3_tasks.host.agent, eagle3_tasks.host.runner;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('torch', 'numpy', 'psutil', 'transformers', 'airflow')))"
    )
    # -S leaves site-packages out, -E the environment's paths.
    assert run_python(sys.executable, program, "-S", "-E").strip() == "[]"


def test_contracts_import_nothing_but_the_standard_library() -> None:
    program = (
        "import sys, pkgutil, importlib; sys.path.insert(0, '.'); import eagle3_tasks.contracts as c;"
        "[importlib.import_module(f'{c.__name__}.{m.name}') for m in pkgutil.iter_modules(c.__path__)];"
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)"
        " - {'__main__', 'eagle3_tasks'}))"
    )
    assert run_python(sys.executable, program, "-S", "-E").strip() == "[]"
