"""GPUs as drivers describe them: UNKNOWN is never 0, and held memory is held at 0 % use."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_tasks.contracts.probes import GpuHolder, GpusReport
from eagle3_tasks.host import gpus
from eagle3_tasks.host.gpus import judge_gpus
from eagle3_tasks.host.nvidia_smi import FIELDS, OLD_FIELDS, parse_cards, parse_holders, query_arguments

IDLE = "0, NVIDIA L40S, 0, 4, 46068, 33.1, Disabled, 0, None, GPU-a"
HELD = "1, NVIDIA L40S, 0, 41000, 46068, 95.0, Disabled, 0, None, GPU-b"


def judged(text: str, needed: int, *, exit_code: int = 0, apps: str = "", ours: tuple[int, ...] = ()):
    return judge_gpus(parse_cards(exit_code, text, holders=parse_holders(apps)), needed, "cuda", ours)


def test_an_idle_card_is_free_and_one_with_memory_held_at_no_use_is_not():
    apps = "GPU-b, 517, 40500\n"
    assert judged(IDLE, 1).is_ready is True
    verdict = judged(f"{IDLE}\n{HELD}\n", 2, apps=apps)
    assert verdict.is_ready is False
    assert "1 41000 MiB held at 0 % used by pid 517" in verdict.line
    assert (verdict.figures["free"], verdict.figures["held"]) == ([0], [1])
    assert "a job of this pipeline" in judged(f"{IDLE}\n{HELD}\n", 2, apps=apps, ours=(517,)).line


def test_a_free_card_that_the_job_does_not_use_makes_it_no_more_ready():
    free = IDLE.replace("0,", "2,", 1)
    held = HELD.replace("1,", "0,", 1)
    verdict = judged(f"{held}\n{IDLE.replace('0,', '1,', 1)}\n{free}", 2)
    assert verdict.is_ready is False
    assert verdict.line.startswith(
        "the job uses cards 0 to 1: 1 of 2 free, 3 answer in all; not free: 0 41000"
    )
    busy_elsewhere = judged(f"{IDLE}\n{HELD}", 1)
    assert busy_elsewhere.is_ready is True
    assert busy_elsewhere.line == "the job uses card 0: 1 of 1 free, 2 answer in all."


def test_memory_held_without_a_process_is_busy_with_an_unknown_owner():
    verdict = judged(HELD.replace("1,", "0,", 1), 1)
    assert verdict.is_ready is False
    assert "owner unknown" in verdict.line


@pytest.mark.parametrize(
    "row",
    [
        "0, H100, [N/A], [Insufficient Permissions], [Insufficient Permissions], 90, Enabled, [N/A], None",
        "0, NVIDIA GB10, 3, [N/A], [N/A], 4.1, [N/A], [N/A], [N/A], GPU-u",
        "0, Some Card, [Not Supported], [Unknown Error], ERR!, N/A, [Not Supported], , , GPU-x",
    ],
)
def test_what_a_card_does_not_say_is_unknown_and_the_answer_is_cannot_tell(row: str):
    report = parse_cards(0, row, holders={})
    assert (report.cards[0].used_mib, report.cards[0].total_mib) == (None, None)
    verdict = judge_gpus(report, 1, "cuda", ())
    assert verdict.is_ready is None
    assert verdict.line.startswith("cannot tell")


def test_a_card_without_memory_figures_is_busy_when_a_process_is_known():
    row = "0, NVIDIA GB10, 3, [N/A], [N/A], 4.1, [N/A], [N/A], None, GPU-u"
    assert judged(row, 1, apps="GPU-u, 88, [N/A]").is_ready is False


@pytest.mark.parametrize("action", ["Reset", "Drain and Reset", "Reboot"])
def test_a_card_that_needs_a_reset_is_not_free_although_it_looks_alive(action: str):
    verdict = judged(f"{IDLE}\n1, NVIDIA L40S, 61, 4, 46068, 80, [N/A], 0, {action}, GPU-c", 2)
    assert verdict.is_ready is False
    assert "1 needs a reset" in verdict.line


def test_a_comma_in_a_name_is_no_column_and_a_missing_card_is_counted():
    rows = "\n".join(
        f'{n}, "Foo, Bar, 48GB", 0, 5, 49140, 20.0, Disabled, 0, None, GPU-{n}' for n in (0, 1, 3)
    )
    report = parse_cards(0, rows, holders={})
    assert {card.name for card in report.cards} == {"Foo, Bar, 48GB"}
    verdict = judge_gpus(report, 4, "cuda", ())
    assert verdict.is_ready is False
    assert "Missing: card 2;" in verdict.line


def test_a_driver_that_does_not_fit_its_library_is_broken_and_waiting_does_not_help():
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 999.1"
    report = parse_cards(18, text)
    assert report.is_broken
    verdict = judge_gpus(report, 1, "cuda", ())
    assert verdict.is_ready is False
    assert "Reboot the host" in verdict.line
    assert "999.1" in verdict.line


def test_a_card_that_fell_off_the_bus_leaves_the_others_and_is_named():
    text = f"{IDLE}\nUnable to determine the device handle for GPU1: 0000:41:00.0: Unknown Error\n"
    report = parse_cards(15, text, holders={})
    assert len(report.cards) == 1
    assert "0000:41:00.0" in (report.problem or "")


def test_older_drivers_are_asked_without_the_recovery_action():
    row = "0, NVIDIA T4, 0, 2, 15360, 9.0, [N/A], 0, GPU-o"
    card = parse_cards(0, row, fields=OLD_FIELDS, holders={}).cards[0]
    assert (card.needs_reset, card.uuid, card.holders) == (None, "GPU-o", ())
    assert query_arguments(FIELDS)[0].endswith("gpu_recovery_action,uuid")


def test_a_run_on_the_cpu_needs_no_gpu_and_one_on_cuda_without_a_driver_is_not_ready():
    nothing = GpusReport(cards=(), problem="no driver.", is_broken=True)
    on_cpu = judge_gpus(nothing, 8, "cpu", ())
    assert (on_cpu.is_ready, on_cpu.line) == (True, "no GPU is needed: the run chose the CPU.")
    on_cuda = judge_gpus(nothing, 8, "cuda", ())
    assert on_cuda.is_ready is False
    assert "no driver" in on_cuda.line


def stand_in(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_nvidia_smi_is_asked_where_the_library_is_absent_and_old_ones_are_asked_again(without_library: Path):
    row = "0, NVIDIA T4, 0, 9000, 15360, 9.0, [N/A], 0, GPU-o"
    script = f"""case "$1" in
      *compute-apps*) echo "GPU-o, $PPID, 8990";;
      *gpu_recovery_action*) echo 'Field "gpu_recovery_action" is not a valid field to query.'; exit 2;;
      *) echo "{row}";;
    esac"""
    stand_in(without_library, script)
    [card] = gpus.read_gpus().cards
    assert card.holders is not None
    assert card.holders[0].command
    assert (card.used_mib, card.needs_reset, card.holders[0].used_mib) == (9000, None, 8990)


def test_a_driver_that_hangs_is_cannot_tell(without_library: Path):
    stand_in(without_library, "exec sleep 60")
    report = gpus.read_gpus(deadline_seconds=0.3)
    assert "did not answer within 0.3 s" in (report.problem or "")
    assert judge_gpus(report, 1, "cuda", ()).is_ready is None


def test_a_host_without_any_driver_says_so(without_library: Path):
    assert "no NVIDIA driver" in (gpus.read_gpus().problem or "")


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def library(**answers: Any) -> Any:
    """Stand in for NVIDIA's library: an answer a question, or an error number."""

    def answer(name: str) -> Any:
        def ask(*_arguments: Any) -> Any:
            value = answers.get(name, 3)
            if type(value) is int:
                raise NvmlError(value)
            return value

        return ask

    names = (
        "Name",
        "MemoryInfo",
        "UtilizationRates",
        "MigMode",
        "ComputeRunningProcesses",
        "FieldValues",
        "UUID",
    )
    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_ERROR_GPU_IS_LOST=15,
        NVML_ERROR_RESET_REQUIRED=16,
        NVML_SUCCESS=0,
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION=230,
        NVML_GPU_RECOVERY_ACTION_NONE=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        **{f"nvmlDeviceGet{name}": answer(name) for name in names},
    )


def test_the_library_and_nvidia_smi_tell_the_same():
    mib = 1 << 20
    answers = library(
        Name="NVIDIA L40S",
        MemoryInfo=SimpleNamespace(total=46068 * mib, used=41000 * mib),
        UtilizationRates=SimpleNamespace(gpu=0),
        MigMode=[0, 0],
        ComputeRunningProcesses=[SimpleNamespace(pid=2**30, usedGpuMemory=40500 * mib)],
        FieldValues=[SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
        UUID="GPU-b",
    )
    [card] = gpus._read_library(answers).cards
    from_text = parse_cards(
        0, HELD.replace("1,", "0,", 1), holders=parse_holders(f"GPU-b, {2**30}, 40500")
    ).cards[0]
    assert card == from_text
    assert card.holders == (GpuHolder(pid=2**30, used_mib=40500, user=None, command=None, is_ours=False),)


def test_what_the_library_does_not_support_is_unknown():
    [card] = gpus._read_library(library(Name="NVIDIA GB10")).cards
    assert (card.used_mib, card.utilization_percent, card.holders, card.needs_reset, card.is_mig) == (
        None,
    ) * 5


def test_a_lost_card_is_missing_and_one_that_must_be_reset_says_so():
    lost = gpus._read_library(library(Name=15))
    assert (lost.cards, "card 0 can't be read" in (lost.problem or "")) == ((), True)
    [card] = gpus._read_library(library(Name="NVIDIA L40S", MemoryInfo=16)).cards
    assert card.needs_reset is True
