"""An attempt that runs on this machine, seen by who wants to get into it: what and where it is."""

from collections.abc import Sequence

from msgspec import Struct

from batchml.local import identity
from batchml.local.executors import record
from batchml.local.executors.container import container_name
from batchml.local.executors.record import CONTAINER
from batchml.local.executors.remains import mark_of
from batchml.local.home import Home
from batchml.runtime.exec.main import Order


class Sitting(Struct, frozen=True):
    """Where an attempt is. `container` is its name in the engine, "" for a process."""

    task_id: str
    mark: str  # of its processes
    runner: int  # the process that looks after it
    groups: tuple[str, ...]  # control groups
    record: str  # a file that goes away with the attempt
    container: str = ""

    def order(self, command: Sequence[str], **more: object) -> Order:
        """What is asked of `batchml.runtime.exec.main`, on this machine or in the container."""
        if self.container:
            return Order(list(command), **more)  # type: ignore[arg-type]
        return Order(
            list(command), root=self.runner, task=self.mark, groups=list(self.groups),
            record=self.record, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def find(home: Home, task_id: str) -> Sitting | None:
    """The attempt of this task id; None once it has ended, or before it began."""
    folder = home.attempt(task_id)
    found = record.read(folder)
    own = identity.of(home)  # None for a copy: its records name the processes of another folder
    if found is None or own is None or not found.is_alive:
        return None
    is_container = found.kind == CONTAINER
    return Sitting(
        task_id,
        mark_of(own.id, task_id),
        found.pid,
        () if is_container else tuple(found.groups),
        str(folder / "runner.json"),
        container_name(own.id, task_id) if is_container else "",
    )
