"""Operators' connection: credentials, host keys, shipping, and what each failure is called."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_airflow.hooks.agent_session import AgentSession
from eagle3_airflow.release import Release, current_release
from eagle3_airflow.remote_command import HostAddress
from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import (
    ConnectionProblem,
    DiskProblem,
    HostUnreachable,
    InvalidSettings,
    MissingSoftware,
    RequestRefused,
    UnexpectedFailure,
)
from eagle3_tasks.contracts.jobs import JobSpec, JobState, PollItem, job_key, run_key
from tests.integration.openssh import OpenSshServer, free_port, make_key

CONN_ID = "eagle3_test_host"
VARIABLE = f"AIRFLOW_CONN_{CONN_ID.upper()}"


def address(root: Path, **changes: Any) -> HostAddress:
    return HostAddress(
        **{
            "ssh_conn_id": CONN_ID,
            "root": str(root),
            "python": "",
            "release": current_release().digest,
            "make_root": True,
            **changes,
        }
    )


def open_and_close(where: HostAddress) -> None:
    with AgentSession(where, current_release()):
        pass


def hang_up(listener: socket.socket) -> None:
    listener.accept()[0].close()


def test_the_release_is_shipped_once_and_private(sshd: OpenSshServer, root: Path) -> None:
    open_and_close(address(root))
    folder = root / "releases" / current_release().digest
    assert release_digest(folder / "eagle3_tasks") == current_release().digest
    modes = {path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")] if path.is_dir()}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.py")} == {0o600}
    before = folder.stat().st_ino
    with AgentSession(address(root), current_release()) as session:
        assert session.host is not None
        assert session.host.release == current_release().digest
    assert folder.stat().st_ino == before
    assert [path.name for path in folder.parent.iterdir()] == [current_release().digest]


def test_two_that_ship_at_once_leave_one_whole_release(sshd: OpenSshServer, root: Path) -> None:
    failures: list[BaseException] = []

    def ship() -> None:
        try:
            open_and_close(address(root))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=ship) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in (root / "releases").iterdir()] == [current_release().digest]


def test_noise_of_a_shell_and_a_flood_on_standard_error_harm_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = tmp_path / "noise.sh"
    noise.write_text(
        "printf '\\033[33mOnly these paths\\033[0m\\n<<<EAGLE:7f3a {\"id\": 1} EAGLE:7f3a>>>\\n\\377\\376'\n"
        "head -c 3000000 /dev/zero | tr '\\0' 'x'; head -c 3000000 /dev/zero | tr '\\0' 'y' >&2\n"
    )
    server = OpenSshServer.make(tmp_path / "noisy")
    server.write_configuration(f'ForceCommand . {noise}; eval "$SSH_ORIGINAL_COMMAND"')
    # The flood also stands before SFTP's answers, so the release is put there beforehand.
    for path, content in current_release().files:
        file = root / "releases" / current_release().digest / "eagle3_tasks" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    server.start()
    try:
        monkeypatch.setenv(VARIABLE, server.connection())
        with AgentSession(address(root), current_release()) as session:
            assert session.host is not None
    finally:
        server.stop()


def test_a_connection_that_airflow_has_not_got_is_named_with_the_command_that_makes_it(
    sshd: OpenSshServer, root: Path
) -> None:
    with pytest.raises(ConnectionProblem, match="airflow connections add no_such_host"):
        open_and_close(address(root, ssh_conn_id="no_such_host"))


def test_a_host_key_that_does_not_match_stops_with_the_text_that_fixes_it(
    sshd: OpenSshServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    monkeypatch.setenv(VARIABLE, sshd.connection(host_key=other))
    with pytest.raises(ConnectionProblem, match=f"ssh-keyscan -p {sshd.port} 127.0.0.1"):
        open_and_close(address(root))
    # The provider's other switch for the same thing is not obeyed.
    monkeypatch.setenv(VARIABLE, sshd.connection(host_key=other, allow_host_key_change="true"))
    with pytest.raises(ConnectionProblem, match="ssh-keyscan"):
        open_and_close(address(root))
    assert not root.exists()


def test_an_unknown_host_key_is_refused_unless_the_connection_says_so_in_words(
    sshd: OpenSshServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, sshd.connection(host_key=None))
    with pytest.raises(ConnectionProblem, match="host_key"):
        open_and_close(address(root))
    monkeypatch.setenv(VARIABLE, sshd.connection(host_key=None, no_host_key_check=True))
    open_and_close(address(root))


def test_a_login_that_is_refused_is_a_connection_problem(
    sshd: OpenSshServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "stranger")
    key_file = str(tmp_path / "stranger")
    monkeypatch.setenv(VARIABLE, sshd.connection(key_file=key_file, look_for_keys="false"))
    with pytest.raises(ConnectionProblem, match="authorized_keys"):
        open_and_close(address(root))
    monkeypatch.setenv(VARIABLE, sshd.connection(key_file="/no/such/key", look_for_keys="false"))
    with pytest.raises(ConnectionProblem, match="/no/such/key"):
        open_and_close(address(root))


def test_nobody_at_the_port_is_unreachable(
    sshd: OpenSshServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, sshd.connection().replace(str(sshd.port), str(free_port())))
    with pytest.raises(HostUnreachable, match=r"refused|Unable to connect"):
        open_and_close(address(root))


def test_a_port_that_hangs_up_without_a_word_is_unreachable(
    sshd: OpenSshServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        port = str(listener.getsockname()[1])
        monkeypatch.setenv(VARIABLE, sshd.connection().replace(str(sshd.port), port))
        with pytest.raises(HostUnreachable):
            open_and_close(address(root))


def test_a_host_without_python_says_what_to_install(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OpenSshServer.make(tmp_path / "bare")
    server.write_configuration('ForceCommand PATH=/nowhere; eval "$SSH_ORIGINAL_COMMAND"')
    server.start()
    try:
        monkeypatch.setenv(VARIABLE, server.connection())
        with pytest.raises(MissingSoftware, match=r"exit code 127.*Python 3.11"):
            open_and_close(address(root))
    finally:
        server.stop()


def test_a_root_or_python_that_cannot_work_is_the_users_problem(sshd: OpenSshServer, root: Path) -> None:
    with pytest.raises(InvalidSettings, match="/proc/no/root"):
        open_and_close(address(Path("/proc/no/root")))
    with pytest.raises(MissingSoftware, match="/no/python"):
        open_and_close(address(root, python="/no/python"))


def test_a_connection_that_is_cut_in_mid_talk_says_nothing_about_the_job(
    sshd: OpenSshServer, root: Path
) -> None:
    with AgentSession(address(root), current_release()) as session:
        sshd.cut_connections()
        with pytest.raises(HostUnreachable):
            session.poll(PollItem(key=job_key(dag_id="d", run_id="r", stage="s")))


def test_an_error_of_the_agent_keeps_its_class(sshd: OpenSshServer, root: Path) -> None:
    with AgentSession(address(root), current_release()) as session:
        with pytest.raises(RequestRefused, match="not the key of a job"):
            session.cancel("../../etc/passwd", "reason")
        key = job_key(dag_id="d", run_id="r", stage="s")
        assert session.poll(PollItem(key=key)).state == JobState.ABSENT


def test_a_job_outlives_the_session_that_submitted_it(
    sshd: OpenSshServer, root: Path, tmp_path: Path
) -> None:
    key = job_key(dag_id="d", run_id="r", stage="s")
    spec = JobSpec(
        key=key, stage="s", run_key=run_key(dag_id="d", run_id="r"),
        argv=("/bin/sh", "-c", f"sleep 0.5; echo done > {tmp_path}/done"),
    )  # fmt: skip
    with AgentSession(address(root), current_release()) as session:
        status = session.submit(spec)
    assert status.state in (JobState.QUEUED, JobState.RUNNING)
    with AgentSession(address(root), current_release()) as session:
        while not (status := session.poll(PollItem(key=key))).state.is_final:
            pass
    assert status.state == JobState.SUCCEEDED
    assert (tmp_path / "done").exists()


def test_a_release_that_differs_from_its_name_is_never_run(sshd: OpenSshServer, root: Path) -> None:
    wrong = Release(files=current_release().files, digest="0" * 24)
    session = AgentSession(address(root, release="0" * 24), wrong)
    with pytest.raises(UnexpectedFailure, match="was shipped, but is not"), session:
        pass
    names = {path.name[: len(".broken-") + 24] for path in (root / "releases").iterdir()}
    assert names == {".broken-" + "0" * 24}


def test_a_torn_release_is_shipped_again_and_what_shippers_that_died_left_goes_after_a_day(
    sshd: OpenSshServer, root: Path
) -> None:
    open_and_close(address(root))
    releases = root / "releases"
    torn = releases / current_release().digest
    (torn / "eagle3_tasks" / "host" / "agent.py").write_bytes(b"")
    old, new = releases / ".tmp-old", releases / ".tmp-new"
    for folder in (old, new):
        (folder / "eagle3_tasks").mkdir(parents=True)
        (folder / "eagle3_tasks" / "a.py").touch()
        (folder / "link").symlink_to(root / "jobs")
    (root / "jobs").mkdir()
    (root / "jobs" / "kept").touch()
    long_ago = time.time() - 2 * 86_400
    os.utime(old, (long_ago, long_ago))
    open_and_close(address(root, make_root=False))
    assert release_digest(torn / "eagle3_tasks") == current_release().digest
    names = {path.name.partition(current_release().digest)[0] for path in releases.iterdir()}
    assert names == {"", ".tmp-new", ".broken-"}
    assert (root / "jobs" / "kept").exists()


def test_a_root_that_has_vanished_is_a_node_problem_and_nothing_is_shipped(
    sshd: OpenSshServer, root: Path
) -> None:
    root.mkdir()
    with pytest.raises(DiskProblem, match="Is the data disk mounted"):
        open_and_close(address(root, make_root=False))
    assert list(root.iterdir()) == []
