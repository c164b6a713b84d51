"""Check a started compose file from within: services, DAGs, and the way to the GPU host.

``docker-compose -f docker/compose.yaml exec -T api-server python - < docker/check.py``
prints one line a check and ends with code 0 only if all hold.
"""

# ruff: noqa: T201 - it speaks to a terminal

from __future__ import annotations

import importlib.util
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8080"
CONNECTION_ID = "eagle3_gpu_host"
DAGS = ("eagle3_train", "eagle3_setup_host")
HOST_PYTHON = "/opt/eagle3/env/bin/python"
PROBE = "import importlib.util as u; print(*(n for n in ('airflow', 'torch') if u.find_spec(n)))"


def main() -> int:
    failed = 0
    for check in (
        _has_no_torch,
        _services_are_healthy,
        _dags_are_listed,
        _gpu_host_answers,
        _other_keys_are_refused,
    ):
        try:
            print(f"ok      {check.__name__[1:]}: {check()}", flush=True)
        except Exception as error:  # noqa: BLE001 - a failed check must not hide the next one
            failed += 1
            print(f"FAILED  {check.__name__[1:]}: {error}", flush=True)
    return 1 if failed else 0


def _has_no_torch() -> str:
    found = [name for name in ("torch", "numpy") if importlib.util.find_spec(name)]
    _demand(not found, f"this image has {found}")
    return "torch and numpy absent"


def _services_are_healthy() -> str:
    def states() -> dict[str, str]:
        health = _request("/api/v2/monitor/health")
        return {name: str(part["status"]) for name, part in health.items()}

    return str(_wait(states, lambda found: set(found.values()) == {"healthy"}, seconds=90))


def _dags_are_listed() -> str:
    errors = _request("/api/v2/importErrors", token=_token())["import_errors"]
    _demand(not errors, f"import errors: {[one['stack_trace'] for one in errors]}")

    def listed() -> list[str]:
        return [dag["dag_id"] for dag in _request("/api/v2/dags", token=_token())["dags"]]

    return ", ".join(_wait(listed, lambda found: set(DAGS) <= set(found), seconds=90))


def _gpu_host_answers() -> str:
    from airflow.providers.ssh.hooks.ssh import SSHHook

    hook = SSHHook(ssh_conn_id=CONNECTION_ID, banner_timeout=10)
    _demand(
        hook.host_key is not None and not hook.no_host_key_check, "the connection does not pin the host key"
    )
    with hook.get_conn() as client:
        _, output, errors = client.exec_command(f'id -un; hostname; {HOST_PYTHON} -c "{PROBE}"', timeout=60)
        lines = output.read().decode().splitlines()
        _demand(lines == ["eagle3", "gpu-host", "torch"], f"{lines} {errors.read().decode()}")
    return f"user {lines[0]} on {lines[1]}; torch there, Airflow absent"


def _other_keys_are_refused() -> str:
    import paramiko
    from airflow.providers.ssh.hooks.ssh import SSHHook

    hook = SSHHook(ssh_conn_id=CONNECTION_ID, banner_timeout=10)
    hook.host_key = paramiko.ECDSAKey.generate()
    try:
        hook.get_conn().close()
    except paramiko.BadHostKeyException:
        return "a GPU host with another key than the pinned one is refused"
    raise RuntimeError("a GPU host with another key than the pinned one was let through")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _wait(ask: Callable[[], Any], is_enough: Callable[[Any], bool], *, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not is_enough(found := ask()):
        _demand(time.monotonic() < deadline, f"after {seconds:.0f} s still {found}")
        time.sleep(2)
    return found


def _token() -> str:
    passwords = json.loads(Path("/var/lib/eagle3/private/passwords.json").read_text())
    user, password = next(iter(passwords.items()))
    return str(_request("/auth/token", body={"username": user, "password": password})["access_token"])


def _request(path: str, *, token: str = "", body: dict[str, str] | None = None) -> Any:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(URL + path, data=data, headers=headers)  # noqa: S310 - http, fixed
    with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
        return json.load(reply)


if __name__ == "__main__":
    sys.exit(main())
