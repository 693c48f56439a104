"""ECS Exec and Session Manager: start a command in a container, or forward a port to a container.

Sources: Amazon ECS API Reference, ExecuteCommand, DescribeTasks (ManagedAgent); AWS Systems Manager
API Reference, StartSession; AWS CLI, customizations/ecs/executecommand.py and sessionmanager.py,
which show the arguments of the program session-manager-plugin.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.errors import call
from batchml.aws.session import Session
from batchml.errors import ExecUnavailable, ServiceError

PLUGIN = "session-manager-plugin"
FORWARD = "AWS-StartPortForwardingSession"

_CONTAINER = "default"  # AWS Batch's name for a job's only container
_AGENT = "ExecuteCommandAgent"
_SESSION_VARIABLE = "AWS_SSM_START_SESSION_RESPONSE"
_LAST_WITHOUT_VARIABLE = (1, 2, 497, 0)  # the newest plugin that needs the session as argument
_ARN = re.compile(r"arn:[\w-]+:ecs:(?P<region>[\w-]+):\d*:task/(?:(?P<cluster>.+)/)?(?P<id>[^/]+)")


class EcsTask(Struct, frozen=True):
    """A task of ECS, with its container that belongs to the run."""

    arn: str
    region: str
    cluster: str
    id: str
    container: str = _CONTAINER
    runtime_id: str = ""
    is_enabled: bool = True  # whether the task was started with ECS Exec
    agent: str = ""  # the state of ECS Exec's agent; "" if it is unknown
    why: str = ""  # the reason for the agent's state

    @property
    def target(self) -> str:
        """Session Manager's name for the container."""
        return f"ecs:{self.cluster}_{self.id}_{self.runtime_id}"


class SsmSession(Struct, frozen=True):
    """A new session of Session Manager, not yet connected. `session` has a secret token."""

    session: dict[str, str]  # SessionId, StreamUrl, TokenValue
    target: dict[str, Any]
    region: str
    endpoint: str

    def __repr__(self) -> str:
        return f"SsmSession({self.session.get('SessionId', '')!r})"  # never the token


def parse_task_arn(arn: str) -> EcsTask:
    """Parse the ARN of a task of ECS. Raises ExecUnavailable for other texts."""
    found = _ARN.fullmatch(arn)
    if found is None or not found["cluster"]:
        raise ExecUnavailable(f"{arn or 'The empty ARN'} is not the ARN of a task of ECS.")
    return EcsTask(arn, found["region"], found["cluster"], found["id"])


def parse_task(task: EcsTask, answer: Mapping[str, Any]) -> EcsTask:
    """Find the run's container in an answer of DescribeTasks. Raises ExecUnavailable.

    AWS may have added other containers to the task, such as GuardDuty's.
    """
    tasks: Sequence[Mapping[str, Any]] = answer.get("tasks") or ()
    containers = tasks[0].get("containers") or () if tasks else ()
    own = [each for each in containers if not each.get("name", "").startswith("aws-guardduty")]
    chosen = next((each for each in own if each.get("name") == _CONTAINER), own[0] if own else None)
    if chosen is None:
        raise ExecUnavailable(
            "ECS no longer knows the run's task: the run is ending, or has ended."
        )
    agents = {each.get("name"): each for each in chosen.get("managedAgents") or ()}
    agent = agents.get(_AGENT, {})
    return EcsTask(
        task.arn, task.region, task.cluster, task.id, chosen.get("name", _CONTAINER),
        chosen.get("runtimeId", ""), bool(tasks[0].get("enableExecuteCommand")),
        agent.get("lastStatus", ""), agent.get("reason", ""),
    )  # fmt: skip


def check_exec(task: EcsTask) -> None:
    """Raise ExecUnavailable, with the fix, for a task that ECS Exec cannot enter."""
    if not task.is_enabled:
        raise ExecUnavailable(
            "This run was submitted without ECS Exec: by another client, by an older batchml, or "
            "in an environment without a job role. ECS Exec cannot be turned on later. Submit the "
            "run again: batchml rerun RUN"
        )
    if task.agent == "STOPPED":
        reason = f" ({task.why})" if task.why else ""
        raise ExecUnavailable(
            f"The agent of ECS Exec in the run's container has stopped{reason}. It needs a job "
            "role with ssmmessages:CreateControlChannel, CreateDataChannel, OpenControlChannel and "
            "OpenDataChannel, a writable root file system, and a route to "
            "ssmmessages.REGION.amazonaws.com. A restarted container has a new agent."
        )
    if task.agent == "PENDING":
        message = "The agent of ECS Exec is starting in the run's container: try again in seconds."
        raise ExecUnavailable(message, is_early=True)
    if not task.runtime_id:
        message = "ECS has not started the run's container yet: try again in seconds."
        raise ExecUnavailable(message, is_early=True)


def exec_request(task: EcsTask, command: str) -> dict[str, Any]:
    """The ExecuteCommand request."""
    return {
        "cluster": task.cluster, "task": task.arn, "container": task.container,
        "command": command, "interactive": True,
    }  # fmt: skip


def forward_request(task: EcsTask, port: int, local_port: int) -> dict[str, Any]:
    """The StartSession request that forwards to a port of the container or its 127.0.0.1."""
    parameters = {"portNumber": [str(port)], "localPortNumber": [str(local_port)]}
    return {"Target": task.target, "DocumentName": FORWARD, "Parameters": parameters}


def plugin_arguments(
    plugin: str, opened: SsmSession, profile: str, version: str
) -> tuple[list[str], dict[str, str]]:
    """The arguments and environment variables of the plugin, as the AWS CLI gives them.

    The session has a secret, and every user of the machine can read the arguments of a process.
    Versions after 1.2.497 read the session from a variable instead.
    """
    session, variables = json.dumps(opened.session), {}
    if parse_version(version) > _LAST_WITHOUT_VARIABLE:
        variables[_SESSION_VARIABLE] = session
        session = _SESSION_VARIABLE
    target = json.dumps(opened.target)
    arguments = [plugin, session, opened.region, "StartSession", profile, target, opened.endpoint]
    return arguments, variables


def parse_version(text: str) -> tuple[int, ...]:
    """Parse `1.2.650.0` to `(1, 2, 650, 0)`; other texts to zeros."""
    words = text.strip().split(".")
    if not all(word.isascii() and word.isdigit() for word in words) or len(words) > 4:
        return (0, 0, 0, 0)
    numbers = [int(word) for word in words]
    return tuple([*numbers, 0, 0, 0][:4])


class ExecApi:
    """The calls of ECS Exec and Session Manager, with our types."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find(self, arn: str) -> EcsTask:
        """Find the run's container by its task's ARN. Raises ExecUnavailable."""
        task = parse_task_arn(arn)
        request = {"cluster": task.cluster, "tasks": [task.arn]}
        answer = call(self._session.client("ecs"), "ecs:DescribeTasks", **request)
        found = parse_task(task, answer)
        check_exec(found)
        return found

    def open_command(self, task: EcsTask, command: str) -> SsmSession:
        """Start a command in the container. Raises ExecUnavailable."""
        # If the call were repeated, two commands could run.
        client = self._session.client("ecs", attempts=1)
        try:
            answer = call(client, "ecs:ExecuteCommand", **exec_request(task, command))
        except ServiceError as error:
            raise _explain(error) from error
        session = {
            "SessionId": answer["session"]["sessionId"],
            "StreamUrl": answer["session"]["streamUrl"],
            "TokenValue": answer["session"]["tokenValue"],
        }
        return SsmSession(session, {"Target": task.target}, *_region_and_endpoint(client))

    def open_forward(self, task: EcsTask, port: int, local_port: int) -> SsmSession:
        """Start a session that forwards a port. Raises ExecUnavailable."""
        client = self._session.client("ssm", attempts=1)
        request = forward_request(task, port, local_port)
        try:
            answer = call(client, "ssm:StartSession", **request)
        except ServiceError as error:
            raise _explain(error) from error
        session = {name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
        return SsmSession(session, request, *_region_and_endpoint(client))

    def end(self, opened: SsmSession) -> None:
        """End a session that was not connected."""
        client = self._session.client("ssm", attempts=1)
        call(client, "ssm:TerminateSession", SessionId=opened.session["SessionId"])


def _region_and_endpoint(client: Any) -> tuple[str, str]:
    return client.meta.region_name, client.meta.endpoint_url


_REFUSED = {
    "TargetNotConnectedException": (
        "The run's container is not connected to Session Manager: it has just started (try again "
        "in a minute), its job role lacks the four ssmmessages permissions, or its subnet has no "
        "route to ssmmessages.REGION.amazonaws.com."
    ),
    "InvalidParameterException": (
        "ECS Exec was not enabled when the run was submitted, or its agent does not run. "
        "Submit the run again: batchml rerun RUN"
    ),
    "ClusterNotFoundException": "The run's compute environment was deleted, with its cluster.",
    "InvalidDocument": f"AWS does not know the document {FORWARD} in this region.",
}
_REFUSED["TargetNotConnected"] = _REFUSED["TargetNotConnectedException"]
_EARLY = ("TargetNotConnected", "TargetNotConnectedException")


def _explain(error: ServiceError) -> Exception:
    """The error that explains a refusal; the error itself for other codes."""
    text = _REFUSED.get(error.code)
    if not text:
        return error
    return ExecUnavailable(f"{text}\n  AWS says: {error.message}", is_early=error.code in _EARLY)
