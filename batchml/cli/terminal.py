"""The terminal: colours, width, a line at the bottom, single keys, Ctrl-C, sparklines.

Only green, red, cyan and magenta are used: yellow and white are unreadable on a light background,
blue on a dark one. Words always say what a colour means.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from batchml.errors import INTERRUPTED

_CODES = {"good": "32", "bad": "31", "busy": "36", "odd": "35", "dim": "2", "strong": "1"}

# The kind of a state or outcome class, which decides its colour.
_KINDS = {
    "SUCCEEDED": "good", "FAILED": "bad", "RUNNING": "busy", "STARTING": "busy",
    "succeeded": "good", "app-error": "bad", "out-of-memory": "bad", "timed-out": "bad",
    "image-error": "bad", "dependency-failed": "bad", "unschedulable": "bad", "unknown": "bad",
    "host-lost": "odd", "cancelled": "odd",
}  # fmt: skip


class Screen(NamedTuple):
    """What a stream can show: `width` is in cells, 0 without a window."""

    width: int = 0
    colour: bool = False


def screen(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Screen:
    """Describe `stream`, by default stdout. NO_COLOR turns colours off (no-color.org), FORCE_COLOR
    turns them on for a pipe.
    """
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    plain = bool(environ.get("NO_COLOR")) or is_dumb(environ)
    forced = environ.get("FORCE_COLOR", "0") not in ("", "0")
    return Screen(_width(stream, environ) if is_terminal else 0, not plain and is_terminal | forced)


def is_dumb(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the terminal can only print lines: no colours, no cursor movement."""
    return environ.get("TERM", "") in ("", "dumb", "unknown")


def _width(stream: TextIO, environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 6 and int(columns):
        return int(columns)
    return window_width(stream)


def window_width(stream: TextIO) -> int:
    """Return the present width of the window in cells; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def kind_of(word: str) -> str:
    """Return `good`, `bad`, `busy` or `odd` for a state or outcome class; "" for other words."""
    return _KINDS.get(word, "")


def paint(text: str, kind: str) -> str:
    """Return the text with the escape sequences of its colour, for a terminal."""
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if kind else text


# --- A line that stays at the bottom --------------------------------------------------------------


ERASE = "\r\x1b[J"  # from the start of the line to the end of the screen
TICK = 0.25  # seconds


class BottomLine:
    """Draws the text of `draw(width)` at the bottom, four times a second and after other output.

    The cursor stays in the first cell, which is blank. When the window gets narrower, a terminal
    may wrap the line or cut it. In both cases the cursor is at its beginning, so erasing from the
    cursor to the end of the screen erases the line and nothing else.
    """

    def __init__(
        self, stream: TextIO, draw: Callable[[int], str], width: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._draw = draw
        self._width = width
        self._lock = threading.RLock()
        self._has_stopped = threading.Event()
        self._is_shown = False
        self._drawn = ""
        self._drawn_width = -1  # cells
        self._thread: threading.Thread | None = None
        self._stderr: Any = None

    def start(self) -> None:
        """Begin to draw. Until `stop`, what is printed to stderr appears above the line, too."""
        self._stderr = sys.stderr
        if sys.stderr.isatty():
            sys.stderr = StreamAbove(self, sys.stderr)
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Restore the terminal."""
        self._has_stopped.set()
        sys.stderr = self._stderr
        with self._lock:
            self.erase()
            self._stream.flush()

    def print(self, text: str, stream: TextIO | None = None) -> None:
        """Print above the line, which is not drawn anew: much output may come at once."""
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
            if not self._has_stopped.is_set():
                self._drawn_width = -1
                self._stream.write(ERASE + self._below(True))
                self._stream.flush()
                self._is_shown = True

    def _below(self, is_shown: bool) -> str:
        """Return the line for the present window; "" if it is not shown."""
        width = self._width()
        if is_shown and width != self._drawn_width:
            self._drawn, self._drawn_width = self._draw(width - 2), width
        return f" {self._drawn}\r" if is_shown else ""

    def _tick(self) -> None:
        while not self._has_stopped.wait(TICK):
            try:
                self.refresh()
            except (OSError, ValueError):  # the terminal or stdout was closed
                return


class StreamAbove:
    """A stream to the same terminal. It prints complete lines above the bottom line.

    `print` writes a line and its newline in two calls; between them the bottom line could overwrite
    the text.
    """

    def __init__(self, bottom: BottomLine, stream: TextIO) -> None:
        self._bottom = bottom
        self._stream = stream
        self._partial = ""  # a line without its newline yet

    def write(self, text: str) -> int:
        lines, end, self._partial = (self._partial + text).rpartition("\n")
        if end:
            self._bottom.print(lines + end, self._stream)
        return len(text)

    def flush(self) -> None:
        partial, self._partial = self._partial, ""
        if partial:
            self._bottom.print(partial, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def live_line(stream: TextIO, draw: Callable[[int], str]) -> Iterator[None]:
    """Show the text of `draw(width)` below other output on stderr, four times a second.

    `stream` is a terminal. The line is erased at the end. For a streaming log it is too slow, and
    `BottomLine` is used (docs/decisions/040-live-output.md).
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


Rest = Callable[[float], str]  # sleeps for these seconds or until a key, and returns the key


@contextmanager
def reading_keys(sleep: Callable[[float], None]) -> Iterator[Rest]:
    """Yield a sleep that a key ends. In the block, keys are not echoed and need no Enter.

    Ctrl-C works as usual. Without a terminal the yielded function only sleeps.
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
        # Read from the descriptor: `select` does not see what Python has buffered.
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(descriptor, 1024).decode(errors="replace")
        if not pressed:  # the terminal was closed, so reading returned at once
            sleep(seconds)
        return pressed[:1]

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield rest
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def end_interrupted() -> int:
    """At a terminal, end this process by SIGINT: only then does a shell end its loop, too.

    Without a terminal, return the exit code for an interruption, on which scripts rely.
    """
    if any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        try:
            sys.stdout.flush()
        except OSError:
            pass  # the reader of stdout has gone
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return INTERRUPTED


# --- Sparklines -----------------------------------------------------------------------------------


BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_NOT_FINITE = "\N{MULTIPLICATION SIGN}"


def sparkline(values: Sequence[float], width: int, breaks: Sequence[int] = ()) -> str:
    """Draw the values as blocks of eight heights, at most `width` characters.

    More values are combined to means; NaN and infinity become a cross. A bar is before each value
    of `breaks`, which are indices, if there is room for bars.
    """
    if not values or width < 1:
        return ""
    breaks = breaks if 2 * len(breaks) < width else ()
    count = min(width - len(breaks), len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [_mean(values[edges[i] : edges[i + 1]]) for i in range(count)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    bars = {sum(edge < each for edge in edges) for each in breaks}
    return "".join(
        f"{'|' if place in bars else ''}{_block(mean, low, high)}"
        for place, mean in enumerate(means)
    )


def _mean(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return math.fsum(value / len(values) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    if low / 2 == high / 2:
        return BLOCKS[3]
    fraction = (value / 2 - low / 2) / (high / 2 - low / 2)  # halved: the differences are finite
    return BLOCKS[min(7, max(0, int(fraction * 8)))]
