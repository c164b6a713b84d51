"""An SSH server on loopback that plays the GPU host: needs neither root nor a package.

It serves one user with one key, runs commands as the user who started it, and offers
SFTP. It is for the demo: a real GPU host runs OpenSSH.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from pathlib import Path

import asyncssh

CHUNK_BYTES = 65_536


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Make the server's key and the client's key once, and give their paths."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = (folder / "host_key", folder / "client_key")
    for path in paths:
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519")
            path.touch(mode=0o600)
            path.write_bytes(key.export_private_key())
            path.with_suffix(".pub").write_bytes(key.export_public_key())
    return paths


def greets(port: int) -> bool:
    """Tell whether such a server, and nobody else, answers on 127.0.0.1:``port``."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            return connection.recv(64).startswith(b"SSH-2.0-AsyncSSH")
    except OSError:
        return False


async def _run_command(process: asyncssh.SSHServerProcess[bytes]) -> None:
    child = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", process.command or "exit 0", cwd=Path.home(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if child.stdin is None or child.stdout is None or child.stderr is None:
        raise RuntimeError("a pipe of the command is missing")

    async def feed(stdin: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await process.stdin.read(CHUNK_BYTES):
                stdin.write(data)
                await stdin.drain()
        with contextlib.suppress(OSError):
            stdin.close()

    async def pump(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await source.read(CHUNK_BYTES):
                sink.write(data)
                await sink.drain()

    feeding = asyncio.create_task(feed(child.stdin))
    # Both streams are read to their end before the exit status is sent: the other order
    # loses the last lines, or the connection.
    await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
    process.exit(await child.wait())
    feeding.cancel()


async def serve(folder: Path, port: int) -> None:
    """Listen on 127.0.0.1 until cancelled."""
    host_key, client_key = make_keys(folder)
    server = await asyncssh.listen(
        "127.0.0.1", port,
        server_host_keys=[str(host_key)],
        authorized_client_keys=str(client_key.with_suffix(".pub")),
        process_factory=_run_command, sftp_factory=True, allow_scp=False, encoding=None, line_editor=False,
    )  # fmt: skip
    await server.wait_closed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the keys lie")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    os.umask(0o077)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.folder, arguments.port))


if __name__ == "__main__":
    main()
