"""The terminal: colours, its width, a line at its bottom, single keys, sparklines.

Only the terminal's own green, red, cyan and magenta are used: its theme makes them readable, where
yellow and white vanish on light and blue on dark. Colour never says what words do not.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

_CODES = {"good": "32", "bad": "31", "busy": "36", "odd": "35", "dim": "2", "strong": "1"}

# The meaning of words that stand alone in a cell.
_KINDS = {
    "SUCCEEDED": "good", "FAILED": "bad", "RUNNING": "busy", "STARTING": "busy",
    "succeeded": "good", "app-error": "bad", "out-of-memory": "bad", "timed-out": "bad",
    "image-error": "bad", "dependency-failed": "bad", "unschedulable": "bad", "unknown": "bad",
    "host-lost": "odd", "cancelled": "odd",
}  # fmt: skip


class Screen(NamedTuple):
    """A stream's width in cells, 0 for no window, and whether it has colours."""

    width: int = 0
    colour: bool = False


def screen(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Screen:
    """The abilities of `stream`, or else stdout. NO_COLOR turns colours off (no-color.org),
    FORCE_COLOR turns them on for a pipe.
    """
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    plain = bool(environ.get("NO_COLOR")) or is_dumb(environ)
    forced = environ.get("FORCE_COLOR", "0") not in ("", "0")
    return Screen(_width(stream, environ) if is_terminal else 0, not plain and is_terminal | forced)


def is_dumb(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal can only print: no colours, no line that changes."""
    return environ.get("TERM", "") in ("", "dumb", "unknown")


def _width(stream: TextIO, environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 6 and int(columns):
        return int(columns)
    return window_width(stream)


def window_width(stream: TextIO) -> int:
    """Cells of the window as it is now; 80 if unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def kind_of(word: str) -> str:
    """`good`, `bad`, `busy`, `odd`, or nothing for a word that has no colour."""
    return _KINDS.get(word, "")


def paint(text: str, kind: str) -> str:
    """The text in a colour, for a terminal."""
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if kind else text


# --- A line that stays at the bottom --------------------------------------------------------------


ERASE = "\r\x1b[J"  # from the start of the line to the end of the screen
TICK = 0.25  # seconds


class BottomLine:
    """Draws the text of `draw(width)` at the bottom, four times a second and after other output.

    The cursor rests in the first cell, which is left blank. When the window gets narrower a
    terminal may break the line into several, or cut it: the cursor is at their beginning either
    way, so erasing from there erases all of them and nothing else.
    """

    def __init__(
        self, stream: TextIO, draw: Callable[[int], str], width: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._draw = draw
        self._width = width
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._is_shown = False
        self._drawn = ""
        self._drawn_for = -1  # cells
        self._thread: threading.Thread | None = None
        self._stderr: Any = None

    def start(self) -> None:
        """Begin to draw. From now on stderr goes above the line, too."""
        self._stderr = sys.stderr
        if sys.stderr.isatty():
            sys.stderr = PrintsAbove(self, sys.stderr)
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Restore the terminal."""
        self._over.set()
        sys.stderr = self._stderr
        with self._lock:
            self.erase()
            self._stream.flush()

    def print(self, text: str, stream: TextIO | None = None) -> None:
        """Print above the line. Much output may come at once, so the last drawing is reused."""
        with self._lock:
            below = self._below(self._is_shown)
            if stream is None:
                self._stream.write(f"{ERASE if below else ''}{text}{below}")
            else:
                self.erase()
                stream.write(text)
                stream.flush()
                self._stream.write(below if text.endswith("\n") else "")
                self._is_shown = bool(below) and text.endswith("\n")
            self._stream.flush()

    def erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._stream.write(ERASE)
            self._stream.flush()

    def refresh(self) -> None:
        """Draw the line again with one write, so that it does not flicker."""
        with self._lock:
            if not self._over.is_set():
                self._drawn_for = -1
                self._stream.write(ERASE + self._below(True))
                self._stream.flush()
                self._is_shown = True

    def _below(self, is_shown: bool) -> str:
        """The line for the current window; nothing without a line."""
        width = self._width()
        if is_shown and width != self._drawn_for:
            self._drawn, self._drawn_for = self._draw(width - 2), width
        return f" {self._drawn}\r" if is_shown else ""

    def _tick(self) -> None:
        while not self._over.wait(TICK):
            try:
                self.refresh()
            except (OSError, ValueError):  # the terminal has gone, or stdout was closed
                return


class PrintsAbove:
    """A stream to the same terminal, whose text goes above the line in whole lines.

    `print` writes a line and its end one after the other: between them the line could be drawn over
    the text.
    """

    def __init__(self, bottom: BottomLine, stream: TextIO) -> None:
        self._bottom = bottom
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        lines, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            self._bottom.print(lines + end, self._stream)
        return len(text)

    def flush(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            self._bottom.print(begun, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def live_line(stream: TextIO, draw: Callable[[int], str]) -> Iterator[None]:
    """Show the text of `draw(width)` below other output on stderr, four times a second.

    `stream` is a terminal. The line is gone at the end. It costs too much beside a streaming log,
    where `BottomLine` is drawn (docs/decisions/040-live-output.md).
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def line() -> Text:
        return Text(draw(console.width - 1), no_wrap=True, overflow="ellipsis")

    with Live(get_renderable=line, console=console, transient=True, redirect_stdout=False):
        yield


# --- Single keys ----------------------------------------------------------------------------------


Rest = Callable[[float], str]  # sleeps so many seconds, or until a key, which it returns


@contextmanager
def reading_keys(sleep: Callable[[float], None]) -> Iterator[Rest]:
    """A sleep that ends at a key; keys are neither echoed nor need Enter meanwhile.

    Ctrl-C works as usual. Without a keyboard it is `sleep` itself.
    """

    def just_sleep(seconds: float) -> str:
        sleep(seconds)
        return ""

    if not (sys.stdin and sys.stdin.isatty()):
        yield just_sleep
        return
    import select
    import termios
    import tty

    descriptor = sys.stdin.fileno()

    def rest(seconds: float) -> str:
        # From the descriptor: select does not see what Python has buffered.
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(descriptor, 1024).decode(errors="replace")
        if not pressed:  # the terminal has gone: reading returns at once
            sleep(seconds)
        return pressed[:1]

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield rest
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- Sparklines -----------------------------------------------------------------------------------


BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_NOT_FINITE = "\N{MULTIPLICATION SIGN}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, at most `width` of them.

    More values are combined by their means; NaN and infinity become a cross.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [_mean(values[edges[i] : edges[i + 1]]) for i in range(count)]
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if _finite(values) else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    if low == high:
        return BLOCKS[3]
    part = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: their difference is finite
    return BLOCKS[min(7, max(0, int(part * 8)))]
