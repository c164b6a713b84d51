"""Write the lock files: exact pins of what is installed in this interpreter's environment.

``make locks`` runs this in both environments after an upgrade. A lock names the closure
of its roots, read from the installed metadata; local version parts (``+cpu``) are left
out, because a GPU host takes another build of the same version.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
LOCKS: dict[str, dict[Path, tuple[str, ...]]] = {
    "host": {
        HERE.parent / "eagle3_tasks/host_requirements.lock": (
            "torch", "transformers", "safetensors", "numpy", "accelerate", "tiktoken", "matplotlib",
            "psutil",
            "nvidia-ml-py", "jinja2",
        ),
        HERE / "host-development.txt": (
            "pytest", "pytest-timeout", "hypothesis", "coverage", "chatterbot-corpus", "pyyaml",
        ),
    },
    "orchestrator": {
        HERE / "orchestrator.txt": (
            "apache-airflow", "apache-airflow-providers-ssh", "apache-airflow-providers-standard", "asyncssh",
            "paramiko",
        ),
        HERE / "orchestrator-development.txt": (
            "pytest", "pytest-timeout", "hypothesis", "coverage", "ruff", "basedpyright",
            "import-linter", "codespell", "build",
        ),
    },
}  # fmt: skip


def closure(roots: tuple[str, ...]) -> dict[str, str]:
    """Map each needed distribution to its installed version, extras of requirements included."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, "") for root in roots]
    while waiting:
        written, extra = waiting.pop()
        name = re.sub(r"[-_.]+", "-", written).lower()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found = distribution(name)
        pins[name] = found.version.split("+")[0]
        for requirement in map(Requirement, found.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return dict(sorted(pins.items()))


def main(environment: str) -> None:
    done: set[str] = set()
    for path, roots in LOCKS[environment].items():
        pins = {name: version for name, version in closure(roots).items() if name not in done}
        done |= set(pins)
        path.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))


if __name__ == "__main__":
    main(sys.argv[1])
