"""The bootstrap run for real, by a local shell, with a stub of an agent as the release."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_airflow.remote_command import BOOTSTRAP, COMMAND, AnswerReader, HostAddress, early_end, to_line
from eagle3_tasks.contracts.digests import files_digest
from eagle3_tasks.contracts.errors import HostUnreachable, MissingSoftware, RequestRefused, UnexpectedFailure
from eagle3_tasks.contracts.jobs import Answer, HelloBody, Request, frame

NONCE = "7f3a"
STUB = """
import json, os, sys
hello = json.loads(os.environ["EAGLE3_AGENT_HELLO"])
body = {"argv0": sys.executable, "hello": hello, "rest": sys.stdin.read()}
body.update({"umask": os.umask(0), "path": sys.path[0]})
text = json.dumps({"id": 1, "body": body, "error": None})
print("<<<EAGLE:%s %s EAGLE:%s>>>" % (hello["nonce"], text, hello["nonce"]), flush=True)
"""


# Names that sort otherwise as text than as paths, and one that a form could not hold.
FILES = {
    "__init__.py": b"", "a-b/__init__.py": b"", "a/b.py": b"\xff", "ab.py": b"", "host/__init__.py": b"",
    "host/agent.py": STUB.encode(), "host/ä.lock": b"\0\n",
}  # fmt: skip
DIGEST = files_digest((str(path), FILES[str(path)]) for path in sorted(map(Path, FILES)))


def make_release(root: Path) -> Path:
    package = root / "releases" / DIGEST / "eagle3_tasks"
    for name, content in {**FILES, "host/__pycache__/agent.pyc": b"cache"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    (root / "jobs").mkdir(exist_ok=True)
    return package


def run_command(
    root: Path | str, *, python: str = "", rest: bytes = b"", shell: str = "/bin/sh", path: str | None = None,
    folder: Path | None = None, make_root: bool = False,
) -> list[Answer]:  # fmt: skip
    address = HostAddress(ssh_conn_id="c", root=str(root), python=python, release=DIGEST, make_root=make_root)
    result = subprocess.run(
        [shell, "-c", COMMAND], input=to_line(address.hello(NONCE)) + rest, capture_output=True, timeout=20,
        check=False, cwd=folder, env={**os.environ, **({"PATH": path} if path else {})},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    return AnswerReader(NONCE).feed(result.stdout)


def answer(answers: list[Answer]) -> dict[str, object]:
    assert [one.id for one in answers] == [1], answers
    assert answers[0].body is not None
    return dict(answers[0].body)


def error_code(answers: list[Answer]) -> str:
    assert [one.id for one in answers] == [0], answers
    assert answers[0].error is not None
    return answers[0].error.code


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_agent_gets_the_hello_and_everything_after_its_line(tmp_path: Path, shell: str) -> None:
    make_release(tmp_path)
    body = answer(run_command(tmp_path, rest=b"first\nsecond\n", shell=shell))
    assert body["rest"] == "first\nsecond\n"
    assert body["hello"] == {
        "protocol": 1, "nonce": NONCE, "root": str(tmp_path), "release": DIGEST, "python": "",
        "make_root": False,
    }  # fmt: skip
    assert body["umask"] == 0o077


def test_a_root_of_any_content_reaches_the_agent_byte_for_byte(tmp_path: Path) -> None:
    root = tmp_path / 'x\'; touch PWNED; $(id) `id` {{ 1+1 }} "é" \\n ü'
    make_release(root)
    body = answer(run_command(root, folder=tmp_path))
    assert body["hello"]["root"] == str(root)  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    assert not (tmp_path / "PWNED").exists()


def test_a_module_in_the_login_folder_shadows_nothing(tmp_path: Path) -> None:
    make_release(tmp_path / "root")
    (tmp_path / "eagle3_tasks.py").write_text("raise SystemExit(3)")
    body = answer(run_command(tmp_path / "root", folder=tmp_path))
    assert body["path"] == str(tmp_path / "root" / "releases" / DIGEST)


def test_the_environment_under_root_is_preferred_to_the_python_on_the_path(tmp_path: Path) -> None:
    make_release(tmp_path)
    own = tmp_path / "env" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert answer(run_command(tmp_path))["argv0"] == str(own)


def test_a_python_that_is_given_is_used_before_all_others(tmp_path: Path) -> None:
    make_release(tmp_path)
    given = tmp_path / "my python"
    given.symlink_to(sys.executable)
    assert answer(run_command(tmp_path, python=str(given)))["argv0"] == str(given)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true2", "/bin/false"])
def test_a_given_python_that_cannot_serve_is_missing_software(tmp_path: Path, python: str) -> None:
    make_release(tmp_path)
    assert error_code(run_command(tmp_path, python=python)) == "MISSING_SOFTWARE"


def test_a_host_with_nothing_but_an_old_python_says_which_it_has(tmp_path: Path) -> None:
    make_release(tmp_path)
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    pretended = "import sys; sys.version_info = (3, 8, 10, 'final', 0); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretended}" "$2"\n')
    old.chmod(0o700)
    answers = run_command(tmp_path, path=str(old.parent))
    assert error_code(answers) == "MISSING_SOFTWARE"
    assert answers[0].error is not None
    assert "Python 3.8" in answers[0].error.message


def test_a_release_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    assert error_code(run_command(tmp_path / "new", make_root=True)) == "RELEASE_MISSING"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("tear", ["emptied", "absent", "no package", "one more"])
def test_a_torn_release_is_moved_aside_before_anything_of_it_runs_and_asked_for_again(
    tmp_path: Path, tear: str
) -> None:
    package = make_release(tmp_path)
    if tear == "emptied":
        (package / "host" / "agent.py").write_bytes(b"")
    elif tear == "absent":
        (package / "ab.py").unlink()
    elif tear == "no package":
        package.rename(tmp_path / "elsewhere")
    else:
        (package / "json.py").touch()
    assert error_code(run_command(tmp_path)) == "RELEASE_MISSING"
    assert [path.name for path in (tmp_path / "releases").iterdir()] == [f".broken-{DIGEST}-{NONCE}"]
    make_release(tmp_path)
    assert answer(run_command(tmp_path))


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answers = run_command(tmp_path / "file" / "root", make_root=True)
    assert error_code(answers) == "INVALID_SETTINGS"
    assert answers[0].error is not None
    assert str(tmp_path / "file" / "root") in answers[0].error.message


@pytest.mark.parametrize("is_mount_point", [False, True])
def test_a_root_that_has_vanished_is_a_disk_that_is_not_mounted_and_is_not_made_anew(
    tmp_path: Path, is_mount_point: bool
) -> None:
    root = tmp_path / "data" / "eagle3"
    if is_mount_point:
        root.mkdir(parents=True)
    answers = run_command(root)
    assert error_code(answers) == "DISK_PROBLEM"
    assert answers[0].error is not None
    assert answers[0].error.kind == "node"
    assert "ROOT is not there" in answers[0].error.message
    assert "Is the data disk mounted?" in answers[0].error.message
    assert not (root / "jobs").exists()
    assert root.exists() == is_mount_point


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EROFS, "DISK_PROBLEM"), (errno.ENOSPC, "DISK_PROBLEM"), (errno.EDQUOT, "DISK_PROBLEM"),
     (errno.EIO, "DISK_PROBLEM"), (errno.ESTALE, "DISK_PROBLEM"), (errno.EACCES, "INVALID_SETTINGS")],
)  # fmt: skip
def test_only_what_a_person_typed_is_the_users_problem(tmp_path: Path, number: int, code: str) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    sick = f"import os, sys\ndef sick(*a, **k): raise OSError({number}, os.strerror({number}))\n"
    (tmp_path / "sick.py").write_text(f"{sick}os.makedirs = sick\nexec(sys.argv[1])\n")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/sick.py "$2"\n')
    python.chmod(0o700)
    answers = run_command(tmp_path / "root", make_root=True, path=str(python.parent))
    assert error_code(answers) == code


def test_an_end_of_input_before_the_hello_ends_quietly() -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", COMMAND], input=b"", capture_output=True, timeout=20, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_the_bootstrap_holds_nothing_that_a_shell_would_touch() -> None:
    assert "'" not in BOOTSTRAP
    assert "\\" not in BOOTSTRAP
    assert "!" not in BOOTSTRAP.replace("!=", "")


def test_answers_are_found_in_noise_that_arrives_byte_by_byte() -> None:
    wanted = [Answer(id=1, body={"text": "é EAGLE:7f3a"}), Answer(id=2, body={})]
    noise = b"\x1b[33mOnly \xff\xfe these paths\x1b[0m\r\n<<<EAGLE:other {} EAGLE:other>>>\n"
    stream = noise + frame(NONCE, wanted[0]).encode() + noise + frame(NONCE, wanted[1]).encode() + b"bye"
    reader = AnswerReader(NONCE)
    found = [one for index in range(len(stream)) for one in reader.feed(stream[index : index + 1])]
    assert found == wanted


def test_a_long_answer_in_many_packets_is_read_in_linear_time() -> None:
    wanted = Answer(id=1, body={"text": "x" * (16 << 20)})
    stream = frame(NONCE, wanted).encode()
    reader = AnswerReader(NONCE)
    began = time.process_time()
    found = [
        one for start in range(0, len(stream), 4096) for one in reader.feed(stream[start : start + 4096])
    ]
    assert found == [wanted]
    # Searched anew with each packet, the 4,096 packets take seven seconds.
    assert time.process_time() - began < 3.0


def test_a_garbled_answer_says_nothing_about_the_job() -> None:
    for content in (b'{"state":"RUNNING"}', b'{"id": 1, "bo<noise>dy"', b""):
        with pytest.raises(HostUnreachable, match="garbled"):
            AnswerReader(NONCE).feed(b"<<<EAGLE:7f3a " + content + b" EAGLE:7f3a>>>")


def test_half_a_surrogate_pair_is_refused_before_it_is_sent() -> None:
    request = Request(id=1, verb="hello", body={"text": json.loads('"\\ud800"')})
    with pytest.raises(RequestRefused, match="no character"):
        to_line(request)
    assert to_line(Request(id=1, verb="hello", body={"b": HelloBody()})).endswith(b"\n")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(None, HostUnreachable), (-1, HostUnreachable), (127, MissingSoftware), (126, MissingSoftware),
     (1, UnexpectedFailure), (0, UnexpectedFailure)],
)  # fmt: skip
def test_a_command_that_ends_early_is_judged_by_its_exit_status(status: int | None, kind: type) -> None:
    problem = early_end(status, "sh: python3: not found")
    assert type(problem) is kind
    if status is not None and status >= 0:
        assert "python3: not found" in str(problem)
