"""Prepare the orchestrator's volume: secrets, login, SSH key, connection, database.

Runs before the services at each start. What exists is kept; the connection is written
anew, because it pins the GPU host's present key.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import asyncssh

PRIVATE = Path("/var/lib/eagle3/private")
CLIENT_PUBLIC_KEY = Path("/exchange/client/client_key.pub")
HOST_PUBLIC_KEY = Path("/exchange/host/host_key.pub")
USER = "admin"


def main() -> None:
    os.umask(0o077)
    PRIVATE.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_once("fernet_key", lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
    _make_once("api_secret_key", lambda: secrets.token_urlsafe(48))
    _make_once("jwt_secret", lambda: secrets.token_urlsafe(48))
    _make_once("passwords.json", lambda: json.dumps({USER: secrets.token_urlsafe(12)}))
    client_key = _make_once("client_key", _new_private_key)
    _replace(CLIENT_PUBLIC_KEY, _public_half(client_key), mode=0o644)
    connections = {"eagle3_gpu_host": _connection(client_key)}
    _replace(PRIVATE / "connections.json", json.dumps(connections, indent=2), mode=0o600)
    subprocess.run(["airflow", "db", "migrate"], check=True)


def _make_once(name: str, content: Callable[[], str]) -> Path:
    path = PRIVATE / name
    if not path.exists():
        _replace(path, content(), mode=0o600)
    return path


def _replace(path: Path, content: str, *, mode: int) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.touch(mode=0o600)
    fresh.write_text(content)
    fresh.chmod(mode)
    fresh.replace(path)


def _new_private_key() -> str:
    return asyncssh.generate_private_key("ssh-ed25519", comment="orchestrator").export_private_key().decode()


def _public_half(key: Path) -> str:
    return asyncssh.read_private_key(key).export_public_key().decode()


def _connection(client_key: Path) -> dict[str, object]:
    if not HOST_PUBLIC_KEY.exists():
        sys.exit(f"{HOST_PUBLIC_KEY} is missing: the gpu-host service, which writes it, must start first.")
    kind, key = HOST_PUBLIC_KEY.read_text().split()[:2]
    return {
        "conn_type": "ssh",
        "host": "gpu-host",
        "port": 2222,
        "login": "eagle3",
        "extra": {
            "key_file": str(client_key),
            "host_key": f"{kind} {key}",
            "no_host_key_check": False,
        },
    }


if __name__ == "__main__":
    main()
