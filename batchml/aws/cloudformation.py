"""CloudFormation: read, create, change and delete the stacks of an environment.

Every call that changes something has a ClientRequestToken, so that a call that the SDK sends twice
counts once. The name of a change set is a hash of its content, so that an interrupted command finds
its own when it is repeated. All other tokens are new in each call: the same stack may have to be
created or deleted again.

Source: AWS CloudFormation API reference, "Stack status codes", "ClientRequestToken".
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import ServiceError

_CAPABILITIES = ["CAPABILITY_NAMED_IAM"]
_GONE = "DELETE_COMPLETE"
_ALLOW_ALL = json.dumps(
    {"Statement": [{"Effect": "Allow", "Action": "Update:*", "Principal": "*", "Resource": "*"}]}
)


class Stack(Struct, frozen=True):
    """A stack in AWS. `template` is the text of the last deployment."""

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
    """The wanted content of a stack."""

    name: str
    template: str
    parameters: dict[str, str]
    tags: dict[str, str]
    is_protected: bool = False
    policy: str = ""  # a stack policy, as JSON

    def token(self, operation: str, since: str = "") -> str:
        """A hash of the operation and the content; `since`: the stack's last change."""
        content = [operation, self.name, self.template, self.parameters, self.tags, since]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"batchml-{operation}-{digest[:40]}"


class StackEvent(Struct, frozen=True):
    id: str
    at: str
    resource: str  # the logical id; the stack's name in events of the stack itself
    type: str
    physical_id: str
    status: str
    reason: str = ""
    token: str = ""


class StackChange(Struct, frozen=True):
    """A change of one resource. `replacement` is "True", "False" or "Conditional"."""

    action: str
    resource: str
    type: str
    replacement: str = ""
    causes: tuple[str, ...] = ()


class ChangeSet(Struct, frozen=True):
    id: str
    status: str
    reason: str = ""
    changes: tuple[StackChange, ...] = ()
    token: str = ""  # of the Blueprint for which it was made

    @property
    def is_ready(self) -> bool:
        return self.status == "CREATE_COMPLETE"

    @property
    def is_pending(self) -> bool:
        return self.status in ("CREATE_PENDING", "CREATE_IN_PROGRESS")

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change, which AWS says in the reason alone."""
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

        Stacks for which `beside` is true are returned, too, without their templates. The call reads
        all stacks of the region anyway.
        """
        found = {}
        with translate_errors("DescribeStacks"):
            for page in self._client.get_paginator("describe_stacks").paginate():
                for detail in page["Stacks"]:
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
            with translate_errors("DescribeStacks"):
                found = self._client.describe_stacks(StackName=name_or_id)["Stacks"]
        except ServiceError as error:
            if _says_missing(error):
                return None
            raise
        return dict(found[0]) if found else None

    def _with_template(self, stack: Stack) -> Stack:
        from msgspec.structs import replace

        with translate_errors("GetTemplate"):
            body = self._client.get_template(StackName=stack.id, TemplateStage="Original").get(
                "TemplateBody", ""
            )
        text = body if isinstance(body, str) else json.dumps(body)
        return replace(stack, template=text)

    def events(self, stack_id: str, after: str = "") -> list[StackEvent]:
        """The events after the event `after`, oldest first; all events if it is empty."""
        found = []
        for event in self._newest_first(stack_id):
            if event.id == after:
                break
            found.append(event)
        return found[::-1]

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
        with translate_errors("DescribeStackEvents"):
            pages = self._client.get_paginator("describe_stack_events").paginate(StackName=stack_id)
            for page in pages:
                yield from map(_event, page["StackEvents"])

    # --- Change -----------------------------------------------------------------------------

    def create(self, blueprint: Blueprint) -> str:
        """Begin to create a stack. Return its id."""
        policy = {"StackPolicyBody": blueprint.policy} if blueprint.policy else {}
        with translate_errors("CreateStack"):
            made = self._client.create_stack(
                **_content(blueprint),
                **policy,
                EnableTerminationProtection=blueprint.is_protected,
                ClientRequestToken=_once("create"),
            )
            return str(made["StackId"])

    def create_change_set(self, blueprint: Blueprint, stack: Stack) -> str:
        """Begin to create a change set for an update. Return its id."""
        token = blueprint.token("update", stack.changed_at)
        try:
            with translate_errors("CreateChangeSet"):
                made = self._client.create_change_set(
                    **_content(blueprint),
                    ChangeSetName=token,
                    ChangeSetType="UPDATE",
                    ClientToken=token,
                )
                return str(made["Id"])
        except ServiceError as error:
            if error.code != "AlreadyExistsException":
                raise
        # An earlier command made the same change set.
        with translate_errors("DescribeChangeSet"):
            found = self._client.describe_change_set(ChangeSetName=token, StackName=blueprint.name)
            return str(found["ChangeSetId"])

    def read_change_set(self, change_set_id: str) -> ChangeSet:
        changes: list[StackChange] = []
        with translate_errors("DescribeChangeSet"):
            # botocore's paginator for this operation returns the changes alone.
            page = self._client.describe_change_set(ChangeSetName=change_set_id)
            first = page
            changes += map(_change, page.get("Changes", ()))
            while page.get("NextToken"):
                page = self._client.describe_change_set(
                    ChangeSetName=change_set_id, NextToken=page["NextToken"]
                )
                changes += map(_change, page.get("Changes", ()))
            return ChangeSet(
                change_set_id, first["Status"], first.get("StatusReason", ""), tuple(changes)
            )

    def execute(self, change_set_id: str) -> None:
        token = hashlib.sha256(change_set_id.encode()).hexdigest()[:40]
        with translate_errors("ExecuteChangeSet"):
            self._client.execute_change_set(
                ChangeSetName=change_set_id, ClientRequestToken=f"batchml-execute-{token}"
            )

    def discard(self, change_set_id: str) -> None:
        with translate_errors("DeleteChangeSet"):
            self._client.delete_change_set(ChangeSetName=change_set_id)

    def delete(self, stack: Stack) -> None:
        """Begin to delete a stack. Resources with a DeletionPolicy of Retain stay."""
        if stack.is_protected:
            self._protect(stack.name, False)
        with translate_errors("DeleteStack"):
            self._client.delete_stack(StackName=stack.id, ClientRequestToken=_once("delete"))

    def _protect(self, name: str, on: bool) -> None:
        with translate_errors("UpdateTerminationProtection"):
            self._client.update_termination_protection(
                StackName=name, EnableTerminationProtection=on
            )

    def guard(self, blueprint: Blueprint) -> None:
        """Set the stack policy and the termination protection of a stack.

        The protection comes last: while it is off, the policy may be off, too. See `unguard`.
        """
        if blueprint.policy:
            with translate_errors("SetStackPolicy"):
                self._client.set_stack_policy(
                    StackName=blueprint.name, StackPolicyBody=blueprint.policy
                )
        if blueprint.is_protected:
            self._protect(blueprint.name, True)

    def unguard(self, name: str) -> None:
        """Let the next update replace and remove data.

        The protection goes first, because DescribeStacks shows the protection and not the policy:
        after an interruption, a stack without protection is guarded again.
        """
        self._protect(name, False)
        with translate_errors("SetStackPolicy"):
            self._client.set_stack_policy(StackName=name, StackPolicyBody=_ALLOW_ALL)

    def continue_rollback(self, stack: Stack, skip: Sequence[str]) -> None:
        """Continue a rollback that is stuck, without the resources `skip`."""
        with translate_errors("ContinueUpdateRollback"):
            self._client.continue_update_rollback(
                StackName=stack.id,
                ClientRequestToken=_once("continue"),
                **({"ResourcesToSkip": list(skip)} if skip else {}),
            )

    # --- Drift ------------------------------------------------------------------------------

    def detect_drift(self, name: str) -> str:
        """Begin to compare a stack with its resources. Return the id of the detection."""
        with translate_errors("DetectStackDrift"):
            return str(self._client.detect_stack_drift(StackName=name)["StackDriftDetectionId"])

    def has_drift_result(self, detection_id: str) -> bool:
        """Whether a detection has ended."""
        with translate_errors("DescribeStackDriftDetectionStatus"):
            found = self._client.describe_stack_drift_detection_status(
                StackDriftDetectionId=detection_id
            )
            return bool(found["DetectionStatus"] != "DETECTION_IN_PROGRESS")

    def drifts(self, name: str) -> list[Drift]:
        """The resources that were changed or deleted. botocore has no paginator for them."""
        found: list[Drift] = []
        more: dict[str, str] = {}
        while True:
            with translate_errors("DescribeStackResourceDrifts"):
                page = self._client.describe_stack_resource_drifts(
                    StackName=name,
                    StackResourceDriftStatusFilters=["MODIFIED", "DELETED"],
                    **more,
                )
                found += map(_drift, page["StackResourceDrifts"])
            if not page.get("NextToken"):
                return found
            more = {"NextToken": page["NextToken"]}


def _once(operation: str) -> str:
    """A new token."""
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
        at=str(detail["Timestamp"]),
        resource=detail.get("LogicalResourceId", ""),
        type=detail.get("ResourceType", ""),
        physical_id=detail.get("PhysicalResourceId", ""),
        status=detail.get("ResourceStatus", ""),
        reason=detail.get("ResourceStatusReason", ""),
        token=detail.get("ClientRequestToken", ""),
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
