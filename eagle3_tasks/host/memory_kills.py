"""How often the kernel killed for memory in a control group: the proof behind OutOfMemory."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def memory_group_of(pid: int) -> Path | None:
    """Find the file that counts memory kills in the control group of ``pid``, if there is one."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and _exists(found := _CGROUPS / path.lstrip("/") / "memory.events"):
            return found
        if "memory" in controllers.split(","):
            found = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            if _exists(found):
                return found
    return None


def count_memory_kills(counter: Path | None) -> int:
    """Read how many processes of the group the kernel has killed for memory; 0 if unknown."""
    if counter is None:
        return 0
    try:
        match = _COUNTER.search(counter.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
