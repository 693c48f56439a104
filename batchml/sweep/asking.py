"""What people ask of a sweep that exists: more trials, failed ones again, the best ones again.

Only a controller writes the ledger. So an ask is an object on the board, and the controller that
runs, or the next one, does what it says and deletes it. Doing it twice is doing it once: new limits
are said in full, and the key of an ask is the key of the wave that comes of it.
"""

import msgspec
from msgspec import Struct

from batchml.model.names import is_key
from batchml.runtime.storage.store import Store

FOLDER = "asks/"


class TopUp(Struct, frozen=True, tag="top-up", omit_defaults=True):
    """These limits from now on, in full, not by how much more; None: as it is."""

    key: str  # by names.new_key, as in all of them
    trials: int | None = None
    hours: float | None = None
    cost: float | None = None
    parallel: int | None = None


class Rerun(Struct, frozen=True, tag="rerun", omit_defaults=True):
    """Run these trials again from their beginning; none named: all that failed."""

    key: str
    numbers: tuple[int, ...] = ()


class Reconfirm(Struct, frozen=True, tag="confirm", omit_defaults=True):
    """Run the best `top` again with `seeds` new seeds each."""

    key: str
    top: int = 3
    seeds: int = 3


class GoOn(Struct, frozen=True, tag="go-on", omit_defaults=True):
    """Go on after `stop`: what it left undone is begun."""

    key: str


Ask = TopUp | Rerun | Reconfirm | GoOn

_DECODER = msgspec.json.Decoder(Ask)


def ask(board: Store, asked: Ask) -> None:
    """Leave it for the controller. Raises StoreError."""
    board.create(_place(asked), msgspec.json.encode(asked))


def pending(board: Store) -> list[Ask]:
    """What was asked and is not done yet. What cannot be read is no ask. Raises StoreError."""
    found: list[Ask] = []
    for place in board.keys(FOLDER):
        data = board.get(place)
        try:
            asked = _DECODER.decode(data or b"")
        except msgspec.DecodeError:
            continue
        if is_key(asked.key) and _place(asked) == place:
            found.append(asked)
    return found


def places(asked: list[Ask]) -> list[str]:
    """Their keys on the board, to be deleted once the ledger has what came of them."""
    return [_place(each) for each in asked]


def _place(asked: Ask) -> str:
    return f"{FOLDER}{asked.key}.json"
