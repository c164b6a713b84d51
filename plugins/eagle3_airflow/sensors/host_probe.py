"""Sensors that wait, without a worker, until the GPU host is ready for a stage."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowSkipException

from eagle3_airflow.airflow_errors import to_airflow
from eagle3_airflow.attempt import current_attempt, form_values
from eagle3_airflow.hooks.agent_session import AgentSession
from eagle3_airflow.operators.stage import host_address
from eagle3_airflow.params import settings_from_params
from eagle3_airflow.release import current_release
from eagle3_airflow.remote_command import HostAddress
from eagle3_airflow.retries import MAX_RETRY_DELAY, RETRIES, RETRY_DELAY
from eagle3_airflow.triggers.host_probe import HostProbeTrigger
from eagle3_airflow.triggers.host_trigger import where_to_wait
from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import (
    ErrorRecord,
    HostUnreachable,
    NodeProblem,
    PipelineError,
    error_from_record,
)
from eagle3_tasks.contracts.jobs import run_key
from eagle3_tasks.contracts.stages import ProbeKind, ProbeSpec, ProbeVerdict, StageSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

Purpose = Literal["regenerate", "extract", "train"]


class HostProbeSensor(BaseSensorOperator):
    """Succeeds when a probe on the GPU host says "ready"; each poke is one line in the log.

    It asks once at once and then defers. ``timeout`` counts from the deferral and ends as a
    sensor's timeout does, ``soft_fail`` included. A host that is away counts as not ready.
    """

    ui_color = "#f5efdc"

    def __init__(
        self,
        *,
        kind: ProbeKind,
        purpose: Purpose = "extract",
        poke_interval: timedelta | float = 60,
        timeout: timedelta | float = timedelta(days=7),
        retries: int | None = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        retry_exponential_backoff: float = 2.0,
        max_retry_delay: timedelta | float | None = MAX_RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            poke_interval=poke_interval,
            timeout=timeout,
            retries=retries,
            retry_delay=retry_delay,
            retry_exponential_backoff=retry_exponential_backoff,
            max_retry_delay=max_retry_delay,
            **kwargs,
        )
        self.kind: ProbeKind = kind
        self.purpose: Purpose = purpose

    def execute(self, context: Context) -> dict[str, Any]:
        spec = self._spec(context)
        address = host_address(spec.stage.settings)
        try:
            with AgentSession(address, current_release()) as session:
                verdict = session.probe(spec)
        except HostUnreachable as error:
            self.log.warning("host unreachable, the sensor waits: %s", error)
        except NodeProblem as error:
            self.log.warning("cannot tell, the sensor waits: %s", error)
        except PipelineError as error:
            raise to_airflow(error) from error
        else:
            self.log.info("%s", verdict.line)
            if verdict.is_ready:
                return dict(verdict.figures)
        return self._defer(address, spec)

    def _defer(self, address: HostAddress, spec: ProbeSpec) -> NoReturn:
        trigger = HostProbeTrigger(
            **where_to_wait(address), spec=codec.to_plain(spec), poke_seconds=self.poke_interval
        )
        self.defer(
            trigger=trigger, method_name=self.on_verdict.__name__, timeout=timedelta(seconds=self.timeout)
        )

    def on_verdict(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Take the trigger's end."""
        del context
        if "error" in event:
            record = codec.from_plain(ErrorRecord, event["error"], where="trigger event")
            raise to_airflow(error_from_record(record))
        return dict(codec.from_plain(ProbeVerdict, event["verdict"], where="trigger event").figures)

    def _spec(self, context: Context) -> ProbeSpec:
        try:
            settings = settings_from_params(form_values(context))
        except PipelineError as error:
            raise to_airflow(error) from error
        if self.purpose == "regenerate" and settings.data.answers == "dataset":
            raise AirflowSkipException("answers is 'dataset': nothing is regenerated, no GPU is needed.")
        attempt = current_attempt(context)
        run = run_key(dag_id=attempt.dag_id, run_id=attempt.run_id)
        return ProbeSpec(
            kind=self.kind, purpose=self.purpose, stage=StageSpec(run_key=run, settings=settings)
        )


class DiskSpaceSensor(HostProbeSensor):
    """Waits until ROOT's file system has room for what is still missing, above the reserve."""

    def __init__(self, *, kind: ProbeKind = "disk", **kwargs: Any) -> None:
        super().__init__(kind=kind, **kwargs)


class GpuIdleSensor(HostProbeSensor):
    """Waits until the cards that a stage needs are there, healthy and free of others."""

    def __init__(self, *, kind: ProbeKind = "gpus", **kwargs: Any) -> None:
        super().__init__(kind=kind, **kwargs)
