"""The trigger form, and the way back: from its values to the settings of a run. Pure.

Form, defaults and checks all come from the fields of ``contracts.settings``. Every field
but the preset may stay empty: it then takes the preset's value.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, cast

from airflow.sdk import Param
from airflow.sdk.definitions.param import ParamsDict

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidSettings
from eagle3_tasks.contracts.presets import PRESETS
from eagle3_tasks.contracts.settings import (
    SECTIONS,
    HostSettings,
    Settings,
    host_settings,
    settings_from_flat,
)

PRESET = "preset"
DEFAULT_PRESET = "default"
NOT_SET = "(the preset's value)"
HOST_FIELDS = (
    "ssh_conn_id", "root", "python", "device", "extraction_gpus", "training_processes", "disk_reserve_gb",
)  # fmt: skip

_SECTION_TITLES = {
    "host": "GPU host",
    "data": "Conversations",
    "target": "Target model",
    "extraction": "Extraction of hidden states",
    "draft": "Draft model",
    "training": "Training",
    "evaluation": "Evaluation",
}
_PRESET_TITLES = {
    "default": "Default values",
    "demo": "Demo: a tiny target model on CPUs",
    "kimi_k2_5": "Kimi-K2.5: 8 GPUs to extract, 4 to train",
    "pilot": "Pilot: 64 conversations through every stage",
}
_JSON_TYPES = {str: "string", int: "integer", float: "number"}
_TRUTH = {"true": True, "false": False}


def form_params() -> ParamsDict:
    """Build the form of a run: the preset first, then every setting by section."""
    params = {
        PRESET: Param(
            DEFAULT_PRESET,
            type="string",
            enum=list(PRESETS),
            values_display={name: _PRESET_TITLES.get(name, name) for name in PRESETS},
            title="Preset",
            description_md=_preset_text(),
            section="Preset",
        )
    }
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            params[field.name] = _param(field, hints[field.name], _SECTION_TITLES[section])
    return ParamsDict(params)


def host_form_params() -> ParamsDict:
    """Build the form for setting up a host: what leads there, and what runs will need of it."""
    hints = typing.get_type_hints(HostSettings)
    fields = {field.name: field for field in dataclasses.fields(HostSettings)}
    return ParamsDict(
        {
            name: _param(fields[name], hints[name], _SECTION_TITLES["host"], needed=name != "python")
            for name in HOST_FIELDS
        }
    )


def settings_from_params(params: Mapping[str, Any]) -> Settings:
    """Build the settings from a form's values; texts arrive byte for byte.

    None, an empty text and an empty list mean: the preset's value.

    Raises:
        InvalidSettings: an unknown preset or name, a value of the wrong type, text that is
            no Unicode, or values that can't work.
    """
    preset = params.get(PRESET) or DEFAULT_PRESET
    if preset not in PRESETS:
        raise InvalidSettings(f"there is no preset {preset!r}. Known: {', '.join(PRESETS)}.")
    return settings_from_flat({**PRESETS[preset], **_chosen(params)})


def host_settings_from_params(params: Mapping[str, Any]) -> Settings:
    """Build settings for the set-up of a host, which asks nothing about data or models.

    Raises:
        InvalidSettings: as :func:`settings_from_params`.
    """
    return host_settings(_chosen({name: params.get(name) for name in HOST_FIELDS}))


def _chosen(params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(name, value) for name, value in params.items() if name != PRESET and not _is_empty(value)
    }


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [])


def _plain(name: str, value: Any) -> Any:
    try:
        # Half of a surrogate pair is legal in JSON, but no file name and no text.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidSettings(
            f"{name} holds {error.object[error.start]!r}, which is no character."
        ) from error
    if isinstance(value, str) and value in _TRUTH and _is_boolean(name):
        return _TRUTH[value]
    return value


def _is_boolean(name: str) -> bool:
    return any(typing.get_type_hints(kind).get(name) is bool for kind in SECTIONS.values())


def _param(field: dataclasses.Field[Any], hint: Any, section: str, *, needed: bool = False) -> Param:
    default = codec.to_plain(field.default)
    empty = "" if needed else f"\n\nEmpty: the preset's value; by default {_shown(default)}."
    schema: dict[str, Any] = {
        "title": field.metadata["title"],
        "description_md": field.metadata["description"] + empty,
        "section": section,
        **_schema(hint),
    }
    for bound in ("minimum", "maximum", "examples"):
        if field.metadata.get(bound) is not None:
            schema[bound] = field.metadata[bound]
    if needed:
        return Param(default, **({"minLength": 1} if schema["type"] == "string" else {}), **schema)
    schema["type"] = [schema["type"], "null"]
    if "enum" in schema:
        schema["values_display"] = {"null": NOT_SET, **{name: name for name in schema["enum"]}}
        schema["enum"] = [None, *schema["enum"]]
    return Param(None, **schema)


def _schema(hint: Any) -> dict[str, Any]:
    """Give the JSON schema of a field's annotation, without its being empty."""
    if typing.get_origin(hint) is types.UnionType:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return {"type": "string", "enum": list(typing.get_args(hint))}
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return {"type": "array", "items": {"type": _JSON_TYPES.get(item, "object")}}
    if hint is bool:
        # A switch has no third position for "the preset's value".
        return {"type": "string", "enum": list(_TRUTH)}
    return {"type": _JSON_TYPES[hint]}


def _shown(default: object) -> str:
    return "empty" if _is_empty(default) else f"`{json.dumps(default)}`"


def _preset_text() -> str:
    lines = ["What every field that stays empty below takes."]
    for name, values in PRESETS.items():
        pairs = ", ".join(f"{key} {json.dumps(value)}" for key, value in cast("Any", values).items())
        lines.append(f"- **{_PRESET_TITLES.get(name, name)}**: {pairs or 'as each field says'}")
    return "\n".join(lines)
