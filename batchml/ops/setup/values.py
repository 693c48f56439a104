"""The words of a plan: what is wanted, what is there, and what becomes of each thing."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack
from batchml.aws.ec2 import Template

# Stands in a request for what is known only once something else is made: "«network.SubnetIds»".
UNKNOWN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"
TAG_ENV = "batchml:env"
TAG_SOURCE = "batchml:source"  # `setup`; what single commands made is theirs to delete


class Action(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    KEEP = "keep"
    DELETE = "delete"


class Kind(StrEnum):
    STACK = "stack"
    PLACEMENT_GROUP = "placement group"
    LAUNCH_TEMPLATE = "launch template"
    POLICY = "scheduling policy"
    ENVIRONMENT = "compute environment"
    QUEUE = "job queue"
    DEFINITION = "job definition"


class Step(Struct, frozen=True):
    """One resource and what becomes of it. `loses` says what would be gone for good."""

    action: Action
    kind: Kind
    name: str
    reasons: tuple[str, ...] = ()
    loses: str = ""
    how: str = ""  # of a stack: wait, recreate, ..., without-files; of what was replaced: drain

    @property
    def changes(self) -> bool:
        return self.action is not Action.KEEP


class Wanted(Struct, frozen=True):
    """What is to be there, each as the request that makes it, by its name in AWS.

    Of stacks that hold data and are not wanted, `data_stacks`, what is in them is deleted only
    with `deletes_data`. `is_backwards` for a teardown: stacks are changed after what stands on
    them is gone.
    """

    stacks: tuple[Blueprint, ...] = ()
    data_stacks: tuple[str, ...] = ()
    deletes_data: bool = False
    deletes_files: bool = False  # of those, the file system alone
    held: dict[str, str] = {}  # stacks that stay as they are, and why: others need them
    is_backwards: bool = False
    shared_with: str = ""  # the environment whose workspace and network these work in
    is_all: bool = True  # what is not among these is not wanted; else it is nobody's business
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, dict[str, Any]] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    definitions: dict[str, dict[str, Any]] = {}


class Facts(Struct, frozen=True):
    """What is there, by its name in AWS. Of Batch's resources those of this environment alone."""

    stacks: dict[str, Stack] = {}
    proposals: dict[str, ChangeSet] = {}  # what AWS says an update of a stack would do
    drifts: dict[str, tuple[Drift, ...]] = {}  # what somebody changed by hand
    causes: dict[str, str] = {}  # of stacks whose last operation failed: its first cause
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, Template] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    users: dict[str, tuple[str, ...]] = {}  # compute environments -> queues that are not ours
    busy: dict[str, int] = {}  # queues with runs that have not ended: how many, at least
    definitions: frozenset[str] = frozenset()
    lent: dict[str, Stack] = {}  # the other's stacks, by their short names, of a shared workspace
    sharers: tuple[str, ...] = ()  # the environments that work in this one's workspace


def is_known(request: Any) -> bool:
    """True when nothing in a request waits for something else to be made."""
    if isinstance(request, Mapping):
        return all(is_known(value) for value in request.values())
    if isinstance(request, list | tuple):
        return all(is_known(value) for value in request)
    return not (isinstance(request, str) and UNKNOWN in request)
