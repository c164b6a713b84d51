"""The trigger form and the way back to settings."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError

from eagle3_airflow.params import (
    form_params,
    host_form_params,
    host_settings_from_params,
    settings_from_params,
)
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.contracts.presets import PRESETS
from eagle3_tasks.contracts.settings import SECTIONS, flat_values, settings_from_flat

NEEDED = {"root": "/data/eagle3", "conversations_path": "/data/c.jsonl", "target_model": "/models/t"}
NASTY = [
    "x; touch PWNED", "$(id)", "`id`", "{{ 1+1 }}", "{% raw %}", "--flag=a b'\"c", "-o ProxyCommand=id",
    "é☃𝄞", " leading and trailing ", "a\tb", "%s %(x)s {0}", "\\n\\x00", "' OR 1=1 --", "<script>", "~root/x",
    "null",
]  # fmt: skip


def filled(**values: Any) -> dict[str, Any]:
    """Send values through the form's own check, as a trigger through UI or API does."""
    params = form_params()
    params.update(values)
    return params.validate()


def test_the_form_left_empty_says_what_is_needed() -> None:
    with pytest.raises(
        InvalidSettings, match=r"root is empty.*conversations_path is empty.*target_model is empty"
    ):
        settings_from_params(filled())


def test_a_field_left_empty_takes_the_preset_and_a_field_filled_in_wins() -> None:
    settings = settings_from_params(filled(**NEEDED, preset="demo", epochs=7, python=""))
    assert settings.training.epochs == 7
    assert settings.training.ttt_steps == PRESETS["demo"]["ttt_steps"]
    assert settings.extraction.segment_mb == PRESETS["demo"]["segment_mb"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_settings_that_work(preset: str) -> None:
    assert settings_from_params(filled(**NEEDED, preset=preset))


def test_every_setting_stands_in_the_form_with_title_text_and_section() -> None:
    params = form_params()
    names = {field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)}
    assert set(params) == names | {"preset"}
    assert next(iter(params)) == "preset"
    for name in names:
        schema = params.get_param(name).schema
        assert schema["title"]
        assert schema["description_md"]
        assert schema["section"]
        assert "null" in schema["type"]
        assert params[name] is None


def test_a_text_of_any_content_arrives_byte_for_byte() -> None:
    for text in NASTY:
        settings = settings_from_params(filled(**{**NEEDED, "target_model": text, "target_revision": text}))
        assert settings.target.target_model == text
        assert settings.target.target_revision == text
        wire = codec.dumps(settings).encode()
        assert codec.loads(type(settings), wire).target.target_model == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("root", "../../etc"), ("root", "/data/../etc"), ("root", "~/x"), ("conversations_path", "c.jsonl"),
        ("target_model", "a\nb"), ("target_model", "a\0b"), ("target_model", json.loads('"\\ud800"')),
        ("root", "/tmp/eagle3"), ("ssh_conn_id", "a\rb"),
    ],
)  # fmt: skip
def test_a_text_that_cannot_work_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=name):
        settings_from_params(filled(**{**NEEDED, name: value}))


def test_a_name_that_is_no_setting_is_refused() -> None:
    # Airflow adds whatever stands in a run's configuration to its params.
    with pytest.raises(InvalidSettings, match="learning_rat"):
        settings_from_params({**filled(**NEEDED), "learning_rat": 1})


def test_yes_and_no_are_chosen_by_word_and_a_text_true_stays_a_text() -> None:
    settings = settings_from_params(filled(**{**NEEDED, "trust_remote_code": "true", "target_model": "true"}))
    assert settings.target.trust_remote_code is True
    assert settings.target.target_model == "true"
    kimi = {**NEEDED, "preset": "kimi_k2_5", "trust_remote_code": "false"}
    assert settings_from_params(filled(**kimi)).target.trust_remote_code is False


def test_zero_is_a_value_and_not_empty() -> None:
    settings = settings_from_params(filled(**NEEDED, preset="pilot", max_rows=0, min_accept_length=0))
    assert settings.data.max_rows == 0


def test_lists_and_objects_come_as_json() -> None:
    sets = [{"name": "reworded", "path": "/data/r.jsonl", "min_accept_length": 1.6}]
    settings = settings_from_params(filled(**NEEDED, aux_layer_ids=[1, 3, 4], evaluation_sets=sets))
    assert settings.target.aux_layer_ids == (1, 3, 4)
    assert settings.evaluation.evaluation_sets[0].min_accept_length == 1.6


def test_the_form_itself_refuses_a_wrong_type_a_wrong_choice_and_a_wrong_bound() -> None:
    for values in ({"epochs": "many"}, {"device": "tpu"}, {"ttt_steps": 17}, {"preset": "none"}):
        with pytest.raises(ParamValidationError):
            filled(**values)


def test_what_a_run_resolved_can_be_given_to_the_form_again() -> None:
    settings = settings_from_params(filled(**NEEDED, preset="kimi_k2_5"))
    again = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in flat_values(settings).items()
    }
    assert settings_from_params(filled(**again)) == settings
    assert settings_from_flat(flat_values(settings)) == settings


def test_the_form_survives_the_serialization_that_airflow_does() -> None:
    params = form_params()
    again = ParamsDict({name: typing.cast("Any", params.get_param(name)) for name in params})
    json.dumps({name: again.get_param(name).serialize() for name in again})


def test_a_host_is_set_up_without_data_or_a_model() -> None:
    params = host_form_params()
    params.update({"root": "/data/eagle3", "ssh_conn_id": "gpu"})
    settings = host_settings_from_params(params.validate())
    assert (settings.host.root, settings.host.ssh_conn_id) == ("/data/eagle3", "gpu")
    assert (settings.host.device, settings.host.extraction_gpus) == ("cuda", 8)
    params.update({"device": "cpu", "training_processes": 2, "python": None})
    settings = host_settings_from_params(params.validate())
    assert (settings.host.device, settings.host.training_processes) == ("cpu", 2)
    with pytest.raises(ParamValidationError):
        host_form_params().validate()


def test_no_value_of_a_form_becomes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in NASTY:
        settings_from_params(filled(**{**NEEDED, "target_model": text}))
    assert not list(tmp_path.iterdir())
