"""One connection a host and trigger process, shared by every trigger that asks about jobs there.

Five hundred deferred tasks are one TCP connection, one agent, and one poll request an
interval. When the host is away, the channel alone tries again, with growing pauses; the
triggers only wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from eagle3_airflow.hooks.agent_link import ANSWER_SECONDS, AgentLink
from eagle3_airflow.remote_command import HostAddress
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import (
    HostUnreachable,
    PipelineError,
    RequestRefused,
    UnexpectedFailure,
)
from eagle3_tasks.contracts.jobs import JobStatus, PollBody, PollItem, PollReply, Verb

logger = logging.getLogger(__name__)


class JobUnknown(HostUnreachable):
    """The host answers, but could not look at this one job just now."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Question:
    item: PollItem
    due: float
    patience: float
    answer: asyncio.Future[JobStatus]

    def succeed(self, status: JobStatus) -> None:
        if not self.answer.done():
            self.answer.set_result(status)

    def fail(self, problem: PipelineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(problem)
            # Whoever asked may have gone: an error that nobody fetches must not be reported.
            self.answer.exception()


class HostChannel:
    """The shared connection. Get one with :meth:`lease`; it closes with its last lease."""

    first_retry_seconds: ClassVar[float] = 5.0
    last_retry_seconds: ClassVar[float] = 300.0
    _shared: ClassVar[dict[tuple[asyncio.AbstractEventLoop, HostAddress], HostChannel]] = {}

    def __init__(self, address: HostAddress) -> None:
        self.address = address
        self._leases = 0
        self._link: AgentLink | None = None
        self._problem: PipelineError | None = None
        self._changed = asyncio.Condition()
        self._questions: list[_Question] = []
        self._wake = asyncio.Event()
        # An empty context: otherwise the log lines of all would go to the task that came first.
        self._keeper = asyncio.create_task(self._keep(), context=contextvars.Context())

    @classmethod
    @contextlib.asynccontextmanager
    async def lease(cls, address: HostAddress) -> AsyncIterator[HostChannel]:
        """Share the channel of this event loop for ``address`` while the block runs."""
        key = (asyncio.get_running_loop(), address)
        channel = cls._shared.get(key)
        if channel is None or channel.is_over:
            channel = cls._shared[key] = cls(address)
        channel._leases += 1
        try:
            yield channel
        finally:
            channel._leases -= 1
            if channel._leases == 0:
                if cls._shared.get(key) is channel:
                    del cls._shared[key]
                channel._keeper.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the channel has given up: what it met, waiting doesn't mend."""
        return self._keeper.done()

    async def request(
        self, verb: Verb, body: object, *, seconds: float = ANSWER_SECONDS
    ) -> Mapping[str, Any]:
        """Ask one thing over the shared agent.

        Raises:
            PipelineError: HostUnreachable at once while the host is away; else as the agent says.
        """
        link = await self._current_link()
        return await link.request(verb, body, seconds=seconds)

    async def poll(self, item: PollItem, *, after_seconds: float) -> JobStatus:
        """Ask about one job after so many seconds, together with everybody whose time has come.

        Raises:
            JobUnknown: the host can't tell how the job is; ask again.
            PipelineError: as :meth:`request`.
        """
        await self._current_link()
        loop = asyncio.get_running_loop()
        question = _Question(
            item=item,
            due=loop.time() + after_seconds,
            patience=after_seconds / 2,
            answer=loop.create_future(),
        )
        self._questions.append(question)
        self._wake.set()
        try:
            return await question.answer
        finally:
            if question in self._questions:
                self._questions.remove(question)

    async def until_reachable(self) -> None:
        """Wait until the host answers.

        Raises:
            PipelineError: it answers, but with something that waiting doesn't mend.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._living_link() is not None or self._is_hopeless())
        if self._problem is not None and self._is_hopeless():
            raise self._problem

    def _is_hopeless(self) -> bool:
        return self._problem is not None and not isinstance(self._problem, HostUnreachable)

    def _living_link(self) -> AgentLink | None:
        # A link that has ended stays until the keeper's turn comes. Whoever took it for a living
        # one would ask, fail and ask again without ever giving the keeper its turn.
        link = self._link
        return link if link is not None and not link.ended.done() else None

    async def _current_link(self) -> AgentLink:
        async with self._changed:
            await self._changed.wait_for(lambda: self._living_link() or self._problem is not None)
            if (link := self._living_link()) is not None:
                return link
            raise self._problem or HostUnreachable("the connection was closed.")

    async def _set(self, link: AgentLink | None, problem: PipelineError | None) -> None:
        async with self._changed:
            self._link, self._problem = link, problem
            self._changed.notify_all()
        if problem is not None:
            for question in self._questions:
                question.fail(problem)

    async def _keep(self) -> None:
        """Hold the connection open, and open it again when it ends."""
        pause = self.first_retry_seconds
        link: AgentLink | None = None
        try:
            while True:
                try:
                    link = await AgentLink.open(self.address)
                    pause = self.first_retry_seconds
                    await self._set(link, None)
                    await self._serve(link)
                except PipelineError as problem:
                    await self._set(None, problem)
                    if self._is_hopeless():
                        return
                finally:
                    if link is not None:
                        await link.close()
                        link = None
                # Half to whole: fifty channels that lost one host don't come back at one moment.
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
                pause = min(pause * 2, self.last_retry_seconds)
        except asyncio.CancelledError:
            await self._set(None, HostUnreachable("the connection was closed."))
            raise
        except Exception as error:
            logger.exception("channel failed conn_id=%s", self.address.ssh_conn_id)
            await self._set(
                None,
                UnexpectedFailure(f"the connection's keeper failed: {type(error).__name__}: {error}."),
            )

    async def _serve(self, link: AgentLink) -> None:
        """Send the questions that are due until the link ends; always raises its reason."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            next_due = min((question.due for question in self._questions), default=None)
            if next_due is not None and next_due <= now:
                # Those who are due soon come along: one request an interval, not one a job.
                due = [question for question in self._questions if question.due - question.patience <= now]
                await self._ask(link, due)
                continue
            self._wake.clear()
            waits = [
                asyncio.ensure_future(self._wake.wait()),
                asyncio.ensure_future(asyncio.shield(link.ended)),
            ]
            try:
                timeout = None if next_due is None else max(0.0, next_due - now)
                await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if link.ended.done():
                raise link.ended.result()

    async def _ask(self, link: AgentLink, due: list[_Question]) -> None:
        self._questions = [question for question in self._questions if question not in due]
        body = PollBody(jobs=tuple(question.item for question in due))
        try:
            reply = codec.from_plain(PollReply, await link.request("poll", body), where="poll")
        except PipelineError as problem:
            for question in due:
                question.fail(problem)
            if isinstance(problem, HostUnreachable):
                raise
            return
        statuses = {status.key: status for status in reply.jobs}
        for question in due:
            key = question.item.key
            if key in statuses:
                question.succeed(statuses[key])
            elif key in reply.errors:
                error = reply.errors[key]
                question.fail(JobUnknown(f"{error.code}: {error.message}"))
            else:
                question.fail(RequestRefused(f"the agent's answer to a poll leaves out job {key}."))
