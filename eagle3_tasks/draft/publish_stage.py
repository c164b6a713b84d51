"""The stage ``publish``: a candidate that passed its gates becomes a published draft model."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import DamagedData, GateNotPassed
from eagle3_tasks.contracts.run_records import (
    DraftModelRecord,
    EvaluationRecord,
    EvaluationResult,
    PlanRecord,
    TrainingRecord,
)
from eagle3_tasks.draft.export import CARD_FILE, load_export
from eagle3_tasks.draft.export_stage import CANDIDATE_FOLDER, is_whole_export
from eagle3_tasks.draft.model_card import model_card
from eagle3_tasks.draft.trained import PLOT_FILE, read_result
from eagle3_tasks.host.files import make_private_folder, sync_folder, write_atomically
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

PUBLISH_VERSION = 1


def run_publish(context: StageContext) -> dict[str, Any]:
    """Move the candidate to ``ROOT/draft_models/DIGEST/``; ends at once where it is.

    Raises:
        GateNotPassed: the evaluation demands more than the draft model reached.
        DamagedData: no candidate, or another training was evaluated.
    """
    training = context.read_record(TrainingRecord)
    evaluation = context.read_record(EvaluationRecord)
    if evaluation.training != training.training:
        raise DamagedData(
            f"the evaluation is of training {evaluation.training}, not of {training.training}. "
            "Run evaluate again."
        )
    if not evaluation.passed:
        raise GateNotPassed(_verdict(evaluation))
    digest = digest_of([PUBLISH_VERSION, training.training, context.settings.target.capture_dtype])
    folder = context.layout.draft_model(digest)
    is_reused = is_whole_export(folder)
    if not is_reused:
        training_folder = context.layout.training(training.training)
        candidate = training_folder / CANDIDATE_FOLDER
        load_export(candidate)
        result = read_result(training_folder)
        if result is None:
            raise DamagedData(f"{training_folder}: the training has not finished. Run train again.")
        card = model_card(context.settings, context.read_record(PlanRecord), result, evaluation)
        write_atomically(candidate / CARD_FILE, card.encode())
        write_atomically(candidate / PLOT_FILE, (training_folder / PLOT_FILE).read_bytes())
        make_private_folder(folder.parent)
        if folder.exists():
            damaged = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
            folder.rename(damaged)
            logger.warning("damaged draft model set aside folder=%s", damaged)
        candidate.rename(folder)
        sync_folder(folder.parent)
        sync_folder(training_folder)
    logger.info("draft model published digest=%s folder=%s reused=%s", digest, folder, is_reused)
    context.write_record(DraftModelRecord(draft_model=digest, training=training.training))
    return {
        "draft_model": digest,
        "folder": str(folder),
        "is_reused": is_reused,
        "accept_lengths": {one.name: one.looped_accept_length for one in evaluation.results},
    }


def _verdict(evaluation: EvaluationRecord) -> str:
    failed = [one for one in evaluation.results if not one.passed]
    return " ".join(
        [*map(_shortfall, failed), "Train longer or on more conversations, or lower what is demanded."]
    )


def _shortfall(one: EvaluationResult) -> str:
    demanded = 0.0 if one.min_accept_length is None else one.min_accept_length
    return f"set {one.name!r}: accept length {one.looped_accept_length:.2f} reached, {demanded:.2f} demanded."
