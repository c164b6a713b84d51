"""A TCP proxy on loopback that does to connections what bad networks do, when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self

Way = Literal["up", "down"]
"""``up``: from the client to the server; ``down``: the answers."""
_BOTH: tuple[Way, ...] = ("up", "down")
_PIECE_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclasses.dataclass(kw_only=True)
class Cut:
    """End a connection after ``num_pieces`` forwarded one way, or after ``num_bytes`` of them."""

    way: Way
    num_pieces: int | None = None
    num_bytes: int | None = None

    def allowed(self, data: bytes) -> tuple[bytes, bool]:
        """Give what of a piece still passes, and whether the connection ends then."""
        if self.num_pieces is not None:
            self.num_pieces -= 1
            return (data, self.num_pieces == 0) if self.num_pieces >= 0 else (b"", True)
        passed = data[: self.num_bytes]
        self.num_bytes = (self.num_bytes or 0) - len(passed)
        return passed, self.num_bytes == 0


class FaultProxy:
    """Forwards a port of its own to ``target_port``. Runs in a thread; use it as a context manager.

    A piece is what one read gave. ``num_pieces`` counts the forwarded ones; ``num_cuts``
    the connections that a :class:`Cut` ended.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.num_pieces: dict[Way, int] = {"up": 0, "down": 0}
        self.num_bytes: dict[Way, int] = {"up": 0, "down": 0}
        self.num_cuts = 0
        self.cut: Cut | None = None
        self._late_seconds = 0.0
        self._is_hole = False
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._flowing.set()
        self.listen()
        return self

    def __exit__(self, *_error: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def listen(self) -> None:
        """Accept connections (again), on the same port."""
        self._call(self._listen())

    def refuse(self) -> None:
        """Refuse new connections and reset those that are open."""
        self._call(self._refuse())

    def reset(self) -> None:
        """Reset every open connection, both ends of it."""
        self._call(self._reset())

    def make_late(self, seconds: float) -> None:
        """Bring each piece so much later, each way."""
        self._late_seconds = seconds

    def hold(self) -> None:
        """Let nothing through until :meth:`release`; nothing is lost, as TCP sends it again."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.set)

    def swallow(self, *ways: Way) -> None:
        """Be a black hole for what goes those ways on open connections, and tell nobody.

        Without ``ways``: both, and new connections too, until :meth:`heal`.
        """
        self._call(self._swallow(ways))

    def heal(self) -> None:
        """Serve new connections; those that the hole has swallowed stay half open."""
        self._is_hole = False

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._reset()

    async def _reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()
        await asyncio.sleep(0)

    async def _swallow(self, ways: tuple[Way, ...]) -> None:
        self._is_hole = not ways
        for connection in self._connections:
            connection.swallowed.update(ways or _BOTH)

    async def _close(self) -> None:
        await self._refuse()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            if self._is_hole:
                connection.swallowed.update(_BOTH)
                await self._forward("up", reader, writer, connection)
                return
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            except OSError:
                connection.reset()
                return
            connection.writers.append(far_writer)
            await asyncio.gather(
                self._forward("up", reader, far_writer, connection),
                self._forward("down", far_reader, writer, connection),
            )
        finally:
            self._connections.discard(connection)
            connection.end()

    async def _forward(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(way, pieces, writer, connection))
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                pieces.put_nowait((self._loop.time() + self._late_seconds, data))
        # The end travels as late as everything before it.
        pieces.put_nowait((self._loop.time() + self._late_seconds, b""))
        await sending

    async def _send(
        self,
        way: Way,
        pieces: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        connection: _Connection,
    ) -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._flowing.wait()
            if not data:
                # A black hole tells nobody of an end either.
                if way not in connection.swallowed:
                    connection.end()
                return
            if way in connection.swallowed or connection.is_over:
                continue
            is_cut = False
            if self.cut is not None and self.cut.way == way:
                data, is_cut = self.cut.allowed(data)
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()
            self.num_pieces[way] += 1
            self.num_bytes[way] += len(data)
            if is_cut:
                self.cut = None
                self.num_cuts += 1
                connection.end()


class _Connection:
    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.swallowed: set[Way] = set()
        self.is_over = False

    def end(self) -> None:
        """Close both ends in order: what was forwarded arrives."""
        self.is_over = True
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        self.is_over = True
        for writer in self.writers:
            own = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
