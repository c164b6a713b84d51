"""Free ports on loopback."""

from __future__ import annotations

import socket


def choose_port(preferred: int) -> int:
    """Give ``preferred`` if nobody listens there, else a free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise RuntimeError("no port on 127.0.0.1 is free")
