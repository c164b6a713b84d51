"""A short conversation with the agent, for operators: open, ask, close."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from eagle3_airflow.hooks.connections import CONNECT_SECONDS, open_client
from eagle3_airflow.hooks.shipping import ship_release
from eagle3_airflow.hooks.ssh_errors import Place, translate_ssh_error
from eagle3_airflow.remote_command import (
    BOOTSTRAP_ANSWER_ID,
    COMMAND,
    RELEASE_MISSING,
    AnswerReader,
    HostAddress,
    early_end,
    to_line,
)
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import (
    DiskProblem,
    HostUnreachable,
    PipelineError,
    UnexpectedFailure,
    error_from_record,
)
from eagle3_tasks.contracts.jobs import (
    AcknowledgeBody,
    Answer,
    CancelBody,
    HelloBody,
    HelloReply,
    JobSpec,
    JobStatus,
    PollBody,
    PollItem,
    PollReply,
    ProbeBody,
    Request,
    SubmitBody,
    Verb,
)
from eagle3_tasks.contracts.stages import ProbeSpec, ProbeVerdict

if TYPE_CHECKING:
    from types import TracebackType

    import paramiko

    from eagle3_airflow.release import Release

ANSWER_SECONDS = 60.0
SUBMIT_SECONDS = 120.0
"""A submit first ends what lives of an attempt before, with its grace time."""
_SLICE_SECONDS = 0.2
_STATUS_SECONDS = 2.0
_PACKET_BYTES = 65_536


class AgentSession:
    """One connection with one agent. Use it as a context manager; opening ships the release if needed.

    Every method raises an error of ``contracts.errors``: ``HostUnreachable`` for whatever
    says nothing about the job.
    """

    def __init__(self, address: HostAddress, release: Release) -> None:
        self.address = address
        self._release = release
        self._place = Place(conn_id=address.ssh_conn_id)
        self._ids = itertools.count(1)
        self._client: paramiko.SSHClient | None = None
        self._channel: paramiko.Channel | None = None
        self._reader = AnswerReader("")
        self._answers: list[Answer] = []
        self._stderr_tail = ""
        self.host: HelloReply | None = None

    def __enter__(self) -> Self:
        try:
            self._client = open_client(self.address.ssh_conn_id)
            if not self._greet():
                self._ship()
                if not self._greet():
                    raise UnexpectedFailure(
                        f"release {self.address.release} was shipped, but is not under "
                        f"{self.address.root}/releases. Does SFTP see another folder than the shell?"
                    )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the agent ends with it, jobs don't."""
        if self._client is not None:
            self._client.close()

    def submit(self, spec: JobSpec) -> JobStatus:
        reply = self.request("submit", SubmitBody(spec=spec), seconds=SUBMIT_SECONDS)
        return codec.from_plain(JobStatus, reply, where="submit")

    def poll(self, item: PollItem) -> JobStatus:
        reply = codec.from_plain(PollReply, self.request("poll", PollBody(jobs=(item,))), where="poll")
        if item.key in reply.errors:
            raise error_from_record(reply.errors[item.key])
        return reply.jobs[0]

    def cancel(self, key: str, reason: str) -> None:
        self.request("cancel", CancelBody(key=key, reason=reason))

    def acknowledge(self, key: str, generation: int) -> None:
        self.request("acknowledge", AcknowledgeBody(key=key, generation=generation))

    def probe(self, spec: ProbeSpec) -> ProbeVerdict:
        body = ProbeBody(spec=codec.to_plain(spec))
        reply = self.request("probe", body, seconds=body.deadline_seconds + ANSWER_SECONDS)
        return codec.from_plain(ProbeVerdict, reply, where="probe")

    def request(self, verb: Verb, body: object, *, seconds: float = ANSWER_SECONDS) -> Mapping[str, Any]:
        """Ask one thing and wait for its answer.

        Raises:
            PipelineError: the agent's own error, or HostUnreachable after ``seconds``.
        """
        request = Request(id=next(self._ids), verb=verb, body=codec.to_plain(body))
        self._send(to_line(request))
        answer = self._wait_for(request.id, seconds)
        if answer.error is not None:
            raise error_from_record(answer.error)
        return answer.body or {}

    def _greet(self) -> bool:
        """Start the agent; False if the host has not got the release."""
        nonce = secrets.token_hex(8)
        self._reader, self._answers, self._stderr_tail = AnswerReader(nonce), [], ""
        request = Request(id=next(self._ids), verb="hello", body=codec.to_plain(HelloBody()))
        try:
            if self._client is None or (transport := self._client.get_transport()) is None:
                raise HostUnreachable(f"connection {self.address.ssh_conn_id!r} is closed.")
            self._channel = transport.open_session(timeout=CONNECT_SECONDS)
            self._channel.exec_command(COMMAND)
        except Exception as error:
            raise translate_ssh_error(error, self._place) from error
        self._send(to_line(self.address.hello(nonce)) + to_line(request))
        answer = self._wait_for(request.id, ANSWER_SECONDS)
        if answer.error is not None:
            if answer.error.code == RELEASE_MISSING:
                return False
            raise error_from_record(answer.error)
        self.host = codec.from_plain(HelloReply, answer.body, where="hello")
        return True

    def _ship(self) -> None:
        try:
            if self._client is None:
                raise HostUnreachable(f"connection {self.address.ssh_conn_id!r} is closed.")
            with contextlib.closing(self._client.open_sftp()) as sftp:
                sftp.get_channel().settimeout(ANSWER_SECONDS)  # pyright: ignore[reportOptionalMemberAccess]
                ship_release(sftp, root=self.address.root, release=self._release)
        except (TimeoutError, ConnectionError, EOFError) as error:
            raise translate_ssh_error(error, self._place) from error
        except OSError as error:
            # SFTP has few codes: a full disk is only "Failure".
            raise DiskProblem(
                f"the release can't be written under {self.address.root}/releases: {error}. "
                "Check the space and the owner of that folder."
            ) from error
        except Exception as error:
            raise translate_ssh_error(error, self._place) from error

    def _send(self, data: bytes) -> None:
        if self._channel is None:
            raise HostUnreachable(f"connection {self.address.ssh_conn_id!r} is closed.")
        try:
            self._channel.settimeout(ANSWER_SECONDS)
            self._channel.sendall(data)
        except Exception as error:
            # It may have ended with an answer that says why: that one counts.
            self._read_rest()
            if not self._answers:
                raise self._end_of_channel() from error

    def _wait_for(self, request_id: int, seconds: float) -> Answer:
        limit = time.monotonic() + seconds
        while True:
            for answer in self._answers:
                # The bootstrap knows no request ids: what it says, it says about all of them.
                if answer.id in (request_id, BOOTSTRAP_ANSWER_ID):
                    self._answers.remove(answer)
                    return answer
            if time.monotonic() > limit:
                raise HostUnreachable(f"the GPU host has not answered within {seconds:.0f} s.")
            if not self._read_once():
                raise self._end_of_channel()

    def _read_once(self) -> bool:
        """Read what comes within a moment; False at the channel's end."""
        channel = self._channel
        if channel is None:
            return False
        try:
            channel.settimeout(_SLICE_SECONDS)
            data = channel.recv(_PACKET_BYTES)
        except TimeoutError:
            data = None
        except Exception as error:
            raise translate_ssh_error(error, self._place) from error
        # Unread standard error would fill the window and stop the other stream for good.
        while channel.recv_stderr_ready():
            text = channel.recv_stderr(_PACKET_BYTES).decode("utf-8", "replace")
            self._stderr_tail = (self._stderr_tail + text)[-800:]
        if data:
            self._answers += self._reader.feed(data)
        return data != b""

    def _read_rest(self) -> None:
        with contextlib.suppress(PipelineError):
            limit = time.monotonic() + CONNECT_SECONDS
            while time.monotonic() < limit and self._read_once():
                pass

    def _end_of_channel(self) -> PipelineError:
        if self.host is not None:
            return HostUnreachable("the connection to the agent ended before its answer.")
        # The exit status comes in a packet of its own, after the end of the output; -1: it never came.
        has_status = self._channel is not None and self._channel.status_event.wait(_STATUS_SECONDS)
        status = self._channel.exit_status if self._channel is not None and has_status else None
        return early_end(status, self._stderr_tail or self._reader.tail)
