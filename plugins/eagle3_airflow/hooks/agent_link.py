"""One connection with one resident agent, for triggers: many requests at once, one stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3_airflow.hooks.connections import CONNECT_SECONDS, open_connection
from eagle3_airflow.hooks.ssh_errors import Place, translate_ssh_error
from eagle3_airflow.remote_command import (
    BOOTSTRAP_ANSWER_ID,
    COMMAND,
    TAIL_CHARACTERS,
    AnswerReader,
    HostAddress,
    early_end,
    to_line,
)
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import HostUnreachable, PipelineError, error_from_record
from eagle3_tasks.contracts.jobs import HelloBody, Request, Verb

if TYPE_CHECKING:
    import asyncssh

ANSWER_SECONDS = 60.0
_PACKET_BYTES = 65_536


class AgentLink:
    """An agent that stays. When its stream ends, every open request fails, and the link is over."""

    def __init__(
        self,
        connection: asyncssh.SSHClientConnection,
        process: asyncssh.SSHClientProcess[bytes],
        *,
        conn_id: str,
        nonce: str,
    ) -> None:
        self._place = Place(conn_id=conn_id)
        self._connection = connection
        self._process = process
        self._answers = AnswerReader(nonce)
        self._stderr_tail = ""
        self._open: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._has_answered = False
        self.ended: asyncio.Future[PipelineError] = asyncio.get_running_loop().create_future()
        """Done with the reason once the link is over."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._drain_stderr())]

    @classmethod
    async def open(cls, address: HostAddress) -> AgentLink:
        """Connect, start the agent and hear it.

        Raises:
            PipelineError: HostUnreachable, or why this agent can't be had. A missing release
                is an UnexpectedFailure here: only operators ship.
        """
        connection = await open_connection(address.ssh_conn_id)
        nonce = secrets.token_hex(8)
        try:
            process = await asyncio.wait_for(
                connection.create_process(COMMAND, encoding=None), timeout=CONNECT_SECONDS
            )
            link = cls(connection, process, conn_id=address.ssh_conn_id, nonce=nonce)
        except BaseException as error:
            # Cancelled as well: nobody else knows of this connection.
            connection.abort()
            if not isinstance(error, Exception):
                raise
            raise translate_ssh_error(error, Place(conn_id=address.ssh_conn_id)) from error
        try:
            process.stdin.write(to_line(address.hello(nonce)))
            await link.request("hello", HelloBody())
        except BaseException:
            await link.close()
            raise
        return link

    async def request(
        self, verb: Verb, body: object, *, seconds: float = ANSWER_SECONDS
    ) -> Mapping[str, Any]:
        """Ask one thing; others may be asked meanwhile.

        Raises:
            PipelineError: the agent's own error; HostUnreachable if the link ends first, or
                after ``seconds``. Then the link is over as well: a stream that is silent for
                so long is half open.
        """
        if self.ended.done():
            raise self.ended.result()
        request = Request(id=next(self._ids), verb=verb, body=codec.to_plain(body))
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[request.id] = answer
        try:
            self._process.stdin.write(to_line(request))
            return await asyncio.wait_for(answer, timeout=seconds)
        except TimeoutError:
            self._end(HostUnreachable(f"the GPU host has not answered within {seconds:.0f} s."))
            raise self.ended.result() from None
        except (OSError, EOFError):
            # The stream is closed for writing; what it said last is the better reason.
            raise await self.ended from None
        finally:
            self._open.pop(request.id, None)

    async def close(self) -> None:
        """End the connection; the agent ends with it, jobs don't."""
        self._end(HostUnreachable("the connection was closed."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, problem: PipelineError) -> None:
        if not self.ended.done():
            self.ended.set_result(problem)
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(problem)
                # Whoever asked may have gone: an error that nobody fetches must not be reported.
                answer.exception()
        self._connection.abort()

    async def _read(self) -> None:
        problem: PipelineError | None = None
        try:
            while data := await self._process.stdout.read(_PACKET_BYTES):
                for answer in self._answers.feed(data):
                    if answer.id == BOOTSTRAP_ANSWER_ID and answer.error is not None:
                        problem = error_from_record(answer.error)
                        return
                    self._has_answered = True
                    waiting = self._open.get(answer.id)
                    if waiting is None or waiting.done():
                        continue
                    if answer.error is not None:
                        waiting.set_exception(error_from_record(answer.error))
                    else:
                        waiting.set_result(answer.body or {})
            problem = await self._reason_of_end()
        except Exception as error:  # noqa: BLE001 - whatever ended the stream, the askers must hear of it
            problem = translate_ssh_error(error, self._place)
        finally:
            self._end(problem or HostUnreachable("the connection was closed."))

    async def _reason_of_end(self) -> PipelineError:
        if self._has_answered:
            return HostUnreachable("the connection to the agent ended.")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait_closed(), timeout=2.0)
        return early_end(self._process.exit_status, self._stderr_tail or self._answers.tail)

    async def _drain_stderr(self) -> None:
        # Unread, it would fill the channel's window and stop the answers for good.
        with contextlib.suppress(Exception):
            while data := await self._process.stderr.read(_PACKET_BYTES):
                text = data.decode("utf-8", "replace")
                self._stderr_tail = (self._stderr_tail + text)[-TAIL_CHARACTERS:]
