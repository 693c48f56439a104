"""A sweep's controller in this process: in a terminal, a program, or a run of its own."""

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.client.submission import Tell, user_name
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.jobs import BatchJobs
from batchml.errors import BatchmlError
from batchml.sweep.controller import Controller
from batchml.sweep.lease import Owner, this_process
from batchml.sweep.ledger import Ledger
from batchml.sweep.pace import AWS, LOCAL
from batchml.sweep.shape import Shape, countable
from batchml.sweep.summary import Picture, Summary

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board


class Attended(Struct):
    """A sweep whose controller is here; `summary` is known once the pictures have ended."""

    frozen: Frozen
    controller: Controller

    def pictures(self) -> Generator[Picture, None, None]:
        """One a round, until the sweep is over. Closing it lets another controller go on at once.

        Raises what the controller raises: for one, that another one holds the sweep.
        """
        yield from self.controller.rounds()

    @property
    def summary(self) -> Summary:
        found: Summary = self.controller.summary
        return found


def attend(
    place: "Place",
    frozen: Frozen,
    board: "Board",
    tell: Tell = lambda _: None,
    owner: Owner | None = None,
    lost: Tell | None = None,
) -> Attended:
    """The controller of a sweep. Nothing is done before its pictures are asked for.

    `owner` is who it is, for one that comes second: this process unless given. `tell` hears what
    takes long, and what the controller notices. `lost` is for who shows the pictures, which have
    all notices: it hears that something cannot be reached, and `tell` nothing of the controller.
    """
    pace = LOCAL if place.settings.is_local else AWS
    jobs = BatchJobs(place, frozen, board, tell)
    owner = owner or this_process(user_name())
    said = tell if lost is None else lambda _: None
    controller = Controller(
        frozen.spec, board, jobs, place.clock, pace, owner, said, lost=lost or tell
    )
    return Attended(frozen, controller)


def needs_controller(frozen: Frozen) -> bool:
    """Whether the sweep stands still, or goes on without its cut-offs, while nobody attends to it.

    An array goes on by itself, its trials keep the limit of hours, and who looks at it later finds
    all that they said. But cut-offs, a target and running the best again are a controller's, and so
    is a limit of the cost that all rungs at worst may exceed.
    """
    spec = frozen.spec
    if frozen.shaped.shape is Shape.WAVES:
        return True
    return (
        spec.early_stop.method in ("asha", "median")
        or spec.limits.target is not None
        or spec.confirm is not None
        or (spec.limits.cost is not None and frozen.shaped.shape is Shape.RUNGS)
    )


def is_better_watched(frozen: Frozen) -> bool:
    """Whether trials wait for others, so that a sweep can still stop when the first all fail."""
    many = countable(frozen.spec)
    return many is None or many > frozen.spec.limits.parallel


def leave(place: "Place", frozen: Frozen, board: "Board", tell: Tell = lambda _: None) -> None:
    """Leave a sweep to itself, or, where one is of use, to a controller that is a run of its own.

    What goes on by itself is submitted first, and does so even where no controller can be had.
    Raises AnotherController where one attends to it already, and what `detach` raises for a sweep
    that needs one.
    """
    from batchml.client.sweeping.detaching import detach
    from batchml.client.sweeping.holding import AnotherController, refuse_second

    refuse_second(place, board)
    is_needed = needs_controller(frozen)
    if frozen.shaped.shape is not Shape.WAVES:
        with closing(attend(place, frozen, board, tell).pictures()) as pictures:
            is_over = next(p.ended for p in pictures if p.ended or _is_submitted(board))
        if is_over or not (is_needed or is_better_watched(frozen)):
            return
    try:
        detach(place, frozen, board, tell)
    except AnotherController:
        raise
    except BatchmlError as error:
        if is_needed:
            raise
        tell(f"Nobody watches how many trials fail, until somebody looks at it. {error}")


def _is_submitted(board: "Board") -> bool:
    """All there is, as a rule by the first round: a failure for a while takes another."""
    state = Ledger(board).load()
    return bool(state.waves) and not state.open_waves
