"""A trial of a sweep, as the entry of its container sees it: before, while and after it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, Optional

from batchml.runtime.entry.attempt import Running
from batchml.runtime.processes import changes_of
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import BRIEF, go_on, open_store
from batchml.runtime.sweep.assignment import begin
from batchml.runtime.sweep.checkpoints import (
    Place,
    checkpoint_folder,
    fetch_checkpoints,
    has_checkpoints,
    recall,
    remember,
)
from batchml.runtime.sweep.watch import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.checkpoint.remote import Kept


# --- the trial ------------------------------------------------------------------------------------


class Trial:
    """Found and claimed when it is made. Raises `sweep_work.Over` where nothing is to be run."""

    def __init__(
        self,
        env: RuntimeEnv,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        check: Callable[[], None] = go_on,
    ) -> None:
        self._environ, self._url, self._attempt, self._say = environ, env.sweep, env.attempt, say
        self._work = begin(open_store(env.sweep, environ, check), env, environ)
        self._folder = checkpoint_folder(env, self._work)
        self.env = env._replace(checkpoint_dir=self._folder, grace=self._work.course.grace)
        self._place = Place(0, None)
        self._kept: Optional[Kept] = None  # the checkpoints, where no folder is shared
        self._watch: Optional[Watch] = None
        self.changes = -1  # a descriptor that can be read when the program has reported

    def command(self) -> List[str]:
        return self._work.command()

    def variables(self) -> Dict[str, str]:
        """What the program sees besides the variables of any run."""
        return self._work.variables()

    def bring_checkpoints(self, folder: str) -> None:
        """Fetch them where no folder is shared, and keep what comes. Raises StoreError, OSError."""
        if not self._folder and self._work.is_main:
            board = open_store(self._url, self._environ)
            self._kept = fetch_checkpoints(board, self._work, self._attempt, folder, self._say)
        self._folder = folder
        self._go_on()

    def _go_on(self) -> None:
        """Take up the steps where the checkpoints are."""
        work, place = self._work, recall(self._folder)
        if not has_checkpoints(self._folder):
            if work.after:
                self._say("batchml notice: this trial left no checkpoint, so it begins anew")
            self._work = work._replace(after=0)
        elif place is not None and (not work.limit or place.step < work.limit):
            self._work = work._replace(after=place.step, shift=place.shift)

    def start(self, running: Running) -> None:
        """The command is about to begin."""
        if self._kept is not None:
            self._kept.start()
        if self._work.is_main:
            board = open_store(self._url, self._environ, patience=BRIEF)
            self._watch = Watch(self._work, board, running, running.env.metrics, self._say)
            self._listen(running.env.metrics)

    def _listen(self, metrics: str) -> None:
        """Hear of reports at once where the program waits for the answer; else once a second.

        Only there, because it holds up the end: the kernel takes 15 ms to let go of such a
        descriptor.
        """
        if self._work.is_judged or self._work.is_part:
            try:
                self.changes = changes_of(metrics)
            except OSError:
                pass

    def hear(self, lines: Sequence[bytes]) -> None:
        """What the program printed."""
        if self._watch is not None:
            self._watch.hear(lines)

    def look(self) -> None:
        """The program has reported."""
        try:
            os.read(self.changes, 65_536)
        except BlockingIOError:
            pass
        if self._watch is not None:
            self._watch.read_file()

    def tick(self, now: float) -> None:
        if self._watch is not None:
            self._watch.tick(now)
            self._remember(self._watch.place)

    def _remember(self, place: Place) -> None:
        if place != self._place:
            self._place = place
            remember(self._folder, place)

    def finish(self) -> None:
        """As a companion; what there is to do comes last of all, in `end`."""

    def end(self, code: int, was_asked: bool, why: str = "") -> int:
        """The exit code of the container, once its end was told.

        `why` is what kept the command from beginning.
        """
        if not self._work.is_main:
            return code
        board = open_store(self._url, self._environ)
        watch = self._watch or Watch(self._work, board, _NeverBegun(), "", self._say)
        ending = watch.ending(code, was_asked, why)
        self._remember(watch.place)
        trouble = self._kept.finish() if self._kept is not None else []
        if trouble:
            self._say(f"batchml: checkpoints could not be kept: {trouble[0]}")
        return watch.tell(ending, board, time.sleep)


class _NeverBegun:
    """A program that cannot be stopped any more."""

    def stop(self, reason: str, code: int) -> None:
        pass

    def ask(self) -> None:
        pass
