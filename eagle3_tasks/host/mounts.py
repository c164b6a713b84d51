"""What kind of file system a path lies on, from ``/proc/self/mountinfo``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs",
        "beegfs_nodev", "orangefs", "ocfs2", "gfs2", "wekafs", "virtiofs", "fuse.sshfs", "fuse.glusterfs",
        "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs",
        "fuse.goofys", "fuse.mount-s3",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system, with the options of the mount and of the file system joined."""

    folder: Path
    file_system: str
    options: frozenset[str]

    @property
    def is_read_only(self) -> bool:
        return "ro" in self.options


def parse_mounts(text: str) -> list[Mount]:
    """Parse ``mountinfo`` (proc(5)); blanks and tabs in names are octal there."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        mounts.append(
            Mount(
                folder=Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])),
                file_system=tail[0],
                options=frozenset(fields[5].split(",")) | frozenset(tail[2].split(",")),
            )
        )
    return mounts


def find_mount(path: Path, mounts: list[Mount]) -> Mount | None:
    """Find what ``path`` (absolute, without links) lies on: the longest folder, mounted last."""
    holding = [mount for mount in mounts if path == mount.folder or mount.folder in path.parents]
    return (
        max(enumerate(holding), key=lambda item: (len(item[1].folder.parts), item[0]))[1] if holding else None
    )


def mount_of(path: Path) -> Mount | None:
    """Find what ``path``, which need not exist yet, lies on."""
    return find_mount(path.resolve(), parse_mounts(_MOUNTINFO.read_text(errors="surrogateescape")))
