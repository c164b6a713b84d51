"""Settings: one error that says it all, before any work."""

import dataclasses

import pytest

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.contracts.presets import PRESETS
from eagle3_tasks.contracts.settings import SECTIONS, Settings, flat_values, settings_from_flat

NEEDED = {"root": "/data/eagle3", "conversations_path": "/data/chat.jsonl", "target_model": "/models/target"}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_makes_valid_settings(preset: str) -> None:
    settings = settings_from_flat({**PRESETS[preset], **NEEDED})
    for name, value in PRESETS[preset].items():
        if name not in NEEDED:
            assert flat_values(settings)[name] == value


def test_settings_survive_the_wire() -> None:
    settings = settings_from_flat({**PRESETS["kimi_k2_5"], **NEEDED, "aux_layer_ids": [2, 30, 58]})
    assert codec.loads(Settings, codec.dumps(settings)) == settings


def test_a_name_belongs_to_one_section_only() -> None:
    names = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"root": ""}, "root is empty"),
        ({"root": "data"}, "an absolute path without '..' is needed"),
        ({"root": "/data/../etc"}, "an absolute path without '..' is needed"),
        ({"root": "/tmp/x"}, "which a reboot may empty"),
        ({"target_model": ""}, "target_model is empty"),
        ({"target_model": "a\nb"}, "target_model holds a line break"),
        ({"conversations_path": ""}, "conversations_path is empty"),
        ({"epochs": 0}, "epochs is 0; at least 1 is possible"),
        ({"epochs": "3"}, "a whole number is needed"),
        ({"epochs": True}, "a whole number is needed"),
        ({"engine": "vllm"}, "'vllm' is not one of"),
        ({"no_such": 1}, "there is no setting 'no_such'"),
        ({"extraction_gpus": 0}, "extraction_gpus is 0, but device is 'cuda'"),
        ({"aux_layer_ids": [3, 2, 1]}, "three different layers in ascending order"),
        ({"aux_layer_ids": [1, 2]}, "three different layers in ascending order"),
        (
            {"answers": "regenerate", "max_tokens": 100, "answer_max_tokens": 100},
            "leaves no room for a question",
        ),
        ({"template_date": "yesterday"}, "template_date is 'yesterday'"),
        ({"draft_num_heads": 8, "draft_num_kv_heads": 3}, "8 is not a multiple of"),
        ({"draft_head_dim": 33}, "rotary positions need an even size"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"evaluation_sets": [{"name": "training", "path": "/x"}]}, "'training' is taken"),
        ({"evaluation_sets": [{"name": "a", "path": "x"}]}, "path of evaluation set 'a' is 'x'"),
        ({"evaluation_sets": [{"nam": "a", "path": "/x"}]}, "Did you mean 'name'?"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        settings_from_flat({**NEEDED, **values})
    assert words in str(refused.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidSettings) as refused:
        settings_from_flat({"root": "x", "conversations_path": "", "target_model": ""})
    assert str(refused.value).count("empty") == 2
    assert "absolute path" in str(refused.value)
