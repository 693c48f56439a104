"""Controllers: small runs that look after a sweep, or after a run that may move to another queue.

On `local` a controller is a process of this installation, in a queue that takes nothing of the
machine and is made when the first controller needs it. In AWS it is a container of
images/controller, whose role may do less than the people who submit it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionContext, SubmissionRequests, make_submission
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.naming import Platform
from batchml.config.environments import ConfigContent
from batchml.config.settings import Setting, Settings
from batchml.context import Context
from batchml.errors import AccessError, ConfigError, NotFound, ServiceError, ServiceUnreachable
from batchml.jobs.find import find_image
from batchml.local import control
from batchml.model.environment import Environment
from batchml.model.job import JobSpec, Resources

if TYPE_CHECKING:
    from batchml.clock import Clock
    from batchml.local.home import ServerEndpoint

IMAGE = "controller"  # below images/
ROLE = "ControllerRoleArn"  # an output of the stack `roles`

QUEUE = "controllers"  # on `local`, also the name of its compute environment: local/batch/state.py
MAX_CONTROLLERS = 64  # controllers of one machine

# AWS Batch starts a new attempt after a lost, killed or failed controller, as often as it allows.
# Nothing of a sweep is lost. After errors of files or policies a new attempt would not help.
RETRY_STRATEGY = {
    "attempts": 10,
    "evaluateOnExit": [
        {"onExitCode": str(ConfigError.exit_code), "action": "EXIT"},
        {"onExitCode": str(AccessError.exit_code), "action": "EXIT"},
        {"onReason": "*", "action": "RETRY"},
    ],
}


class ControllerRun(Struct, frozen=True, kw_only=True):
    """A small run that controls a sweep, or looks after another run, while nobody waits for it."""

    name: str  # what people see in `ls`
    command: tuple[str, ...]
    image: str
    queue: str
    platform: Platform
    memory: str
    tags: dict[str, str]
    store: str = ""  # below which its outputs are kept


def controller_requests(run: ControllerRun, key: str) -> SubmissionRequests:
    """The requests of a controller's run. Pure."""
    submission = SubmissionContext(
        key=key,
        store=f"{run.store}/{key}" if run.store else "",
        tags={**run.tags, "batchml:key": key},
    )
    job = JobSpec(
        name=run.name,
        image=run.image,
        command=run.command,
        code=False,
        resources=Resources(vcpus=1, memory=run.memory),
    )
    made = make_submission(
        job, image=run.image, queue=run.queue, submission=submission, platform=run.platform
    )
    return replace(made, submit={**made.submit, "retryStrategy": RETRY_STRATEGY})


def find_controller_folder(context: Context) -> Path:
    """The image folder of controllers. Raises NotFound."""
    folder = find_image(IMAGE, context.image_folders)
    if folder is None:
        raise NotFound("Image", IMAGE, [], "It comes with batchml: install that again.")
    return folder


def controller_platform(platform: Platform, outputs: Mapping[str, str], env: str) -> Platform:
    """The environment's part of a controller's definition: its own role, no workspace.

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


def ensure_queue(context: Context) -> str:
    """The queue of controllers on `local`, which is made when the first one is needed."""
    api = ComputeApi(context.connect())
    if api.queue(QUEUE) is not None:
        return QUEUE
    order = [{"order": 1, "computeEnvironment": QUEUE}]
    try:
        if api.environment(QUEUE) is None:
            api.create_environment(
                {
                    "computeEnvironmentName": QUEUE,
                    "type": "UNMANAGED",
                    "unmanagedvCpus": MAX_CONTROLLERS,
                }
            )
        api.create_queue({"jobQueueName": QUEUE, "priority": 1, "computeEnvironmentOrder": order})
    except ServiceError as error:
        if "already exists" not in error.message:  # another process was faster
            raise
        if api.queue(QUEUE) is None:
            api.create_queue(
                {"jobQueueName": QUEUE, "priority": 1, "computeEnvironmentOrder": order}
            )
    return QUEUE


# --- Inside a controller's run --------------------------------------------------------------------


_SERVER_WAIT = 5.0  # seconds for the embedded server to come back, at each call
_SERVER_POLL = 0.5


class ControllerContext(Context):
    """`local` as seen from a run of the embedded server, which is never started from there.

    A server that this run started would end with this run. While the user has stopped the server,
    each call waits a little; then the run fails, and the next server starts it again.
    """

    def server(self) -> "ServerEndpoint":
        end = self.clock.monotonic() + _SERVER_WAIT
        while (endpoint := control.find_server(self.home)) is None:
            if self.clock.monotonic() >= end:
                raise ServiceUnreachable(
                    "The embedded server is not running. Start it with `batchml local start`: "
                    "then this continues."
                )
            self.clock.sleep(_SERVER_POLL)
        return endpoint


def context_in_aws(env: str, region: str, home: Path, clock: "Clock", source: str) -> Context:
    """An environment in AWS as seen from a controller's container: its region, and the rights of
    the container. `source` says where both were read."""
    described = ConfigContent(env, {env: Environment(region=region)}, {})
    settings = Settings(Setting(env, source), Setting(str(home), source), None, described)
    return Context(settings, clock, home)
