"""Each message as it crosses the wire: a change of a format must be deliberate, and stand on the page.

``python -m tests.contracts.test_wire_golden`` writes the golden files anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eagle3_tasks.contracts import codec, errors, jobs, run_records, settings, stages
from eagle3_tasks.contracts.errors import LEAVES, ErrorRecord
from eagle3_tasks.contracts.jobs import JobState
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.settings import SECTIONS, settings_from_flat

CHECKOUT = Path(__file__).parents[2]
GOLDEN = CHECKOUT / "tests" / "golden" / "wire-v1"
PAGE = CHECKOUT / "docs" / "wire-formats.md"

ROWS = RowRange(start=2000, stop=4000)
RUN_KEY = jobs.run_key(dag_id="eagle3_train", run_id="manual__2026-01-31T10:00:00+00:00")
KEY = jobs.job_key(
    dag_id="eagle3_train", run_id="manual__2026-01-31T10:00:00+00:00", stage="extract", rows=ROWS
)
DIGEST = "0123456789abcdef01234567"
# Every setting that has no place in a default, so that the file shows each form a value can have.
SETTINGS = settings_from_flat(
    {
        "root": "/data/eagle3",
        "conversations_path": "/data/chät.jsonl",
        "target_model": "/models/target",
        "aux_layer_ids": [1, 15, 28],
        "evaluation_sets": [
            {"name": "reworded", "path": "/data/reworded.jsonl", "min_accept_length": 1.6},
            {"name": "new_questions", "path": "/data/new.jsonl"},
        ],
    }
)
STAGE_SPEC = stages.StageSpec(run_key=RUN_KEY, settings=SETTINGS, rows=ROWS)
ERROR = ErrorRecord(code="DISK_PROBLEM", kind="node", message="gpu-host-1: /data is full. Free space.")
SLOTS = jobs.SlotRule(name="shards", count=2, order=2000)
JOB_SPEC = jobs.JobSpec(
    key=KEY,
    stage="extract",
    run_key=RUN_KEY,
    argv=("@python", "-m", "eagle3_tasks.commands.main", "extract", "--spec", "-"),
    stdin='{"version": 1}',
    environment={"HF_HUB_OFFLINE": "1"},
    slots=SLOTS,
    orphan_minutes=30.0,
)
PROGRESS = jobs.Progress(
    stage="extract", done=512, total=2000, unit="samples", seconds=61.5, rate_per_second=8.33,
    eta_seconds=178.6, values={"tokens": 801234.0, "bytes": 15846743300.0},
)  # fmt: skip
EXIT = jobs.ExitRecord(
    state=JobState.FAILED, exit_code=30, signal=None, error=ERROR, ended_at=1769850000.5, seconds=61.5
)
LOG = jobs.LogPiece(start=65536, stop=65541, size=70000, data="aGVsbG8=", omitted_bytes=4096)
FAILED = jobs.JobStatus(
    key=KEY, state=JobState.FAILED, generation=2, detail=ERROR.message, progress=PROGRESS, exit=EXIT, log=LOG,
    log_path=f"/data/eagle3/jobs/{KEY}/gen-0002/output.log",
)  # fmt: skip
QUEUED = jobs.JobStatus(
    key=KEY, state=JobState.QUEUED, generation=1, detail="waits for a place in pool 'shards' (2) behind x",
    heartbeat_age_seconds=2.5,
)  # fmt: skip
RESULT = run_records.EvaluationResult(
    name="training", num_rows=40, num_rounds=700, untrained_accept_length=1.02, simulated_accept_length=2.91,
    looped_accept_length=2.9, acceptance=(0.8, 0.6, 0.5), is_identical_to_greedy=True, min_accept_length=2.6,
    passed=True,
)  # fmt: skip
POLL_ITEM = jobs.PollItem(key=KEY, generation=2, confirmed=65536)

EXAMPLES: dict[str, object] = {
    "error_record": ERROR,
    "hello": jobs.Hello(nonce="7f3a9c51e0b2d846", root="/data/eagle3", release=DIGEST),
    "request": jobs.Request(id=1, verb="poll", body=codec.to_plain(jobs.PollBody(jobs=(POLL_ITEM,)))),
    "answer": jobs.Answer(id=1, body={"jobs": [], "errors": {}}),
    "answer_error": jobs.Answer(id=0, error=ERROR),
    "hello_body": jobs.HelloBody(),
    "hello_reply": jobs.HelloReply(
        host_name="gpu-host-1", machine_id="boot-5f:init-83:ns-4026531836", release=DIGEST,
        python="/data/eagle3/env/bin/python", python_version="3.11.2",
    ),
    "submit_body": jobs.SubmitBody(spec=JOB_SPEC),
    "poll_item": POLL_ITEM,
    "poll_body": jobs.PollBody(jobs=(POLL_ITEM, jobs.PollItem(key=KEY))),
    "poll_reply": jobs.PollReply(jobs=(FAILED, QUEUED), errors={KEY: ERROR}),
    "cancel_body": jobs.CancelBody(key=KEY, reason="a user stopped task instance 0197 in Airflow"),
    "acknowledge_body": jobs.AcknowledgeBody(key=KEY, generation=2),
    "probe_body": jobs.ProbeBody(spec={"kind": "disk"}),
    "slot_rule": SLOTS,
    "job_spec": JOB_SPEC,
    "job_status": FAILED,
    "job_status_succeeded": jobs.JobStatus(
        key=KEY, state=JobState.SUCCEEDED, generation=1, acknowledged=True, report={"rows": [2000, 4000]}
    ),
    "progress": PROGRESS,
    "exit_record": EXIT,
    "log_piece": LOG,
    "stage_spec": STAGE_SPEC,
    "stage_spec_whole_run": stages.StageSpec(run_key=RUN_KEY, settings=SETTINGS),
    "probe_spec": stages.ProbeSpec(kind="gpus", stage=STAGE_SPEC, purpose="train"),
    "probe_verdict": stages.ProbeVerdict(is_ready=None, line="cannot tell.", figures={"free": [0, 1]}),
    "settings": SETTINGS,
    "conversations_record": run_records.ConversationsRecord(
        conversations=DIGEST, num_rows=20000, num_rejects=12
    ),
    "dataset_record": run_records.DatasetRecord(
        dataset=DIGEST, num_samples=19980, num_tokens=31811920, num_trained_tokens=20123456
    ),
    "plan_record": run_records.PlanRecord(
        dataset=DIGEST, capture=DIGEST, num_samples=4000, num_tokens=6362384, distinct_trained_tokens=41234,
        shards=(RowRange(start=0, stop=2000), ROWS), aux_layer_ids=(1, 15, 28), hidden_size=4096,
        num_layers=32, target_vocab_size=128256, capture_dtype="bfloat16", bytes_per_token=32772,
        forecast_bytes=208508048448, missing_bytes=104254024224, release=DIGEST,
    ),
    "vocabulary_record": run_records.VocabularyRecord(
        vocabulary=DIGEST, draft_vocab_size=32000, covered_percent=99.25
    ),
    "training_record": run_records.TrainingRecord(training=DIGEST, num_steps=1200, final_loss=1.25),
    "evaluation_result": RESULT,
    "evaluation_record": run_records.EvaluationRecord(training=DIGEST, results=(RESULT,), passed=True),
    "draft_model_record": run_records.DraftModelRecord(draft_model=DIGEST, training=DIGEST),
}  # fmt: skip
FRAME = jobs.frame("7f3a9c51e0b2d846", jobs.Answer(id=1, body={"text": "chät\n"}))
INSIDE_OTHERS = {kind.__name__ for kind in (*SECTIONS.values(), settings.EvaluationSet)}


def encoded(value: object) -> str:
    return codec.dumps(value, indent=1) + "\n"


def write_golden() -> None:
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, value in EXAMPLES.items():
        (GOLDEN / f"{name}.json").write_text(encoded(value), encoding="utf-8")
    (GOLDEN / "frame.txt").write_text(FRAME, encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_is_encoded_as_its_golden_file_and_decoded_from_it(name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    assert encoded(EXAMPLES[name]) == golden
    assert codec.loads(type(EXAMPLES[name]), golden) == EXAMPLES[name]


def test_an_answer_is_framed_as_in_its_golden_file() -> None:
    golden = (GOLDEN / "frame.txt").read_text(encoding="utf-8")
    assert golden == FRAME
    assert jobs.find_frames("7f3a9c51e0b2d846", golden)[0] == [jobs.Answer(id=1, body={"text": "chät\n"})]


def test_every_message_has_a_golden_file_and_no_file_is_left_over() -> None:
    declared = {
        name
        for module in (errors, jobs, stages, run_records, settings)
        for name, kind in vars(module).items()
        if dataclasses.is_dataclass(kind) and getattr(kind, "__module__", "") == module.__name__
    }
    assert declared - INSIDE_OTHERS == {type(value).__name__ for value in EXAMPLES.values()}
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.json" for name in EXAMPLES} | {"frame.txt"}


def test_a_message_is_one_line_whatever_text_it_holds() -> None:
    spec = dataclasses.replace(JOB_SPEC, stdin="a\nb\r\u2028\x00")
    line = codec.dumps(spec)
    assert "\n" not in line
    assert "\r" not in line
    assert codec.loads(jobs.JobSpec, line) == spec


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_page_names_every_key_of_a_message(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    value: Any = EXAMPLES[name]
    keys = ["settings"] if name == "settings" else [field.name for field in dataclasses.fields(value)]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_page_lists_exactly_the_errors_that_there_are() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    listed = {(int(row[0]), row[1], row[2]) for row in cells if row[0].isdigit()}
    assert listed == {(leaf.exit_code, leaf("").code, leaf.kind) for leaf in LEAVES}


def test_the_page_lists_exactly_the_states_that_there_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = {state: f"| `{state.value}` | " in page for state in JobState}
    assert all(listed.values()), listed
    final = {
        line.split("`")[1]
        for line in page.splitlines()
        if line.startswith("| `") and line.endswith("| yes |")
    }
    assert final == {state.value for state in JobState if state.is_final}


if __name__ == "__main__":
    write_golden()
