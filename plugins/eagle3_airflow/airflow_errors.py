"""What Airflow does about an error: fail at once, or try again."""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from eagle3_tasks.contracts.errors import Cancelled, HostUnreachable, PipelineError, UserProblem


def to_airflow(error: PipelineError) -> AirflowException:
    """Give the exception to raise: a user's problem ends the task, a node's uses a retry.

    A job that a person stopped on the host is not started again behind their back. A host
    that stays away for the longest outage has been waited for: retries would wait ten times as long.
    """
    text = f"{error.code}: {error}"
    if isinstance(error, UserProblem | Cancelled | HostUnreachable):
        return AirflowFailException(text)
    return AirflowException(text)
