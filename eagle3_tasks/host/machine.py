"""Which machine this is: a reboot and a restarted container both make it another one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

MACHINE_ID_VARIABLE = "EAGLE3_MACHINE_ID"
"""Environment variable that stands in for the machine's identity. For fault tests."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_PROCESS = Path("/proc/1/stat")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def machine_id(environment: Mapping[str, str]) -> str:
    """Name the running system, such as ``boot-545b…:init-83:ns-4026531836``.

    The kernel's boot id alone would not do: a restarted container keeps it, while its
    processes are gone. Start time of pid 1 (clock ticks after boot) and the inode of the
    pid namespace tell such a restart.
    """
    given = environment.get(MACHINE_ID_VARIABLE)
    if given:
        return given
    namespace = _PID_NAMESPACE.readlink().name.strip("pid:[]")
    return f"boot-{_BOOT_ID.read_text().strip()}:init-{_first_process_start()}:ns-{namespace}"


def boot_seconds() -> float:
    """Give the seconds since boot, suspended time included; no change of the clock moves them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def host_name() -> str:
    """Name this machine in messages."""
    return os.uname().nodename


def _first_process_start() -> str:
    try:
        text = _FIRST_PROCESS.read_text(errors="replace")
    except OSError:
        # /proc mounted with hidepid: boot id and namespace still tell reboots.
        return "hidden"
    return text.rpartition(")")[2].split()[19]
