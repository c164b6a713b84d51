"""The disk probe: what a writer may use, and disks that stall, refuse or fill up."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import DiskProblem
from eagle3_tasks.contracts.probes import DiskReport
from eagle3_tasks.host.child_command import Look, run_with_deadline
from eagle3_tasks.host.disk import MINIMUM_INODES, judge_disk, parse_report, read_disk
from eagle3_tasks.host.mounts import find_mount, parse_mounts
from eagle3_tasks.host.process import identity_of
from eagle3_tasks.host.root_folder import durability_problem

GB = 10**9
HEALTHY = DiskReport(
    path="/data/eagle3",
    file_system="ext4",
    total_bytes=270 * GB,
    free_bytes=86 * GB,
    free_inodes=9_000_000,
    is_read_only=False,
    is_stalled=False,
    write_seconds=0.002,
)
MOUNTS = r"""
21 1 8:1 / / rw,relatime - ext4 /dev/vda1 rw
30 21 0:40 / /mnt/with\040blank\011and\134slash rw - nfs4 nas:/export rw,vers=4.2
31 21 0:41 / /data rw,noatime - xfs /dev/sdb ro,attr2
32 21 0:42 / /data rw,noatime shared:7 master:3 - ceph mon:/ rw
33 32 0:43 / /data/eagle3/jobs rw - ext4 /dev/sdc rw
34 21 0:44 / /tmp rw - tmpfs tmpfs rw
a line that is none
"""


def test_a_real_folder_is_measured_and_written_to(tmp_path: Path):
    report = read_disk(tmp_path / "not" / "made" / "yet")
    status = os.statvfs(tmp_path)
    assert report.path == str(tmp_path)
    assert report.write_seconds is not None
    assert 0 < report.write_seconds < 10
    assert abs(report.free_bytes - status.f_bavail * status.f_frsize) < GB
    assert not report.is_stalled
    assert not report.is_read_only
    assert list(tmp_path.iterdir()) == []


def look(output: bytes, errors: bytes = b"", *, return_code: int | None = 0) -> Look:
    return Look(return_code=return_code, output=output, errors=errors)


def test_what_a_loader_prints_for_each_process_does_not_hide_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libmonitor.so")
    found = run_with_deadline([sys.executable, "-c", "print(1)"], 10.0)
    assert b"libmonitor.so" in found.errors
    assert read_disk(tmp_path).write_seconds is not None


def test_a_report_that_stops_before_the_write_is_a_stalled_disk_however_much_is_free():
    figures = codec.dumps(dataclasses.replace(HEALTHY, write_seconds=None)).encode()
    verdict = judge_disk(parse_report("/data", look(figures + b"\n", return_code=None)), 0, 0)
    assert verdict.is_ready is False
    assert "stalled" in verdict.line
    assert verdict.figures["is_stalled"] is True


def test_a_disk_that_gives_not_even_figures_is_stalled():
    assert parse_report("/data", look(b"", return_code=None)).is_stalled


def test_a_probe_that_fails_says_what_it_printed():
    with pytest.raises(DiskProblem, match="Traceback: no such device"):
        parse_report("/data", look(b"", b"Traceback: no such device", return_code=1))


def test_a_write_that_fails_at_once_is_not_ready_and_says_why():
    lines = codec.dumps(HEALTHY) + '\n{"seconds": null, "error": "Disk quota exceeded"}\n'
    verdict = judge_disk(parse_report("/data", look(lines.encode())), 0, 0)
    assert (verdict.is_ready, "Disk quota exceeded" in verdict.line) == (False, True)


@pytest.mark.parametrize(
    ("changes", "needed", "reserve", "words"),
    [
        ({}, 80 * GB, 10 * GB, "Free 4.0 GB, or lower disk_reserve_gb"),
        ({"is_read_only": True}, 0, 0, "read-only"),
        ({"free_inodes": MINIMUM_INODES - 1}, 0, 0, "9999 inodes are free"),
    ],
)
def test_what_stands_in_the_way_is_named_with_its_numbers(
    changes: dict, needed: int, reserve: int, words: str
):
    verdict = judge_disk(dataclasses.replace(HEALTHY, **changes), needed, reserve)
    assert verdict.is_ready is False
    assert words in verdict.line


def test_enough_beside_the_reserve_is_ready_and_unknown_inodes_do_not_matter():
    verdict = judge_disk(dataclasses.replace(HEALTHY, free_inodes=None), 76 * GB, 10 * GB)
    assert (verdict.is_ready, verdict.figures["missing_bytes"]) == (True, 0)


def test_a_look_that_hangs_ends_at_its_deadline():
    began = time.monotonic()
    found = run_with_deadline(["sh", "-c", "echo $$; exec sleep 60"], 0.3)
    assert found.return_code is None
    assert time.monotonic() - began < 5
    pid = int(found.output)
    deadline = time.monotonic() + 5
    while identity_of(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert identity_of(pid) is None, signal.SIGKILL


def test_mounts_with_odd_names_are_read_and_the_last_one_on_a_folder_counts():
    mounts = parse_mounts(MOUNTS)
    odd = find_mount(Path("/mnt/with blank\tand\\slash/x"), mounts)
    assert odd is not None
    assert odd.file_system == "nfs4"
    for path, kind in (("/data/eagle3", "ceph"), ("/data/eagle3/jobs/k", "ext4"), ("/database", "ext4")):
        found = find_mount(Path(path), mounts)
        assert found is not None
        assert found.file_system == kind, path
    assert mounts[2].is_read_only, "the file system may be read-only under a mount that is not"
    assert find_mount(Path("/"), []) is None


def test_only_jobs_must_not_lie_on_a_network_file_system():
    nfs = parse_mounts("30 21 0:40 / /mnt rw - nfs4 nas:/export rw")[0]
    memory = parse_mounts("30 21 0:40 / /mnt rw - tmpfs tmpfs rw")[0]
    assert "mount a local disk at /mnt/eagle3/jobs" in (
        durability_problem(Path("/mnt/eagle3/jobs"), nfs) or ""
    )
    assert durability_problem(Path("/mnt/eagle3"), nfs) is None
    assert "reboot empties" in (durability_problem(Path("/mnt/eagle3"), memory) or "")
