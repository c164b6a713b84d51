"""``eagle3 probe``: what a sensor wants to know of the host, answered in one line and figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eagle3_tasks.contracts.paths import RootLayout
from eagle3_tasks.contracts.probes import GpusReport
from eagle3_tasks.contracts.run_records import PlanRecord
from eagle3_tasks.contracts.stages import ProbeSpec, ProbeVerdict
from eagle3_tasks.host.disk import GB, judge_disk, read_disk
from eagle3_tasks.host.gpus import judge_gpus, read_gpus
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.stage_context import StageContext

NOT_ASKED = GpusReport(cards=(), problem=None, is_broken=False)
"""Stands for a driver that nobody has to ask, because the run chose the CPU."""


def run_probe(spec: ProbeSpec) -> ProbeVerdict:
    """Look at the disk or the GPUs for one run.

    Raises:
        InvalidInput: the disk is asked about before the run's plan exists.
        DiskProblem: the system gives no figures for the disk.
    """
    verdict = _probe_disk(spec) if spec.kind == "disk" else _probe_gpus(spec)
    return dataclasses.replace(verdict, line=f"{host_name()}: {verdict.line}")


def missing_bytes(layout: RootLayout[Path], plan: PlanRecord) -> int:
    """Count the tensor bytes of the run's samples that no receipt names.

    Counted sample by sample, for a capture is shared: what other datasets' samples hold of
    it is no part of this run. No folder is walked and no log's counter believed.
    """
    from eagle3_tasks.data.dataset import Dataset
    from eagle3_tasks.storage.capture import Capture

    dataset, capture = Dataset(layout.dataset(plan.dataset)), Capture(layout.capture(plan.capture))
    capture.load_index()
    lengths = dataset.lengths()
    # Rows that differ in their loss mask alone are one sample of the capture.
    tokens = {dataset.sample(row): int(lengths[row]) for row in range(dataset.num_samples)}
    return plan.bytes_per_token * sum(length for sample, length in tokens.items() if not capture.has(sample))


def _probe_disk(spec: ProbeSpec) -> ProbeVerdict:
    context = StageContext(spec=spec.stage, generation=1, report_progress=lambda _progress: None)
    host = context.settings.host
    reserve = round(host.disk_reserve_gb * GB)
    # The timed write comes first: on a stalled disk, reading the plan could hang as well.
    report = read_disk(Path(host.root))
    if report.is_stalled:
        return judge_disk(report, 0, reserve)
    plan = context.read_record(PlanRecord)
    verdict = judge_disk(report, plan.missing_bytes, reserve)
    if verdict.is_ready:
        return verdict
    # Since the plan was made, much may have been written; only now is that worth counting.
    return judge_disk(report, missing_bytes(context.layout, plan), reserve)


def _probe_gpus(spec: ProbeSpec) -> ProbeVerdict:
    host = spec.stage.settings.host
    needed = host.training_processes if spec.purpose == "train" else host.extraction_gpus
    report = NOT_ASKED if host.device == "cpu" else read_gpus()
    ours = {holder.pid for card in report.cards for holder in card.holders or () if holder.is_ours}
    return judge_gpus(report, needed, host.device, ours)
