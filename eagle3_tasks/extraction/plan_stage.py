"""Stage ``plan``: everything resolved, pinned and forecast before the first GPU hour."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np

import eagle3_tasks
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import InvalidInput, InvalidSettings, PipelineError
from eagle3_tasks.contracts.rows import choose_shards
from eagle3_tasks.contracts.run_records import DatasetRecord, PlanRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.draft.aux_layers import aux_layer_entries
from eagle3_tasks.engines.interface import TargetDescription
from eagle3_tasks.engines.target_folder import read_target_description
from eagle3_tasks.extraction.capture_facts import (
    CaptureFacts,
    read_capture_facts,
    resolve_capture,
    write_capture_facts,
)
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.storage.capture import Capture
from eagle3_tasks.storage.sample import bytes_per_token
from eagle3_tasks.storage.segment_format import ITEM_SIZES

logger = logging.getLogger(__name__)


def run_plan(context: StageContext) -> dict[str, Any]:
    """Resolve the run's capture and shards, and forecast its bytes.

    Raises:
        InvalidSettings: values that can't work with this data and target.
        InvalidInput: a target that the engine can't load.
    """
    from eagle3_tasks.draft.target_weights import read_target_weights
    from eagle3_tasks.engines.huggingface import check_loadable

    settings = context.settings
    dataset_digest = context.read_record(DatasetRecord).dataset
    dataset = Dataset(context.layout.dataset(dataset_digest))
    description = read_target_description(settings)
    check_loadable(settings)
    # Only mapped: tensors that training can't find are refused now as well.
    read_target_weights(settings)
    facts = resolve_capture(settings, description)
    # Layers that no engine can serve are refused now, not after the hours of extraction.
    model_type = str(description.text_config.get("model_type", description.model_type))
    aux_layer_entries(facts.aux_layer_ids, description.num_layers, model_type)
    distinct = count_distinct_trained_tokens(dataset, description.vocab_size)
    check_draft_vocab_size(
        settings.draft.draft_vocab_size, distinct=distinct, vocab_size=description.vocab_size
    )
    shards = choose_shards(dataset.num_samples, settings.extraction.rows_per_shard, setting="rows_per_shard")
    folder = context.layout.capture(facts.digest)
    forecast, missing, num_missing = _forecast(dataset, description, facts, folder)
    record = PlanRecord(
        dataset=dataset_digest,
        capture=facts.digest,
        num_samples=dataset.num_samples,
        num_tokens=dataset.num_tokens,
        distinct_trained_tokens=distinct,
        shards=shards,
        aux_layer_ids=facts.aux_layer_ids,
        hidden_size=description.hidden_size,
        num_layers=description.num_layers,
        target_vocab_size=description.vocab_size,
        capture_dtype=facts.dtype,
        bytes_per_token=_bytes_per_token(description, facts),
        forecast_bytes=forecast,
        missing_bytes=missing,
        release=release_digest(Path(eagle3_tasks.__file__).parent),
    )
    write_capture_facts(folder, facts)
    _report_changes(context, record)
    context.write_record(record)
    _log_plan(settings, record, num_missing)
    _log_other_captures(folder.parent, facts, dataset)
    host = settings.host.ssh_conn_id
    return {
        "dataset": record.dataset,
        "capture": record.capture,
        "samples": record.num_samples,
        "tokens": record.num_tokens,
        "distinct_trained_tokens": distinct,
        "forecast_bytes": forecast,
        "missing_bytes": missing,
        "missing_samples": num_missing,
        "shards": [[shard.start, shard.stop, host] for shard in shards],
    }


def count_distinct_trained_tokens(dataset: Dataset, vocab_size: int) -> int:
    """Count the target ids that occur under the loss mask.

    Raises:
        InvalidInput: an id is outside the target's vocabulary: the tokenizer is another model's.
    """
    is_trained = np.zeros(vocab_size, dtype=bool)
    for row in range(dataset.num_samples):
        ids = dataset.token_ids(row)
        if len(ids) == 0 or int(ids.max()) >= vocab_size:
            raise InvalidInput(
                f"row {row} of the dataset has {len(ids)} tokens with ids up to {int(ids.max(initial=0))}, "
                f"but the target's vocabulary has {vocab_size}. Put the target's own tokenizer into its "
                "folder."
            )
        is_trained[ids[dataset.loss_mask(row)]] = True
    return int(is_trained.sum())


def check_draft_vocab_size(draft_vocab_size: int, *, distinct: int, vocab_size: int) -> None:
    """Refuse a draft vocabulary that the target or the data can't fill.

    Raises:
        InvalidSettings: the message says which, and the largest possible value.
    """
    if draft_vocab_size > vocab_size:
        raise InvalidSettings(
            f"draft_vocab_size is {draft_vocab_size}, but the target's vocabulary has {vocab_size}. "
            f"Set it to at most {min(vocab_size, distinct)}."
        )
    if distinct < draft_vocab_size:
        raise InvalidSettings(
            f"only {distinct} distinct tokens occur under the loss mask, but the draft vocabulary needs "
            f"{draft_vocab_size}. Extract more rows or set draft_vocab_size to at most {distinct}."
        )


def _bytes_per_token(description: TargetDescription, facts: CaptureFacts) -> int:
    return bytes_per_token(description.hidden_size, ITEM_SIZES[facts.dtype])


def _forecast(
    dataset: Dataset, description: TargetDescription, facts: CaptureFacts, folder: Path
) -> tuple[int, int, int]:
    """Count the capture's tensor bytes exactly, from token counts.

    Returns:
        bytes in all, bytes not yet committed, samples not yet committed.
    """
    capture = Capture(folder)
    capture.load_index()
    lengths = dataset.lengths()
    # Two rows may differ in their loss mask alone; they share their hidden states.
    tokens = {dataset.sample(row): int(lengths[row]) for row in range(dataset.num_samples)}
    missing = [length for sample, length in tokens.items() if not capture.has(sample)]
    each = _bytes_per_token(description, facts)
    return sum(tokens.values()) * each, sum(missing) * each, len(missing)


def _report_changes(context: StageContext, record: PlanRecord) -> None:
    try:
        former = context.read_record(PlanRecord)
    except InvalidInput:
        return
    changed = [
        field.name
        for field in dataclasses.fields(record)
        if field.name != "missing_bytes" and getattr(former, field.name) != getattr(record, field.name)
    ]
    if changed:
        logger.warning("plan differs from this run's former one fields=%s", ",".join(changed))
    else:
        logger.info("plan is the same as this run's former one")


def _log_plan(settings: Settings, record: PlanRecord, num_missing: int) -> None:
    logger.info(
        "plan dataset=%s capture=%s samples=%d tokens=%d distinct_trained_tokens=%d draft_vocab_size=%d "
        "shards=%d rows_per_shard=%d",
        record.dataset, record.capture, record.num_samples, record.num_tokens, record.distinct_trained_tokens,
        settings.draft.draft_vocab_size, len(record.shards), settings.extraction.rows_per_shard,
    )  # fmt: skip
    logger.info(
        "plan aux_layer_ids=%s hidden_size=%d dtype=%s bytes_per_token=%d forecast_bytes=%d missing_bytes=%d "
        "missing_samples=%d",
        list(record.aux_layer_ids), record.hidden_size, record.capture_dtype, record.bytes_per_token,
        record.forecast_bytes, record.missing_bytes, num_missing,
    )  # fmt: skip


def _log_other_captures(captures: Path, facts: CaptureFacts, dataset: Dataset) -> None:
    """Show which other captures hold samples of this dataset, and in what they differ."""
    samples = {dataset.sample(row) for row in range(dataset.num_samples)}
    for folder in sorted(path for path in captures.iterdir() if path.is_dir()):
        if folder.name == facts.digest:
            continue
        capture = Capture(folder)
        try:
            other = read_capture_facts(folder)
            if other is None:
                continue
            capture.load_index()
        except (PipelineError, OSError) as error:
            # This run has no use for it: whatever is wrong there must not stop the plan.
            logger.warning("other capture not looked at capture=%s: %s", folder.name, error)
            continue
        logger.info(
            "other capture capture=%s target=%s samples_of_this_dataset=%d differs_in=%s",
            folder.name, other.target_name, sum(map(capture.has, samples)),
            ",".join(facts.differences(other)),
        )  # fmt: skip
