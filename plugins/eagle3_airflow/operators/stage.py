"""A stage of the pipeline as a remote job, its spec built from the run's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from eagle3_airflow.attempt import current_attempt, form_values
from eagle3_airflow.operators.remote_job import RemoteJob, RemoteJobOperator
from eagle3_airflow.params import host_settings_from_params, settings_from_params
from eagle3_airflow.release import current_release
from eagle3_airflow.remote_command import HostAddress
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import RequestRefused
from eagle3_tasks.contracts.jobs import AGENT_PYTHON, JobSpec, SlotRule, job_key, run_key
from eagle3_tasks.contracts.rows import RowRange
from eagle3_tasks.contracts.settings import HostSettings, Settings
from eagle3_tasks.contracts.stages import Stage, StageSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

FIRST_STAGES: tuple[Stage, ...] = ("preflight", "setup-host")
"""They may make ROOT. For all others a ROOT that isn't there is a disk that is not mounted."""
COMMAND_MODULE = "eagle3_tasks.commands.main"
SHARD_SLOTS = "shards"
MAX_SHARDS_AT_ONCE: int = HostSettings.__dataclass_fields__["shard_slots"].metadata["maximum"]
"""Airflow's own, second bound. The GPU host runs ``shard_slots`` of them, lowest rows first."""


class StageOperator(RemoteJobOperator):
    """Run one stage of the run on its GPU host.

    Args:
        stage: the verb of ``eagle3``.
        rows: ``[start, stop, host]`` of a mapped stage's shard; its row range names the map index.
        returns: what the task returns: the stage's report, or only its shards, because
            Airflow maps over nothing but a task's return value.
    """

    ui_color = "#dfe9f5"

    def __init__(
        self,
        *,
        stage: Stage,
        rows: Sequence[Any] | None = None,
        returns: Literal["report", "shards"] = "report",
        map_index_template: str | None = "{{ task.shard_name }}",
        **kwargs: Any,
    ) -> None:
        super().__init__(map_index_template=map_index_template, **kwargs)
        if stage not in get_args(Stage):
            raise ValueError(f"stage {stage!r} is none of {', '.join(get_args(Stage))}.")
        self.stage = stage
        self.rows = rows
        self.returns = returns

    @property
    def shard_name(self) -> str:
        """The row range's name, such as ``rows_002000-004000``; known before the job is submitted."""
        return "" if self.rows is None else _row_range(self.rows).name(0)

    def settings_from(self, params: Mapping[str, Any]) -> Settings:
        """Give the run's settings from the values of its form."""
        return settings_from_params(params)

    def plan_job(self, context: Context) -> RemoteJob:
        settings = self.settings_from(form_values(context))
        attempt = current_attempt(context)
        rows = None if self.rows is None else _shard(self.rows, settings)
        run = run_key(dag_id=attempt.dag_id, run_id=attempt.run_id)
        spec = StageSpec(run_key=run, settings=settings, rows=rows)
        return RemoteJob(
            address=host_address(settings, make_root=self.stage in FIRST_STAGES),
            spec=JobSpec(
                key=job_key(dag_id=attempt.dag_id, run_id=attempt.run_id, stage=self.stage, rows=rows),
                stage=self.stage,
                run_key=run,
                argv=(AGENT_PYTHON, "-m", COMMAND_MODULE, self.stage, "--spec", "-"),
                stdin=codec.dumps(spec),
                slots=_slots(rows, settings),
                orphan_minutes=settings.host.orphan_minutes,
            ),
            poll_seconds=settings.host.poll_seconds,
        )

    def value_of(self, report: Mapping[str, Any]) -> Any:
        if self.returns == "report":
            return dict(report)
        shards = report.get("shards")
        if not isinstance(shards, list):
            raise RequestRefused(f"the report of stage {self.stage} lists no shards to map over.")
        return shards


class SetupHostOperator(StageOperator):
    """Run a stage of the set-up, ``setup-host`` or ``check-host``; its form knows the host alone."""

    def __init__(self, *, stage: Stage = "setup-host", **kwargs: Any) -> None:
        super().__init__(stage=stage, **kwargs)

    def settings_from(self, params: Mapping[str, Any]) -> Settings:
        if self.stage == "check-host":
            # Runs are to use ROOT/env; the interpreter that it was made with has no packages.
            params = {**params, "python": None}
        return host_settings_from_params(params)


def host_address(settings: Settings, *, make_root: bool = False) -> HostAddress:
    """Say where a run's jobs go."""
    host = settings.host
    return HostAddress(
        ssh_conn_id=host.ssh_conn_id,
        root=host.root,
        python=host.python,
        release=current_release().digest,
        make_root=make_root,
    )


def _slots(rows: RowRange | None, settings: Settings) -> SlotRule | None:
    """Shards wait for each other on the host, lowest rows first, whatever Airflow starts at once."""
    if rows is None:
        return None
    return SlotRule(name=SHARD_SLOTS, count=settings.host.shard_slots, order=rows.start)


def _row_range(shard: Sequence[Any]) -> RowRange:
    if len(shard) != 3 or not all(type(number) is int for number in shard[:2]):
        raise RequestRefused(f"{list(shard)!r} is no shard; [start, stop, host] is needed.")
    return RowRange(start=shard[0], stop=shard[1])


def _shard(shard: Sequence[Any], settings: Settings) -> RowRange:
    """Check a shard that came from a stage's report.

    Raises:
        RequestRefused: it names a host that the run's form does not; a report must not be
            able to lead Airflow to another connection.
    """
    rows = _row_range(shard)
    if shard[2] not in ("", None, settings.host.ssh_conn_id):
        raise RequestRefused(
            f"shard {list(shard)!r} is for connection {shard[2]!r}, "
            f"but the run uses {settings.host.ssh_conn_id!r}."
        )
    return rows
