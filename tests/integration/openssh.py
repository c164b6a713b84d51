"""A private OpenSSH server on a loopback port: own configuration, own host key, one user key."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"


@dataclasses.dataclass(kw_only=True)
class OpenSshServer:
    """A server that lives in one folder. ``environment`` is what its shells see besides the usual."""

    folder: Path
    port: int
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls, folder: Path, environment: dict[str, str] | None = None) -> OpenSshServer:
        """Write keys and configuration; :meth:`start` starts it."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = cls(folder=folder, port=free_port(), environment=environment or {})
        for name in ("host_key", "user_key"):
            make_key(folder / name)
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        server.write_configuration()
        return server

    def write_configuration(self, *more: str) -> None:
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
            f"PidFile {self.folder / 'sshd.pid'}",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "PermitRootLogin prohibit-password",
            "MaxStartups 100:30:200",
            "Subsystem sftp internal-sftp",
            *(f'SetEnv {name}="{value}"' for name, value in self.environment.items()),
            *more,
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True, mode=0o755)
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")], stdout=log, stderr=log
            )
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(f"sshd did not start: {(self.folder / 'sshd.log').read_text()}")

    def stop(self) -> None:
        """End the listener; connections that are open stay."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def cut_connections(self) -> None:
        """End the processes of the open connections, as the loss of the host would."""
        if self.process is None:
            return
        for child in children_of(self.process.pid):
            os.kill(child, signal.SIGKILL)

    @property
    def host_key(self) -> str:
        """The public host key as ``type data``."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def connection(self, **extra: object) -> str:
        """Give the Airflow connection to this server, as JSON for ``AIRFLOW_CONN_...``."""
        values = {"key_file": str(self.folder / "user_key"), "host_key": self.host_key, **extra}
        return json.dumps(
            {
                "conn_type": "ssh",
                "host": "127.0.0.1",
                "port": self.port,
                "login": getpass.getuser(),
                "extra": {name: value for name, value in values.items() if value is not None},
            }
        )


def make_key(path: Path) -> None:
    """Make an ed25519 key pair at ``path`` and ``path.pub``."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children_of(pid: int) -> list[int]:
    """Give the direct children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found
