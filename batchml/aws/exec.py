"""ECS Exec and Session Manager: what is asked of them, and what their answers and refusals mean.

Sources: Amazon ECS API Reference, ExecuteCommand, DescribeTasks (ManagedAgent); AWS Systems Manager
API Reference, StartSession; AWS CLI, customizations/ecs/executecommand.py and sessionmanager.py,
which say what the program session-manager-plugin is given.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import NoDoor, ServiceError

PLUGIN = "session-manager-plugin"
FORWARD = "AWS-StartPortForwardingSession"

_CONTAINER = "default"  # AWS Batch's name for a job's only container
_AGENT = "ExecuteCommandAgent"
_BY_NAME = "AWS_SSM_START_SESSION_RESPONSE"
_LAST_WITHOUT = (1, 2, 497, 0)  # the newest plugin that takes the session as an argument alone
_ARN = re.compile(r"arn:[\w-]+:ecs:(?P<region>[\w-]+):\d*:task/(?:(?P<cluster>.+)/)?(?P<id>[^/]+)")


class Task(Struct, frozen=True):
    """A task of ECS by its ARN, and one container of it."""

    arn: str
    region: str
    cluster: str
    id: str
    container: str = _CONTAINER
    runtime_id: str = ""
    is_enabled: bool = True  # ECS Exec was asked for when it was started
    agent: str = ""  # the state of the agent that connects it; "" where AWS does not say
    why: str = ""  # the agent's reason

    @property
    def target(self) -> str:
        """What Session Manager calls the container."""
        return f"ecs:{self.cluster}_{self.id}_{self.runtime_id}"


class Opened(Struct, frozen=True):
    """A session that AWS has opened and nobody has taken up: its secret and where it is."""

    session: dict[str, str]  # SessionId, StreamUrl, TokenValue
    target: dict[str, Any]
    region: str
    endpoint: str

    def __repr__(self) -> str:
        return f"Opened({self.session.get('SessionId', '')!r})"  # never the token


def read_arn(arn: str) -> Task:
    """Raises NoDoor for anything that is no task of an ECS cluster."""
    found = _ARN.fullmatch(arn)
    if found is None or not found["cluster"]:
        raise NoDoor(f"{arn or 'What AWS Batch tells'} names no task of an ECS cluster.")
    return Task(arn, found["region"], found["cluster"], found["id"])


def read_task(task: Task, answer: Mapping[str, Any]) -> Task:
    """The container that our run is, from an answer of DescribeTasks. Raises NoDoor.

    Beside it there may be others that AWS added, such as GuardDuty's.
    """
    tasks: Sequence[Mapping[str, Any]] = answer.get("tasks") or ()
    containers = tasks[0].get("containers") or () if tasks else ()
    own = [each for each in containers if not each.get("name", "").startswith("aws-guardduty")]
    chosen = next((each for each in own if each.get("name") == _CONTAINER), own[0] if own else None)
    if chosen is None:
        raise NoDoor("ECS does not know the run's task any more: it is ending, or has ended.")
    agents = {each.get("name"): each for each in chosen.get("managedAgents") or ()}
    agent = agents.get(_AGENT, {})
    return Task(
        task.arn, task.region, task.cluster, task.id, chosen.get("name", _CONTAINER),
        chosen.get("runtimeId", ""), bool(tasks[0].get("enableExecuteCommand")),
        agent.get("lastStatus", ""), agent.get("reason", ""),
    )  # fmt: skip


def check(task: Task) -> None:
    """Raise NoDoor for a task that ECS Exec cannot get into, with what to do about it."""
    if not task.is_enabled:
        raise NoDoor(
            "This run was submitted without ECS Exec, which is decided at submission: by another "
            "client, by an older batchml, or where the environment has no job role. Submit it "
            "again: batchml rerun RUN"
        )
    if task.agent == "STOPPED":
        reason = f" ({task.why})" if task.why else ""
        raise NoDoor(
            f"The agent of ECS Exec in the run's container has stopped{reason}. It needs a job "
            "role with ssmmessages:CreateControlChannel, CreateDataChannel, OpenControlChannel and "
            "OpenDataChannel, a root file system that can be written, and a way out to "
            "ssmmessages.REGION.amazonaws.com. A container started anew has a new one."
        )
    if task.agent == "PENDING":
        words = "The agent of ECS Exec is just starting in the run: try again in seconds."
        raise NoDoor(words, is_early=True)
    if not task.runtime_id:
        words = "ECS has not started the run's container yet: try again in seconds."
        raise NoDoor(words, is_early=True)


def exec_request(task: Task, command: str) -> dict[str, Any]:
    """ExecuteCommand arguments."""
    return {
        "cluster": task.cluster, "task": task.arn, "container": task.container,
        "command": command, "interactive": True,
    }  # fmt: skip


def forward_request(task: Task, port: int, local_port: int) -> dict[str, Any]:
    """StartSession arguments: to a port that the container sees as its own, 127.0.0.1 included."""
    parameters = {"portNumber": [str(port)], "localPortNumber": [str(local_port)]}
    return {"Target": task.target, "DocumentName": FORWARD, "Parameters": parameters}


def plugin_call(
    plugin: str, opened: Opened, profile: str, version: str
) -> tuple[list[str], dict[str, str]]:
    """The words and variables that the plugin is started with, as the AWS CLI has them.

    From 1.2.497 on it reads the session, which holds a secret, from a variable: the words of a
    process are for everybody to see.
    """
    session, variables = json.dumps(opened.session), {}
    if version_of(version) > _LAST_WITHOUT:
        variables[_BY_NAME] = session
        session = _BY_NAME
    target = json.dumps(opened.target)
    words = [plugin, session, opened.region, "StartSession", profile, target, opened.endpoint]
    return words, variables


def version_of(text: str) -> tuple[int, ...]:
    """`(1, 2, 650, 0)`; zeros for what is no version."""
    words = text.strip().split(".")
    if not all(word.isascii() and word.isdigit() for word in words) or len(words) > 4:
        return (0, 0, 0, 0)
    numbers = [int(word) for word in words]
    return tuple([*numbers, 0, 0, 0][:4])


class ExecApi:
    """Our calls; errors are ours."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find(self, arn: str) -> Task:
        """The run's container by its task's ARN. Raises NoDoor."""
        task = read_arn(arn)
        with translated("ecs:DescribeTasks"):
            answer = self._session.client("ecs").describe_tasks(
                cluster=task.cluster, tasks=[task.arn]
            )
        found = read_task(task, answer)
        check(found)
        return found

    def open_command(self, task: Task, command: str) -> Opened:
        """Start a command in the container. Raises NoDoor."""
        client = self._session.client("ecs", attempts=1)  # a second call is a second command
        try:
            with translated("ecs:ExecuteCommand"):
                answer = client.execute_command(**exec_request(task, command))
        except ServiceError as error:
            raise _explained(error) from error
        session = {
            "SessionId": answer["session"]["sessionId"],
            "StreamUrl": answer["session"]["streamUrl"],
            "TokenValue": answer["session"]["tokenValue"],
        }
        return Opened(session, {"Target": task.target}, *_of(client))

    def open_forward(self, task: Task, port: int, local_port: int) -> Opened:
        """Start a session that forwards a port. Raises NoDoor."""
        client = self._session.client("ssm", attempts=1)
        request = forward_request(task, port, local_port)
        try:
            with translated("ssm:StartSession"):
                answer = client.start_session(**request)
        except ServiceError as error:
            raise _explained(error) from error
        session = {name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
        return Opened(session, request, *_of(client))

    def end(self, opened: Opened) -> None:
        """End a session that nobody takes up."""
        with translated("ssm:TerminateSession"):
            self._session.client("ssm", attempts=1).terminate_session(
                SessionId=opened.session["SessionId"]
            )


def _of(client: Any) -> tuple[str, str]:
    return client.meta.region_name, client.meta.endpoint_url


_REFUSED = {
    "TargetNotConnectedException": (
        "The run's container is not connected to Session Manager: it has only started (try again "
        "in a minute), its job role lacks the four ssmmessages permissions, or its subnet has no "
        "way to ssmmessages.REGION.amazonaws.com."
    ),
    "InvalidParameterException": (
        "ECS Exec was not enabled when the run was submitted, or its agent does not run there. "
        "Submit the run again: batchml rerun RUN"
    ),
    "ClusterNotFoundException": "The run's compute environment is gone, and its cluster with it.",
    "InvalidDocument": f"AWS does not know the document {FORWARD} in this region.",
}
_REFUSED["TargetNotConnected"] = _REFUSED["TargetNotConnectedException"]
_EARLY = ("TargetNotConnected", "TargetNotConnectedException")


def _explained(error: ServiceError) -> Exception:
    """AWS's refusal in a sentence that helps; others as they are."""
    words = _REFUSED.get(error.code)
    if not words:
        return error
    return NoDoor(f"{words}\n  AWS says: {error.message}", is_early=error.code in _EARLY)
