"""Which controller a sweep has."""

from typing import TYPE_CHECKING

from batchml.errors import BatchmlError
from batchml.sweep.lease import Lease, Refused, this_process

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.runtime.storage.store import Store


class AnotherController(BatchmlError):
    """Somebody attends to the sweep already."""

    def __init__(self, holder: str, key: str) -> None:
        super().__init__(
            f"Another controller has this sweep: {holder}. Nothing was changed. To watch it: "
            f"batchml sweeps show --follow {key}. Once it has ended, do this again."
        )


def holder(place: "Place", board: "Store") -> Refused | None:
    """Who attends to a sweep; None when nobody does. Raises StoreError."""
    return Lease(board, place.clock, this_process()).holder()


def refuse_second(place: "Place", board: "Board") -> None:
    """Raise AnotherController, naming it, where there is one."""
    found = holder(place, board)
    if found is not None:
        raise AnotherController(found.holder.words, board.key)
