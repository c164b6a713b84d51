"""``eagle3 VERB``: the one entry for jobs and for people.

A stage's verb reads its spec as JSON from ``--spec FILE`` (``-``: standard input), logs to standard
output, writes its report, and ends with the exit code of ``contracts.errors``. Run by a
job, report, progress and error go into the job's generation folder; run by hand, the
report is printed as the last thing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_tasks.commands.foreign_errors import translate
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidInput, PipelineError, RequestRefused
from eagle3_tasks.contracts.jobs import MAX_PROGRESS_BYTES, MAX_REPORT_BYTES, Progress, run_key
from eagle3_tasks.contracts.settings import host_settings
from eagle3_tasks.contracts.stages import (
    ERROR_FILE,
    GENERATION_FOLDER_VARIABLE,
    PROGRESS_FILE,
    REPORT_FILE,
    ProbeSpec,
    StageSpec,
    parse_stage_spec,
)
from eagle3_tasks.host.files import write_atomically, write_json
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger("eagle3")

# Modules are named, not imported: `eagle3 --help` and the host's bare Python load no torch.
STAGES: Mapping[str, str] = {
    "preflight": "eagle3_tasks.commands.preflight:run_preflight",
    "read-conversations": "eagle3_tasks.data.read_stage:run_read_conversations",
    "regenerate": "eagle3_tasks.extraction.answers_stage:run_regenerate",
    "prepare-data": "eagle3_tasks.data.prepare_stage:run_prepare_data",
    "plan": "eagle3_tasks.extraction.plan_stage:run_plan",
    "extract": "eagle3_tasks.extraction.extract_stage:run_extract",
    "verify": "eagle3_tasks.extraction.verify_stage:run_verify",
    "map-vocab": "eagle3_tasks.vocab.stage:run_map_vocab",
    "train": "eagle3_tasks.training.stage:run_train",
    "export-candidate": "eagle3_tasks.draft.export_stage:run_export_candidate",
    "evaluate": "eagle3_tasks.evaluation.stage:run_evaluate",
    "publish": "eagle3_tasks.draft.publish_stage:run_publish",
    "setup-host": "eagle3_tasks.commands.setup_host:run_setup_host",
    "check-host": "eagle3_tasks.commands.preflight:run_check_host",
}
HOST_VERBS = ("setup-host", "check-host")
PROBE = "probe"
BENCH = "bench"
PROGRESS_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and give its exit code."""
    parsed = _parser().parse_args(arguments)
    if parsed.verb == BENCH:
        from eagle3_tasks.commands.bench_store import run_bench_store

        print(json.dumps(run_bench_store(parsed.folder), indent=None if parsed.json else 1))
        return 0
    os.umask(0o077)
    # Threads that spin while they wait for one another take the cores from every other process:
    # on a busy host an evaluation took 2.3 times as long, on a quiet one nothing is lost.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    folder = os.environ.get(GENERATION_FOLDER_VARIABLE)
    generation_folder = Path(folder) if folder else None
    try:
        text = _host_spec(parsed) if getattr(parsed, "root", None) else _read_spec(parsed.spec)
        report = _run(parsed.verb, text, generation_folder)
        if generation_folder is None:
            print(codec.dumps(report, indent=1))
        else:
            _write_report(generation_folder, report)
    except Exception as error:  # noqa: BLE001 - the edge: whatever it is, it gets a class and a record
        return _fail(translate(error), error, generation_folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (*STAGES, PROBE):
        inputs = verbs.add_parser(verb, help=f"run {verb}").add_mutually_exclusive_group(required=True)
        inputs.add_argument("--spec", metavar="FILE", help="the spec as JSON; - reads standard input")
        if verb in HOST_VERBS:
            inputs.add_argument("--root", help="the folder for everything that runs make, instead of a spec")
    bench = verbs.add_parser(BENCH, help="measure the store on a disk")
    bench.add_argument("name", choices=["store"])
    bench.add_argument(
        "--folder", type=Path, default=Path(), help="a folder on the disk to measure; default: here"
    )
    bench.add_argument("--json", action="store_true", help="one line of flat JSON")
    return parser


def _host_spec(parsed: argparse.Namespace) -> bytes:
    spec = StageSpec(
        run_key=run_key(dag_id="by hand", run_id=parsed.verb), settings=host_settings({"root": parsed.root})
    )
    return codec.dumps(spec).encode()


def _run(verb: str, text: bytes, generation_folder: Path | None) -> object:
    if verb == PROBE:
        from eagle3_tasks.commands.probe import run_probe

        return run_probe(codec.loads(ProbeSpec, text, where="probe spec"))
    context = StageContext(
        spec=parse_stage_spec(text, where="spec"),
        generation=_generation(generation_folder),
        report_progress=_progress_writer(generation_folder),
    )
    module, _, name = STAGES[verb].partition(":")
    run_stage: Callable[[StageContext], dict[str, Any]] = getattr(importlib.import_module(module), name)
    logger.info("stage started stage=%s run=%s generation=%d", verb, context.spec.run_key, context.generation)
    began = time.monotonic()
    report = run_stage(context)
    logger.info("stage ended stage=%s seconds=%.1f", verb, time.monotonic() - began)
    return report


def _read_spec(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror}. Give the path of a spec file, or - for standard input."
        ) from error


def _generation(folder: Path | None) -> int:
    # gen-0002 is the second attempt; by hand there is only a first.
    return int(folder.name.rpartition("-")[2]) if folder else 1


def _progress_writer(folder: Path | None) -> Callable[[Progress], None]:
    last_written = -PROGRESS_SECONDS

    def write(progress: Progress) -> None:
        nonlocal last_written
        now = time.monotonic()
        is_due = now - last_written >= PROGRESS_SECONDS or progress.done >= progress.total
        if folder is None or not is_due:
            return
        last_written = now
        content = codec.dumps(progress).encode()
        if len(content) > MAX_PROGRESS_BYTES:
            raise RequestRefused(
                f"a progress record of {len(content)} bytes; {MAX_PROGRESS_BYTES} are possible."
            )
        temporary = folder / f".{PROGRESS_FILE}.tmp"
        temporary.write_bytes(content)
        # Not synced: after a power cut the job is lost anyway, and receipts hold the truth.
        temporary.replace(folder / PROGRESS_FILE)

    return write


def _write_report(folder: Path, report: object) -> None:
    content = codec.dumps(report).encode()
    if len(content) > MAX_REPORT_BYTES:
        raise RequestRefused(f"a report of {len(content)} bytes; {MAX_REPORT_BYTES} are possible.")
    write_atomically(folder / REPORT_FILE, content)


def _fail(problem: PipelineError, cause: Exception, folder: Path | None) -> int:
    is_expected = problem is cause
    logger.error("%s: %s", problem.code, problem, exc_info=None if is_expected else cause)
    if folder is not None:
        try:
            write_json(folder / ERROR_FILE, problem.record())
        except OSError as error:
            # On a full disk the exit code still says which kind of problem it was.
            logger.error("the error record could not be written path=%s: %s", folder / ERROR_FILE, error)
    return problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
