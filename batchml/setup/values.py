"""The types of a plan: the wanted state, the current state, and a step for each resource."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack
from batchml.aws.ec2 import LaunchTemplate

# Begins a placeholder in a request for a value that another resource will have:
# "«network.SubnetIds»".
UNKNOWN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"
TAG_ENV = "batchml:env"
TAG_SOURCE = "batchml:source"  # `setup`, or `command`: then setup does not delete the resource


class Action(StrEnum):
    """The effect of a step on its resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    KEEP = "keep"
    DELETE = "delete"


class ResourceKind(StrEnum):
    """The kinds of resources that setup makes."""

    STACK = "stack"
    PLACEMENT_GROUP = "placement group"
    LAUNCH_TEMPLATE = "launch template"
    POLICY = "scheduling policy"
    ENVIRONMENT = "compute environment"
    QUEUE = "job queue"
    DEFINITION = "job definition"


class PlanStep(Struct, frozen=True):
    """One resource and the action on it. `loses`: the data that the action deletes for good."""

    action: Action
    kind: ResourceKind
    name: str
    reasons: tuple[str, ...] = ()
    loses: str = ""
    how: str = ""  # for a stack: wait, recreate, ..., without-files; after a replacement: drain

    @property
    def changes(self) -> bool:
        return self.action is not Action.KEEP


class WantedState(Struct, frozen=True):
    """The resources that are to exist: name in AWS -> the request that creates it.

    The data in unwanted `data_stacks` is deleted only with `deletes_data`. `is_backwards`, for a
    teardown: stacks are changed after the resources that depend on them are gone.
    """

    stacks: tuple[Blueprint, ...] = ()
    data_stacks: tuple[str, ...] = ()
    deletes_data: bool = False
    deletes_files: bool = False  # delete only the file system of the data stacks
    held: dict[str, str] = {}  # stacks that stay unchanged because others need them -> why
    is_backwards: bool = False
    shared_with: str = ""  # the environment whose workspace and network this one uses
    is_all: bool = True  # delete resources that are not wanted; False: leave them alone
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, dict[str, Any]] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    definitions: dict[str, dict[str, Any]] = {}


class CurrentState(Struct, frozen=True):
    """The resources of an environment that exist, by name in AWS."""

    stacks: dict[str, Stack] = {}
    proposals: dict[str, ChangeSet] = {}  # stack -> the changes that an update would make
    drifts: dict[str, tuple[Drift, ...]] = {}  # stack -> manual changes to its resources
    causes: dict[str, str] = {}  # stack whose last operation failed -> the first cause
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, LaunchTemplate] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    users: dict[str, tuple[str, ...]] = {}  # compute environment -> queues that are not ours
    busy: dict[str, int] = {}  # queue -> the least number of runs in it that have not ended
    definitions: frozenset[str] = frozenset()
    lent: dict[str, Stack] = {}  # short name -> stack of the environment whose workspace is shared
    sharers: tuple[str, ...] = ()  # the environments that use this one's workspace


def is_known(request: Any) -> bool:
    """Whether a request has no placeholder for a value that another resource will have."""
    if isinstance(request, Mapping):
        return all(is_known(value) for value in request.values())
    if isinstance(request, list | tuple):
        return all(is_known(value) for value in request)
    return not (isinstance(request, str) and UNKNOWN in request)
