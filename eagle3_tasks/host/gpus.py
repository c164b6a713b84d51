"""The GPUs of this machine: which there are, which are free, and who holds the others.

``python -m eagle3_tasks.host.gpus`` prints a report that it gets through NVIDIA's library: a
process of its own, because a wedged driver lets its callers hang.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.probes import GpuHolder, GpuReport, GpusReport
from eagle3_tasks.contracts.stages import ProbeVerdict
from eagle3_tasks.host.child_command import run_module, run_with_deadline
from eagle3_tasks.host.nvidia_smi import (
    FIELDS,
    OLD_FIELDS,
    apps_arguments,
    parse_cards,
    parse_holders,
    query_arguments,
    with_holder_names,
)
from eagle3_tasks.host.process import generation_folder_of

DEADLINE_SECONDS = 15.0
HELD_MIB = 1024
"""A card with more memory in use than this is held by somebody; drivers and screens use less."""
_INVALID_QUERY = 2
_MIB = 1 << 20
_MAX_NAMED = 8


def read_gpus(*, deadline_seconds: float = DEADLINE_SECONDS) -> GpusReport:
    """Report on all cards through NVIDIA's Python library, else through ``nvidia-smi``."""
    if importlib.util.find_spec("pynvml") is not None:
        look = run_module(__spec__.name, deadline_seconds=deadline_seconds)
        if look.return_code is None:
            return _hung(deadline_seconds)
        try:
            return codec.loads(GpusReport, look.output, where="GPU report")
        except RequestRefused:
            pass
    return _read_nvidia_smi(deadline_seconds)


def judge_gpus(report: GpusReport, needed_cards: int, device: str, our_pids: Collection[int]) -> ProbeVerdict:
    """Decide whether the cards that a job with ``needed_cards`` uses, 0 and following, are free.

    A free card beyond those helps it nothing. Memory held at 0 % utilisation is held. What
    can't be learnt of a card is neither free nor busy: where the answer hangs on such cards,
    ``is_ready`` is None.
    """
    if device == "cpu":
        line = "no GPU is needed: the run chose the CPU."
        return ProbeVerdict(is_ready=True, line=line, figures={"needed_cards": 0})
    used = [card for card in report.cards if card.index < needed_cards]
    verdicts = [(card, *_judge_card(card, our_pids)) for card in used]
    free = [card.index for card, is_free, _ in verdicts if is_free]
    unknown = [card.index for card, is_free, _ in verdicts if is_free is None]
    others = [f"{card.index} {reason}" for card, is_free, reason in verdicts if not is_free]
    figures = {
        "needed_cards": needed_cards,
        "cards": len(report.cards),
        "free": free,
        "unknown": unknown,
        "held": [card.index for card, is_free, _ in verdicts if is_free is False],
        "used_mib": {str(card.index): card.used_mib for card in report.cards},
    }
    if report.problem and not report.cards:
        remedy = "A retry does not mend that." if report.is_broken else "That may pass."
        return ProbeVerdict(
            is_ready=False if report.is_broken else None,
            line=f"no GPU answers: {report.problem} {remedy}",
            figures=figures,
        )
    missing = sorted(set(range(needed_cards)) - {card.index for card in used})
    facts = (
        f"the job uses {_cards(range(needed_cards))}: {len(free)} of {needed_cards} free, "
        f"{len(report.cards)} answer in all"
    )
    if others:
        more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
        facts += f"; not free: {'; '.join(others[:_MAX_NAMED])}{more}"
    if report.problem:
        facts += f"; {report.problem}"
    if missing:
        line = f"{facts}. Missing: {_cards(missing)}; look for Xid errors in `dmesg`, or ask for fewer."
        return ProbeVerdict(is_ready=False, line=line, figures=figures)
    if len(free) == needed_cards:
        return ProbeVerdict(is_ready=True, line=f"{facts}.", figures=figures)
    if len(free) + len(unknown) == needed_cards:
        return ProbeVerdict(is_ready=None, line=f"cannot tell: {facts}.", figures=figures)
    return ProbeVerdict(is_ready=False, line=f"{facts}.", figures=figures)


def _cards(indices: Sequence[int]) -> str:
    """Name cards: ``card 2``, ``cards 0 to 3``, ``cards 1, 3``."""
    if not indices:
        return "no card"
    if len(indices) == 1:
        return f"card {indices[0]}"
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"cards {indices[0]} to {indices[-1]}"
    return f"cards {', '.join(map(str, indices))}"


def _judge_card(card: GpuReport, our_pids: Collection[int]) -> tuple[bool | None, str]:
    """Tell whether a card is free (None: cannot tell), and why not."""
    if card.needs_reset:
        return False, "needs a reset, although it may look alive"
    if card.holders:
        use = "unknown use" if card.utilization_percent is None else f"{card.utilization_percent} % used"
        memory = f"{card.used_mib} MiB" if card.used_mib is not None else "memory"
        names = ", ".join(_holder_name(holder, our_pids) for holder in card.holders)
        return False, f"{memory} held at {use} by {names}"
    if card.used_mib is None:
        return None, "does not say how much memory is in use" + (" (MIG is on)" if card.is_mig else "")
    if card.used_mib > HELD_MIB:
        return False, f"{card.used_mib} MiB held by no process that can be seen: owner unknown"
    return True, ""


def _holder_name(holder: GpuHolder, our_pids: Collection[int]) -> str:
    words = [f"pid {holder.pid}", holder.command or "", f"of {holder.user}" if holder.user else ""]
    if holder.is_ours or holder.pid in our_pids:
        words.append("(a job of this pipeline)")
    return " ".join(word for word in words if word)


def _hung(deadline_seconds: float) -> GpusReport:
    return GpusReport(
        cards=(), problem=f"the NVIDIA driver did not answer within {deadline_seconds:g} s.", is_broken=False
    )


def _read_nvidia_smi(deadline_seconds: float) -> GpusReport:
    program = shutil.which("nvidia-smi")
    if program is None:
        problem = "this host has no NVIDIA driver: neither its library nor nvidia-smi is there."
        return GpusReport(cards=(), problem=problem, is_broken=True)
    apps = run_with_deadline([program, *apps_arguments()], deadline_seconds)
    holders = parse_holders(apps.output.decode(errors="replace"))
    for fields in (FIELDS, OLD_FIELDS):
        look = run_with_deadline([program, *query_arguments(fields)], deadline_seconds)
        if look.return_code is None:
            return _hung(deadline_seconds)
        if look.return_code != _INVALID_QUERY:
            break
    # It names its troubles on either stream; without any, the second one is not its own.
    text = look.said if look.return_code else look.output.decode(errors="replace")
    report = parse_cards(look.return_code, text, fields=fields, holders=holders)
    pids = {holder.pid for card in report.cards for holder in card.holders or ()}
    return with_holder_names(report, {pid: describe_holder(pid, None) for pid in pids})


def describe_holder(pid: int, used_mib: int | None) -> GpuHolder:
    """Name a process that holds a card. The driver's numbers may be those of another container."""
    folder = Path("/proc") / str(pid)
    user = command = None
    try:
        command = (folder / "comm").read_text(errors="replace").strip()
        owner = folder.stat().st_uid
        try:
            user = pwd.getpwuid(owner).pw_name
        except KeyError:
            user = str(owner)
    except OSError:
        pass
    return GpuHolder(
        pid=pid, used_mib=used_mib, user=user, command=command, is_ours=generation_folder_of(pid) is not None
    )


def _read_library(nvml: Any) -> GpusReport:
    """Ask NVIDIA's library, value by value: what one card doesn't say, another may."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        problem = f"the NVIDIA driver can't be used: {error}."
        return GpusReport(cards=(), problem=problem, is_broken=True)
    cards: list[GpuReport] = []
    problems: list[str] = []
    for index in range(count):
        try:
            cards.append(_read_card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            problems.append(f"card {index} can't be read: {error}")
    if not cards and not problems:
        return GpusReport(cards=(), problem="no card was found.", is_broken=True)
    return GpusReport(cards=tuple(cards), problem="; ".join(problems) or None, is_broken=False)


def _read_card(nvml: Any, index: int, handle: Any) -> GpuReport:
    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    needs_reset = None
    try:
        # The name comes first: a card that fell off the bus has none.
        name = nvml.nvmlDeviceGetName(handle)
        memory, rates = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetUtilizationRates)
        mode, processes = ask(nvml.nvmlDeviceGetMigMode), ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        action = ask(nvml.nvmlDeviceGetFieldValues, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if action and action[0].nvmlReturn == nvml.NVML_SUCCESS:
            needs_reset = action[0].value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_RESET_REQUIRED:
            raise
        name, memory, rates, mode, processes, needs_reset = "unknown", None, None, None, None, True
    is_mig = None if mode is None else bool(mode[0])
    return GpuReport(
        index=index,
        uuid=ask(nvml.nvmlDeviceGetUUID) if not needs_reset else None,
        name=name,
        total_mib=memory.total // _MIB if memory and not is_mig else None,
        used_mib=memory.used // _MIB if memory and not is_mig else None,
        utilization_percent=rates.gpu if rates else None,
        needs_reset=needs_reset,
        is_mig=is_mig,
        holders=None if processes is None else tuple(_library_holder(process) for process in processes),
    )


def _library_holder(process: Any) -> GpuHolder:
    used = process.usedGpuMemory
    return describe_holder(process.pid, None if used is None else used // _MIB)


def main() -> int:
    """Print the report."""
    sys.stdout.write(codec.dumps(_read_library(importlib.import_module("pynvml"))))
    sys.stdout.flush()
    # The driver's library may hang in its own cleaning up.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
