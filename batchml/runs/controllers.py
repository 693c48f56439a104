"""Controllers: small runs that control a sweep, or watch a run that may move to another queue.

On `local` a controller is a process of this installation, in a queue of its own whose jobs use none
of the machine's vCPUs; the first controller creates the queue. In AWS it is a container of
images/controller, whose role has fewer permissions than its users.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionContext, SubmissionRequests, make_submission
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.naming import Platform
from batchml.config.settings import Setting, Settings
from batchml.context import Context
from batchml.errors import AccessError, ConfigError, NotFound, ServiceError, ServiceUnreachable
from batchml.jobs.find import find_image
from batchml.local import control
from batchml.model.environment import ConfigContent, Environment
from batchml.model.job import JobSpec, Resources

if TYPE_CHECKING:
    from batchml.clock import Clock
    from batchml.local.home import ServerEndpoint

IMAGE = "controller"  # a folder below images/
ROLE = "ControllerRoleArn"  # an output of the stack `roles`

QUEUE = "controllers"  # on `local`, also the name of its compute environment: local/batch/state.py
MAX_CONTROLLERS = 64  # on one machine at a time

# AWS Batch starts another attempt after any failure, as often as it allows; the attempt goes on
# where the last one ended. After errors of files or permissions another attempt would not help.
_RETRY = {
    "attempts": 10,
    "evaluateOnExit": [
        {"onExitCode": str(ConfigError.exit_code), "action": "EXIT"},
        {"onExitCode": str(AccessError.exit_code), "action": "EXIT"},
        {"onReason": "*", "action": "RETRY"},
    ],
}


class ControllerRun(Struct, frozen=True, kw_only=True):
    """A run that controls a sweep, or watches a run that may move."""

    name: str
    command: tuple[str, ...]
    image: str
    queue: str
    platform: Platform
    memory: str
    tags: dict[str, str]
    store: str = ""  # the address below which its outputs are stored


def controller_requests(run: ControllerRun, key: str) -> SubmissionRequests:
    """The requests of a controller. Pure."""
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
    return replace(made, submit={**made.submit, "retryStrategy": _RETRY})


def find_controller_folder(context: Context) -> Path:
    """The image folder of controllers. Raises NotFound."""
    folder = find_image(IMAGE, context.image_folders)
    if folder is None:
        raise NotFound("Image", IMAGE, [], "It comes with batchml: install batchml again.")
    return folder


def controller_platform(platform: Platform, outputs: Mapping[str, str], env: str) -> Platform:
    """The platform of a controller's job definition: a role of its own, no workspace.

    Raises ConfigError if the stacks of the environment are older than that role.
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
    """Create the queue of controllers on `local`, if it does not exist; its name."""
    api = ComputeApi(context.connect())
    if api.queue(QUEUE) is not None:
        return QUEUE
    request = {
        "jobQueueName": QUEUE,
        "priority": 1,
        "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": QUEUE}],
    }
    try:
        if api.environment(QUEUE) is None:
            api.create_environment(
                {
                    "computeEnvironmentName": QUEUE,
                    "type": "UNMANAGED",
                    "unmanagedvCpus": MAX_CONTROLLERS,
                }
            )
        api.create_queue(request)
    except ServiceError as error:
        if "already exists" not in error.message:  # another process was faster
            raise
        if api.queue(QUEUE) is None:
            api.create_queue(request)
    return QUEUE


# --- Inside a controller --------------------------------------------------------------------------


_SERVER_WAIT = 5.0  # seconds for the embedded server to come back, at each call
_SERVER_POLL = 0.5


class ControllerContext(Context):
    """The context of `local` inside a run: it never starts the embedded server.

    A server that a run started would end with the run. While the user has stopped the server, each
    call waits a few seconds; then the run fails, and the next server starts it again.
    """

    def server(self) -> "ServerEndpoint":
        end = self.clock.monotonic() + _SERVER_WAIT
        while (endpoint := control.find_server(self.home)) is None:
            if self.clock.monotonic() >= end:
                raise ServiceUnreachable(
                    "The embedded server is not running. Start it with `batchml local start`: "
                    "then the controller goes on."
                )
            self.clock.sleep(_SERVER_POLL)
        return endpoint


def context_in_aws(env: str, region: str, home: Path, clock: "Clock", source: str) -> Context:
    """The context of an environment in AWS inside a controller's container, with its permissions.

    `source` says where `env` and `region` come from, for messages.
    """
    described = ConfigContent(env, {env: Environment(region=region)}, {})
    settings = Settings(Setting(env, source), Setting(str(home), source), None, described)
    return Context(settings, clock, home)
