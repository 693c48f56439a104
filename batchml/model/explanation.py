"""Explanation: why a run waits or failed, and what is known of where it waits. No I/O."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct


class Explanation(Struct, frozen=True):
    """One verdict, what it rests on, and one command that mends it or shows more.

    `cause` is a word for scripts. `is_problem` is False where nothing is wrong and time will do.
    The texts hold words of AWS and of the program: not fit for a terminal as they are.
    """

    cause: str
    verdict: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    command: str = ""
    is_problem: bool = True

    def __repr__(self) -> str:
        command = f", command={self.command!r}" if self.command else ""
        return f"Explanation({self.cause!r}, {self.verdict!r}{command})"


class QueueState(Struct, frozen=True):
    name: str
    is_enabled: bool = True
    status: str = "VALID"
    status_reason: str = ""
    environments: tuple[str, ...] = ()  # names, in the order in which they are tried
    policy: str = ""  # the scheduling policy of a queue with fair share
    priority: int = 0


class ComputeState(Struct, frozen=True):
    """A compute environment. vCPUs are 0 where it is not managed."""

    name: str
    is_enabled: bool = True
    status: str = "VALID"
    status_reason: str = ""
    max_vcpus: int = 0
    desired_vcpus: int = 0
    is_spot: bool = False
    is_managed: bool = True
    instance_types: tuple[str, ...] = ()
    cluster: str = ""  # ARN of the ECS cluster
    service_role: str = ""
    ami: str = ""  # only where one of the user's own is named
    min_vcpus: int = 0


class Waiting(Struct, frozen=True):
    """A place in the front of a queue. `since` is in ms: it has been there at the earliest then."""

    job_id: str
    since: int


class Snapshot(Struct, frozen=True):
    """The front of a queue, at most 100 runs, and what the queue's runs occupy."""

    front: tuple[Waiting, ...] = ()
    used_vcpus: float = 0.0
    active_shares: int = 0
    shares: dict[str, float] = {}  # the top ones -> vCPUs

    def place_of(self, job_id: str) -> int | None:
        """From 0; None where the run is not among the first."""
        ids = [waiting.job_id for waiting in self.front]
        return ids.index(job_id) if job_id in ids else None


class Activity(Struct, frozen=True):
    """One try of an Auto Scaling group to start or end instances. Times in ms."""

    group: str
    status: str  # Successful, Failed, Cancelled, InProgress, ...
    message: str = ""
    description: str = ""
    at: int = 0


class HostType(Struct, frozen=True):
    name: str
    vcpus: int
    memory_mib: int
    gpus: int = 0
    architectures: tuple[str, ...] = ()


class Stock(Struct, frozen=True):
    """A consumable resource."""

    name: str
    total: int
    in_use: int


class Machine(Struct, frozen=True):
    """An EC2 instance that a run was on. EC2 forgets one about an hour after its end."""

    instance_id: str
    is_spot: bool
    state: str
    reason: str = ""


# --- findings -------------------------------------------------------------------------------------
# Finding: what a check says of one thing, and the way out.


Mark = Literal["ok", "warning", "problem"]

ALL_WELL, SOMETHING, ACCESS = 0, 1, 77  # exit codes of `doctor`


class Finding(Struct, frozen=True):
    """One line, and below it what to type or to paste, line by line.

    `check` is a word for scripts. `is_access` says that credentials or permissions are at fault.
    """

    check: str
    mark: Mark
    text: str
    fix: tuple[str, ...] = ()
    is_access: bool = False


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing is a problem, 77 when credentials or permissions are, else 1."""
    problems = [finding for finding in findings if finding.mark == "problem"]
    if any(finding.is_access for finding in problems):
        return ACCESS
    return SOMETHING if problems else ALL_WELL
