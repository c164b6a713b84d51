"""The stage ``map-vocab``: choose the draft vocabulary from the tokens that are trained on."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import save

from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.run_records import PlanRecord, VocabularyRecord
from eagle3_tasks.data.dataset import Dataset
from eagle3_tasks.data.template import ChatTemplate
from eagle3_tasks.host.files import read_json, write_atomically, write_json
from eagle3_tasks.host.sealed_folder import building, is_sealed
from eagle3_tasks.host.stage_context import StageContext
from eagle3_tasks.vocab.mapping import (
    VOCABULARY_FILE,
    choose_target_ids,
    count_trained_tokens,
    make_vocabulary,
)

logger = logging.getLogger(__name__)

VOCABULARY_VERSION = 1
STATISTICS_FILE = "statistics.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyStatistics:
    """``covered_percent``: share of the trained tokens that have a draft id."""

    num_trained_tokens: int
    num_distinct_tokens: int
    draft_vocab_size: int
    covered_percent: float


def run_map_vocab(context: StageContext) -> dict[str, Any]:
    """Count, choose and write ``ROOT/vocabularies/DIGEST/``; ends at once where it exists.

    Raises:
        InvalidSettings: fewer distinct tokens are trained on than the draft vocabulary has.
    """
    plan = context.read_record(PlanRecord)
    size = context.settings.draft.draft_vocab_size
    always = sorted(ChatTemplate.load(context.settings).end_of_turn_ids)
    digest = digest_of([VOCABULARY_VERSION, plan.dataset, plan.target_vocab_size, size, always])
    folder = context.layout.vocabulary(digest)
    statistics = read_json(VocabularyStatistics, folder / STATISTICS_FILE) if is_sealed(folder) else None
    is_reused = statistics is not None
    if statistics is None:
        dataset = Dataset(context.layout.dataset(plan.dataset))
        statistics = _write_vocabulary(folder, dataset, plan.target_vocab_size, size, always)
    logger.info(
        "vocabulary ready digest=%s size=%d distinct=%d covered_percent=%.2f reused=%s",
        digest, size, statistics.num_distinct_tokens, statistics.covered_percent, is_reused,
    )  # fmt: skip
    context.write_record(
        VocabularyRecord(vocabulary=digest, draft_vocab_size=size, covered_percent=statistics.covered_percent)
    )
    return {"vocabulary": digest, "is_reused": is_reused, **dataclasses.asdict(statistics)}


def _write_vocabulary(
    folder: Path, dataset: Dataset, target_vocab_size: int, size: int, always: list[int]
) -> VocabularyStatistics:
    """Write maps and statistics into a folder that appears whole."""
    counts_W = count_trained_tokens(dataset, target_vocab_size)
    target_ids = choose_target_ids(counts_W, size, always)
    vocabulary = make_vocabulary(target_ids, target_vocab_size)
    num_trained = int(counts_W.sum())
    statistics = VocabularyStatistics(
        num_trained_tokens=num_trained,
        num_distinct_tokens=int((counts_W > 0).sum()),
        draft_vocab_size=size,
        covered_percent=100.0 * int(counts_W[target_ids].sum()) / num_trained,
    )
    with building(folder) as temporary:
        if temporary is not None:
            content = save({"d2t": vocabulary.d2t_V, "t2d": vocabulary.t2d_W}, metadata={"format": "pt"})
            write_atomically(temporary / VOCABULARY_FILE, content)
            write_json(temporary / STATISTICS_FILE, statistics)
    return statistics
