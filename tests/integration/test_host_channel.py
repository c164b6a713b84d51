"""The shared connection of a trigger process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import asyncssh
import pytest

from eagle3_airflow.hooks.agent_link import AgentLink
from eagle3_airflow.hooks.agent_session import AgentSession
from eagle3_airflow.hooks.host_channel import HostChannel
from eagle3_airflow.release import current_release
from eagle3_airflow.remote_command import HostAddress
from eagle3_tasks.contracts.errors import (
    ConnectionProblem,
    HostUnreachable,
    RequestRefused,
    UnexpectedFailure,
)
from eagle3_tasks.contracts.jobs import CancelBody, HelloBody, JobState, PollItem, job_key
from tests.integration.conftest import CONN_ID
from tests.integration.openssh import OpenSshServer, children_of


def ship(root: Path) -> HostAddress:
    address = HostAddress(ssh_conn_id=CONN_ID, root=str(root), python="", release=current_release().digest)
    with AgentSession(address, current_release()):
        pass
    return address


def test_a_hundred_questions_are_one_connection_and_few_requests(
    sshd: OpenSshServer, shared_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ship(shared_root)
    verbs: list[str] = []
    request = AgentLink.request

    async def counting(self: AgentLink, verb: str, body: object, **more: float) -> object:
        verbs.append(verb)
        return await request(self, verb, body, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(AgentLink, "request", counting)

    async def ask(number: int) -> list[JobState]:
        states = []
        async with HostChannel.lease(address) as channel:
            for _ in range(3):
                item = PollItem(key=job_key(dag_id="d", run_id="r", stage=f"s{number}"))
                states.append((await channel.poll(item, after_seconds=0.4)).state)
        return states

    async def everybody() -> int:
        asking = [asyncio.create_task(ask(number)) for number in range(100)]
        await asyncio.sleep(1.0)
        assert sshd.process is not None
        connections = len(children_of(sshd.process.pid))
        assert await asyncio.gather(*asking) == [[JobState.ABSENT] * 3] * 100
        return connections

    assert asyncio.run(everybody()) == 1
    assert verbs.count("hello") == 1
    assert verbs.count("poll") <= 6


def test_the_connection_ends_with_its_last_lease_and_comes_again_with_the_next(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    address = ship(shared_root)

    async def twice() -> None:
        assert sshd.process is not None
        for _ in range(2):
            async with HostChannel.lease(address) as channel:
                await channel.request("hello", HelloBody())
                assert len(children_of(sshd.process.pid)) == 1
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not children_of(sshd.process.pid):
                    break
            assert children_of(sshd.process.pid) == []

    asyncio.run(twice())


def test_while_the_host_is_away_questions_fail_at_once_and_later_ones_are_answered(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    address = ship(shared_root)

    async def outage() -> None:
        item = PollItem(key=job_key(dag_id="d", run_id="r", stage="s"))
        async with HostChannel.lease(address) as channel:
            await channel.poll(item, after_seconds=0)
            waiting = asyncio.create_task(channel.poll(item, after_seconds=30))
            await asyncio.sleep(0.1)
            sshd.cut_connections()
            sshd.stop()
            with pytest.raises(HostUnreachable):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(HostUnreachable):
                await asyncio.wait_for(channel.request("hello", HelloBody()), 5)
            sshd.start()
            await asyncio.wait_for(channel.until_reachable(), 10)
            assert (await channel.poll(item, after_seconds=0)).state == JobState.ABSENT

    asyncio.run(outage())


def test_an_error_about_one_request_leaves_the_connection_to_the_others(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    address = ship(shared_root)

    async def ask() -> None:
        async with HostChannel.lease(address) as channel:
            with pytest.raises(RequestRefused):
                await channel.request("cancel", CancelBody(key="../x", reason="r"))
            await channel.request("hello", HelloBody())

    asyncio.run(ask())


def test_what_waiting_does_not_mend_reaches_everybody_who_waits(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    address = HostAddress(ssh_conn_id="no_such_host", root=str(shared_root), python="", release="0" * 24)

    async def ask() -> None:
        async with HostChannel.lease(address) as first, HostChannel.lease(address) as second:
            for channel in (first, second):
                with pytest.raises(ConnectionProblem, match="airflow connections add no_such_host"):
                    await channel.until_reachable()
                with pytest.raises(ConnectionProblem):
                    await channel.poll(PollItem(key="k"), after_seconds=0)

    asyncio.run(ask())


def test_both_hooks_refuse_an_unknown_host_key(
    sshd: OpenSshServer, shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ship(shared_root)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", sshd.connection(host_key=None))

    async def ask() -> None:
        async with HostChannel.lease(address) as channel:
            with pytest.raises(ConnectionProblem, match="host_key"):
                await channel.until_reachable()

    asyncio.run(ask())


def test_a_link_that_ends_during_a_request_is_not_asked_again_before_the_host_answers(
    sshd: OpenSshServer, shared_root: Path
) -> None:
    address = ship(shared_root)

    async def ask() -> tuple[int, int]:
        requests = waits = 0
        async with HostChannel.lease(address) as channel:
            link = await channel._current_link()
            asking = asyncio.create_task(link.request("hello", HelloBody()))
            await asyncio.sleep(0)
            link._end(HostUnreachable("cut"))
            # Both loops of the triggers: without a suspension in them nothing else would ever run.
            while waits < 1000:
                try:
                    requests += 1
                    await channel.request("hello", HelloBody())
                    break
                except HostUnreachable:
                    waits += 1
                    await channel.until_reachable()
            with contextlib.suppress(HostUnreachable):
                await asking
        return requests, waits

    assert asyncio.run(ask()) == (2, 1)


def test_a_connection_whose_opening_is_cancelled_is_closed(
    sshd: OpenSshServer, shared_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ship(shared_root)

    async def cancel() -> None:
        assert sshd.process is not None
        is_connected = asyncio.Event()

        async def never(*_: object, **__: object) -> None:
            is_connected.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncssh.SSHClientConnection, "create_process", never)
        opening = asyncio.create_task(AgentLink.open(address))
        await is_connected.wait()
        assert children_of(sshd.process.pid)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        for _ in range(100):
            if not children_of(sshd.process.pid):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the connection is still open")

    asyncio.run(cancel())


def test_an_error_of_our_own_is_no_users_problem(
    sshd: OpenSshServer, shared_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_address: HostAddress) -> AgentLink:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(AgentLink, "open", fail)

    async def ask() -> None:
        async with HostChannel.lease(ship(shared_root)) as channel:
            with pytest.raises(UnexpectedFailure, match="ZeroDivisionError: a mistake of ours"):
                await channel.until_reachable()

    asyncio.run(ask())
