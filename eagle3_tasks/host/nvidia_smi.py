"""Reading what ``nvidia-smi`` prints, for hosts without its Python library. Pure: runs nothing.

What it can't say, it says in many ways; each of them is UNKNOWN here, never 0 and never idle.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence

from eagle3_tasks.contracts.probes import GpuHolder, GpuReport, GpusReport

FIELDS = (
    "index", "name", "utilization.gpu", "memory.used", "memory.total", "power.draw", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total", "gpu_recovery_action", "uuid",
)  # fmt: skip
"""What is asked of ``--query-gpu``, in this order. Drivers before 565 don't know the recovery action."""
OLD_FIELDS = tuple(field for field in FIELDS if field != "gpu_recovery_action")
APPS_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory")

_EXIT_CODES = {
    2: "nvidia-smi does not know what it was asked",
    4: "this user may not ask the driver",
    6: "no card was found",
    8: "a card's power cables are not attached",
    9: "the NVIDIA driver is not loaded",
    10: "the kernel has trouble with a card's interrupts",
    12: "the library of the driver (libnvidia-ml.so) is not there",
    13: "this driver does not know the function",
    15: "a card has fallen off the bus or is not accessible",
    18: "the kernel's driver and its library have different versions. Reboot the host",
}


def query_arguments(fields: Sequence[str]) -> list[str]:
    return [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def apps_arguments() -> list[str]:
    return [f"--query-compute-apps={','.join(APPS_FIELDS)}", "--format=csv,noheader,nounits"]


def parse_cards(
    exit_code: int,
    output: str,
    *,
    fields: Sequence[str] = FIELDS,
    holders: Mapping[str, Sequence[GpuHolder]] | None = None,
) -> GpusReport:
    """Read the answer to :func:`query_arguments`.

    Args:
        exit_code: of nvidia-smi.
        output: standard output and error together: errors come on either.
        fields: what was asked; columns that are missing at the end of a row are UNKNOWN.
        holders: who holds memory, by the cards' uuid; None where it could not be learnt.
    """
    cards: list[GpuReport] = []
    notes: list[str] = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) > 2 and row[0].strip().isdigit():
            cards.append(_card(dict(zip(fields, (value.strip() for value in row), strict=False)), holders))
        elif any(row):
            notes.append(", ".join(row).strip())
    if exit_code == 0 and cards:
        return GpusReport(cards=tuple(cards), problem="; ".join(notes) or None, is_broken=False)
    said = f" ({' / '.join(notes)})" if notes else ""
    fact = _EXIT_CODES.get(exit_code, "no card was found" if exit_code == 0 else "nvidia-smi failed")
    return GpusReport(cards=tuple(cards), problem=f"{fact}; exit code {exit_code}{said}.", is_broken=True)


def parse_holders(output: str) -> dict[str, list[GpuHolder]]:
    """Read the answer to :func:`apps_arguments`, by the cards' uuid."""
    holders: dict[str, list[GpuHolder]] = {}
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) < 2 or not row[1].strip().isdigit():
            continue
        holder = GpuHolder(
            pid=int(row[1]),
            used_mib=_number(row[2]) if len(row) > 2 else None,
            user=None,
            command=None,
            is_ours=False,
        )
        holders.setdefault(row[0].strip(), []).append(holder)
    return holders


def with_holder_names(report: GpusReport, name: Mapping[int, GpuHolder]) -> GpusReport:
    """Put user, command and ownership, by process number, into a report's holders."""
    cards = tuple(
        dataclasses.replace(card, holders=tuple(_named(holder, name) for holder in card.holders))
        if card.holders
        else card
        for card in report.cards
    )
    return dataclasses.replace(report, cards=cards)


def _named(holder: GpuHolder, name: Mapping[int, GpuHolder]) -> GpuHolder:
    known = name.get(holder.pid)
    return dataclasses.replace(known, used_mib=holder.used_mib) if known else holder


def _card(row: Mapping[str, str], holders: Mapping[str, Sequence[GpuHolder]] | None) -> GpuReport:
    uuid = row.get("uuid") or None
    is_mig = {"Enabled": True, "Disabled": False}.get(row.get("mig.mode.current", ""))
    action = row.get("gpu_recovery_action", "")
    return GpuReport(
        index=int(row["index"]),
        uuid=uuid,
        name=row["name"],
        total_mib=_number(row.get("memory.total")),
        used_mib=_number(row.get("memory.used")),
        utilization_percent=_number(row.get("utilization.gpu")),
        needs_reset=None if _is_unknown(action) else action != "None",
        is_mig=is_mig,
        holders=None if holders is None or uuid is None else tuple(holders.get(uuid, ())),
    )


def _is_unknown(value: str) -> bool:
    return not value or value[0] == "[" or value in ("N/A", "ERR!", "Unknown Error")


def _number(value: str | None) -> int | None:
    if value is None or _is_unknown(value):
        return None
    try:
        return round(float(value))
    except ValueError:
        return None
