"""What a controller that is a run of its own has around it: its environment, and its sweep."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.client.place import Place
from batchml.client.sweeping.boards import Board, board_at, open_board
from batchml.client.sweeping.freezing import SPEC, Frozen, read_frozen
from batchml.errors import ConfigError, NotFound, ServiceUnreachable

if TYPE_CHECKING:
    from batchml.clock import Clock
    from batchml.local.home import Endpoint

_WAIT = 5.0  # seconds for the embedded server to come back, at each call
_LOOK = 0.5


class Where(Struct, frozen=True):
    """What a controller is told of its sweep. In AWS it may not ask for more."""

    key: str
    env: str
    board: str = ""  # its address
    region: str = ""
    digest: str = ""  # of the sweep's first document, as it was when the controller was submitted

    @property
    def words(self) -> list[str]:
        """As options of `sweeps attend`."""
        given = {"env": self.env, "board": self.board, "region": self.region, "digest": self.digest}
        return [self.key, *(word for name, value in given.items() for word in (f"--{name}", value))]


class ControllerPlace(Place):
    """`local` as a run sees it: the server, which is the run's own parent, is never started here.

    One that was would end with this run. A user who stops the server stops what it does, and this
    run waits, or is tried again by the next server.
    """

    def server(self) -> "Endpoint":
        from batchml.local import control

        end = self.clock.monotonic() + _WAIT
        while (endpoint := control.running(self.home)) is None:
            if self.clock.monotonic() >= end:
                raise ServiceUnreachable(
                    "The embedded server does not run: batchml local start. The sweep goes on then."
                )
            self.clock.sleep(_LOOK)
        return endpoint


def place_in_aws(where: Where, home: Path, clock: "Clock") -> Place:
    """An environment as a controller's container sees it: where it is, and the container's rights.

    All else that is needed of it was frozen with the sweep.
    """
    from batchml.model.description import Described
    from batchml.model.environment import Environment
    from batchml.settings import Setting, Settings

    env = where.env
    described = Described(env, {env: Environment(region=where.region)}, {})
    source = "the sweep"
    settings = Settings(Setting(env, source), Setting(str(home), source), None, described)
    return Place(settings, clock, home)


def sweep_of(place: Place, where: Where) -> tuple[Board, Frozen]:
    """The sweep of a controller. Raises NotFound, ConfigError for another than was meant, and
    StoreError."""
    board = board_at(place, where.board) if where.board else open_board(place, where.key)
    if where.digest:
        _check_digest(board, where.digest)
    frozen = read_frozen(board)
    if frozen is None or frozen.key != where.key:
        raise NotFound("Sweep", where.key, [], "Its first document is gone: start it anew.")
    return board, frozen


def digest_of(board: Board) -> str:
    """What tells that a sweep is the one that was meant: programs in jobs can write there, too."""
    return hashlib.sha256(board.get(SPEC) or b"").hexdigest()


def _check_digest(board: Board, digest: str) -> None:
    if digest_of(board) != digest:
        raise ConfigError(
            SPEC,
            [
                "it is not what it was when this controller was submitted. If you changed it: "
                "batchml sweeps resume --detach."
            ],
        )
