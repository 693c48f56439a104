"""Into a run that is RUNNING: a terminal, a command, a tunnel to a port; no keys, no open ports.

Four functions, the same for the machine here (`doors_local`) and for AWS (`doors_aws`).
"""

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from batchml.errors import NoDoor, NotFound, NotRunning, UsageError
from batchml.model.record import NOT_KNOWN_WORDS
from batchml.model.run import JobStatus, Run

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.tunnel import Tunnel

PATIENCE = 60.0  # seconds for what a program asks inside


class Seat(Struct, frozen=True):
    """Where to go in: an attempt that runs. `run` is the child, node or job whose container it is;
    `node` its number among the nodes of a run that has several."""

    run: Run
    node: int | None = None


class Asked(Struct, frozen=True):
    """What a command that was sent inside came to."""

    code: int
    out: bytes


class Doors(Protocol):
    """How to get into the runs of one kind of place."""

    def run(self, seat: Seat, command: tuple[str, ...], tty: bool) -> int: ...

    def ask(self, seat: Seat, command: tuple[str, ...], limit: float | None) -> Asked: ...

    def tunnel(self, seat: Seat, port: int, local_port: int | None) -> "Tunnel": ...


def find_seat(place: "Place", word: str, node: int | None = None) -> Seat:
    """The attempt that runs of what `word` means; of a run of several nodes the main one's.

    Raises UsageError, NotFound, NotRunning.
    """
    from batchml.client.runs import described, select

    (job_id,) = select(place, [word])
    run = described(place, [job_id])[job_id]
    if run.array_size:
        raise UsageError(
            f"{run.name} is an array of {run.array_size} runs: name one of them, such as {word}:0."
        )
    if run.nodes and run.node_index is None:
        return _running(place, word, _node_of(place, run, node or 0), node or 0)
    if node is not None:
        return _running(place, word, _member_of(place, run, node), node)
    return _running(place, word, run, run.node_index)


def run_inside(
    place: "Place", seat: Seat, command: tuple[str, ...], *, tty: bool | None = None
) -> int:
    """Run a command inside, or with none a shell, on this process's terminal; its exit code.

    Without a terminal (`tty` False, or where there is none) input and output are passed on as they
    are. NotRunning when the run ends beneath it; NoDoor when there is no way in.
    """
    import sys

    if tty is None:
        tty = sys.stdin.isatty() and sys.stdout.isatty()
    return _doors(place).run(seat, command, tty)


def ask_inside(
    place: "Place", seat: Seat, command: tuple[str, ...], limit: float | None = PATIENCE
) -> Asked:
    """What a command prints that is run inside, without its errors, and its exit code.

    Raises NotRunning, NoDoor, and ServiceUnreachable after `limit` seconds; None: never.
    """
    return _doors(place).ask(seat, command, limit)


def open_tunnel(place: "Place", seat: Seat, port: int, local_port: int | None = None) -> "Tunnel":
    """A port of this machine, on 127.0.0.1, that leads to a port inside.

    With `local_port` that one. Nothing needs to listen inside yet: a connection is refused until
    then. Raises UsageError for a port that is taken, NotRunning, NoDoor.
    """
    return _doors(place).tunnel(seat, port, local_port)


def _doors(place: "Place") -> Doors:
    if place.settings.is_local:
        from batchml.client.doors_local import LocalDoors

        return LocalDoors(place)
    from batchml.client.doors_aws import AwsDoors

    return AwsDoors(place)


def _node_of(place: "Place", run: Run, node: int) -> Run:
    from batchml.client.runs import described

    if not 0 <= node < run.nodes:
        raise UsageError(f"--node {node}: the nodes of {run.name} are 0 to {run.nodes - 1}.")
    part = f"{run.job_id}#{node}"
    return described(place, [part])[part]


def _member_of(place: "Place", run: Run, node: int) -> Run:
    """One of the jobs of a gang: the head is 0, and its workers follow in their order."""
    from batchml.client.finding import recall
    from batchml.client.gang_parts import parts_of
    from batchml.client.nodeuse import nodes_of

    if run.node_index is not None:
        raise UsageError(f"{run.job_id} is one node already: leave out --node.")
    (found,) = recall(place, [run.job_id])
    members = nodes_of(place, found, parts_of(place, found))
    if not members:
        if node == 0:
            return run
        raise UsageError(f"--node {node}: {run.name} has one node. Leave out --node.")
    if node >= len(members) or node < 0:
        known = ", ".join(f"{number} ({each.name})" for number, each in enumerate(members))
        raise UsageError(f"--node {node}: the nodes of {run.name} that run are {known}.")
    return members[node].run


def _running(place: "Place", word: str, run: Run, node: int | None) -> Seat:
    if run.status is JobStatus.RUNNING:
        return Seat(run, node)
    raise not_running(place, run, word)


def not_running(place: "Place", run: Run, word: str = "") -> NotRunning:
    """What to say of a run that nobody can be in: it waits, or how it has ended."""
    option = "" if place.settings.is_local else f" --env {place.env}"
    word = word or run.job_id
    if run.status.is_terminal:
        return NotRunning(
            f"{run.name} has ended: {ending(run)}. What it left: batchml logs {word}{option}, "
            f"batchml get {word}{option}",
            over=True,
        )
    return NotRunning(
        f"{run.name} is {run.status.value} and has no program to go to yet. Why it waits: "
        f"batchml explain {word}{option}. With --wait it is waited for."
    )


def ending(run: Run) -> str:
    """`succeeded`, or `app-error, exit code 3`."""
    from batchml.model.run import classify

    outcome = classify(run).outcome.value
    if run.exit_code in (None, 0):
        return outcome
    return f"{outcome}, exit code {run.exit_code}"


def task_of(place: "Place", run: Run) -> str:
    """The ARN of the ECS task that the run is now. Raises NotRunning, NoDoor, NotFound."""
    for detail in place.batch.describe_raw([run.job_id]):
        if detail["status"] != JobStatus.RUNNING.value:
            from batchml.aws.batch.responses import to_run

            raise not_running(place, to_run(detail))
        task = (detail.get("container") or {}).get("taskArn", "")
        if task:
            return str(task)
        words = f"{run.name} is RUNNING, and AWS Batch does not name its task yet."
        raise NoDoor(words, is_early=True)
    raise NotFound("Run", run.job_id, [], NOT_KNOWN_WORDS)
