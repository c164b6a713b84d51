"""Airflow's REST API, as far as a run needs it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""As ``urllib.request.urlopen``, but past any proxy of the environment: the API is on loopback."""

LOGIN_PATH = "/auth/token"
OUTAGE_SECONDS = 30.0
"""How long an API that doesn't answer is asked again: it may be busy, or starting anew."""
_RETRY_SECONDS = 1.0


class AirflowClient:
    """Triggers runs and reads their state, with the token of one user.

    Errors of the API surface as ``RuntimeError`` with the server's own words. Questions are
    asked again for a while where the API is away; what changes something only if it was
    refused a connection, since otherwise it may have been done.
    """

    def __init__(self, *, url: str, user: str, password: str) -> None:
        self.url = url
        self._credentials = {"username": user, "password": password}
        self._token = ""

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call ``/api/v2`` + ``path`` and give the decoded answer; None for a 404."""
        if not self._token:
            self._token = self._send("POST", f"{self.url}{LOGIN_PATH}", self._credentials)["access_token"]
        return self._send(method, f"{self.url}/api/v2{path}", body)

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        is_question = method == "GET" or url.endswith(LOGIN_PATH)
        deadline = time.monotonic() + OUTAGE_SECONDS
        while True:
            try:
                with open_url(request, timeout=OUTAGE_SECONDS) as reply:
                    content = reply.read()
            except urllib.error.HTTPError as error:
                if error.code == 404 and method == "GET":
                    return None
                problem, is_passing = f"{error.code} {_text_of(error)}", is_question and error.code >= 500
            except (OSError, http.client.HTTPException) as error:
                # urllib wraps what happens before the answer's first line, and nothing after it.
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                problem = f"{type(reason).__name__}: {reason}"
                is_passing = is_question or isinstance(reason, ConnectionRefusedError)
            else:
                return json.loads(content) if content else None
            if not is_passing or time.monotonic() > deadline:
                raise RuntimeError(f"{method} {url}: {problem}")
            time.sleep(_RETRY_SECONDS)

    def wait_for_dag(self, dag_id: str, *, seconds: float = 120.0) -> None:
        """Wait until the DAG has been parsed.

        Raises:
            RuntimeError: it has an import error, or did not appear.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            errors = self.request("GET", "/importErrors")
            if errors and errors["total_entries"]:
                raise RuntimeError(f"import error: {errors['import_errors'][0]['stack_trace']}")
            if self.request("GET", f"/dags/{dag_id}"):
                return
            time.sleep(0.5)
        raise RuntimeError(f"the DAG {dag_id} did not appear within {seconds:.0f} s")

    def trigger(self, dag_id: str, *, run_id: str, conf: Mapping[str, Any]) -> None:
        body = {"dag_run_id": run_id, "conf": dict(conf), "logical_date": None}
        self.request("POST", f"/dags/{dag_id}/dagRuns", body)

    def end_runs(self, dag_id: str, *, prefix: str) -> None:
        """Mark the unfinished runs whose id begins with ``prefix`` as failed, which cancels their jobs."""
        path = f"/dags/{dag_id}/dagRuns"
        for run in self.request("GET", f"{path}?limit=100&state=running&state=queued")["dag_runs"]:
            if run["dag_run_id"].startswith(prefix):
                self.request("PATCH", f"{path}/{_quote(run['dag_run_id'])}", {"state": "failed"})

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.request("GET", f"/dags/{dag_id}/dagRuns/{_quote(run_id)}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """List every task instance of a run, mapped ones included."""
        found: list[dict[str, Any]] = []
        while True:
            path = f"/dags/{dag_id}/dagRuns/{_quote(run_id)}/taskInstances?limit=100&offset={len(found)}"
            page = self.request("GET", path)
            found += page["task_instances"]
            if len(found) >= page["total_entries"] or not page["task_instances"]:
                return found

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str, map_index: int = -1) -> Any:
        """Read one XCom value; None if there is none."""
        path = (
            f"/dags/{dag_id}/dagRuns/{_quote(run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
            f"?map_index={map_index}&deserialize=false&stringify=false"
        )
        entry = self.request("GET", path)
        if entry is None:
            return None
        value = entry["value"]
        return json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value

    def log(self, dag_id: str, run_id: str, task_id: str, *, try_number: int, map_index: int = -1) -> str:
        """Read a task's log as the UI shows it."""
        path = (
            f"/dags/{dag_id}/dagRuns/{_quote(run_id)}/taskInstances/{task_id}/logs/{try_number}"
            f"?map_index={map_index}&full_content=true"
        )
        answer = self.request("GET", path)
        return "\n".join(_log_text(line) for line in (answer["content"] if answer else []))

    def clear(
        self, dag_id: str, run_id: str, task_id: str, map_index: int | None = None, **options: Any
    ) -> None:
        """Clear one task, or one map index of it."""
        task: Any = task_id if map_index is None else [task_id, map_index]
        body = {"dag_run_id": run_id, "task_ids": [task], "dry_run": False, "only_failed": False, **options}
        self.request("POST", f"/dags/{dag_id}/clearTaskInstances", body)


def _text_of(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return error.reason


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _log_text(line: Any) -> str:
    if not isinstance(line, dict):
        return str(line)
    causes = [f"{one['exc_type']}: {one['exc_value']}" for one in line.get("error_detail") or []]
    return "\n".join([str(line.get("event", "")), *causes])
