"""CloudFormation: read, create, change and delete the stacks of an environment.

Each call that begins an operation on a stack has a ClientRequestToken, so that AWS carries it out
once, even if the SDK sends it twice. The name of a change set is a hash of its content, so that an
interrupted command finds its change set when it is repeated. All other tokens are new in each call,
because the same stack may have to be created or deleted again.

Source: AWS CloudFormation API reference, "Stack status codes", "ClientRequestToken".
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.errors import call, read_entries, read_token_pages
from batchml.aws.session import Session
from batchml.errors import ServiceError

_CAPABILITIES = ["CAPABILITY_NAMED_IAM"]
_GONE = "DELETE_COMPLETE"
_ALLOW_ALL = json.dumps(
    {"Statement": [{"Effect": "Allow", "Action": "Update:*", "Principal": "*", "Resource": "*"}]}
)


class Stack(Struct, frozen=True):
    """A stack in AWS. `template` is the template's text in its last deployment."""

    id: str
    name: str
    status: str
    reason: str = ""
    outputs: dict[str, str] = {}
    parameters: dict[str, str] = {}
    tags: dict[str, str] = {}
    is_protected: bool = False
    changed_at: str = ""
    template: str = ""

    @property
    def is_busy(self) -> bool:
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"


class Blueprint(Struct, frozen=True):
    """The content that a stack shall have."""

    name: str
    template: str
    parameters: dict[str, str]
    tags: dict[str, str]
    is_protected: bool = False
    policy: str = ""  # a stack policy, as JSON

    def update_token(self, stack: Stack) -> str:
        """The token of an update: a hash of the content and the time of the stack's last change."""
        since = stack.changed_at
        content = ["update", self.name, self.template, self.parameters, self.tags, since]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"batchml-update-{digest[:40]}"


class StackEvent(Struct, frozen=True):
    """An event of a stack, or of one of its resources."""

    id: str
    resource: str  # the logical id; for events of the stack itself, the stack's name
    type: str
    physical_id: str
    status: str
    reason: str = ""


class StackChange(Struct, frozen=True):
    """A change of one resource. `replacement` is AWS's "True", "False" or "Conditional"."""

    action: str
    resource: str
    type: str
    replacement: str = ""
    causes: tuple[str, ...] = ()


class ChangeSet(Struct, frozen=True):
    """A change set: the changes that an update would make."""

    id: str
    status: str
    reason: str = ""
    changes: tuple[StackChange, ...] = ()
    token: str = ""  # the token of its Blueprint

    @property
    def is_ready(self) -> bool:
        return self.status == "CREATE_COMPLETE"

    @property
    def is_pending(self) -> bool:
        return self.status in ("CREATE_PENDING", "CREATE_IN_PROGRESS")

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change. Only the reason tells: the status is FAILED."""
        text = self.reason
        return "didn't contain changes" in text or "No updates are to be performed" in text


NO_CHANGES = ChangeSet("", "FAILED", "No updates are to be performed.")


class Drift(Struct, frozen=True):
    """A resource that was changed outside of CloudFormation: `MODIFIED` or `DELETED`."""

    resource: str
    type: str
    status: str
    properties: tuple[str, ...] = ()


class Stacks:
    """CloudFormation's calls, with our types."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("cloudformation")

    # --- Read -------------------------------------------------------------------------------

    def read_all(
        self, names: Sequence[str], beside: Callable[[Stack], bool] = lambda stack: False
    ) -> dict[str, Stack]:
        """Return the named stacks that exist, with their templates.

        Other stacks for which `beside` is true are returned without their templates. The call reads
        all stacks of the region in any case.
        """
        found = {}
        for detail in read_entries(self._client, "DescribeStacks", "Stacks"):
            stack = _stack(detail)
            if stack.status == _GONE:
                continue
            if stack.name in names:
                found[stack.name] = self._with_template(stack)
            elif beside(stack):
                found[stack.name] = stack
        return found

    def read(self, name_or_id: str) -> Stack | None:
        """One stack; None if it does not exist or was deleted."""
        detail = self._describe(name_or_id)
        if detail is None or detail["StackStatus"] == _GONE:
            return None
        return self._with_template(_stack(detail))

    def outputs(self, name: str) -> dict[str, str]:
        """The outputs of a stack; empty if it does not exist."""
        detail = self._describe(name)
        return _stack(detail).outputs if detail else {}

    def _describe(self, name_or_id: str) -> dict[str, Any] | None:
        try:
            found = call(self._client, "DescribeStacks", StackName=name_or_id)["Stacks"]
        except ServiceError as error:
            if _says_missing(error):
                return None
            raise
        return dict(found[0]) if found else None

    def _with_template(self, stack: Stack) -> Stack:
        answer = call(self._client, "GetTemplate", StackName=stack.id, TemplateStage="Original")
        body = answer.get("TemplateBody", "")
        return replace(stack, template=body if isinstance(body, str) else json.dumps(body))

    def events(self, stack_id: str, after: str = "") -> list[StackEvent]:
        """The events after the event `after`, oldest first; all events if it is empty."""
        return [*takewhile(lambda event: event.id != after, self._newest_first(stack_id))][::-1]

    def operation(self, stack_id: str) -> list[StackEvent]:
        """The events of the newest operation on a stack, oldest first.

        An operation begins with the first event in which the stack itself is in progress. The
        rollback after a failure belongs to it.
        """
        found: list[StackEvent] = []
        for event in self._newest_first(stack_id):
            found.append(event)
            if event.physical_id == stack_id and event.status in (
                "CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "DELETE_IN_PROGRESS",
                "IMPORT_IN_PROGRESS",
            ):  # fmt: skip
                break
        return found[::-1]

    def _newest_first(self, stack_id: str) -> Iterator[StackEvent]:
        operation, member = "DescribeStackEvents", "StackEvents"
        return map(_event, read_entries(self._client, operation, member, StackName=stack_id))

    # --- Change -----------------------------------------------------------------------------

    def create(self, blueprint: Blueprint) -> str:
        """Begin to create a stack. Return its id."""
        policy = {"StackPolicyBody": blueprint.policy} if blueprint.policy else {}
        answer = call(
            self._client,
            "CreateStack",
            **_content(blueprint),
            **policy,
            EnableTerminationProtection=blueprint.is_protected,
            ClientRequestToken=_new_token("create"),
        )
        return str(answer["StackId"])

    def create_change_set(self, blueprint: Blueprint, stack: Stack) -> str:
        """Begin to create a change set for an update. Return its id."""
        token = blueprint.update_token(stack)
        names = {"ChangeSetName": token, "ChangeSetType": "UPDATE", "ClientToken": token}
        try:
            answer = call(self._client, "CreateChangeSet", **_content(blueprint), **names)
            return str(answer["Id"])
        except ServiceError as error:
            if error.code != "AlreadyExistsException":
                raise
        # An earlier command made the same change set.
        request = {"ChangeSetName": token, "StackName": blueprint.name}
        return str(call(self._client, "DescribeChangeSet", **request)["ChangeSetId"])

    # The calls with a change set's id name its stack, too: permissions are for stacks.

    def read_change_set(self, change_set_id: str, stack: str) -> ChangeSet:
        # botocore's paginator for this operation returns only the changes.
        request = {"ChangeSetName": change_set_id, "StackName": stack}
        pages = [*read_token_pages(self._client, "DescribeChangeSet", **request)]
        changes = tuple(_change(each) for page in pages for each in page.get("Changes", ()))
        status, reason = pages[0]["Status"], pages[0].get("StatusReason", "")
        return ChangeSet(change_set_id, status, reason, changes)

    def execute(self, change_set_id: str, stack: str) -> None:
        """Begin to update the stack of a change set."""
        token = f"batchml-execute-{hashlib.sha256(change_set_id.encode()).hexdigest()[:40]}"
        request = {"ChangeSetName": change_set_id, "StackName": stack, "ClientRequestToken": token}
        call(self._client, "ExecuteChangeSet", **request)

    def discard(self, change_set_id: str, stack: str) -> None:
        """Delete a change set."""
        call(self._client, "DeleteChangeSet", ChangeSetName=change_set_id, StackName=stack)

    def delete(self, stack: Stack) -> None:
        """Begin to delete a stack. Resources with a DeletionPolicy of Retain stay."""
        if stack.is_protected:
            self._protect(stack.name, False)
        request = {"StackName": stack.id, "ClientRequestToken": _new_token("delete")}
        call(self._client, "DeleteStack", **request)

    def _protect(self, name: str, is_protected: bool) -> None:
        request = {"StackName": name, "EnableTerminationProtection": is_protected}
        call(self._client, "UpdateTerminationProtection", **request)

    def _set_policy(self, name: str, policy: str) -> None:
        call(self._client, "SetStackPolicy", StackName=name, StackPolicyBody=policy)

    def guard(self, blueprint: Blueprint) -> None:
        """Set the stack policy and the termination protection of a stack.

        The protection is set last, so that a stack with protection also has its policy. See
        `unguard`.
        """
        if blueprint.policy:
            self._set_policy(blueprint.name, blueprint.policy)
        if blueprint.is_protected:
            self._protect(blueprint.name, True)

    def unguard(self, name: str) -> None:
        """Let the next update replace and remove data.

        The protection is removed first, because DescribeStacks shows the protection but not the
        policy: after an interruption, the next command guards a stack without protection again.
        """
        self._protect(name, False)
        self._set_policy(name, _ALLOW_ALL)

    def continue_rollback(self, stack: Stack, skip: Sequence[str]) -> None:
        """Continue a rollback that is stuck, without the resources `skip`."""
        request: dict[str, Any] = {
            "StackName": stack.id,
            "ClientRequestToken": _new_token("continue"),
        }
        if skip:
            request["ResourcesToSkip"] = list(skip)
        call(self._client, "ContinueUpdateRollback", **request)

    # --- Drift ------------------------------------------------------------------------------

    def detect_drift(self, name: str) -> str:
        """Begin to compare a stack with its resources. Return the id of the detection."""
        answer = call(self._client, "DetectStackDrift", StackName=name)
        return str(answer["StackDriftDetectionId"])

    def has_drift_result(self, detection_id: str) -> bool:
        """Whether a detection has ended."""
        request = {"StackDriftDetectionId": detection_id}
        answer = call(self._client, "DescribeStackDriftDetectionStatus", **request)
        return bool(answer["DetectionStatus"] != "DETECTION_IN_PROGRESS")

    def drifts(self, name: str) -> list[Drift]:
        """The resources that were changed or deleted outside of CloudFormation."""
        request = {
            "StackName": name,
            "StackResourceDriftStatusFilters": ["MODIFIED", "DELETED"],
        }
        pages = read_token_pages(self._client, "DescribeStackResourceDrifts", **request)
        return [_drift(each) for page in pages for each in page["StackResourceDrifts"]]


def _new_token(operation: str) -> str:
    return f"batchml-{operation}-{uuid.uuid4().hex}"


def _content(blueprint: Blueprint) -> dict[str, Any]:
    return {
        "StackName": blueprint.name,
        "TemplateBody": blueprint.template,
        "Parameters": [
            {"ParameterKey": key, "ParameterValue": value}
            for key, value in sorted(blueprint.parameters.items())
        ],
        "Tags": [{"Key": key, "Value": value} for key, value in sorted(blueprint.tags.items())],
        "Capabilities": _CAPABILITIES,
    }


def _says_missing(error: ServiceError) -> bool:
    return error.code == "ValidationError" and "does not exist" in error.message


def _pairs(entries: Sequence[Mapping[str, Any]], key: str, value: str) -> dict[str, str]:
    return {entry[key]: entry.get(value, "") for entry in entries}


def _stack(detail: Mapping[str, Any]) -> Stack:
    changed = detail.get("LastUpdatedTime") or detail.get("CreationTime") or ""
    return Stack(
        id=detail.get("StackId", detail["StackName"]),
        name=detail["StackName"],
        status=detail["StackStatus"],
        reason=detail.get("StackStatusReason", ""),
        outputs=_pairs(detail.get("Outputs", ()), "OutputKey", "OutputValue"),
        parameters=_pairs(detail.get("Parameters", ()), "ParameterKey", "ParameterValue"),
        tags=_pairs(detail.get("Tags", ()), "Key", "Value"),
        is_protected=bool(detail.get("EnableTerminationProtection")),
        changed_at=str(changed),
    )


def _event(detail: Mapping[str, Any]) -> StackEvent:
    return StackEvent(
        id=detail["EventId"],
        resource=detail.get("LogicalResourceId", ""),
        type=detail.get("ResourceType", ""),
        physical_id=detail.get("PhysicalResourceId", ""),
        status=detail.get("ResourceStatus", ""),
        reason=detail.get("ResourceStatusReason", ""),
    )


def _change(entry: Mapping[str, Any]) -> StackChange:
    change = entry.get("ResourceChange", {})
    causes = [detail.get("Target", {}) for detail in change.get("Details", ())]
    names = [target.get("Name") or target.get("Attribute", "") for target in causes]
    return StackChange(
        action=change.get("Action", ""),
        resource=change.get("LogicalResourceId", ""),
        type=change.get("ResourceType", ""),
        replacement=change.get("Replacement", ""),
        causes=tuple(dict.fromkeys(filter(None, names))),
    )


def _drift(detail: Mapping[str, Any]) -> Drift:
    return Drift(
        resource=detail["LogicalResourceId"],
        type=detail["ResourceType"],
        status=detail["StackResourceDriftStatus"],
        properties=tuple(
            difference["PropertyPath"] for difference in detail.get("PropertyDifferences", ())
        ),
    )
