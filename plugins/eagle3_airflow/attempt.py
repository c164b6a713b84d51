"""Which attempt at which task this is, and what the run's form said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from airflow.sdk import Context

NOT_MAPPED = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a task. ``id`` differs for each; the other fields name the task of the run."""

    id: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int


def attempt_of(task_instance: Any) -> Attempt:
    """Describe a task instance, be it an operator's or a trigger's."""
    map_index = task_instance.map_index
    return Attempt(
        id=str(task_instance.id),
        dag_id=task_instance.dag_id,
        run_id=task_instance.run_id,
        task_id=task_instance.task_id,
        map_index=NOT_MAPPED if map_index is None else map_index,
    )


def current_attempt(context: Context) -> Attempt:
    return attempt_of(cast("Mapping[str, Any]", context)["ti"])


def form_values(context: Context) -> Mapping[str, Any]:
    """Give the values of the run's form, as they were typed."""
    return cast("Mapping[str, Any]", context)["params"]
