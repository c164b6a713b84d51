"""The demo's client of Airflow's API, and what it prints of a run."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo import airflow_client
from demo.airflow_client import AirflowClient
from demo.airflow_services import AirflowServices
from demo.follow import _StatusLine, follow_run
from demo.ports import choose_port
from demo.run import demo_conf

Answer = tuple[int, Any] | None


@contextlib.contextmanager
def api(answers: Callable[[str, str], Answer], port: int = 0) -> Iterator[str]:
    """Serve an API whose ``answers`` give (status, body), or None to hang up."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_login = self.path == airflow_client.LOGIN_PATH
            answer = (200, {"access_token": "t"}) if is_login else answers(self.command, self.path)
            if answer is None:
                self.close_connection = True
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base names it
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airflow_client, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(airflow_client, "OUTAGE_SECONDS", 0.5)


def client_of(url: str) -> AirflowClient:
    return AirflowClient(url=url, user="u", password="p")


@pytest.mark.parametrize("trouble", [None, (500, {"detail": "database is locked"}), (503, {})])
def test_a_question_is_asked_again_while_the_api_is_away(trouble: Answer) -> None:
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        asked.append(path)
        return trouble if len(asked) < 4 else (200, {"state": "running"})

    with api(answers) as url:
        assert client_of(url).run_state("d", "r") == "running"
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("trouble", "message"), [(None, "RemoteDisconnected"), ((500, {"detail": "locked"}), "500 .*locked")]
)
def test_an_api_that_stays_away_is_one_error_that_names_it(trouble: Answer, message: str) -> None:
    with api(lambda _method, _path: trouble) as url, pytest.raises(RuntimeError, match=message):
        client_of(url).run_state("d", "r")
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"):
        client_of(f"http://127.0.0.1:{choose_port(0)}").run_state("d", "r")


@pytest.mark.parametrize("trouble", [None, (500, {"detail": "locked"})])
def test_what_may_have_been_done_is_not_asked_twice(trouble: Answer) -> None:
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        asked.append(path)
        return trouble

    with api(answers) as url, pytest.raises(RuntimeError, match="POST"):
        client_of(url).trigger("d", run_id="r", conf={})
    assert len(asked) == 1


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{choose_port(0)}")
    monkeypatch.setenv("no_proxy", "intranet.example")
    with api(lambda _method, _path: (200, {"state": "success"})) as url:
        assert client_of(url).run_state("d", "r") == "success"
    environment = AirflowServices(home=tmp_path, connections={}, preferred_port=0).environment
    for name in ("no_proxy", "NO_PROXY"):
        assert environment[name].split(",") == ["intranet.example", "127.0.0.1", "localhost"]


def test_jobs_of_a_demo_that_was_killed_end_within_minutes(tmp_path: Path) -> None:
    assert demo_conf(tmp_path, root=tmp_path)["orphan_minutes"] <= 5


def test_in_a_file_a_line_stands_only_for_progress_or_a_change_of_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.follow.POLL_SECONDS", 0.0)
    monkeypatch.setattr("demo.follow.PLAIN_LINE_SECONDS", 0.0)

    def one(state: str) -> dict[str, Any]:
        return {"task_id": "train", "map_index": -1, "state": state, "start_date": "2026", "duration": 3.0}

    progress = {"done": 5, "total": 10, "unit": "steps"}
    rounds = [
        ("queued", None), ("running", None), ("deferred", None), ("deferred", progress),
        ("running", None), ("deferred", progress), ("success", progress),
    ]  # fmt: skip

    class Client:
        def run_state(self, *_: object) -> str:
            return "running" if len(rounds) > 1 else "success"

        def task_instances(self, *_: object) -> list[dict[str, Any]]:
            self.progress = rounds[0][1]
            return [one(rounds.pop(0)[0])]

        def xcom(self, *_: object) -> Any:
            return self.progress

    fake: Any = Client()
    assert follow_run(fake, "d", "r") == "success"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["train", "|", "5/10", "steps"],
        ["0", "s", "train", "success", "3.0", "s"],
    ]


def test_a_terminal_shows_the_stage_before_it_has_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _StatusLine().show("preflight", "")
    assert capsys.readouterr().out.endswith("preflight")
