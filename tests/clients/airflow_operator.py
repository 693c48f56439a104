"""Airflow's BatchOperator, in its own environment: submits, waits, reads the log, and fails."""

import sys

from airflow.providers.amazon.aws.hooks.batch_client import BatchClientHook
from airflow.providers.amazon.aws.operators.batch import BatchOperator
from airflow.sdk.exceptions import AirflowException

# The operator polls at random between these, in seconds, so that many tasks do not ask at once.
BatchClientHook.DEFAULT_DELAY_MIN, BatchClientHook.DEFAULT_DELAY_MAX = 0, 1


def run(definition: str, code: int) -> str:
    operator = BatchOperator(
        task_id="run",
        job_name="run",
        job_queue="default",
        job_definition=definition,
        container_overrides={"environment": [{"name": "CODE", "value": str(code)}]},
        aws_conn_id=None,
        awslogs_enabled=True,
        do_xcom_push=False,
    )
    return str(operator.execute({}))


definition = sys.argv[1]
print("succeeded:", run(definition, 0))
try:
    run(definition, 3)
except AirflowException as error:
    print("failed:", error)
