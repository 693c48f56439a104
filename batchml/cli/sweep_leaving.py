"""Ctrl-C and SIGTERM while a command works on a sweep: how to go on is said, once and always."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchml.cli.following import detaching
from batchml.cli.output import print_json, say
from batchml.errors import INTERRUPTED, BatchmlError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.freezing import Frozen
    from batchml.sweep.summary import Picture

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Leaving:
    """What there is to say of a sweep when its command is interrupted.

    `is_started`: whether there is one; None: its first document is being written.
    """

    def __init__(
        self, place: "Place", frozen: "Frozen", *, json_: bool, is_started: bool | None = True
    ) -> None:
        self._place = place
        self._frozen = frozen
        self._json = json_
        self.is_started = is_started
        self._picture: Picture | None = None

    def writing(self) -> None:
        """From now on nobody here can say whether there is one."""
        self.is_started = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Say how to go on where what is done here is interrupted. One may be inside another."""
        with detaching(self._place, []):
            try:
                yield
            except KeyboardInterrupt:
                with _undisturbed():
                    self._tell()
                raise

    def watch(self, pictures: "Iterator[Picture]") -> "Iterator[Picture]":
        for picture in pictures:
            self._picture = picture
            yield picture

    def _tell(self) -> None:
        is_started = self.is_started
        if is_started is None:
            is_started = self._is_there()
        if is_started is None:
            word = f"{self._frozen.key}{self._place.option}"
            say(f"\nNobody knows yet whether it was started: batchml sweeps show {word}")
        elif is_started:
            say(left_alone(self._place, self._frozen, self._picture))
        else:
            say("\nNothing was started.")
        if self._json:
            print_json(self._as_json(is_started))

    def _is_there(self) -> bool | None:
        """Whether the sweep has its first document; asked where that takes no time."""
        from batchml.client.sweeping.boards import open_board
        from batchml.client.sweeping.freezing import SPEC

        if not self._place.settings.is_local:
            return None
        try:
            return open_board(self._place, self._frozen.key).get(SPEC) is not None
        except BatchmlError:
            return None

    def _as_json(self, is_started: bool | None) -> dict[str, object]:
        from batchml.cli.sweep_running import trial_json
        from batchml.sweep.shape import Shape

        picture, frozen = self._picture, self._frozen
        goes_on = picture is not None and frozen.shaped.shape is not Shape.WAVES
        status = "running" if goes_on else "paused"
        if picture is not None and picture.ended:
            status = "ended"
        counts = picture.counts if picture is not None else {}
        return {
            "sweepId": frozen.key if is_started is not False else None,
            "name": frozen.name,
            "env": self._place.env,
            "status": status if is_started else None,
            "trials": picture.planned if picture is not None else 0,
            "counts": {str(state): many for state, many in counts.items() if many},
            "best": trial_json(frozen, picture.best if picture is not None else None),
            "exitCode": INTERRUPTED,
        }


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Few people press Ctrl-C once. It takes no time: nothing is waited for."""
    before = [signal.signal(each, signal.SIG_IGN) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(each, handler)


def left_alone(place: "Place", frozen: "Frozen", picture: "Picture | None") -> str:
    """What goes on, and how all does. `picture` is the last that was seen, if any was."""
    from batchml.client.sweeping.running import is_better_watched, needs_controller
    from batchml.sweep.shape import Shape

    word = f"{frozen.key}{place.option}"
    if picture is None:
        words = "\nPaused: it was started, and not all of its trials were submitted yet."
    elif frozen.shaped.shape is Shape.WAVES:
        words = "\nPaused: trials that were submitted go on, and nothing new begins until you say:"
    elif needs_controller(frozen):
        words = "\nDetached: its trials go on; limits and cut-offs wait until somebody looks:"
    elif is_better_watched(frozen):
        words = "\nDetached: its trials go on; how many fail is watched once somebody looks:"
    else:
        words = "\nDetached: its trials go on by themselves."
    go_on = [f"  go on:   batchml sweeps resume {word}"]
    if needs_controller(frozen):
        go_on.append(f"  without this terminal:  batchml sweeps resume --detach {word}")
    return "\n".join([words, *go_on, ways(word)])


def ways(word: str) -> str:
    return f"  follow:  batchml sweeps show --follow {word}\n  stop:    batchml sweeps stop {word}"
