"""What the steps of a plan are taken with, and how they fail."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack, Stacks
from batchml.aws.ec2 import LaunchApi
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ServiceError
from batchml.ops.setup.causes import failure_of, fix_for
from batchml.ops.setup.values import Facts, Kind, is_known
from batchml.ops.watch import Pace, backoff

Steps = Generator[str, None, Facts]
BATCH_LIMIT = 900.0  # seconds for a compute environment or queue to settle
_DRIFT_LIMIT = 300.0
PACE = Pace(first=0.5, most=10.0)


class SetupFailed(BatchmlError):
    """A step failed in AWS: what, the first cause, and what to do."""

    def __init__(self, kind: Kind, name: str, what: str, fix: str) -> None:
        super().__init__(f"{kind} {name}: {what}\n  {fix}")


class Tools(Struct, frozen=True):
    """What steps are taken with. On `local` there are no stacks and no launch templates."""

    stacks: Stacks
    compute: ComputeApi
    batch: BatchApi
    clock: Clock
    launch: LaunchApi | None = None
    empty_bucket: Callable[[str], None] | None = None
    continue_rollback: Sequence[str] | None = None  # None: ask first; else resources to skip
    command: str = "setup"  # what to type again, for messages
    replacing: frozenset[str] = frozenset()  # stacks whose data may be replaced now

    def propose(self, blueprint: Blueprint, stack: Stack) -> ChangeSet:
        """What AWS says an update would do; waits for it."""
        change_set = self.stacks.propose(blueprint, stack)
        end, pauses = self.clock.monotonic() + BATCH_LIMIT, backoff(PACE)
        while (found := self.stacks.proposal(change_set)).is_pending:
            if self.clock.monotonic() > end:
                raise BatchmlError(f"CloudFormation is still working on {change_set}.")
            self.clock.sleep(next(pauses))
        if not found.is_ready and not found.is_empty:
            self.stacks.discard(change_set)
            fix = fix_for(found.reason)
            raise SetupFailed(Kind.STACK, stack.name, f"AWS refuses: {found.reason}", fix)
        if found.is_empty:
            self.stacks.discard(change_set)
        return replace(found, token=update_token(blueprint, stack))

    def drifts(self, name: str) -> tuple[Drift, ...]:
        """What was changed by hand; nothing where AWS cannot say."""
        try:
            detection = self.stacks.detect_drift(name)
            end, pauses = self.clock.monotonic() + _DRIFT_LIMIT, backoff(PACE)
            while not self.stacks.drift_is_known(detection):
                if self.clock.monotonic() > end:
                    return ()
                self.clock.sleep(next(pauses))
            return tuple(self.stacks.drifts(name))
        except (ServiceError, AccessError):
            return ()

    def first_cause(self, stack: Stack) -> str:
        found = failure_of(self.stacks.operation(stack.id))
        return str(found) if found else stack.reason


def check_time(end: float, kind: Kind, name: str, status: str, tools: Tools) -> None:
    if tools.clock.monotonic() > end:
        raise BatchmlError(
            f"{kind} {name} is still {status}. It goes on in AWS; run the command again to follow."
        )


def refuse_unknown(kind: Kind, name: str, request: Any) -> None:
    if not is_known(request):
        raise AssertionError(f"{kind} {name} needs what is not made yet: {request}")


def update_token(blueprint: Blueprint, stack: Stack) -> str:
    return blueprint.token("update", stack.changed_at)
