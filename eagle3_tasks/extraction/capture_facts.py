"""What determines a capture, and so its name; kept beside it as ``capture.json``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.receipts import STORAGE_VERSION
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.engines.interface import TargetDescription, resolve_aux_layer_ids
from eagle3_tasks.engines.target_folder import is_hub_name, target_fingerprint
from eagle3_tasks.host.files import make_private_folder, read_json, write_json
from eagle3_tasks.storage import names

LAST_HIDDEN_CONVENTION = "after_final_norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureFacts:
    """All that two runs must share to share hidden states; ``target_name`` is for people."""

    target_name: str
    target_fingerprint: str
    aux_layer_ids: tuple[int, ...]
    last_hidden: str
    dtype: str
    storage_version: int

    @property
    def digest(self) -> str:
        fields = dataclasses.asdict(self)
        del fields["target_name"]
        return digest_of(fields)

    def differences(self, other: CaptureFacts) -> list[str]:
        """Name the facts in which two captures differ, in words for a log line."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name != "target_name" and getattr(self, field.name) != getattr(other, field.name)
        ]


def resolve_capture(settings: Settings, description: TargetDescription) -> CaptureFacts:
    """Work out which capture these settings mean.

    Raises:
        InvalidInput: the target's files can't be read.
        InvalidSettings: the chosen layers don't exist.
    """
    target = settings.target
    # A folder's place may change and no absolute path belongs under ROOT: its name is enough for people.
    name = target.target_model if is_hub_name(settings) else Path(target.target_model).name
    return CaptureFacts(
        target_name=name,
        target_fingerprint=target_fingerprint(settings),
        aux_layer_ids=resolve_aux_layer_ids(target.aux_layer_ids, description.num_layers),
        last_hidden=LAST_HIDDEN_CONVENTION,
        dtype=target.capture_dtype,
        storage_version=STORAGE_VERSION,
    )


def write_capture_facts(folder: Path, facts: CaptureFacts) -> None:
    """Write ``capture.json`` where it is missing."""
    if not (folder / names.CAPTURE_FACTS).exists():
        write_json(make_private_folder(folder) / names.CAPTURE_FACTS, facts)


def read_capture_facts(folder: Path) -> CaptureFacts | None:
    return read_json(CaptureFacts, folder / names.CAPTURE_FACTS)


def check_target_unchanged(settings: Settings, folder: Path) -> None:
    """Refuse to add to a capture when the target's files are no longer those of its plan.

    Raises:
        InvalidInput: they differ, or the capture's facts are missing.
    """
    facts = read_capture_facts(folder)
    if facts is None:
        raise InvalidInput(f"{folder / names.CAPTURE_FACTS} is missing. Clear the plan stage.")
    if target_fingerprint(settings) != facts.target_fingerprint:
        raise InvalidInput(
            f"the files of target_model {settings.target.target_model!r} changed after the plan was made. "
            "Put the former files back, or clear the plan stage to begin another capture."
        )
