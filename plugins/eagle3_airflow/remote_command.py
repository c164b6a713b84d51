"""The one remote command, and the text that goes through it. Pure: opens nothing.

The command line is a constant. What a run wants travels on standard input, so no value
from a form can reach a shell.
"""

from __future__ import annotations

import codecs
import dataclasses

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import (
    HostUnreachable,
    MissingSoftware,
    PipelineError,
    RequestRefused,
    UnexpectedFailure,
)
from eagle3_tasks.contracts.jobs import Answer, Hello, Request, find_frames

RELEASE_MISSING = "RELEASE_MISSING"
"""Code of the bootstrap's error when ROOT holds no such release: ship it, then try again."""

BOOTSTRAP_ANSWER_ID = 0
TAIL_CHARACTERS = 800

# Runs under whatever python3 the host has, so nothing newer than Python 3.5 and only its
# standard library. Neither a single quote nor a backslash may stand in it: the shell sees it
# inside single quotes.
BOOTSTRAP = """
import json, os, subprocess, sys
from shutil import which

def fail(code, kind, message):
    record = {"id": 0, "body": None, "error": {"code": code, "kind": kind, "message": message}}
    line = "<<<EAGLE:%s %s EAGLE:%s>>>" % (hello["nonce"], json.dumps(record), hello["nonce"])
    os.write(1, line.encode() + bytes([10]))
    sys.exit(0)

def is_new_enough(python):
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    quiet = subprocess.DEVNULL
    try:
        return subprocess.call([python, "-c", check], stdin=quiet, stdout=quiet, stderr=quiet) == 0
    except OSError:
        return False

def choose_python(root):
    if hello["python"]:
        if is_new_enough(hello["python"]):
            return hello["python"]
        fail("MISSING_SOFTWARE", "user", "python is %s, which is no Python 3.11 or later on this host."
             " Give the path of one, or leave the field empty." % hello["python"])
    own = os.path.join(root, "env", "bin", "python")
    if os.path.exists(own) and is_new_enough(own):
        return own
    if sys.version_info >= (3, 11):
        return sys.executable
    for name in ("python3.13", "python3.12", "python3.11"):
        if which(name) and is_new_enough(which(name)):
            return which(name)
    fail("MISSING_SOFTWARE", "user", "this host has Python %d.%d; 3.11 or later is needed."
         " Install python3.11, or give its path in the field python." % sys.version_info[:2])

line = b""
while not line.endswith(bytes([10])):
    # Byte by byte: what follows the first line belongs to the agent.
    byte = os.read(0, 1)
    if not byte or len(line) > 65536:
        sys.exit(0)
    line += byte
hello = json.loads(line.decode("utf-8"))
os.umask(0o077)
root = hello["root"]
try:
    os.makedirs(root, 0o700, exist_ok=True)
    problem = "" if os.access(root, os.W_OK | os.X_OK) else "no permission to write"
except OSError as error:
    problem = error.strerror
if problem:
    fail("INVALID_SETTINGS", "user", "root %s cannot be used on the GPU host: %s."
         " Choose a folder that the login user may write." % (root, problem))
python = choose_python(root)
release = os.path.join(root, "releases", hello["release"])
if not os.path.isdir(os.path.join(release, "eagle3_tasks")):
    fail("RELEASE_MISSING", "node", "release %s is not under %s/releases." % (hello["release"], root))
os.environ["PYTHONPATH"] = release
os.environ["EAGLE3_AGENT_HELLO"] = line.decode("utf-8").strip()
# -P: a json.py in the login folder must not shadow the standard one.
os.execve(python, [python, "-P", "-m", "eagle3_tasks.host.agent"], os.environ)
"""

COMMAND = f"exec python3 -c '{BOOTSTRAP}'"
"""The whole remote command line, for any login shell of the Bourne family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostAddress:
    """What leads to one agent: an Airflow connection, ROOT, the interpreter and the release."""

    ssh_conn_id: str
    root: str
    python: str
    release: str

    def hello(self, nonce: str) -> Hello:
        return Hello(nonce=nonce, root=self.root, release=self.release, python=self.python)


def to_line(message: Hello | Request) -> bytes:
    """Encode a message as the one line that goes down.

    Raises:
        RequestRefused: it holds text that UTF-8 can't carry (half of a surrogate pair).
    """
    try:
        return (codec.dumps(message) + "\n").encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRefused(
            f"the request holds {error.object[error.start]!r}, which is no character. Remove it."
        ) from error


class AnswerReader:
    """Find the answers of one connection in what the host prints, whatever else it prints."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self.tail = ""
        """The last printed characters, for the message when no answer comes."""

    def feed(self, data: bytes) -> list[Answer]:
        """Take more bytes and give the answers that they complete.

        Raises:
            HostUnreachable: a frame is garbled; an answer that can't be read says nothing.
        """
        text = self._decoder.decode(data)
        self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
        try:
            answers, self._rest = find_frames(self._nonce, self._rest + text)
        except RequestRefused as error:
            raise HostUnreachable(f"the host's answer is garbled: {error}") from error
        return answers


def early_end(exit_status: int | None, tail: str) -> PipelineError:
    """Say why the remote command ended before its agent had answered.

    A missing exit status means that the connection died: nothing is known of the host.
    """
    printed = tail.strip() or "nothing"
    if exit_status is None or exit_status < 0:
        return HostUnreachable("the connection ended before the host had answered.")
    if exit_status in (126, 127):
        return MissingSoftware(
            f"the GPU host can't run python3 (exit code {exit_status}; printed: {printed}). "
            "Install Python 3.11 or later there, so that `ssh HOST python3 --version` answers."
        )
    return UnexpectedFailure(
        f"the agent's command ended with exit code {exit_status} before it answered; printed: {printed}. "
        "Check that `ssh HOST python3 --version` works for the login user."
    )
