"""The stage ``export-candidate``: a finished training becomes the folder that engines serve."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from eagle3_tasks.contracts.errors import DamagedData, InvalidInput
from eagle3_tasks.contracts.run_records import PlanRecord, TrainingRecord
from eagle3_tasks.draft.aux_layers import aux_layer_entries
from eagle3_tasks.draft.config import draft_config
from eagle3_tasks.draft.export import load_export, write_export
from eagle3_tasks.draft.model_card import model_card
from eagle3_tasks.draft.target_config import read_target_config
from eagle3_tasks.draft.trained import read_trained
from eagle3_tasks.host.files import sync_folder, temporary_sibling
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

CANDIDATE_FOLDER = "candidate"


def run_export_candidate(context: StageContext) -> dict[str, Any]:
    """Write ``ROOT/training/DIGEST/candidate/``, whole or not at all; ends at once where it is.

    Raises:
        DamagedData: the training has not finished, or its weights changed since.
        InvalidSettings: the auxiliary layers can't be named so that both engines agree.
    """
    training = context.read_record(TrainingRecord)
    folder = context.layout.training(training.training) / CANDIDATE_FOLDER
    is_reused = is_whole_export(folder)
    if not is_reused:
        _export(context, folder)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    logger.info("candidate ready training=%s bytes=%d reused=%s", training.training, num_bytes, is_reused)
    return {"training": training.training, "is_reused": is_reused, "num_bytes": num_bytes}


def is_whole_export(folder: Path) -> bool:
    """Say whether ``folder`` holds a draft model that passes every check."""
    try:
        load_export(folder)
    except (DamagedData, InvalidInput):
        return False
    return True


def _export(context: StageContext, folder: Path) -> None:
    settings = context.settings
    plan = context.read_record(PlanRecord)
    target = read_target_config(settings)
    aux_layers = aux_layer_entries(plan.aux_layer_ids, plan.num_layers, str(target.model_type))
    tensors, result = read_trained(folder.parent)
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    temporary = temporary_sibling(folder)
    temporary.mkdir(mode=0o700)
    try:
        write_export(
            temporary,
            tensors,
            draft_config(settings, target),
            dtype=settings.target.capture_dtype,
            aux_layers=aux_layers,
            token_ids=_token_ids(target),
            card=model_card(settings, plan, result, None),
        )
        if folder.exists():
            logger.warning("damaged candidate replaced folder=%s", folder)
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)


def _token_ids(target: PreTrainedConfig) -> dict[str, Any]:
    found = {name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: value for name, value in found.items() if value is not None}
