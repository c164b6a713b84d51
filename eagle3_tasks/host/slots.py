"""Places on a host: at most so many jobs of a pool at once, lowest order first.

::

    ROOT/slots/POOL/
        pool.lock              held for the moment of choosing
        place-0000             locked by the job that runs there; holds its key
        ticket-0000002000-KEY  locked by a job that waits

Locks are the kernel's: whoever dies, however, frees its place and leaves the queue. The
descriptor of a place is passed on to the job's command, so a place stays taken while a
tree lives on without its runner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Generator
from pathlib import Path

from eagle3_tasks.contracts.jobs import SlotRule, check_job_key
from eagle3_tasks.host.files import PRIVATE_FILE, file_lock, make_private_folder

_PLACE = re.compile(r"place-(\d{4})")
_TICKET = re.compile(r"ticket-(-?\d+)-(.+)")


class Ticket:
    """A job's place in the queue of a pool, from its making until a place is taken."""

    def __init__(self, folder: Path, rule: SlotRule, key: str) -> None:
        self._folder = make_private_folder(folder)
        self._rule = rule
        self._key = check_job_key(key)
        self._path = folder / f"ticket-{rule.order:010d}-{key}"
        with file_lock(folder / "pool.lock"):
            self._descriptor = _open_locked(self._path)

    def try_take(self) -> tuple[int | None, str]:
        """Take a place if one is free and nobody with a lower order waits.

        Returns:
            the descriptor that holds the place, or None and why: the keys of who holds
            the places, or of who comes first.
        """
        with file_lock(self._folder / "pool.lock"):
            holders, free = self._look_at_places()
            pool = f"pool {self._rule.name!r} ({self._rule.count})"
            if len(holders) >= self._rule.count:
                return None, f"waits for a place in {pool}, held by {', '.join(sorted(holders))}"
            first = self._first_in_line()
            if first != self._key:
                return None, f"waits for a place in {pool} behind {first}"
            descriptor = _open_locked(self._folder / f"place-{free:04d}")
            if descriptor is None:
                return None, f"waits for a place in {pool}"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._key.encode(), 0)
            self.leave()
            return descriptor, ""

    def leave(self) -> None:
        """Leave the queue."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _look_at_places(self) -> tuple[list[str], int]:
        """List the keys of the holders, and the lowest free number.

        All places are looked at, not only the first ``count``: another run may allow more.
        """
        holders: list[str] = []
        taken: set[int] = set()
        for path in self._folder.iterdir():
            match = _PLACE.fullmatch(path.name)
            if match and _is_locked(path):
                holders.append(path.read_text(errors="replace") or "somebody")
                taken.add(int(match[1]))
        return holders, next(number for number in range(len(taken) + 1) if number not in taken)

    def _first_in_line(self) -> str:
        waiting: list[tuple[int, str]] = []
        for path in list(self._folder.iterdir()):
            match = _TICKET.fullmatch(path.name)
            if match is None:
                continue
            if path == self._path or _is_locked(path):
                waiting.append((int(match[1]), match[2]))
            else:
                # Its job died while it waited.
                path.unlink(missing_ok=True)
        return min(waiting)[1]


@contextlib.contextmanager
def waiting_ticket(folder: Path, rule: SlotRule, key: str) -> Generator[Ticket]:
    """Queue for a place while the block runs."""
    ticket = Ticket(folder, rule, key)
    try:
        yield ticket
    finally:
        ticket.leave()


def _open_locked(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(path: Path) -> bool:
    descriptor = _open_locked(path) if path.exists() else None
    if descriptor is None:
        return path.exists()
    os.close(descriptor)
    return False
