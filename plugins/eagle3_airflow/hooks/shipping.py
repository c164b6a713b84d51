"""Bring a release of ``eagle3_tasks`` to the GPU host, whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import secrets
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko

    from eagle3_airflow.release import Release

logger = logging.getLogger(__name__)

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
PACKAGE = "eagle3_tasks"
LEFTOVERS = (".tmp-", ".broken-")
"""Beginnings of names under ROOT/releases: not yet a release, and one that the bootstrap moved aside."""
LEFTOVER_SECONDS = 86_400


def ship_release(sftp: paramiko.SFTPClient, *, root: str, release: Release) -> None:
    """Write the release under a temporary name and rename it to ``ROOT/releases/DIGEST``.

    Two shippers at once do no harm: a folder that is there wins, and it holds the same
    bytes, because its name is their digest. What shippers that died left there, and torn
    releases that were moved aside, go after a day.
    """
    releases = posixpath.join(root, "releases")
    final = posixpath.join(releases, release.digest)
    temporary = posixpath.join(releases, f".tmp-{release.digest}-{secrets.token_hex(6)}")
    with contextlib.suppress(OSError):  # it exists; if it doesn't, the next line says why
        sftp.mkdir(releases, PRIVATE_FOLDER)
    sftp.mkdir(temporary, PRIVATE_FOLDER)
    made: list[str] = [temporary]
    written: list[str] = []
    num_bytes = 0
    try:
        for path, content in release.files:
            relative = posixpath.join(PACKAGE, path)
            _make_parents(sftp, temporary, relative, made)
            target = posixpath.join(temporary, relative)
            written.append(target)
            with sftp.open(target, "wx") as file:
                file.chmod(PRIVATE_FILE)
                file.set_pipelined(True)
                file.write(content)
            num_bytes += len(content)
        try:
            sftp.rename(temporary, final)
        except OSError:
            sftp.stat(final)  # somebody else was first; if nobody was, this raises
            _remove(sftp, written, made)
    except BaseException:
        with contextlib.suppress(Exception):
            _remove(sftp, written, made)
        raise
    logger.info("release shipped digest=%s files=%d bytes=%d", release.digest, len(written), num_bytes)
    try:
        num_removed = _remove_leftovers(sftp, releases, now=sftp.stat(final).st_mtime or 0)
    except OSError as error:
        logger.warning("leftovers not removed folder=%s: %s", releases, error)
    else:
        if num_removed:
            logger.info("leftovers removed folder=%s folders=%d", releases, num_removed)


def _make_parents(sftp: paramiko.SFTPClient, folder: str, relative: str, made: list[str]) -> None:
    for part in relative.split("/")[:-1]:
        folder = posixpath.join(folder, part)
        if folder not in made:
            sftp.mkdir(folder, PRIVATE_FOLDER)
            made.append(folder)


def _remove_leftovers(sftp: paramiko.SFTPClient, releases: str, *, now: float) -> int:
    """Remove what is older than a day by the host's own clock, and count it."""
    old = [
        entry
        for entry in sftp.listdir_attr(releases)
        if entry.filename.startswith(LEFTOVERS) and (entry.st_mtime or now) < now - LEFTOVER_SECONDS
    ]
    for entry in old:
        _remove_tree(sftp, posixpath.join(releases, entry.filename))
    return len(old)


def _remove_tree(sftp: paramiko.SFTPClient, folder: str) -> None:
    for entry in sftp.listdir_attr(folder):
        path = posixpath.join(folder, entry.filename)
        if stat.S_ISDIR(entry.st_mode or 0):
            _remove_tree(sftp, path)
        else:
            sftp.remove(path)
    sftp.rmdir(folder)


def _remove(sftp: paramiko.SFTPClient, files: list[str], folders: list[str]) -> None:
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            sftp.remove(file)
    for folder in reversed(folders):
        with contextlib.suppress(FileNotFoundError):
            sftp.rmdir(folder)
