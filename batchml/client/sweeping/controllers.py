"""Where a sweep's controller runs when no terminal stays open: its queue, its image, its requests.

On `local` it is a process of this installation in a queue that takes nothing of the machine, made
when the first one is needed. In AWS it is a container of images/controller, with a role that may do
less than the people who submit.
"""

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.requests import Submission, Travel, submission
from batchml.aws.naming import Platform
from batchml.client.sweeping.freezing import Frozen
from batchml.errors import AccessError, ConfigError, ServiceError
from batchml.model.job import JobSpec, Resources
from batchml.model.names import to_name
from batchml.model.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.client.place import Place

IMAGE = "controller"  # below images/
ROLE = "ControllerRoleArn"  # an output of the stack `roles`

QUEUE = "controllers"  # on `local`, and the compute environment beside it: local/batch/records.py
AT_ONCE = 64  # controllers of one machine

# A controller that is lost, killed or gives up is followed by the next, as often as Batch allows.
# Nothing of a sweep is lost by it. What a file or a policy says does not change by trying again.
_RETRY = {
    "attempts": 10,
    "evaluateOnExit": [
        {"onExitCode": str(ConfigError.exit_code), "action": "EXIT"},
        {"onExitCode": str(AccessError.exit_code), "action": "EXIT"},
        {"onReason": "*", "action": "RETRY"},
    ],
}
_MEMORY = "1 GiB"  # ten thousand trials take about 150 MiB
# The methods whose controller imports Optuna.
_BY_OPTUNA = ("gp", "cmaes", "nsga2")
_OPTUNA = re.compile(r"\s*optuna\b")


def controller_job(frozen: Frozen, command: tuple[str, ...], image: str) -> JobSpec:
    """The job of a controller."""
    return JobSpec(
        name=controller_name(frozen),
        image=image,
        command=command,
        code=False,
        resources=Resources(vcpus=1, memory=_MEMORY),
    )


def controller_name(frozen: Frozen) -> str:
    """What people see in `ls`: `lenet-controller`."""
    return to_name(f"{frozen.name}-controller")


def controller_requests(
    frozen: Frozen,
    key: str,
    command: tuple[str, ...],
    *,
    image: str,
    queue: str,
    platform: Platform,
) -> Submission:
    """The requests of a controller's run. Pure."""
    tags = {**frozen.tags, "batchml:key": key}
    travel = Travel(
        key=key,
        store=f"{frozen.runs}/{key}" if frozen.runs else "",
        tags={name: value for name, value in tags.items() if name != "batchml:job"},
    )
    job = controller_job(frozen, command, image)
    made = submission(job, image=image, queue=queue, travel=travel, platform=platform)
    return replace(made, submit={**made.submit, "retryStrategy": _RETRY})


def controller_record(frozen: Frozen, key: str, requests: Submission) -> Record:
    """What the history keeps of a controller's run."""
    request = requests.submit
    container = requests.register["containerProperties"]
    return Record(
        key=key,
        name=controller_name(frozen),
        job_name=request["jobName"],
        env=frozen.env,
        queue=request["jobQueue"],
        command=tuple(request["containerOverrides"]["command"]),
        tags=request["tags"],
        image=container["image"],
        vcpus=1,
        memory_mib=1024,
    )


def as_controller(platform: Platform, outputs: "Mapping[str, str]", env: str) -> Platform:
    """What a controller's definition has of the environment: a role of its own, no workspace.

    Raises ConfigError where the stacks are older than that role.
    """
    role = outputs.get(ROLE, "")
    if not role:
        raise ConfigError(
            env,
            [
                f"its stack `roles` has no role for controllers of sweeps. Update it with "
                f"`batchml setup --env {env}`, or keep the terminal open: leave out --detach."
            ],
        )
    return replace(platform, job_role=role, workspace="", gpu="")


def check_method(frozen: Frozen, requirements: str) -> None:
    """Raise ConfigError for a method whose package the controller's image does not have."""
    lines = requirements.lower().splitlines()
    if frozen.spec.method in _BY_OPTUNA and not any(map(_OPTUNA.match, lines)):
        raise ConfigError(
            f"images/{IMAGE}/requirements.txt",
            [
                f"method {frozen.spec.method} needs Optuna, which the image of controllers does "
                f"not have. Copy images/{IMAGE} into your project, add the packages that "
                f"`pip install 'batchml[optuna]'` brings, and push it: batchml image push {IMAGE}. "
                f"Or keep the terminal open: leave out --detach."
            ],
        )


def make_queue(place: "Place") -> str:
    """The queue of controllers on `local`, which is made when the first one is needed."""
    from batchml.aws.batch.resources import ComputeApi

    api = ComputeApi(place.connect())
    if api.queue(QUEUE) is not None:
        return QUEUE
    order = [{"order": 1, "computeEnvironment": QUEUE}]
    try:
        if api.environment(QUEUE) is None:
            api.create_environment(
                {
                    "computeEnvironmentName": QUEUE,
                    "type": "UNMANAGED",
                    "unmanagedvCpus": AT_ONCE,
                }
            )
        api.create_queue({"jobQueueName": QUEUE, "priority": 1, "computeEnvironmentOrder": order})
    except ServiceError as error:
        if "already exists" not in error.message:  # someone else was faster
            raise
        if api.queue(QUEUE) is None:
            api.create_queue(
                {"jobQueueName": QUEUE, "priority": 1, "computeEnvironmentOrder": order}
            )
    return QUEUE
