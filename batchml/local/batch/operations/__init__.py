"""The API calls that change something: `(transaction, call) -> answer`. They raise ApiError.

Each checks what AWS checks on the server besides the shapes: names, references, limits.
"""

from collections.abc import Callable
from typing import Any

from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations.definitions import (
    deregister_job_definition,
    register_job_definition,
)
from batchml.local.batch.operations.jobs import (
    cancel_job,
    cancel_jobs,
    submit_job,
    terminate_job,
    terminate_jobs,
)
from batchml.local.batch.operations.resources import (
    create_compute_environment,
    create_consumable_resource,
    create_job_queue,
    create_scheduling_policy,
    delete_compute_environment,
    delete_consumable_resource,
    delete_job_queue,
    delete_scheduling_policy,
    tag_resource,
    untag_resource,
    update_compute_environment,
    update_consumable_resource,
    update_job_queue,
    update_scheduling_policy,
)
from batchml.local.batch.transaction import Transaction

HANDLERS: dict[str, Callable[[Transaction, CallReceived], dict[str, Any]]] = {
    "CreateComputeEnvironment": create_compute_environment,
    "UpdateComputeEnvironment": update_compute_environment,
    "DeleteComputeEnvironment": delete_compute_environment,
    "CreateJobQueue": create_job_queue,
    "UpdateJobQueue": update_job_queue,
    "DeleteJobQueue": delete_job_queue,
    "CreateSchedulingPolicy": create_scheduling_policy,
    "UpdateSchedulingPolicy": update_scheduling_policy,
    "DeleteSchedulingPolicy": delete_scheduling_policy,
    "CreateConsumableResource": create_consumable_resource,
    "UpdateConsumableResource": update_consumable_resource,
    "DeleteConsumableResource": delete_consumable_resource,
    "RegisterJobDefinition": register_job_definition,
    "DeregisterJobDefinition": deregister_job_definition,
    "SubmitJob": submit_job,
    "CancelJob": cancel_job,
    "TerminateJob": terminate_job,
    "CancelJobs": cancel_jobs,
    "TerminateJobs": terminate_jobs,
    "TagResource": tag_resource,
    "UntagResource": untag_resource,
}
