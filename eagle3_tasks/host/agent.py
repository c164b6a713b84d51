"""``python -m eagle3_tasks.host.agent``: answers the orchestrator on one connection.

The environment variable ``EAGLE3_AGENT_HELLO`` holds the Hello line; requests come on
standard input, one a line, answers go to standard output in frames. Requests are worked
on side by side, so a slow one holds up no other; answers carry the request's number and
come in any order. The agent ends when its channel does, and jobs live on.
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import (
    ErrorRecord,
    IncompatibleRelease,
    PipelineError,
    RequestRefused,
    UnexpectedFailure,
)
from eagle3_tasks.contracts.jobs import (
    PROTOCOL_VERSION,
    AcknowledgeBody,
    Answer,
    CancelBody,
    Hello,
    HelloBody,
    HelloReply,
    PollBody,
    ProbeBody,
    Request,
    SubmitBody,
    frame,
)
from eagle3_tasks.host.disk_errors import disk_problem
from eagle3_tasks.host.launch import AGENT_HELLO_VARIABLE, package_folder
from eagle3_tasks.host.machine import host_name, machine_id
from eagle3_tasks.host.probe_command import run_probe_command
from eagle3_tasks.host.verbs import JobVerbs

IDLE_SECONDS = 3600.0
"""A connection that has said nothing for so long is dead, whatever the network thinks."""
MAX_REQUEST_BYTES = 8 << 20
_HEAD_BYTES = 4096
_HEAD_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*,')
NUM_WORKERS = 8
HELLO_ID = 0
"""Number of an answer to no request: why the agent can't serve, or can't read a line."""

B = TypeVar("B")
Handler = Callable[[Mapping[str, Any]], object]


def handlers(hello: Hello, environment: Mapping[str, str]) -> dict[str, Handler]:
    """Give what answers each verb's body."""
    identity = machine_id(environment)
    verbs = JobVerbs(
        root=Path(hello.root), make_root=hello.make_root, machine_id=identity, environment=environment
    )

    def reply(_body: HelloBody) -> HelloReply:
        return HelloReply(
            host_name=host_name(),
            machine_id=identity,
            python=sys.executable,
            python_version=platform.python_version(),
            release=hello.release,
        )

    def probe(body: ProbeBody) -> Mapping[str, Any]:
        return run_probe_command(body, environment)

    return {
        "hello": _decoding(HelloBody, reply),
        "submit": _decoding(SubmitBody, verbs.submit),
        "poll": _decoding(PollBody, verbs.poll),
        "cancel": _decoding(CancelBody, verbs.cancel),
        "acknowledge": _decoding(AcknowledgeBody, verbs.acknowledge),
        "probe": _decoding(ProbeBody, probe),
    }


def answer_line(line: bytes, answer_with: Mapping[str, Handler]) -> Answer:
    """Answer one request. Whatever goes wrong becomes an error in the answer."""
    request_id = _request_id(line)
    try:
        request = codec.loads(Request, line, where="request")
        body = answer_with[request.verb](request.body)
        return Answer(id=request.id, body=codec.to_plain(body))
    except PipelineError as error:
        record = error.record()
    except OSError as error:
        record = disk_problem(error).record()
    except Exception as error:  # noqa: BLE001 - the edge: an agent that dies would look like a dead host
        record = UnexpectedFailure(
            f"{host_name()}: the agent failed: {type(error).__name__}: {error}."
        ).record()
    return Answer(id=request_id, error=record)


def refuse_length(head: bytes, num_bytes: int) -> Answer:
    """Answer a request that is too long to be read, by the number at its beginning."""
    match = _HEAD_ID.match(head)
    problem = RequestRefused(
        f"{host_name()}: a request of {num_bytes} bytes; {MAX_REQUEST_BYTES} are possible. Shorten what the "
        "job reads (stdin, environment, argv), or put it into a file on the host."
    )
    return Answer(id=int(match[1]) if match else HELLO_ID, error=problem.record())


def check_hello(text: str) -> Hello:
    """Read the Hello line and make sure that this is the code it asks for.

    Raises:
        IncompatibleRelease: it is other code; the bootstrap has checked the release itself.
        RequestRefused: another protocol.
    """
    hello = codec.loads(Hello, text, where="hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise RequestRefused(
            f"protocol {hello.protocol} is asked for; this release speaks {PROTOCOL_VERSION}."
        )
    found = release_digest(package_folder())
    if found != hello.release:
        raise IncompatibleRelease(
            f"{host_name()}: the agent runs {package_folder()}, release {found}, but {hello.release} was "
            "asked for. Something puts that folder first on Python's path: take away the .pth file or the "
            "sitecustomize that does."
        )
    return hello


def serve(input_fd: int, output_fd: int, nonce: str, answer_with: Mapping[str, Handler]) -> None:
    """Answer requests until the channel ends, then what is still being worked on, if anybody listens."""
    writing = threading.Lock()

    def work(line: bytes, num_bytes: int) -> None:
        is_too_long = num_bytes > MAX_REQUEST_BYTES
        answer = refuse_length(line, num_bytes) if is_too_long else answer_line(line, answer_with)
        with writing:
            _write(output_fd, frame(nonce, answer).encode("utf-8", "surrogatepass"))

    workers = concurrent.futures.ThreadPoolExecutor(NUM_WORKERS)
    pending: set[concurrent.futures.Future[None]] = set()
    for line, num_bytes in _read_lines(input_fd):
        pending = {future for future in pending if not future.done()}
        pending.add(workers.submit(work, line, num_bytes))
    while pending and not _has_hung_up(output_fd):
        _, pending = concurrent.futures.wait(pending, timeout=0.1)


def main() -> int:
    """Serve one connection."""
    os.umask(0o077)
    environment = dict(os.environ)
    text = environment.pop(AGENT_HELLO_VARIABLE, "")
    try:
        nonce = codec.loads(Hello, text, where="hello").nonce
    except RequestRefused as error:
        sys.stderr.write(f"{AGENT_HELLO_VARIABLE}: {error}\n")
        return error.exit_code
    try:
        hello = check_hello(text)
    except PipelineError as error:
        _write_error(nonce, error.record())
        return error.exit_code
    try:
        serve(sys.stdin.fileno(), sys.stdout.fileno(), nonce, handlers(hello, environment))
    except OSError:
        # The channel broke; there is nobody to tell.
        return 1
    return 0


def _decoding(kind: type[B], handle: Callable[[B], object]) -> Handler:
    return lambda body: handle(codec.from_plain(kind, body, where=kind.__name__))


def _request_id(line: bytes) -> int:
    """Find the number of a request that may be malformed otherwise."""
    try:
        value: object = codec.loads_plain(line, where="request")
    except RequestRefused:
        return HELLO_ID
    number = cast("dict[str, object]", value).get("id") if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else HELLO_ID


def _read_lines(descriptor: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its length. Of one that is too long, only the beginning is kept."""
    rest = b""
    num_dropped = 0
    while select.select([descriptor], [], [], IDLE_SECONDS)[0]:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line, len(line) + num_dropped
            num_dropped = 0
        if len(rest) > MAX_REQUEST_BYTES:
            # Only counted from here to its end; what comes after it is still answered.
            num_dropped += len(rest) - _HEAD_BYTES
            rest = rest[:_HEAD_BYTES]


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_error(nonce: str, record: ErrorRecord) -> None:
    _write(sys.stdout.fileno(), frame(nonce, Answer(id=HELLO_ID, error=record)).encode())


def _has_hung_up(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poller.poll(0))


if __name__ == "__main__":
    # Threads of hung requests must not keep the process; nothing is buffered.
    os._exit(main())
