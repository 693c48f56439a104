"""The logs of runs: each is followed once, however many tabs show it, and only new lines are read.

A log that is shown has a thread of its own, which follows the run as `batchml logs --follow` does,
with its attempts, children and nodes. It also finds the metrics in the lines, for the curves. Few
logs are followed at a time; one that no tab has asked for lately ends first.
"""

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

from batchml.dashboard.app import Response
from batchml.dashboard.html import Html, tag, visible
from batchml.dashboard.outputs import file_response
from batchml.errors import BatchmlError, LogDamaged
from batchml.handles import RunHandle
from batchml.runs.metrics.series import Metrics, Series
from batchml.runs.watch.events import (
    DAMAGED,
    ContactLost,
    LogClosed,
    LogOpened,
    OutputLine,
    PollingPaused,
    RunEvent,
    RunMessage,
    StatusChanged,
)

MOST_LINES = 100_000  # kept of a run; the newest
MOST_KEPT = 32_000_000  # characters of these lines
MOST_LOGS = 8  # followed or kept at a time
MOST_CHARACTERS = 4000  # of a line that is shown; the file for download has the whole line
_PLAIN = 500  # lines in a page without scripts
_IN_ANSWER = 20_000  # lines of one answer
_PATIENCE = 2.0  # seconds that the first curves of a long log are waited for
_UNASKED = 120.0  # seconds without a question, after which following a log ends
# Sequences of terminals (ECMA-48, sections 5.4 and 5.6): CSI such as colours, OSC such as links.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\|$))")

Line = tuple[int, str, str]  # milliseconds since the epoch, child, text


class LogLines:
    """The newest lines of a log, each with its number, and what is to be said about them."""

    def __init__(self, name: str = "") -> None:
        """`name`: of this reading; another one may give the lines of children in another order."""
        self.name = name
        self._lines: deque[Line] = deque()
        self._size = 0  # characters of these lines
        self.total = 0  # lines so far, with those that are no longer kept
        self.notice = ""
        self.is_over = False

    def take(self, event: RunEvent) -> None:
        """Note one event of the run."""
        if isinstance(event, OutputLine):
            self._add(event.timestamp, event.child, event.text)
        elif isinstance(event, LogOpened):
            if event.number > 1:
                self._add(0, event.child, f"--- attempt {event.number} ---")
        elif isinstance(event, LogClosed):
            if event.proof == DAMAGED and event.check is not None:
                self.notice = event.check.describe(event.child)
        elif isinstance(event, ContactLost):
            self.notice = f"No new lines now: {event.error}"
            return
        elif isinstance(event, RunMessage):
            self.notice = event.text
        if isinstance(event, OutputLine) and self.notice.startswith("No new lines now: "):
            self.notice = ""

    def _add(self, timestamp: int, child: str, text: str) -> None:
        shown = _shown(text)
        self._lines.append((timestamp, child, shown))
        self._size += len(shown)
        self.total += 1
        while len(self._lines) > MOST_LINES or self._size > MOST_KEPT:
            self._size -= len(self._lines.popleft()[2])

    def document(self, after: int) -> dict[str, Any]:
        """The lines after the first `after` of them. `first` is the number of the first line here.

        It is larger than `after` if the lines between are no longer kept.
        """
        oldest = self.total - len(self._lines)
        first = min(max(after, oldest), self.total)
        # Counted from the end, where new lines are: a deque is slow in its middle.
        found = list(self._lines)[first - oldest :][:_IN_ANSWER] if first < self.total else []
        return {
            "first": first, "total": self.total, "oldest": oldest, "lines": found,
            "log": self.name, "notice": visible(self.notice), "over": self.is_over,
        }  # fmt: skip


def log_section(job_id: str) -> Html:
    """The place of a log with its search; the script fills it."""
    levels = (
        tag("option", words, value=value)
        for value, words in (("", "All lines"), ("warning", "Warnings and errors"),
                             ("error", "Errors"))
    )  # fmt: skip
    bar = tag(
        "div",
        tag("input", id="log-search", type="search", placeholder="Search the log",
            aria_label="Search the log", autocomplete="off", spellcheck="false"),
        tag("button", "Previous", id="log-previous", type="button"),
        tag("button", "Next", id="log-next", type="button"),
        tag("button", "First error", id="log-error", type="button"),
        tag("select", *levels, id="log-level", aria_label="Which lines"),
        tag("select", tag("option", "All parts", value=""), id="log-part", hidden=True,
            aria_label="Which child or node"),
        tag("label", tag("input", id="log-wrap", type="checkbox", checked=True), " Wrap"),
        tag("label", tag("input", id="log-follow", type="checkbox", checked=True), " Follow"),
        tag("a", "Download", href=f"/run/{job_id}/log.txt", download=True),
        tag("span", "", id="log-count", role="status"),
        class_="bar",
    )  # fmt: skip
    place = tag("div", id="log", class_="log", tabindex="0", role="log", aria_label="Log",
                aria_live="off", data_lines=f"/run/{job_id}/log")  # fmt: skip
    plain = tag("noscript", tag("div", data_panel=f"/run/{job_id}/lines"))
    notice = tag("p", id="log-notice", class_="dim", role="status")
    return tag("section", tag("h2", "Log", id="log-title"), bar, notice, place, plain,
               class_="card wide")  # fmt: skip


def last_lines(handle: RunHandle) -> Html:
    """The end of a log, for browsers without scripts."""
    newest = deque((_shown(_with_child(each.child, each.text)) for each in handle.logs()), _PLAIN)
    return tag("pre", "\n".join(newest) or "It has printed nothing.")


def _with_child(child: str, text: str) -> str:
    return f"{child} | {text}" if child else text


def log_file(handle: RunHandle) -> Response:
    """The whole log as a file to save: the lines as they were printed, no matter how many."""
    name = "".join(each for each in handle.job_id[:8] if each.isalnum()) or "run"

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            try:
                for line in handle.logs():
                    file.write(f"{_with_child(line.child, line.text)}\n")
            except LogDamaged as error:
                file.write(f"# {error}\n")

    return file_response(f"{name}.log", write)


def _shown(text: str) -> str:
    """A line as a terminal leaves it: the last state of a progress bar, without colours and links;
    other invisible characters are marked, and a very long line is cut."""
    last = text.rstrip("\r").rpartition("\r")[2]
    more = len(last) - MOST_CHARACTERS
    cut = last if more <= 0 else f"{last[:MOST_CHARACTERS]} ... ({more} more characters)"
    return visible(_SEQUENCE.sub("", cut))


def _has_no_log_yet(event: RunEvent) -> bool:
    """Whether the run waits, so that there is nothing to read."""
    if not isinstance(event, StatusChanged):
        return False
    status = event.run.status
    return not (status.is_terminal or status.holds_resources or event.run.attempts)


class _Follower:
    """A thread that follows one run until it ends, or until `stop` is set."""

    def __init__(self, handle: RunHandle, now: Callable[[], float]) -> None:
        self._handle = handle
        self._now = now
        self._lock = threading.Lock()
        self._lines = LogLines(token_hex(4))
        record = handle.seen.record if handle.seen else None
        self._metrics = Metrics(record.patterns if record else {})
        self._first = threading.Event()  # the first lines are there, or the log has none
        self.stop = threading.Event()
        self.asked_at = now()
        self.is_broken = False  # the run could not be followed; the next question tries again
        threading.Thread(target=self._follow, name="log", daemon=True).start()

    def _follow(self) -> None:
        try:
            for event in self._handle.watch(stop=self.stop):
                with self._lock:
                    self._lines.take(event)
                    deque(self._metrics.watch((event,)), maxlen=0)
                if isinstance(event, PollingPaused | ContactLost) or _has_no_log_yet(event):
                    self._first.set()
                if self.stop.is_set():
                    return
        except BatchmlError as error:
            with self._lock:
                self._lines.notice = str(error)
            self.is_broken = True
        finally:
            with self._lock:
                self._lines.is_over = True
            self._first.set()

    def document(self, after: int) -> dict[str, Any]:
        self.asked_at = self._now()
        self._first.wait(1.0)
        with self._lock:
            return self._lines.document(after)

    def series(self, patience: float) -> tuple[dict[str, Series], bool]:
        """The metrics of the lines so far, and whether those are all that there are now.

        Of a run that has ended these are all when its watching is over: the logs of its attempts
        and children come one after the other.
        """
        self.asked_at = self._now()
        is_whole = self._first.wait(patience)
        with self._lock:
            run = self._handle.seen.run if self._handle.seen else None
            has_ended = run is not None and run.status.is_terminal
            return self._metrics.series, self._lines.is_over if has_ended else is_whole


class FollowedLogs:
    """The logs that tabs have asked for lately, by job id."""

    def __init__(self, now: Callable[[], float], most: int = MOST_LOGS) -> None:
        """`now`: seconds of a clock that only runs forwards. `most`: logs at a time."""
        self._now = now
        self._most = most
        self._lock = threading.Lock()
        self._followers: OrderedDict[str, _Follower] = OrderedDict()  # the last asked for is last

    def document(self, handle: RunHandle, after: int) -> dict[str, Any]:
        """The lines of a run after the first `after` of them; see `LogLines.document`."""
        return self._follower(handle).document(after)

    def series(
        self, handle: RunHandle, patience: float = _PATIENCE
    ) -> tuple[dict[str, Series], bool]:
        """The metrics of a run, and whether its log has been read up to its present end."""
        return self._follower(handle).series(patience)

    def _follower(self, handle: RunHandle) -> _Follower:
        with self._lock:
            found = self._followers.get(handle.job_id)
            if found is None or found.stop.is_set() or found.is_broken:
                found = self._followers[handle.job_id] = _Follower(handle, self._now)
            self._followers.move_to_end(handle.job_id)
            self._drop()
        return found

    def drop_left(self) -> None:
        """End what no tab has asked for lately, also while nothing is asked."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        """Forget the logs beyond `most`, and those that nobody has asked for."""
        for job_id, each in list(self._followers.items()):
            is_left = self._now() - each.asked_at > _UNASKED
            if is_left or len(self._followers) > self._most:
                each.stop.set()
                del self._followers[job_id]

    def stop(self) -> None:
        with self._lock:
            for each in self._followers.values():
                each.stop.set()
