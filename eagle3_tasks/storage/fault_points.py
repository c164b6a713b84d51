"""Named places where the fault suite stops, delays or fails the process. Silent in a real run.

``EAGLE3_FAULT_POINTS`` names a JSON file with a list of faults. It is read at each
point, so a fault ends when the file is deleted::

    [{"point": "extract_started", "match": "rows_000150-000300", "raise": "EngineProblem: injected"},
     {"point": "segment_renamed", "after": 2, "exit": 137},
     {"point": "sample_written", "sleep_seconds": 0.05}]

``match`` must occur in the point's subject; ``after`` counts the passes of this process.
"""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts import errors

VARIABLE = "EAGLE3_FAULT_POINTS"
_passes: collections.Counter[str] = collections.Counter()


def fault_point(point: str, subject: str = "") -> None:
    """Do what the fault file says for this point, if there is one.

    Args:
        point: the place's name.
        subject: what is being worked on there, such as a shard's folder name.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        faults: list[dict[str, Any]] = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return
    _passes[point] += 1
    for fault in faults:
        if fault["point"] != point or fault.get("match", "") not in subject:
            continue
        if "after" in fault and _passes[point] != fault["after"]:
            continue
        time.sleep(fault.get("sleep_seconds", 0.0))
        if "exit" in fault:
            os._exit(fault["exit"])
        if "raise" in fault:
            kind, _, message = fault["raise"].partition(": ")
            raise getattr(errors, kind)(message)
