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
from eagle3_tasks.contracts.jobs import Answer, Hello, Request, find_frames, frame_marks

RELEASE_MISSING = "RELEASE_MISSING"
"""Code of the bootstrap's error when ROOT holds no such release, or a torn one that was moved
away: ship it, then try again."""

BOOTSTRAP_ANSWER_ID = 0
TAIL_CHARACTERS = 800

# Runs under whatever python3 the host has, so nothing newer than Python 3.5 and only its
# standard library. Neither a single quote nor a backslash may stand in it: the shell sees it
# inside single quotes.
BOOTSTRAP = """
import errno, hashlib, json, os, subprocess, sys
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

def refuse_root(number, reason):
    # What a person typed can be wrong in these ways only. All else is the disk, and may pass.
    typed = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP,
             errno.ENAMETOOLONG, errno.EINVAL)
    if number in typed:
        fail("INVALID_SETTINGS", "user", "root %s cannot be used on the GPU host: %s."
             " Choose a folder that the login user may write." % (root, reason))
    fail("DISK_PROBLEM", "node", "root %s cannot be used on the GPU host: %s."
         " Look at its disk and at dmesg; a retry goes on once it is mended." % (root, reason))

def check_root():
    try:
        if hello["make_root"]:
            os.makedirs(root, 0o700, exist_ok=True)
        elif not os.path.isdir(os.path.join(root, "jobs")):
            fail("DISK_PROBLEM", "node", "ROOT is not there: %s is no folder with jobs in it on the GPU"
                 " host. Is the data disk mounted? Mount it; a retry then goes on. Where it is gone"
                 " for good, start a new run: preflight makes ROOT anew." % root)
        if os.access(root, os.W_OK | os.X_OK):
            return
        read_only = os.statvfs(root).f_flag & os.ST_RDONLY
    except OSError as error:
        refuse_root(error.errno, error.strerror)
    number = errno.EROFS if read_only else errno.EACCES
    refuse_root(number, os.strerror(number))

def note_error(error):
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise error

def digest_of(package):
    # As release_digest in contracts/digests.py; what is not there adds nothing.
    files = []
    for folder, folders, names in os.walk(package, onerror=note_error):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if not name.endswith(".pyc"):
                path = os.path.join(folder, name)
                files.append((os.path.relpath(path, package).split("/"), path))
    total = hashlib.sha256()
    for parts, path in sorted(files):
        with open(path, "rb") as file:
            content = file.read()
        total.update(os.fsencode("/".join(parts)) + bytes([0]) + str(len(content)).encode() + bytes([0]))
        total.update(content)
    return total.hexdigest()[:24]

def check_release(releases):
    release = os.path.join(releases, hello["release"])
    try:
        if os.path.exists(release):
            seen = os.stat(release)
            if digest_of(os.path.join(release, "eagle3_tasks")) == hello["release"]:
                return release
            # Torn by a power cut, or changed. Not if somebody has just put a whole one there.
            if os.path.samestat(seen, os.stat(release)):
                aside = ".broken-%s-%s" % (hello["release"], hello["nonce"])
                os.utime(release)
                os.rename(release, os.path.join(releases, aside))
    except FileNotFoundError:
        pass  # somebody else moved it away
    except OSError as error:
        fail("DISK_PROBLEM", "node", "release %s cannot be read: %s: %s. Look at its disk and its owner."
             % (hello["release"], error.filename, error.strerror))
    fail("RELEASE_MISSING", "node", "release %s is not whole under %s." % (hello["release"], releases))

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
check_root()
python = choose_python(root)
os.environ["PYTHONPATH"] = check_release(os.path.join(root, "releases"))
os.environ["EAGLE3_AGENT_HELLO"] = line.decode("utf-8").strip()
# -P: a json.py in the login folder must not shadow the standard one.
os.execve(python, [python, "-P", "-m", "eagle3_tasks.host.agent"], os.environ)
"""

COMMAND = f"exec python3 -c '{BOOTSTRAP}'"
"""The whole remote command line, for any login shell of the Bourne family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostAddress:
    """What leads to one agent: an Airflow connection, ROOT, the interpreter and the release.

    With ``make_root`` a ROOT that isn't there is made. Only for what a host begins with.
    """

    ssh_conn_id: str
    root: str
    python: str
    release: str
    make_root: bool = False

    def hello(self, nonce: str) -> Hello:
        return Hello(
            nonce=nonce,
            root=self.root,
            release=self.release,
            python=self.python,
            make_root=self.make_root,
        )


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
        self._opening, self._closing = frame_marks(nonce)
        self._pieces: list[str] = []
        self._edge = ""
        self._is_inside = False
        self.tail = ""
        """The last printed characters, for the message when no answer comes."""

    def feed(self, data: bytes) -> list[Answer]:
        """Take more bytes and give the answers that they complete.

        Raises:
            HostUnreachable: a frame is garbled; an answer that can't be read says nothing.
        """
        text = self._decoder.decode(data)
        self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
        self._pieces.append(text)
        # The end of a long answer is looked for in what is new alone, and where that joins the old.
        edge = self._edge + text
        self._edge = edge[-(len(self._closing) - 1) :]
        if self._is_inside and self._closing not in edge:
            return []
        try:
            answers, rest = find_frames(self._nonce, "".join(self._pieces))
        except RequestRefused as error:
            raise HostUnreachable(f"the host's answer is garbled: {error}") from error
        self._pieces = [rest]
        self._is_inside = rest.startswith(self._opening)
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
