"""Preflight: each wrong input has its message, all of them come at once, and nothing was done."""

from __future__ import annotations

import getpass
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from eagle3_tasks.commands import preflight
from eagle3_tasks.commands.preflight import run_check_host, run_preflight
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings, MissingSoftware, PipelineError
from eagle3_tasks.contracts.jobs import run_key
from eagle3_tasks.contracts.probes import GpuReport, GpusReport
from eagle3_tasks.contracts.settings import Settings, host_settings, settings_from_flat
from eagle3_tasks.contracts.stages import StageSpec
from eagle3_tasks.host.stage_context import StageContext

RUN_KEY = run_key(dag_id="tests", run_id="preflight")
ROWS = [
    {"conversations": [{"from": "human", "value": "hello"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]},
]


class World:
    """A run whose every input is right, until a test makes one wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conversations = folder / "conversations.jsonl"
        self.conversations.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.target = folder / "target"
        self.target.mkdir()
        self.write_config(vocab_size=2048, num_hidden_layers=8, hidden_size=128)
        save_file({}, self.target / "model.safetensors")
        (self.target / "tokenizer.json").write_text("{}")

    def write_config(self, **text: Any) -> None:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **text}
        (self.target / "config.json").write_text(json.dumps(config))

    def context(self, **changes: Any) -> StageContext:
        values: dict[str, Any] = {
            "root": str(self.folder / "root"),
            "device": "cpu",
            "extraction_gpus": 0,
            "disk_reserve_gb": 0.001,
            "conversations_path": str(self.conversations),
            "target_model": str(self.target),
            "draft_vocab_size": 1024,
        }
        spec = StageSpec(run_key=RUN_KEY, settings=settings_from_flat(values | changes))
        return StageContext(spec=spec, generation=1, report_progress=lambda _progress: None)

    def problem(self, **changes: Any) -> PipelineError:
        with pytest.raises(PipelineError) as caught:
            run_preflight(self.context(**changes))
        assert not (self.folder / "root" / "runs").exists(), "nothing is written before all is right"
        return caught.value


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_that_can_work_passes_and_its_settings_are_pinned(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    context = world.context()
    report = run_preflight(context)
    results = {check["name"]: check["result"] for check in report["checks"]}
    assert set(results.values()) == {"pass"}
    assert list(results) == list(preflight.CHECKS)
    assert all(f"preflight check={name} result=pass" in caplog.text for name in results)
    pinned = (context.layout.run(RUN_KEY) / "settings.json").read_bytes()
    assert codec.loads(Settings, pinned) == context.settings


def test_a_conversations_file_that_is_not_there_is_named(world: World):
    problem = world.problem(conversations_path=str(world.folder / "other.jsonl"))
    assert isinstance(problem, InvalidInput)
    assert f"{world.folder / 'other.jsonl'}: there is no such file" in str(problem)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "none of its 3 lines"),
        (
            json.dumps(ROWS[0]).encode() + b"\n",
            "none of its 1 lines is a conversation with an assistant's turn",
        ),
        (b'{"messages": "text"}\nnot json\n', "none of its 2 lines"),
        (json.dumps(ROWS).encode(), "array"),
    ],
)
def test_conversations_without_an_assistant_turn_are_refused(world: World, content: bytes, words: str):
    world.conversations.write_bytes(content)
    problem = world.problem()
    assert isinstance(problem, InvalidInput)
    assert words in str(problem)
    assert str(world.conversations) in str(problem)


def test_one_assistant_turn_far_down_the_file_is_enough(world: World):
    world.conversations.write_text((json.dumps(ROWS[0]) + "\n") * 2000 + json.dumps(ROWS[1]) + "\n")
    run_preflight(world.context())


def test_a_folder_instead_of_conversations_is_refused(world: World):
    assert "is not a file" in str(world.problem(conversations_path=str(world.folder)))


def test_each_bad_evaluation_set_is_named(world: World):
    empty = world.folder / "empty.jsonl"
    empty.touch()
    sets = [
        {"name": "reworded", "path": str(empty)},
        {"name": "fine", "path": str(world.conversations)},
        {"name": "absent", "path": "/nowhere/x.jsonl"},
    ]
    text = str(world.problem(evaluation_sets=sets))
    assert "evaluation set 'reworded'" in text
    assert "evaluation set 'absent'" in text
    assert "'fine'" not in text


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_target_folder_that_lacks_something_is_refused(world: World, missing: str):
    (world.target / missing).unlink()
    problem = world.problem()
    assert isinstance(problem, InvalidInput)
    assert str(world.target) in str(problem)


def test_a_target_folder_that_does_not_exist_is_refused(world: World):
    assert "/nowhere/model" in str(world.problem(target_model="/nowhere/model"))


@pytest.mark.parametrize("key", [None, "text_config"])
def test_a_draft_vocabulary_above_the_targets_is_refused(world: World, key: str | None):
    facts = {"vocab_size": 900, "num_hidden_layers": 8, "hidden_size": 128}
    world.write_config(**({key: facts} if key else facts))
    problem = world.problem()
    assert isinstance(problem, InvalidSettings)
    assert "draft_vocab_size is 1024" in str(problem)
    assert "at most 900" in str(problem)


def test_auxiliary_layers_that_the_target_has_not_got_are_refused(world: World):
    problem = world.problem(aux_layer_ids=[1, 4, 8])
    assert isinstance(problem, InvalidSettings)
    assert "8 layers, 0 to 7" in str(problem)


@pytest.mark.parametrize("root", ["file/root", "/proc/eagle3"])
def test_a_root_that_cannot_be_written_is_refused_with_user_and_path(world: World, root: str):
    (world.folder / "file").touch()
    path = world.folder / root
    problem = world.problem(root=str(path))
    assert isinstance(problem, InvalidSettings)
    assert f"user {getpass.getuser()!r} can't write in {path}" in str(problem)


def test_a_root_in_memory_is_refused(world: World):
    assert "reboot empties" in str(world.problem(root="/dev/shm/eagle3-preflight"))


def test_a_reserve_that_is_not_free_is_refused_before_any_work(world: World):
    problem = world.problem(disk_reserve_gb=1e9)
    assert isinstance(problem, InvalidSettings)
    assert "lower disk_reserve_gb" in str(problem)


def test_a_package_that_is_absent_or_old_is_named_with_the_command_that_installs_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    versions = {
        "torch": "2.9.1+cu128",
        "transformers": "6.0.0",
        "safetensors": "0.8.0",
        "numpy": "2.4",
        "psutil": None,
    }
    monkeypatch.setattr(preflight, "_installed_version", versions.get)
    problem = world.problem()
    assert isinstance(problem, MissingSoftware)
    text = str(problem)
    assert "torch is 2.9.1+cu128, 2.13 or later is needed" in text
    assert "psutil is absent" in text
    assert "transformers" not in text
    assert "eagle3 setup-host" in text


def test_cuda_on_a_host_without_a_gpu_is_refused(world: World):
    problem = world.problem(device="cuda", extraction_gpus=1)
    assert "device is 'cuda', but" in str(problem)
    assert "Choose device 'cpu'" in str(problem)


def test_fewer_cards_than_the_run_needs_are_refused_and_busy_ones_only_warned_about(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    card = GpuReport(
        index=0,
        uuid=None,
        name="NVIDIA L40S",
        total_mib=46068,
        used_mib=41000,
        utilization_percent=0,
        needs_reset=False,
        is_mig=False,
        holders=(),
    )
    report = GpusReport(cards=(card,), problem=None, is_broken=False)
    monkeypatch.setattr(preflight, "read_gpus", lambda: report)
    assert "Missing: cards 1 to 3;" in str(world.problem(device="cuda", extraction_gpus=4))
    outcome, line = preflight.check_gpus(
        world.context(device="cuda", extraction_gpus=1, training_processes=1)
    )
    assert outcome == "warn"
    assert "owner unknown" in line


def test_a_tokenizer_that_needs_a_package_names_it(world: World, monkeypatch: pytest.MonkeyPatch):
    (world.target / "tokenizer.json").unlink()
    (world.target / "tiktoken.model").touch()
    monkeypatch.setattr(preflight, "_installed_version", lambda name: None if name == "tiktoken" else "99.0")
    problem = world.problem()
    assert isinstance(problem, MissingSoftware)
    assert "pip install tiktoken" in str(problem)


def test_all_problems_are_reported_at_once_one_a_line(world: World):
    world.conversations.write_bytes(b"")
    world.write_config(vocab_size=900, num_hidden_layers=8, hidden_size=128)
    lines = str(world.problem(disk_reserve_gb=1e9)).splitlines()
    assert len(lines) == 3
    assert "disk_reserve_gb" in lines[0]
    assert "is empty" in lines[1]
    assert "draft_vocab_size" in lines[2]


def test_a_host_is_checked_before_there_is_data_or_a_model(tmp_path: Path):
    settings = host_settings({"root": str(tmp_path / "root"), "device": "cpu", "disk_reserve_gb": 0.001})
    spec = StageSpec(run_key=RUN_KEY, settings=settings)
    report = run_check_host(StageContext(spec=spec, generation=1, report_progress=lambda _progress: None))
    assert [check["name"] for check in report["checks"]] == ["packages", "root", "disk", "gpus"]
    assert {check["result"] for check in report["checks"]} == {"pass"}
    assert not (tmp_path / "root" / "runs").exists(), "no run has begun"
