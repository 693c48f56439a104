"""The API calls that change something: `(transaction, call) -> answer`. They raise ApiError.

Each call checks names, references and limits, as AWS's server does. Types are checked before.
"""

from collections.abc import Callable
from typing import Any

from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations import definitions, jobs, resources
from batchml.local.batch.transaction import Transaction

HANDLERS: dict[str, Callable[[Transaction, CallReceived], dict[str, Any]]] = {
    "CreateComputeEnvironment": resources.create_compute_environment,
    "UpdateComputeEnvironment": resources.update_compute_environment,
    "DeleteComputeEnvironment": resources.delete_compute_environment,
    "CreateJobQueue": resources.create_job_queue,
    "UpdateJobQueue": resources.update_job_queue,
    "DeleteJobQueue": resources.delete_job_queue,
    "CreateSchedulingPolicy": resources.create_scheduling_policy,
    "UpdateSchedulingPolicy": resources.update_scheduling_policy,
    "DeleteSchedulingPolicy": resources.delete_scheduling_policy,
    "CreateConsumableResource": resources.create_consumable_resource,
    "UpdateConsumableResource": resources.update_consumable_resource,
    "DeleteConsumableResource": resources.delete_consumable_resource,
    "RegisterJobDefinition": definitions.register_job_definition,
    "DeregisterJobDefinition": definitions.deregister_job_definition,
    "SubmitJob": jobs.submit_job,
    "CancelJob": jobs.cancel_job,
    "TerminateJob": jobs.terminate_job,
    "CancelJobs": jobs.cancel_jobs,
    "TerminateJobs": jobs.terminate_jobs,
    "TagResource": resources.tag_resource,
    "UntagResource": resources.untag_resource,
}
