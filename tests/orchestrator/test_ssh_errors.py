"""Who waits and who is told what to type."""

from __future__ import annotations

import socket
from typing import Any

import asyncssh
import paramiko
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from eagle3_airflow.airflow_errors import to_airflow
from eagle3_airflow.hooks.ssh_errors import Place, translate_ssh_error
from eagle3_tasks.contracts.errors import (
    LEAVES,
    Cancelled,
    ConnectionProblem,
    HostUnreachable,
    UnexpectedFailure,
    UserProblem,
)

PLACE = Place(conn_id="my host", host="gpu-1", port=2222)


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(-2, "Name or service not known"),
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError(),
        EOFError(),
        OSError(113, "No route to host"),
        paramiko.SSHException("Error reading SSH protocol banner"),
        paramiko.AuthenticationException("Authentication timeout."),
        paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF"),
        asyncssh.ConnectionLost("Connection lost"),
        asyncssh.DisconnectError(2, "Too many"),
        asyncssh.ChannelOpenError(2, "failed"),
    ],
)
def test_what_says_nothing_about_the_job_is_unreachable(error: Exception) -> None:
    problem = translate_ssh_error(error, PLACE)
    assert type(problem) is HostUnreachable
    assert "gpu-1:2222" in str(problem)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            AirflowNotFoundException("The conn_id `my host` isn't defined"),
            "airflow connections add 'my host'",
        ),
        (paramiko.AuthenticationException("Authentication failed."), "authorized_keys"),
        (asyncssh.PermissionDenied("Permission denied"), "authorized_keys"),
        (paramiko.SSHException("No authentication methods available"), "authorized_keys"),
        (
            paramiko.SSHException("Server '[gpu-1]:2222' not found in known_hosts"),
            "ssh-keyscan -p 2222 gpu-1",
        ),
        (asyncssh.HostKeyNotVerifiable("Host key is not trusted"), "ssh-keyscan -p 2222 gpu-1"),
        (FileNotFoundError(2, "No such file", "/keys/id"), "/keys/id"),
        (asyncssh.KeyImportError("Invalid private key"), "can't be used"),
        (ValueError("Must check host key when provided"), "can't be used"),
        (AirflowException("Missing required param: remote_host"), "can't be used"),
    ],
)
def test_what_a_person_must_change_is_a_connection_problem_that_says_how(
    error: Exception, words: str
) -> None:
    problem = translate_ssh_error(error, PLACE)
    assert type(problem) is ConnectionProblem
    assert words in str(problem)


def test_another_host_key_names_both_machines_commands() -> None:
    key: Any = paramiko.RSAKey.generate(1024)
    problem = translate_ssh_error(paramiko.BadHostKeyException("gpu-1", key, key), PLACE)
    assert type(problem) is ConnectionProblem
    assert "host_key" in str(problem)


def test_a_banner_that_is_no_utf8_is_told_and_not_waited_for() -> None:
    problem = translate_ssh_error(asyncssh.ProtocolError("Invalid userauth banner"), PLACE)
    assert type(problem) is ConnectionProblem
    assert "sshd_config" in str(problem)


def test_an_error_that_nobody_foresaw_is_a_node_problem() -> None:
    assert type(translate_ssh_error(RuntimeError("x"), PLACE)) is UnexpectedFailure


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_persons_problem_and_the_longest_outage_end_the_retries(leaf: Any) -> None:
    error = to_airflow(leaf("fact. remedy."))
    ends = isinstance(error, AirflowFailException)
    assert ends == issubclass(leaf, UserProblem | Cancelled | HostUnreachable)
    assert str(error).endswith(": fact. remedy.")
