"""Files on their way, shown: a line at the bottom of a terminal, or one now and then without."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from batchml.cli.output import say
from batchml.clock import Clock
from batchml.model.workspace import Progress, Watch
from batchml.runtime.entry.folders import size_text

EVERY = 10.0  # seconds between two lines, where there is no terminal
_SURE = 2.0  # seconds after which a rate says something


def progress_line(now: Progress, seconds: float, width: int = 80) -> str:
    """`pushing 12/40 files  1.2 GiB of 4.0 GiB  30%  85.1 MiB/s  ~0:33 left  sets/a.bin`"""
    from batchml.cli.render import cut, duration, printable

    words = [f"{now.doing} {now.files}/{now.of_files} files"]
    if now.of_size:
        share = 100 if now.size >= now.of_size else int(100 * now.size / now.of_size)
        words += [f"{size_text(now.size)} of {size_text(now.of_size)}", f"{share}%"]
    if seconds >= _SURE and now.moved:
        words.append(f"{size_text(int(now.moved / seconds))}/s")
    if seconds >= _SURE and 0 < now.size < now.of_size:
        words.append(f"~{duration(seconds * (now.of_size - now.size) / now.size)} left")
    line = "  ".join(words)
    room = width - len(line) - 2
    return f"{line}  {cut(printable(now.path), room)}" if now.path and room >= 12 else line


class Shown:
    """What is known of a transfer, and since when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = Progress()
        self._doing, self._since, self._last = "", clock.monotonic(), clock.monotonic()

    def see(self, now: Progress) -> None:
        if now.doing != self._doing:
            self._doing, self._since = now.doing, self._clock.monotonic()
        self.now = now

    def line(self, width: int) -> str:
        if not self.now.of_files:
            return self.now.doing or "looking ..."
        return progress_line(self.now, self._clock.monotonic() - self._since, width)

    def see_and_say(self, now: Progress) -> None:
        self.see(now)
        if self._clock.monotonic() - self._last >= EVERY and now.of_files:
            self._last = self._clock.monotonic()
            say(self.line(200))


@contextmanager
def shown(clock: Clock, stream: TextIO | None = None) -> Iterator[Watch]:
    """Show what is told to the function that this gives. Nothing of it goes to a pipe on stdout."""
    from batchml.cli.bottom import Bottom
    from batchml.cli.colour import is_dumb, window_width

    stream = stream or sys.stderr
    seen = Shown(clock)
    if not stream.isatty() or is_dumb():
        with _going_on():
            yield seen.see_and_say
        return
    out: TextIO = stream
    width: Callable[[], int] = lambda: window_width(out)  # noqa: E731
    bottom = Bottom(out, seen.line, width)
    with _going_on():
        bottom.start()
        try:
            yield seen.see
        finally:
            bottom.stop()


@contextmanager
def _going_on() -> Iterator[None]:
    """Ctrl-C loses nothing."""
    try:
        yield
    except KeyboardInterrupt:
        say("\nInterrupted. What has arrived is whole, and the same command goes on with the rest.")
        raise
