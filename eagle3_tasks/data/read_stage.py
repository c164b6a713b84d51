"""Stage ``read-conversations``: the source file to ``ROOT/conversations/DIGEST/``.

A finished folder is kept whatever the reject limit says: its content is true for every
limit, and the list of rejects is what a person needs. The limit is judged each time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_tasks.contracts.digests import digest_of
from eagle3_tasks.contracts.errors import InvalidInput
from eagle3_tasks.contracts.rows import choose_shards
from eagle3_tasks.contracts.run_records import ConversationsRecord
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.data.conversations import POLICY_VERSION, ConversationReader, check_source
from eagle3_tasks.data.conversations_folder import (
    REJECTS_FILE,
    ConversationsFolder,
    ConversationStatistics,
    write_conversations,
)
from eagle3_tasks.data.progress import ProgressClock
from eagle3_tasks.host.sealed_folder import building
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

STAGE = "read-conversations"
"""Airflow's ``[core] max_map_length``: more mapped tasks than this are refused."""
_HASH_BLOCK_BYTES = 1 << 22
_REJECTS_NAMED = 3


def run_read_conversations(context: StageContext) -> dict[str, Any]:
    """Read the conversations once; a finished folder ends this in the time of one hash.

    Raises:
        InvalidInput: no file, an empty one, no conversation with an answer, or more rejects
            than ``max_reject_percent``.
        InvalidSettings: more answer shards than Airflow maps.
    """
    data = context.settings.data
    source = Path(data.conversations_path)
    check_source(source)
    # The file is passed over twice: once for its name, once for its rows.
    num_bytes = source.stat().st_size
    clock = ProgressClock(context, stage=STAGE, unit="bytes", total=2 * num_bytes)
    digest, identity = conversations_digest(source, max_rows=data.max_rows, on_bytes=clock.update)
    path = context.layout.conversations(digest)
    with building(path) as folder:
        if folder is not None:
            reader = ConversationReader(source, max_rows=data.max_rows)
            statistics = write_conversations(
                folder, reader, lambda rows, done: clock.update(num_bytes + done, rows=rows)
            )
            clock.update(2 * num_bytes, rows=statistics.num_rows)
            if _identity(source) != identity:
                raise InvalidInput(
                    f"{source} changed while it was read. Run again when nothing writes to it."
                )
            seconds = clock.seconds()
            logger.info(
                "conversations read digest=%s rows=%d rejects=%d duplicates=%d bytes=%d seconds=%.1f "
                "rows_per_second=%.0f",
                digest,
                statistics.num_rows,
                statistics.num_rejects,
                statistics.num_duplicates,
                statistics.num_bytes,
                seconds,
                statistics.num_rows / max(seconds, 1e-3),
            )
        else:
            logger.info("conversations are there already digest=%s seconds=%.1f", digest, clock.seconds())
    conversations = ConversationsFolder(path)
    statistics = conversations.statistics()
    _judge(conversations, statistics, source, data.max_reject_percent)
    shards = _answer_shards(context.settings, statistics.num_rows)
    context.write_record(
        ConversationsRecord(
            conversations=digest, num_rows=statistics.num_rows, num_rejects=statistics.num_rejects
        )
    )
    return {
        "conversations": digest,
        "rows": statistics.num_rows,
        "rejects": statistics.num_rejects,
        "duplicates": statistics.num_duplicates,
        "reasons": statistics.reasons,
        "policies": statistics.policies,
        "shards": shards,
        "seconds": round(clock.seconds(), 2),
    }


def conversations_digest(
    source: Path, *, max_rows: int, on_bytes: Callable[[int], None] = lambda _: None
) -> tuple[str, tuple[int, ...]]:
    """Name what reading ``source`` gives, by its bytes and the options.

    Returns:
        the digest, and the file's identity while it was hashed.
    """
    identity = _identity(source)
    hasher = hashlib.sha256()
    num_bytes = 0
    with source.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            hasher.update(block)
            num_bytes += len(block)
            on_bytes(num_bytes)
    digest = digest_of(
        {"policy": POLICY_VERSION, "source": hasher.hexdigest(), "bytes": num_bytes, "max_rows": max_rows}
    )
    return digest, identity


def _identity(source: Path) -> tuple[int, ...]:
    status = source.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _judge(
    conversations: ConversationsFolder,
    statistics: ConversationStatistics,
    source: Path,
    max_reject_percent: float,
) -> None:
    num_rejects = statistics.num_rejects
    num_read = statistics.num_rows + statistics.num_duplicates + num_rejects
    if num_read == 0:
        raise InvalidInput(f"{source} holds blank lines only. Give a file with one conversation a line.")
    percent = 100 * num_rejects / num_read
    if statistics.num_rows and percent <= max_reject_percent:
        return
    named = " ".join(
        f"Line {reject.line} ({reject.reason}): {reject.message}"
        for reject in conversations.first_rejects(_REJECTS_NAMED)
    )
    where = f"All rejects: {conversations.path / REJECTS_FILE}."
    if not statistics.num_rows:
        raise InvalidInput(
            f"{source} has no conversation with an assistant turn that can be used: all {num_rejects} rows "
            f"are rejected. {named} Give ShareGPT `conversations` or OpenAI `messages`. {where}"
        )
    raise InvalidInput(
        f"{source}: {num_rejects} of {num_read} rows are rejected ({percent:.1f} %), and max_reject_percent "
        f"is {max_reject_percent:g}. {named} Correct the rows or raise max_reject_percent. {where}"
    )


def _answer_shards(settings: Settings, num_rows: int) -> list[list[object]]:
    if settings.data.answers == "dataset":
        return []
    ranges = choose_shards(num_rows, settings.data.rows_per_answer_shard, setting="rows_per_answer_shard")
    return [[rows.start, rows.stop, settings.host.ssh_conn_id] for rows in ranges]
