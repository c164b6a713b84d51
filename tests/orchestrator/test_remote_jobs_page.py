"""The example in docs/remote-jobs.md is a DAG as it stands."""

from __future__ import annotations

import re
import types
import uuid
from pathlib import Path
from typing import Any

from airflow.dag_processing.dagbag import BundleDagBag

from eagle3_airflow.operators.remote_job import RemoteJobOperator

PAGE = Path(__file__).parents[2] / "docs" / "remote-jobs.md"


def test_the_example_is_one_task_that_asks_for_the_job_it_shows(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "check_disks.py").write_text(code)
    bag = BundleDagBag(str(tmp_path), bundle_path=tmp_path, bundle_name="dags-folder")
    assert bag.import_errors == {}
    (task,) = bag.dags["check_disks"].tasks
    assert isinstance(task, RemoteJobOperator)
    ti = types.SimpleNamespace(id=uuid.uuid4(), dag_id="d", run_id="r", task_id="check", map_index=-1)
    context: Any = {"ti": ti, "params": {}}
    job = task.plan_job(context)
    assert job.spec.argv[:2] == ("/bin/sh", "-c")
    assert "report.json" in job.spec.argv[2]
    assert job.spec.environment == {"LIST": "/data/models/SHA256SUMS"}
    assert (job.address.root, job.address.make_root) == ("/data/eagle3", True)
