"""An AWS account in this process: CloudFormation and EC2 by a script, AWS Batch by the real server.

boto3's clients reach it through botocore's events, so that requests are built and checked, and
errors raised, by botocore itself; only the wire is left out. Every request must satisfy botocore's
model with its enums and limits, and so must every answer.

CloudFormation does what its documentation says of statuses and events: an operation's events appear
as time goes by, a failure is followed by those that were given up for it and by the rollback. moto
does none of this (see docs/decisions/018-scripted-cloudformation.md).
"""

import copy
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from batchml.aws.capacity import BUILD_TYPE, Offers, make_offers
from batchml.local.server.protocol import problems
from batchml.model.names import bare_name
from tests.security.cloudformation import parse
from tests.support.fakes import FakeClock
from tests.support.server_rig import Rig

ACCOUNT = "123456789012"
EVENT_EVERY = 3.0  # seconds between two events of an operation
SETTLES = 3.0  # seconds that AWS Batch takes over a compute environment or queue

_IN_CFN = "arn:aws:cloudformation:us-east-1"


@cache
def parsed(template: str) -> dict[str, Any]:
    return parse(template)


_DATA = ("AWS::S3::Bucket", "AWS::EFS::FileSystem", "AWS::Logs::LogGroup", "AWS::KMS::Key")


@cache
def reduced(template: str) -> str:
    """A template with the parameters and outputs of another, and few resources: its data, and two.

    What the code under test sees of a template is all there, and its operations are short.
    """
    whole = parsed(template)
    resources = whole["Resources"]
    kept = [name for name, body in resources.items() if body["Type"] in _DATA]
    others = [name for name in resources if name not in kept]
    return str(
        yaml.safe_dump(
            {
                "Parameters": whole.get("Parameters", {}),
                "Resources": {
                    name: {
                        key: body for key, body in resources[name].items()
                        if key in ("Type", "DeletionPolicy", "UpdateReplacePolicy")
                    }
                    for name in [*others[:2], *kept]
                },
                "Outputs": {key: {"Value": key} for key in whole.get("Outputs", {})},
            },
            sort_keys=False,
        )
    )  # fmt: skip


def without_policies(content: dict[str, Any]) -> dict[str, Any]:
    """A stack's content as far as a change of it is an update: not how its data is deleted.

    Source: CloudFormation User Guide, DeletionPolicy: "To update a stack with only a change of
    it, change something else as well".
    """
    unsaid = r"(?m)^ *(#|DeletionPolicy: |UpdateReplacePolicy: ).*\n"
    template = re.sub(unsaid, "", content["template"])
    return {**content, "template": template}


_SMALL_CHANGE = {
    "Action": "Modify", "LogicalResourceId": "X", "ResourceType": "AWS::EC2::VPC",
    "Replacement": "False", "Details": [],
}  # fmt: skip


class AwsError(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class Interrupted(BaseException):
    """The command is killed here."""


class Trouble(Struct):
    """One operation of a stack that goes wrong: at which resource, and with AWS's words."""

    resource: str
    reason: str
    on: str = "CREATE"
    rollback_fails: str = ""  # the reason, if the rollback gets stuck as well


class FakeStack:
    def __init__(self, account: "Account", params: dict[str, Any], number: int) -> None:
        self.account = account
        self.name = params["StackName"]
        self.id = f"{_IN_CFN}:{ACCOUNT}:stack/{self.name}/{number:032d}"
        self.protected = bool(params.get("EnableTerminationProtection"))
        self.policy = params.get("StackPolicyBody", "")
        self.timeline: list[dict[str, Any]] = []  # events, the future ones too
        self.created = account.now()
        self.updated: datetime | None = None
        self.take(params)

    def take(self, params: dict[str, Any]) -> None:
        self.before = getattr(self, "content", None)
        self.content = {
            "template": params["TemplateBody"],
            "parameters": {p["ParameterKey"]: p["ParameterValue"] for p in params["Parameters"]},
            "tags": {t["Key"]: t["Value"] for t in params["Tags"]},
        }

    def revert(self) -> None:
        if self.before is not None:
            self.content = self.before

    def resources(self) -> dict[str, str]:
        return {
            name: body["Type"]
            for name, body in parsed(self.content["template"])["Resources"].items()
        }

    # --- events -----------------------------------------------------------------------------

    def say(self, resource: str, status: str, reason: str = "", *, is_first: bool = False) -> None:
        last = self.timeline[-1]["at"] if self.timeline else 0.0
        at = max(last, self.account.clock.now()) + (0 if is_first else self.account.event_every)
        is_stack = resource == self.name
        kind = "AWS::CloudFormation::Stack" if is_stack else self.resources().get(resource, "")
        self.timeline.append(
            {
                "at": at,
                "StackId": self.id,
                "StackName": self.name,
                "EventId": f"{resource}-{status}-{len(self.timeline)}",
                "LogicalResourceId": resource,
                "PhysicalResourceId": self.id if is_stack else f"{resource.lower()}-1",
                "ResourceType": kind,
                "ResourceStatus": status,
                "ResourceStatusReason": reason,
                "Timestamp": datetime.fromtimestamp(at, UTC),
            }
        )

    def visible(self) -> list[dict[str, Any]]:
        return [event for event in self.timeline if event["at"] <= self.account.clock.now()]

    @property
    def status(self) -> str:
        own = [event for event in self.visible() if event["LogicalResourceId"] == self.name]
        first = self.timeline[0]["ResourceStatus"] if self.timeline else "REVIEW_IN_PROGRESS"
        return str(own[-1]["ResourceStatus"] if own else first)

    @property
    def reason(self) -> str:
        own = [event for event in self.visible() if event["LogicalResourceId"] == self.name]
        return str(own[-1]["ResourceStatusReason"]) if own else ""

    def run(self, verb: str) -> None:
        """Lay out the events of an operation: CREATE, UPDATE or DELETE."""
        trouble = self.account.trouble_of(self.name, verb)
        self.say(self.name, f"{verb}_IN_PROGRESS", "User Initiated", is_first=True)
        names = list(self.resources())
        for place, resource in enumerate(names):
            self.say(resource, f"{verb}_IN_PROGRESS")
            if verb == "DELETE":
                trouble = self._dies(resource) or trouble
            if trouble is not None and trouble.resource in (resource, "*"):
                trouble.resource = resource
                return self._fail(verb, trouble, names[place + 1 : place + 3], names[:place])
            left = f"{self.name} {resource}" in self.account.retained
            self.say(resource, "DELETE_SKIPPED" if left else f"{verb}_COMPLETE")
        self.say(self.name, f"{verb}_COMPLETE")

    def _dies(self, resource: str) -> Trouble | None:
        """A resource is deleted, is retained, or is a bucket that is not empty."""
        body = parsed(self.content["template"])["Resources"][resource]
        if self.name.endswith("-roles") and any(self.account.attached.values()):
            reason = "Cannot delete a policy attached to entities. (Service: Iam, Status Code: 409)"
            return Trouble(resource, reason, "DELETE")
        if body["Type"] not in _DATA:
            return None
        if str(body.get("DeletionPolicy", "Delete")).startswith("Retain"):
            self.account.retained.append(f"{self.name} {resource}")
        elif body["Type"] == "AWS::S3::Bucket" and self.account.objects.get(
            self.outputs().get("BucketName", "")
        ):
            reason = "The bucket you tried to delete is not empty (BucketNotEmpty)"
            return Trouble(resource, reason, "DELETE")
        return None

    def _fail(self, verb: str, trouble: Trouble, beside: list[str], done: list[str]) -> None:
        self.say(trouble.resource, f"{verb}_FAILED", trouble.reason)
        for other in beside:
            what = {"CREATE": "creation", "UPDATE": "update", "DELETE": "deletion"}[verb]
            self.say(other, f"{verb}_FAILED", f"Resource {what} cancelled")
        if verb == "DELETE":
            self.say(
                self.name,
                "DELETE_FAILED",
                f"The following resource(s) failed to delete: [{trouble.resource}].",
            )
            return
        prefix = "" if verb == "CREATE" else "UPDATE_"
        text = f"The following resource(s) failed to {verb.lower()}: [{trouble.resource}]."
        self.say(self.name, f"{prefix}ROLLBACK_IN_PROGRESS", text)
        if trouble.rollback_fails:
            undone = "DELETE_FAILED" if verb == "CREATE" else "UPDATE_FAILED"
            self.say(trouble.resource, undone, trouble.rollback_fails)
            self.account.stuck[self.name] = trouble
            self.say(self.name, f"{prefix}ROLLBACK_FAILED", text)
            return
        for resource in reversed(done):
            self.say(resource, "DELETE_COMPLETE" if verb == "CREATE" else "UPDATE_COMPLETE")
        self.say(self.name, f"{prefix}ROLLBACK_COMPLETE")
        self.revert()

    # --- as AWS describes it ----------------------------------------------------------------

    def outputs(self) -> dict[str, str]:
        made = self.account.outputs
        wanted = parsed(self.content["template"]).get("Outputs", {})
        short = self.name.rpartition("-")[2]
        found = {key: made.get(f"{short}.{key}", f"{short}-{key}") for key in wanted}
        if self.content["parameters"].get("Workspace") == "none":
            unused = ("FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId")
            found |= dict.fromkeys(unused, "")
            found.pop("WorkspaceId", None)
        if not self.shares:
            found.pop("SharedFileSystemId", None)
        zones = self.content["parameters"].get("Zones", "")
        if not zones.isdecimal() and zones:
            ids = [
                f"subnet-0aaaaaaaaaaaaaaa{place}" for place in range(1, len(zones.split(",")) + 1)
            ]
            found |= {"AvailabilityZones": zones}
            if "network.SubnetIds" not in made:
                found |= {"SubnetIds": ",".join(ids)}
        if "LogGroupName" in self.content["parameters"]:
            found["LogGroupName"] = self.content["parameters"]["LogGroupName"]
        return {key: value for key, value in found.items() if key in wanted}

    @property
    def shares(self) -> str:
        """The environment whose file system it imports."""
        return str(self.content["parameters"].get("SharedWith", ""))

    def detail(self) -> dict[str, Any]:
        status = self.status
        done = status.startswith("UPDATE") or status in (
            "CREATE_COMPLETE", "DELETE_IN_PROGRESS", "DELETE_FAILED",
        )  # fmt: skip
        found: dict[str, Any] = {
            "StackId": self.id,
            "StackName": self.name,
            "CreationTime": self.created,
            "StackStatus": status,
            "StackStatusReason": self.reason,
            "EnableTerminationProtection": self.protected,
            "Parameters": [
                {"ParameterKey": key, "ParameterValue": value}
                for key, value in self.content["parameters"].items()
            ],
            "Tags": [{"Key": key, "Value": value} for key, value in self.content["tags"].items()],
            "Outputs": [
                {"OutputKey": key, "OutputValue": value} for key, value in self.outputs().items()
            ] if done else [],
        }  # fmt: skip
        if self.updated is not None:
            found["LastUpdatedTime"] = self.updated
        return found


class Account:
    """What AWS holds, and what it is told to do wrong."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.rig = Rig(folder)
        self.stacks: list[FakeStack] = []
        self.change_sets: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, str] = {}
        self.templates: dict[str, list[dict[str, Any]]] = {}
        self.template_tags: dict[str, dict[str, str]] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        both = ("us-east-1a", "us-east-1b")
        types = (
            "c7i.large g5.xlarge g5.12xlarge g6.xlarge m5.large m6i.xlarge m7g.large m7i.large "
            "m7i.xlarge m7i.2xlarge"
        )
        self.offered: dict[str, tuple[str, ...]] = dict.fromkeys(types.split(), both)  # -> zones
        self.attached: dict[str, list[str]] = {}  # Users, Groups or Roles that have the policy
        self.backups: list[dict[str, Any]] = []
        self.repositories: list[str] = []
        self.images: list[str] = ["ami-0aaaaaaaaaaaaaaa0"]  # one of an earlier build
        self.troubles: dict[str, list[Trouble]] = {}
        self.drifted: dict[str, list[dict[str, Any]]] = {}
        self.outputs: dict[str, str] = {
            "network.VpcId": "vpc-0123456789abcdef0",
            "network.BuildSubnetId": "subnet-0aaaaaaaaaaaaaaa1",
            "network.SecurityGroupId": "sg-0aaaaaaaaaaaaaaa1",
            "roles.InstanceProfileArn": f"arn:aws:iam::{ACCOUNT}:instance-profile/batchml",
            "roles.JobRoleArn": f"arn:aws:iam::{ACCOUNT}:role/batchml-job",
            "roles.ExecutionRoleArn": f"arn:aws:iam::{ACCOUNT}:role/batchml-execution",
            "roles.SubmitterPolicyArn": f"arn:aws:iam::{ACCOUNT}:policy/batchml-dev-submitter",
            "roles.ControllerRoleArn": f"arn:aws:iam::{ACCOUNT}:role/batchml-controller",
            "storage.BucketName": f"batchml-dev-{ACCOUNT}-us-east-1",
            "storage.FileSystemId": "fs-0123456789abcdef0",
            "ami.ImageId": "ami-0123456789abcdef0",
        }
        self.replacements: dict[
            str, list[dict[str, Any]]
        ] = {}  # stack -> changes of its change set
        self.stuck: dict[str, Trouble] = {}  # what keeps a rollback from going on
        self.refused_changes: dict[str, str] = {}  # stack -> why its next change set fails
        self.objects = {self.outputs["storage.BucketName"]: 3}  # of buckets
        self.retained: list[str] = []  # what deleted stacks have left behind
        self.event_every = EVENT_EVERY
        # Of AWS Batch: compute environments that it finds INVALID, and what it is still busy with:
        # the status, until when, and for what is deleted its last description.
        self.invalid: dict[str, str] = {}
        self.stay_invalid: set[str] = set()  # whatever is done to them
        self.settles = SETTLES
        self.settling: dict[str, tuple[str, float, dict[str, Any]]] = {}
        self.refusals: dict[str, list[tuple[str, str]]] = {}  # operation -> next codes, messages
        self.after_call: Callable[[str], None] = lambda operation: None
        self._checked: set[str] = set()
        self.calls: list[str] = []
        self.interrupt_at: tuple[int, str] | None = None  # the n-th call, "before" or "after"
        self._changes = 0
        self._clients: dict[str, Any] = {}
        self._plain: Any = None
        self._asked: tuple[str, dict[str, Any]] = ("", {})
        self._last: dict[str, Any] = {}
        self._operation = ""

    def close(self) -> None:
        self.rig.close()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now(), UTC)

    def trouble_of(self, stack: str, verb: str) -> Trouble | None:
        waiting = self.troubles.get(stack, [])
        for trouble in waiting:
            if trouble.on == verb:
                waiting.remove(trouble)
                return trouble
        return None

    def stack(self, name: str) -> FakeStack | None:
        """The living stack of a name, or any by its id."""
        for stack in reversed(self.stacks):
            if stack.id == name or (stack.name == name and stack.status != "DELETE_COMPLETE"):
                return stack
        return None

    def _existing(self, name: str) -> FakeStack:
        found = self.stack(name)
        if found is None:
            raise AwsError("ValidationError", f"Stack with id {name} does not exist")
        return found

    # --- CloudFormation ---------------------------------------------------------------------

    def _check_import(self, params: dict[str, Any]) -> None:
        """Fn::ImportValue of an export that is not there fails."""
        given = {p["ParameterKey"]: p["ParameterValue"] for p in params["Parameters"]}
        owner = given.get("SharedWith", "")
        stack = self.stack(f"batchml-{owner}-storage") if owner else None
        if owner and (stack is None or "WorkspaceId" not in stack.outputs()):
            text = f"No export named batchml-{owner}-workspace found"
            raise AwsError("ValidationError", text)

    def _imported(self, stack: FakeStack) -> str:
        """Why an export stays as it is: CloudFormation User Guide, "Fn::ImportValue"."""
        export = stack.name.removesuffix("-storage")
        users = [
            each.name for each in self.stacks
            if each.status != "DELETE_COMPLETE" and each.shares
            and f"batchml-{each.shares}" == export
        ]  # fmt: skip
        names = " and ".join(users)
        return f"Export {export}-workspace cannot be deleted as it is in use by {names}" * bool(
            users
        )

    def describe_stacks(self, params: dict[str, Any]) -> dict[str, Any]:
        if "StackName" in params:
            return {"Stacks": [self._existing(params["StackName"]).detail()]}
        return {"Stacks": [s.detail() for s in self.stacks if s.status != "DELETE_COMPLETE"]}

    def get_template(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"TemplateBody": self._existing(params["StackName"]).content["template"]}

    def describe_stack_events(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        events = [{k: v for k, v in e.items() if k != "at"} for e in stack.visible()]
        return {"StackEvents": events[::-1]}

    def create_stack(self, params: dict[str, Any]) -> dict[str, Any]:
        if params["ClientRequestToken"] in self.tokens:
            return {"StackId": self.tokens[params["ClientRequestToken"]]}
        if self.stack(params["StackName"]) is not None:
            raise AwsError(
                "AlreadyExistsException", f"Stack [{params['StackName']}] already exists"
            )
        self._check_parameters(params)
        self._check_import(params)
        made = FakeStack(self, params, len(self.stacks))
        self.stacks.append(made)
        made.run("CREATE")
        self.tokens[params["ClientRequestToken"]] = made.id
        return {"StackId": made.id}

    def _check_parameters(self, params: dict[str, Any]) -> None:
        known = parsed(params["TemplateBody"]).get("Parameters", {})
        given = {each["ParameterKey"] for each in params["Parameters"]}
        if given - set(known):
            names = ", ".join(sorted(given - set(known)))
            raise AwsError("ValidationError", f"Parameters: [{names}] do not exist in the template")
        for name, body in parsed(params["TemplateBody"]).get("Resources", {}).items():
            said = {body.get("DeletionPolicy", "Delete"), body.get("UpdateReplacePolicy", "Delete")}
            if said - {"Delete", "Retain", "RetainExceptOnCreate", "Snapshot"}:
                text = f"Template error: {name} has a deletion policy of {sorted(said)}"
                raise AwsError("ValidationError", text)
        missing = [key for key, body in known.items() if "Default" not in body and key not in given]
        if missing:
            raise AwsError("ValidationError", f"Parameters: {missing} must have values")

    def create_change_set(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        if not stack.status.endswith("_COMPLETE") or stack.status == "ROLLBACK_COMPLETE":
            text = f"Stack:{stack.id} is in {stack.status} state and can not be updated."
            raise AwsError("ValidationError", text)
        self._check_parameters(params)
        self._check_import(params)
        name = params["ChangeSetName"]
        if any(s["name"] == name and s["stack"] is stack for s in self.change_sets.values()):
            raise AwsError("AlreadyExistsException", f"ChangeSet {name} already exists")
        wanted = FakeStack.__new__(FakeStack)
        wanted.take(params)
        same = without_policies(wanted.content) == without_policies(stack.content)
        self._changes += 1
        identifier = f"{_IN_CFN}:{ACCOUNT}:changeSet/{name}/{self._changes}"
        changes = self.replacements.get(stack.name, [_SMALL_CHANGE])
        self.change_sets[identifier] = {
            "name": name, "stack": stack, "params": params, "ready_at": self.clock.now() + 4,
            "empty": same, "changes": [] if same else changes,
            "refused": self.refused_changes.pop(stack.name, ""),
        }  # fmt: skip
        return {"Id": identifier, "StackId": stack.id}

    def describe_change_set(self, params: dict[str, Any]) -> dict[str, Any]:
        name = params["ChangeSetName"]
        found = self.change_sets.get(name) or next(
            (s for s in self.change_sets.values()
             if s["name"] == name and s["stack"].name == params.get("StackName")), None
        )  # fmt: skip
        if found is None:
            raise AwsError("ChangeSetNotFound", f"ChangeSet [{name}] does not exist", 404)
        identifier = next(key for key, value in self.change_sets.items() if value is found)
        answer: dict[str, Any] = {"ChangeSetId": identifier, "ChangeSetName": found["name"]}
        if self.clock.now() < found["ready_at"]:
            return {**answer, "Status": "CREATE_IN_PROGRESS", "Changes": []}
        if found["refused"]:
            return {**answer, "Status": "FAILED", "StatusReason": found["refused"], "Changes": []}
        if found["empty"]:
            reason = "The submitted information didn't contain changes."
            return {**answer, "Status": "FAILED", "StatusReason": reason, "Changes": []}
        changes = [{"Type": "Resource", "ResourceChange": change} for change in found["changes"]]
        return {**answer, "Status": "CREATE_COMPLETE", "Changes": changes}

    def execute_change_set(self, params: dict[str, Any]) -> dict[str, Any]:
        found = self.change_sets.get(params["ChangeSetName"])
        if found is None:
            if params["ClientRequestToken"] in self.tokens:
                return {}
            raise AwsError("ChangeSetNotFound", "it does not exist", 404)
        self.tokens[params["ClientRequestToken"]] = params["ChangeSetName"]
        stack = found["stack"]
        # "AWS CloudFormation deletes all the change sets of a stack when it executes one."
        self.change_sets = {
            key: each for key, each in self.change_sets.items() if each["stack"] is not stack
        }
        if '"Deny"' in stack.policy and any(
            change["ResourceType"] in _DATA
            and (change["Action"] == "Remove" or change.get("Replacement") == "True")
            for change in found["changes"]
        ):
            reason = "Action denied by stack policy: Statement [#2] does not allow [Update:Replace]"
            self.troubles.setdefault(stack.name, []).append(Trouble("*", reason, "UPDATE"))
        before = stack.content["parameters"].get("Workspace")
        stack.take(found["params"])
        if stack.content["parameters"].get("Workspace") != before and self._imported(stack):
            trouble = Trouble("*", self._imported(stack), "UPDATE")
            self.troubles.setdefault(stack.name, []).append(trouble)
        stack.updated = self.now()
        stack.run("UPDATE")
        self.replacements.pop(stack.name, None)
        return {}

    def delete_change_set(self, params: dict[str, Any]) -> dict[str, Any]:
        self.change_sets.pop(params["ChangeSetName"], None)
        return {}

    def delete_stack(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        if stack.protected:
            raise AwsError(
                "ValidationError",
                f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled",
            )
        if stack.status.startswith("UPDATE") and stack.status.endswith("IN_PROGRESS"):
            raise AwsError("ValidationError", f"Stack {stack.name} is in {stack.status} state")
        if self._imported(stack):
            raise AwsError("ValidationError", self._imported(stack))
        if params["ClientRequestToken"] not in self.tokens:
            self.tokens[params["ClientRequestToken"]] = stack.id
            stack.run("DELETE")
        return {}

    def update_termination_protection(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        stack.protected = params["EnableTerminationProtection"]
        return {"StackId": stack.id}

    def set_stack_policy(self, params: dict[str, Any]) -> dict[str, Any]:
        self._existing(params["StackName"]).policy = params["StackPolicyBody"]
        json.loads(params["StackPolicyBody"])
        return {}

    def continue_update_rollback(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        if stack.status != "UPDATE_ROLLBACK_FAILED":
            raise AwsError("ValidationError", f"Stack [{stack.name}] is in {stack.status} state")
        stack.say(stack.name, "UPDATE_ROLLBACK_IN_PROGRESS", "User Initiated", is_first=True)
        broken = self.stuck.get(stack.name)
        skipped = params.get("ResourcesToSkip", [])
        if broken and broken.resource not in skipped:
            stack.say(broken.resource, "UPDATE_FAILED", broken.rollback_fails)
            stack.say(stack.name, "UPDATE_ROLLBACK_FAILED", "it is stuck")
            return {}
        if set(skipped) - ({broken.resource} if broken else set()):
            raise AwsError("ValidationError", f"{skipped} are not in UPDATE_FAILED")
        self.stuck.pop(stack.name, None)
        stack.say(stack.name, "UPDATE_ROLLBACK_COMPLETE")
        stack.revert()
        return {}

    def detect_stack_drift(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"StackDriftDetectionId": f"drift-{self._existing(params['StackName']).name}"}

    def describe_stack_drift_detection_status(self, params: dict[str, Any]) -> dict[str, Any]:
        identifier = params["StackDriftDetectionId"]
        return {"StackId": identifier, "StackDriftDetectionId": identifier,
                "DetectionStatus": "DETECTION_COMPLETE", "Timestamp": self.now()}  # fmt: skip

    def describe_stack_resource_drifts(self, params: dict[str, Any]) -> dict[str, Any]:
        stack = self._existing(params["StackName"])
        return {"StackResourceDrifts": [
            {"StackId": stack.id, "Timestamp": self.now(), **each}
            for each in self.drifted.get(stack.name, [])
        ]}  # fmt: skip

    # --- EC2 --------------------------------------------------------------------------------

    def offers(self, names: Iterable[str]) -> Offers:
        """What a command knows after it has asked which zones offer these types."""
        found = [(kind, zone) for kind, zones in self.offered.items() for zone in zones]
        return make_offers("us-east-1", [*names, BUILD_TYPE], found)

    def describe_instance_type_offerings(self, params: dict[str, Any]) -> dict[str, Any]:
        """The types of the region by zone, those of a Local Zone too."""
        patterns = [value for each in params.get("Filters", ()) for value in each["Values"]]
        kinds = [
            kind for kind in self.offered
            if not patterns or any(fnmatch.fnmatchcase(kind, each) for each in patterns)
        ]  # fmt: skip
        is_region = params["LocationType"] == "region"
        return {"InstanceTypeOfferings": [
            {"InstanceType": kind, "LocationType": params["LocationType"], "Location": place}
            for kind in kinds
            for place in (["us-east-1"] if is_region else self.offered[kind])
        ]}  # fmt: skip

    def describe_availability_zones(self, params: dict[str, Any]) -> dict[str, Any]:
        names = sorted({zone for zones in self.offered.values() for zone in zones})
        return {"AvailabilityZones": [{"ZoneName": name, "State": "available"} for name in names]}

    def describe_launch_templates(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"LaunchTemplates": [
            {"LaunchTemplateName": name, "LatestVersionNumber": len(self.templates[name]),
             "LaunchTemplateId": f"lt-{name}"}
            for name in self.templates if self._has(self.template_tags[name], params)
        ]}  # fmt: skip

    @staticmethod
    def _has(tags: dict[str, str], params: dict[str, Any]) -> bool:
        wanted = {f["Name"].removeprefix("tag:"): f["Values"] for f in params.get("Filters", [])}
        return all(tags.get(key) in values for key, values in wanted.items())

    def describe_launch_template_versions(self, params: dict[str, Any]) -> dict[str, Any]:
        name = params.get("LaunchTemplateName")
        if name is None:  # `$Latest` of all of them
            return {
                "LaunchTemplateVersions": [versions[-1] for versions in self.templates.values()]
            }
        if name not in self.templates:
            raise AwsError("InvalidLaunchTemplateName.NotFoundException", "there is none")
        return {"LaunchTemplateVersions": [self.templates[name][-1]]}

    def create_launch_template(self, params: dict[str, Any]) -> dict[str, Any]:
        name = params["LaunchTemplateName"]
        if name in self.templates:
            raise AwsError("InvalidLaunchTemplateName.AlreadyExistsException", "it is there")
        self.templates[name] = []
        (given,) = params["TagSpecifications"]
        self.template_tags[name] = {tag["Key"]: tag["Value"] for tag in given["Tags"]}
        self._version(params)
        return {"LaunchTemplate": {"LaunchTemplateName": name, "LatestVersionNumber": 1}}

    def create_launch_template_version(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"LaunchTemplateVersion": self._version(params)}

    def _version(self, params: dict[str, Any]) -> dict[str, Any]:
        versions = self.templates[params["LaunchTemplateName"]]
        made = {"LaunchTemplateName": params["LaunchTemplateName"],
                "VersionNumber": len(versions) + 1,
                "VersionDescription": params["VersionDescription"]}  # fmt: skip
        versions.append(made)
        return made

    def delete_launch_template(self, params: dict[str, Any]) -> dict[str, Any]:
        self.templates.pop(params["LaunchTemplateName"])
        return {}

    def describe_placement_groups(self, params: dict[str, Any]) -> dict[str, Any]:
        found = [g for g in self.groups.values() if self._has(g["tags"], params)]
        names = params.get("GroupNames")
        if names:
            found = [g for g in found if g["GroupName"] in names]
            if not found:
                raise AwsError("InvalidPlacementGroup.Unknown", "there is none")
        return {"PlacementGroups": [
            {"GroupName": g["GroupName"], "Strategy": "cluster", "State": "available"}
            for g in found
        ]}  # fmt: skip

    def create_placement_group(self, params: dict[str, Any]) -> dict[str, Any]:
        (given,) = params["TagSpecifications"]
        tags = {tag["Key"]: tag["Value"] for tag in given["Tags"]}
        self.groups[params["GroupName"]] = {"GroupName": params["GroupName"], "tags": tags}
        return {}

    def delete_placement_group(self, params: dict[str, Any]) -> dict[str, Any]:
        self.groups.pop(params["GroupName"])
        return {}

    def describe_images(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"Images": [
            {"ImageId": image, "BlockDeviceMappings": [{"Ebs": {"SnapshotId": f"snap-{image}"}}]}
            for image in self.images
        ]}  # fmt: skip

    # --- what outlives an environment ---------------------------------------------------------

    def list_entities_for_policy(self, params: dict[str, Any]) -> dict[str, Any]:
        return {
            f"Policy{kind}s": [{f"{kind}Name": name} for name in self.attached.get(kind, [])]
            for kind in ("User", "Group", "Role")
        }

    def _having_policy(self) -> dict[str, list[str]]:
        return {kind: sorted(names) for kind, names in self.attached.items() if names}

    def _detach(self, kind: str, params: dict[str, Any]) -> dict[str, Any]:
        names = self.attached.get(kind, [])
        if params[f"{kind}Name"] not in names:
            raise AwsError("NoSuchEntity", "the policy is not attached", 404)
        names.remove(params[f"{kind}Name"])
        return {}

    def detach_user_policy(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._detach("User", params)

    def detach_group_policy(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._detach("Group", params)

    def detach_role_policy(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._detach("Role", params)

    def list_recovery_points_by_resource(self, params: dict[str, Any]) -> dict[str, Any]:
        name = self.outputs["storage.FileSystemId"]
        asked = f"arn:aws:elasticfilesystem:us-east-1:{ACCOUNT}:file-system/{name}"
        return {"RecoveryPoints": self.backups if params["ResourceArn"] == asked else []}

    def describe_repositories(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"repositories": [{"repositoryName": name} for name in self.repositories]}

    def deregister_image(self, params: dict[str, Any]) -> dict[str, Any]:
        self.images.remove(params["ImageId"])
        return {}

    def delete_snapshot(self, params: dict[str, Any]) -> dict[str, Any]:
        assert params["SnapshotId"].removeprefix("snap-") not in self.images, "in use"
        return {}

    # --- how clients reach it ---------------------------------------------------------------

    def client(self, service: str, attempts: int = 5) -> Any:
        if service not in self._clients:
            self._clients[service] = self._client(service)
        return self._clients[service]

    def _client(self, service: str) -> Any:
        if service == "batch":
            made = self.rig.client("batch")
            made.meta.events.register_first("before-call.batch.*", self._batch_busy)
            made.meta.events.register_last("after-call.batch.*", self._batch_answer)
        else:
            made = self._scripted(service)
        made.meta.events.register_first("before-call.*.*", self._count)
        made.meta.events.register_last("after-call.*.*", self._count_after)
        return made

    def submitting_client(self) -> Any:
        return self.client("batch")

    def _scripted(self, service: str) -> Any:
        import botocore.session

        session = botocore.session.Session()
        made = session.create_client(
            service, region_name="us-east-1", aws_access_key_id="A", aws_secret_access_key="S"
        )
        given: list[dict[str, Any]] = []

        def note(params: dict[str, Any], model: Any, **_: Any) -> None:
            found = [str(p) for p in problems(model.input_shape, params, strict=True)]
            assert not found, f"{model.name}: {found}"
            given.append(params)

        def answer(model: Any, **_: Any) -> Any:
            name = "".join(f"_{c.lower()}" if c.isupper() else c for c in model.name).strip("_")
            return self._answered(model, getattr(self, name), given.pop())

        made.meta.events.register("before-parameter-build.*.*", note)
        made.meta.events.register("before-call.*.*", answer)
        return made

    def _new(self, body: dict[str, Any]) -> Any:
        """The answer in what has not been checked before: events are told again and again."""
        if "StackEvents" not in body:
            return _plain(body)
        new = [
            e for e in body["StackEvents"] if f"{e['StackId']} {e['EventId']}" not in self._checked
        ]
        self._checked |= {f"{e['StackId']} {e['EventId']}" for e in new}
        return _plain({"StackEvents": new})

    def _answered(
        self, model: Any, do: Callable[[dict[str, Any]], dict[str, Any]], params: dict[str, Any]
    ) -> Any:
        from botocore.awsrequest import AWSResponse

        try:
            body, status = do(params), 200
        except AwsError as error:
            body = {"Error": {"Code": error.code, "Message": str(error)}}
            status = error.status
        else:
            if model.output_shape is not None:
                found = [str(p) for p in problems(model.output_shape, self._new(body), strict=True)]
                assert not found, f"{model.name}: {found}"
        body["ResponseMetadata"] = {"HTTPStatusCode": status}
        return AWSResponse("", status, {}, None), body

    def _batch_busy(self, model: Any, params: dict[str, Any], **_: Any) -> Any:
        """AWS Batch takes no change of what it is still busy with."""
        body = json.loads(params["body"] or b"{}") if params.get("body") else {}
        verb = _VERB.match(model.name)
        if verb is None:
            return None
        self._asked = (verb[1], body)
        keys = ("computeEnvironment", "jobQueue", "computeEnvironmentName", "jobQueueName")
        name = next((bare_name(body[key]) for key in keys if key in body), "")
        if self._busy_with(name):
            return _refused("ClientException", "Cannot change it, resource is being modified.")
        if model.name in ("CreateJobQueue", "UpdateJobQueue"):
            for entry in body.get("computeEnvironmentOrder", ()):
                used = bare_name(entry["computeEnvironment"])
                if self._busy_with(used) in ("CREATING", "DELETING") or used in self.invalid:
                    text = f"computeEnvironment {used} is not VALID"
                    return _refused("ClientException", text)
        if verb[1] == "Delete":  # what it was, for as long as it is still described
            self._last = self._detail(name)
        return None

    def _busy_with(self, name: str) -> str:
        status, until, _ = self.settling.get(name, ("", 0.0, {}))
        if status and self.clock.now() >= until:
            del self.settling[name]
            return ""
        return status

    def _detail(self, name: str) -> dict[str, Any]:
        batch = self.rig.client("batch") if self._plain is None else self._plain
        self._plain = batch
        environments = batch.describe_compute_environments(computeEnvironments=[name])
        queues = batch.describe_job_queues(jobQueues=[name])
        found = [*environments["computeEnvironments"], *queues["jobQueues"]]
        return dict(found[0]) if found else {}

    def _batch_answer(self, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        """What the embedded server does at once takes AWS Batch a while, and may end INVALID."""
        verb = _VERB.match(model.name)
        if verb is not None and "Error" not in parsed:
            self._begin_settling(model.name, verb[1], parsed)
        for member, key in (
            ("computeEnvironments", "computeEnvironmentName"), ("jobQueues", "jobQueueName")
        ):  # fmt: skip
            if member not in parsed or "Error" in parsed:
                continue
            for detail in parsed[member]:
                name = detail[key]
                busy = self._busy_with(name)
                if busy:
                    detail["status"] = busy
                elif name in self.invalid:
                    detail.update(status="INVALID", statusReason=self.invalid[name])
            known = {detail[key] for detail in parsed[member]}
            asked = self._asked[1].get(member, [])
            parsed[member] += [
                {**last, "status": "DELETING"}
                for name, (_, _, last) in list(self.settling.items())
                if last.get(key) == name and name not in known and self._busy_with(name)
                and (not asked or name in asked)
            ]  # fmt: skip

    def _begin_settling(self, operation: str, verb: str, parsed: dict[str, Any]) -> None:
        body = self._asked[1]
        if verb == "Describe" or not operation.endswith(("ComputeEnvironment", "JobQueue")):
            return
        keys = ("computeEnvironmentName", "jobQueueName")
        name = next((parsed[key] for key in keys if key in parsed), "") or bare_name(
            body.get("computeEnvironment", body.get("jobQueue", ""))
        )
        status = {"Create": "CREATING", "Update": "UPDATING", "Delete": "DELETING"}[verb]
        last = self._last if verb == "Delete" else {}
        self.settling[name] = (status, self.clock.now() + self.settles, last)
        if verb != "Delete" and operation.endswith("ComputeEnvironment"):
            self.repaired(name)

    def repaired(self, name: str) -> None:
        """An update mends what made a compute environment INVALID, unless it is said to stay so."""
        if name not in self.stay_invalid:
            self.invalid.pop(name, None)

    def _count(self, model: Any, **_: Any) -> Any:
        self.calls.append(model.name)
        self._operation = model.name
        if self.interrupt_at == (len(self.calls), "before"):
            raise Interrupted
        waiting = self.refusals.get(model.name) or self.refusals.get("*")
        if waiting:
            return _refused(*waiting.pop(0))
        return None

    def _count_after(self, **_: Any) -> None:
        self.after_call(self._operation)
        if self.interrupt_at == (len(self.calls), "after"):
            raise Interrupted

    # --- going back in time -----------------------------------------------------------------

    _KEPT = (
        "stacks", "change_sets", "tokens", "templates", "template_tags", "groups", "troubles",
        "drifted", "replacements", "refused_changes", "objects", "retained", "invalid",
        "settling", "refusals", "stuck", "stay_invalid", "outputs", "images", "offered",
        "attached", "backups", "repositories", "_changes",
    )  # fmt: skip

    def save(self) -> dict[str, Any]:
        """All that AWS holds at this moment, for `restore`."""
        memo = {id(self): self, id(self.clock): self.clock}
        held = copy.deepcopy({key: getattr(self, key) for key in self._KEPT}, memo)
        return {"held": held, "time": self.clock.time, "batch": self.rig.core.state}

    def restore(self, saved: dict[str, Any]) -> None:
        memo = {id(self): self, id(self.clock): self.clock}
        for key, value in copy.deepcopy(saved["held"], memo).items():
            setattr(self, key, value)
        self.clock.time = saved["time"]
        self.rig.core.state = saved["batch"]
        self.calls.clear()

    def mark(self) -> Any:
        """What changes whenever anything that a command can see does."""
        for name in list(self.settling):
            self._busy_with(name)
        return (
            [(s.id, len(s.visible()), s.protected, s.policy, id(s.content)) for s in self.stacks],
            [(key, each["ready_at"] <= self.clock.now()) for key, each in self.change_sets.items()],
            {name: len(versions) for name, versions in self.templates.items()},
            sorted(self.groups), sorted(self.settling), dict(self.objects), self._having_policy(),
            self.rig.core.state,
        )  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """What there is, for comparing two ends."""
        self._detail("none")
        batch = self._plain
        living = [stack for stack in self.stacks if stack.status != "DELETE_COMPLETE"]
        policies = [each["arn"] for each in batch.list_scheduling_policies()["schedulingPolicies"]]
        return {
            "stacks": sorted(
                (s.name, s.status, s.content, s.protected, s.policy) for s in living
            ),
            "templates": {name: versions[-1] for name, versions in self.templates.items()},
            "groups": sorted(self.groups),
            "environments": {
                e["computeEnvironmentName"]: (e["computeResources"], e["tags"], e["state"])
                for e in batch.describe_compute_environments()["computeEnvironments"]
                if "computeResources" in e
            },
            "queues": {
                q.pop("jobQueueName"): {k: v for k, v in q.items() if k != "statusReason"}
                for q in batch.describe_job_queues()["jobQueues"]
            },
            "retained": self.retained,
            "change sets": sorted(self.change_sets),
            "objects": self.objects,
            "attached": self._having_policy(),
            "busy": {
                name: status for name, (status, until, _) in self.settling.items()
                if until > self.clock.now()
            },
            "policies": batch.describe_scheduling_policies(arns=policies)["schedulingPolicies"]
            if policies
            else [],
            "definitions": sorted(
                f"{d['jobDefinitionName']}:{d['revision']}"
                for d in batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
            ),
        }  # fmt: skip


_VERB = re.compile(r"(Create|Update|Delete|Describe)(ComputeEnvironment|JobQueue)s?$")


def _refused(code: str, message: str) -> Any:
    from botocore.awsrequest import AWSResponse

    body = {
        "Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": 400}
    }  # fmt: skip
    return AWSResponse("", 400, {}, None), body


def _plain(value: Any) -> Any:
    """With times as the numbers that shapes are checked with."""
    if isinstance(value, datetime):
        return int(value.timestamp())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def lines(progress: Iterator[Any]) -> list[str]:
    return [f"{each.step.kind} {each.step.name} {each.text}" for each in progress]
