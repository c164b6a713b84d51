"""One execution, one whole log and no retry, whatever the network does between Airflow and the host.

The counter file is written by the job itself; the log is judged by the lines that the job
numbered. Nothing of the product says how it went. A retry would show as an exception:
``AirflowTask`` tries nothing twice.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle3_airflow.hooks import agent_session
from eagle3_airflow.hooks.agent_session import AgentSession
from eagle3_tasks.contracts.jobs import MAX_LOG_PIECE_BYTES
from tests.faults.conftest import IS_SOAK, Line
from tests.faults.proxy import Cut
from tests.host.job_host import wait_until
from tests.integration.conftest import AirflowTask, count, first_event, until
from tests.integration.openssh import OpenSshServer

Lines = Callable[[], list[str]]
NUM_CUTS_A_WAY = 20 if IS_SOAK else 4
OUTAGE_SECONDS = 30.0 if IS_SOAK else 1.0
LATE_SECONDS = 0.25
"""Each way: half a second for a question and its answer."""


class NumberedJob:
    """A job that counts its executions and numbers its lines; its last line has no newline."""

    def __init__(
        self, folder: Path, tag: str, *, num_lines: int = 8, pause: float = 0.03, width: int = 1
    ) -> None:
        self.tag = tag
        self.num_lines = num_lines
        self.counter = folder / f"{tag}.counter"
        self.script = "; ".join(
            [
                f"printf x >> {self.counter}",
                "i=0",
                f"while [ $i -lt {num_lines} ]",
                f"do printf '{tag} %d %0{width}d\\n' $i 0",
                "i=$((i + 1))",
                f"sleep {pause}" if pause else ":",
                "done",
                f'echo \'{{"tag": "{tag}"}}\' > $EAGLE3_GENERATION_FOLDER/report.json',
                f"printf '{tag} {num_lines} 0'",
            ]
        )

    def numbers(self, lines: list[str]) -> list[int]:
        return [int(line.split()[1]) for line in lines if line.startswith(f"{self.tag} ")]

    def check(self, result: Any, lines: list[str], *, num_readers: int) -> None:
        """Judge the end of a task whose log was begun by so many readers, one after another."""
        assert result == {"tag": self.tag}
        assert count(self.counter) == 1, f"{self.tag}: {count(self.counter)} executions"
        numbers = self.numbers(lines)
        assert set(numbers) == set(range(self.num_lines + 1)), f"{self.tag}: lines are missing"
        # Going back is what a new reader may do, by at most the piece that nobody had confirmed.
        backs = [index for index, (one, two) in enumerate(itertools.pairwise(numbers)) if two <= one]
        assert len(backs) < num_readers, f"{self.tag}: {numbers}"
        text = [line for line in lines if line.startswith(f"{self.tag} ")]
        again = sum(len(line) + 1 for line in text) - sum(len(line) + 1 for line in set(text))
        assert again <= len(backs) * MAX_LOG_PIECE_BYTES


def num_readers(task: AirflowTask) -> int:
    """Count who may have begun to read the log: each trigger, and an operator that came back late."""
    return max(1, task.deferrals.count("RemoteJobTrigger") + ("HostWaitTrigger" in task.deferrals))


async def follow(task: AirflowTask, result: Any, deferral: Any) -> Any:
    """Bring a task that has started to its end while others go on."""
    while deferral is not None:
        event = await first_event(task.trigger(deferral))
        result, deferral = await asyncio.to_thread(task.resume, deferral, event)
    return result


def test_a_connection_cut_after_any_piece_runs_the_job_once_and_loses_no_line(
    make_line: Callable[..., Line], shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    def run(tag: str, line: Line, cut: Cut | None = None) -> None:
        job = NumberedJob(tmp_path, tag)
        task = line.task(shared_root, job.script)
        line.proxy.cut = cut
        result = task.run()
        task.succeed()
        assert task.ti.xcom == {"report": {"tag": tag}}
        job.check(result, log_lines(), num_readers=num_readers(task))
        assert line.proxy.num_cuts == (cut is not None)

    run("ship", make_line())
    whole = make_line()
    run("whole", whole)
    cuts = [
        # The last pieces may be missing in another run: how often it polls is a matter of time.
        (f"{way}-{place}", make_line(), Cut(way=way, num_pieces=place))
        for way, num_pieces in whole.proxy.num_pieces.items()
        for place in sorted(
            {1 + index * (num_pieces - 4) // NUM_CUTS_A_WAY for index in range(NUM_CUTS_A_WAY)}
        )
    ]
    with ThreadPoolExecutor(4) as pool:
        runs = [(tag, pool.submit(run, tag, line, cut)) for tag, line, cut in cuts]
    assert {tag: str(error) for tag, future in runs if (error := future.exception())} == {}
    assert len(runs) >= NUM_CUTS_A_WAY * 2 - 2


@pytest.mark.usefixtures("_short_limits")
@pytest.mark.parametrize("is_told", [True, False])
def test_a_submit_whose_answer_is_lost_has_started_one_job(
    line: Line, shared_root: Path, tmp_path: Path, log_lines: Lines, monkeypatch: pytest.MonkeyPatch,
    is_told: bool,
) -> None:  # fmt: skip
    submit = AgentSession.submit
    job = NumberedJob(tmp_path, "lost")

    def reset_once_it_runs() -> None:
        assert wait_until(lambda: count(job.counter) > 0)
        line.proxy.reset()

    def submit_unheard(session: AgentSession, *arguments: Any) -> Any:
        if not count(job.counter):
            line.proxy.swallow("down")
            if is_told:
                threading.Thread(target=reset_once_it_runs).start()
        return submit(session, *arguments)

    monkeypatch.setattr(AgentSession, "submit", submit_unheard)
    monkeypatch.setattr(agent_session, "SUBMIT_SECONDS", 2.0)
    task = line.task(shared_root, job.script)
    _, deferral = task.start()
    assert task.deferrals == ["HostWaitTrigger"]
    assert count(job.counter) == 1
    job.check(asyncio.run(follow(task, None, deferral)), log_lines(), num_readers=num_readers(task))


FAULTS: dict[str, tuple[Callable[[Line], None], Callable[[Line], None]]] = {
    "reset": (lambda line: line.proxy.reset(), lambda line: None),
    "hole": (lambda line: line.proxy.swallow(), lambda line: line.proxy.heal()),
    "hold": (lambda line: line.proxy.hold(), lambda line: line.proxy.release()),
    "refuse": (lambda line: line.proxy.refuse(), lambda line: line.proxy.listen()),
    "late": (lambda line: line.proxy.make_late(LATE_SECONDS), lambda line: None),
    "stopped": (lambda line: line.stop_server(), lambda line: line.server.start()),
    "frozen": (
        lambda line: line.signal_server(signal.SIGSTOP),
        lambda line: line.signal_server(signal.SIGCONT),
    ),
}


@pytest.fixture
def fault_lines(
    make_line: Callable[..., Line], sshd: OpenSshServer, tmp_path: Path
) -> Iterator[dict[str, Line]]:
    """One line for each fault; those that strike the server have one of their own."""
    servers = {name: OpenSshServer.make(tmp_path / name) for name in ("stopped", "frozen")}
    for server in servers.values():
        server.start()
    lines = {name: make_line(servers.get(name, sshd)) for name in FAULTS}
    yield lines
    for server in servers.values():
        server.cut_connections()
        server.stop()


@pytest.mark.usefixtures("_short_limits")
def test_an_outage_of_any_kind_while_the_job_runs_loses_no_line_and_starts_nothing(
    fault_lines: dict[str, Line], shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    async def suffer(name: str) -> None:
        line, (begin, end) = fault_lines[name], FAULTS[name]
        job = NumberedJob(tmp_path, name, num_lines=20, pause=0.1)
        task = line.task(shared_root, job.script)
        waiting = asyncio.create_task(follow(task, *await asyncio.to_thread(task.start)))
        await until(lambda: 2 in job.numbers(log_lines()))
        await asyncio.to_thread(begin, line)
        await asyncio.sleep(OUTAGE_SECONDS)
        await asyncio.to_thread(end, line)
        result = await asyncio.wait_for(waiting, 60)
        job.check(result, log_lines(), num_readers=num_readers(task))

    asyncio.run(together(suffer, FAULTS))


@pytest.mark.usefixtures("_short_limits")
def test_an_outage_of_any_kind_at_the_submit_is_waited_for_and_starts_one_job(
    fault_lines: dict[str, Line], shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    async def suffer(name: str) -> None:
        line, (begin, end) = fault_lines[name], FAULTS[name]
        job = NumberedJob(tmp_path, name)
        task = line.task(shared_root, job.script)
        await asyncio.to_thread(begin, line)
        waiting = asyncio.create_task(follow(task, *await asyncio.to_thread(task.start)))
        assert name == "late" or count(job.counter) == 0
        await asyncio.sleep(OUTAGE_SECONDS / 2)
        await asyncio.to_thread(end, line)
        result = await asyncio.wait_for(waiting, 60)
        job.check(result, log_lines(), num_readers=num_readers(task))

    # Before there is a connection, there is none to reset.
    asyncio.run(together(suffer, set(FAULTS) - {"reset"}))


async def together(suffer: Callable[[str], Any], names: Iterable[str]) -> None:
    """Let these faults happen at once, each on its own line; all their failures are told."""
    names = list(names)
    ends = await asyncio.gather(*(suffer(name) for name in names), return_exceptions=True)
    failures = {name: repr(end) for name, end in zip(names, ends, strict=True) if end is not None}
    assert failures == {}


# One way a message; in soak the network is as slow as a bad satellite link, which takes minutes.
@pytest.mark.parametrize("seconds", [1.0, 2.0] if IS_SOAK else [0.1])
def test_a_very_slow_network_only_makes_the_task_slow(
    line: Line, shared_root: Path, tmp_path: Path, log_lines: Lines, seconds: float
) -> None:
    # To ship the release file by file takes many questions and answers.
    line.task(shared_root, "true").run()
    line.proxy.make_late(seconds)
    job = NumberedJob(tmp_path, "slow")
    task = line.task(shared_root, job.script)
    job.check(task.run(), log_lines(), num_readers=1)
    assert task.deferrals == ["RemoteJobTrigger"], "not even an outage"


def test_answers_torn_in_mid_piece_lose_no_byte_of_a_long_log(
    line: Line, shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    job = NumberedJob(tmp_path, "long", num_lines=1_500, pause=0, width=200)
    task = line.task(shared_root, job.script)
    _, deferral = task.start()

    async def tear_twice() -> Any:
        line.proxy.cut = Cut(way="down", num_bytes=20_000)
        waiting = asyncio.create_task(follow(task, None, deferral))
        await until(lambda: line.proxy.num_cuts == 1)
        line.proxy.cut = Cut(way="down", num_bytes=150_000)
        return await waiting

    result = asyncio.run(tear_twice())
    assert line.proxy.num_cuts == 2
    job.check(result, log_lines(), num_readers=1)


def test_noise_of_login_and_shell_among_the_answers_harms_nothing(
    make_line: Callable[..., Line], shared_root: Path, tmp_path: Path, log_lines: Lines
) -> None:
    job = NumberedJob(tmp_path, "noisy")
    (tmp_path / "banner").write_bytes("Zugang nur für Befugte\n\033[31m".encode() * 20)
    noise = tmp_path / "noise.sh"
    noise.write_text(
        "head -c 5000000 /dev/urandom\n"
        "printf '\\033[1;31mUnauthorised\\033[0m\\r\\n<<<EAGLE:00 {} EAGLE:00>>>\\n<<<EAGLE:\\377\\376\\n'\n"
        # Goes on among the answers until nobody listens.
        "(while printf '\\033[2Jnews \\303\\n' 2>/dev/null; do sleep 0.02; done) &\n"
    )
    server = OpenSshServer.make(tmp_path / "noisy")
    server.write_configuration(
        f"Banner {tmp_path / 'banner'}", f'ForceCommand . {noise}; eval "$SSH_ORIGINAL_COMMAND"'
    )
    # The noise would stand before SFTP's answers too, so the release is there beforehand.
    make_line().task(shared_root, "true").run()
    server.start()
    try:
        line = make_line(server)
        task = line.task(shared_root, job.script)
        job.check(task.run(), log_lines(), num_readers=1)
        task.succeed()
        assert line.proxy.num_bytes["down"] > 3 * 5_000_000, "submit, poll and acknowledgement were noisy"
        assert task.deferrals == ["RemoteJobTrigger"]
    finally:
        server.cut_connections()
        server.stop()
