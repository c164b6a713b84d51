"""The target's configuration: dimensions, positions and ids, without its weights."""

from __future__ import annotations

from typing import cast

from transformers import AutoConfig, PreTrainedConfig

from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.settings import Settings


def read_target_config(settings: Settings) -> PreTrainedConfig:
    """Read the text part of the target's configuration, from a folder or by hub name.

    Raises:
        InvalidInput: there is none that transformers can read.
    """
    return cast("PreTrainedConfig", read_whole_config(settings).get_text_config())


def read_whole_config(settings: Settings) -> PreTrainedConfig:
    """Read the target's configuration as it stands, with what wraps the text part.

    Raises:
        InvalidInput: there is none that transformers can read.
    """
    target = settings.target
    try:
        return cast(
            "PreTrainedConfig",
            AutoConfig.from_pretrained(
                target.target_model,
                revision=target.target_revision or None,
                trust_remote_code=target.trust_remote_code,
            ),
        )
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"target_model {target.target_model!r} has no configuration that transformers can read: {error}"
        ) from error
