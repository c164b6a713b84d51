"""What paramiko, asyncssh and the operating system say about a connection, in our own errors.

Translated here, once: whoever cannot reach the host waits, and whoever must change a
connection is told what to type.
"""

from __future__ import annotations

import dataclasses
import shlex

import asyncssh
import paramiko
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from eagle3_tasks.contracts.errors import ConnectionProblem, HostUnreachable, PipelineError, UnexpectedFailure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Which connection an error belongs to; ``host`` is empty while it isn't known yet."""

    conn_id: str
    host: str = ""
    port: int = 22


def translate_ssh_error(error: BaseException, place: Place) -> PipelineError:
    """Turn any error of opening or using a connection into one of ``contracts.errors``."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, AirflowNotFoundException):
        return ConnectionProblem(
            f"Airflow has no connection {place.conn_id!r}. Make it: airflow connections add "
            f"{shlex.quote(place.conn_id)} --conn-type ssh --conn-host HOST --conn-login USER --conn-extra "
            """'{"key_file": "/path/of/private_key", "host_key": "ssh-ed25519 AAAA..."}'"""
        )
    if _is_host_key_error(error):
        return ConnectionProblem(
            f"the host key that {_name(place)} shows is not the one that is trusted ({error}). "
            f"Ask who runs the host whether its key has changed. `ssh-keyscan -p {place.port} "
            f"{place.host or 'HOST'}` prints the keys; put the right one, as in 'ssh-ed25519 AAAA...', "
            f"into the field host_key of the extra of connection {place.conn_id!r}."
        )
    if _is_refused_login(error):
        return ConnectionProblem(
            f"{_name(place)} refuses the login ({error}). Check user, key_file and password of connection "
            f"{place.conn_id!r}, and that the public key stands in the user's authorized_keys."
        )
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename:
        return ConnectionProblem(
            f"{error.filename}: {error.strerror}. Connection {place.conn_id!r} names this file; "
            "the worker and the triggerer must be able to read it."
        )
    if isinstance(error, AirflowException | ValueError):
        return ConnectionProblem(f"connection {place.conn_id!r} can't be used: {error}")
    if isinstance(error, asyncssh.ProtocolError) and "banner" in str(error):
        return ConnectionProblem(
            f"{_name(place)} sends a login banner that is not UTF-8 ({error}). Convert the file that "
            "`Banner` names in its sshd_config."
        )
    if isinstance(error, OSError | EOFError | paramiko.SSHException | asyncssh.Error):
        # Names that don't resolve, refusals, resets, banners that don't come, time limits.
        return HostUnreachable(f"{_name(place)} is unreachable: {str(error) or type(error).__name__}.")
    return UnexpectedFailure(f"{_name(place)}: {type(error).__name__}: {error}")


def _name(place: Place) -> str:
    return f"{place.host}:{place.port}" if place.host else f"the host of connection {place.conn_id!r}"


def _is_host_key_error(error: BaseException) -> bool:
    if isinstance(error, paramiko.BadHostKeyException | asyncssh.HostKeyNotVerifiable):
        return True
    # paramiko has no class of its own for a host that no known_hosts file names.
    return isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error)


def _is_refused_login(error: BaseException) -> bool:
    if isinstance(error, paramiko.AuthenticationException):
        # The same class also says that the connection died, or that the time ran out, during the login.
        return not any(word in str(error) for word in ("timeout", "EOF", "shut down"))
    if isinstance(error, paramiko.SSHException):
        # A private key that can't be read, or none at all, has no class either.
        return any(word in str(error) for word in ("No authentication methods", "not a valid", "private key"))
    return isinstance(error, asyncssh.PermissionDenied)
