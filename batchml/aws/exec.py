"""ECS Exec and Session Manager: start a command in a container, or forward a port to it.

Sources: Amazon ECS API Reference, ExecuteCommand, DescribeTasks (ManagedAgent); AWS Systems Manager
API Reference, StartSession; AWS CLI, customizations/ecs/executecommand.py and sessionmanager.py,
which have the arguments of the program session-manager-plugin.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import ExecUnavailable, ServiceError

PLUGIN = "session-manager-plugin"
FORWARD = "AWS-StartPortForwardingSession"

_CONTAINER = "default"  # AWS Batch's name for a job's only container
_AGENT = "ExecuteCommandAgent"
_BY_NAME = "AWS_SSM_START_SESSION_RESPONSE"
_LAST_WITHOUT = (1, 2, 497, 0)  # the newest plugin that reads the session from an argument only
_ARN = re.compile(r"arn:[\w-]+:ecs:(?P<region>[\w-]+):\d*:task/(?:(?P<cluster>.+)/)?(?P<id>[^/]+)")


class EcsTask(Struct, frozen=True):
    """A task of ECS, and the container of it that a run is."""

    arn: str
    region: str
    cluster: str
    id: str
    container: str = _CONTAINER
    runtime_id: str = ""
    is_enabled: bool = True  # it was started with ECS Exec
    agent: str = ""  # the state of ECS Exec's agent; "" for unknown
    why: str = ""  # the reason for that state

    @property
    def target(self) -> str:
        """Session Manager's name for the container."""
        return f"ecs:{self.cluster}_{self.id}_{self.runtime_id}"


class SsmSession(Struct, frozen=True):
    """A new session of Session Manager, not yet connected. `session` has its secret token."""

    session: dict[str, str]  # SessionId, StreamUrl, TokenValue
    target: dict[str, Any]
    region: str
    endpoint: str

    def __repr__(self) -> str:
        return f"SsmSession({self.session.get('SessionId', '')!r})"  # never the token


def parse_task_arn(arn: str) -> EcsTask:
    """Raises ExecUnavailable for other ARNs."""
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
    """The StartSession request that forwards to a port of the container, also of its 127.0.0.1."""
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
    if parse_version(version) > _LAST_WITHOUT:
        variables[_BY_NAME] = session
        session = _BY_NAME
    target = json.dumps(opened.target)
    arguments = [plugin, session, opened.region, "StartSession", profile, target, opened.endpoint]
    return arguments, variables


def parse_version(text: str) -> tuple[int, ...]:
    """`(1, 2, 650, 0)`; zeros for a text that is no version."""
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
        with translate_errors("ecs:DescribeTasks"):
            answer = self._session.client("ecs").describe_tasks(
                cluster=task.cluster, tasks=[task.arn]
            )
        found = parse_task(task, answer)
        check_exec(found)
        return found

    def open_command(self, task: EcsTask, command: str) -> SsmSession:
        """Start a command in the container. Raises ExecUnavailable."""
        client = self._session.client("ecs", attempts=1)  # a second call would be a second command
        try:
            with translate_errors("ecs:ExecuteCommand"):
                answer = client.execute_command(**exec_request(task, command))
        except ServiceError as error:
            raise _explain(error) from error
        session = {
            "SessionId": answer["session"]["sessionId"],
            "StreamUrl": answer["session"]["streamUrl"],
            "TokenValue": answer["session"]["tokenValue"],
        }
        return SsmSession(session, {"Target": task.target}, *_of(client))

    def open_forward(self, task: EcsTask, port: int, local_port: int) -> SsmSession:
        """Start a session that forwards a port. Raises ExecUnavailable."""
        client = self._session.client("ssm", attempts=1)
        request = forward_request(task, port, local_port)
        try:
            with translate_errors("ssm:StartSession"):
                answer = client.start_session(**request)
        except ServiceError as error:
            raise _explain(error) from error
        session = {name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
        return SsmSession(session, request, *_of(client))

    def end(self, opened: SsmSession) -> None:
        """End a session that was not connected."""
        with translate_errors("ssm:TerminateSession"):
            self._session.client("ssm", attempts=1).terminate_session(
                SessionId=opened.session["SessionId"]
            )


def _of(client: Any) -> tuple[str, str]:
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
    """The error with an explanation, if its code has one."""
    text = _REFUSED.get(error.code)
    if not text:
        return error
    return ExecUnavailable(f"{text}\n  AWS says: {error.message}", is_early=error.code in _EARLY)
