"""One attempt at a trial in its container: before, while, and after its command runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, Optional

from batchml.runtime.entry.attempt import RunningAttempt
from batchml.runtime.processes import changes_of
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, no_check
from batchml.runtime.sweep.assignment import claim_trial
from batchml.runtime.sweep.checkpoints import (
    TrialProgress,
    fetch_checkpoints,
    has_checkpoints,
    load_progress,
    save_progress,
    shared_checkpoint_folder,
)
from batchml.runtime.sweep.watch import TrialWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.checkpoint.remote import CheckpointSender


class TrialAttempt:
    """One attempt at a trial, which is found and claimed here. Raises NothingToRun."""

    def __init__(
        self,
        env: RuntimeEnv,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        check: Callable[[], None] = no_check,
    ) -> None:
        self._environ, self._url, self._attempt, self._say = environ, env.sweep, env.attempt, say
        self._work = claim_trial(open_store(env.sweep, environ, check), env, environ)
        self._folder = shared_checkpoint_folder(env, self._work)
        self.env = env._replace(checkpoint_dir=self._folder, grace=self._work.contract.grace)
        self._progress = TrialProgress(0, None)
        self._sender: Optional[CheckpointSender] = (
            None  # sends checkpoints to the store, where no folder is shared
        )
        self._watch: Optional[TrialWatch] = None
        self.changes = -1  # a descriptor that is readable when the program has reported

    def command(self) -> List[str]:
        return self._work.command()

    def variables(self) -> Dict[str, str]:
        """The variables of the program beside those of any run."""
        return self._work.variables()

    def fetch_checkpoints(self, folder: str) -> None:
        """Fetch checkpoints if no folder is shared. Raises StoreError, OSError."""
        if not self._folder and self._work.is_main:
            store = open_store(self._url, self._environ)
            self._sender = fetch_checkpoints(store, self._work, self._attempt, folder, self._say)
        self._folder = folder
        self._continue_from_checkpoint()

    def _continue_from_checkpoint(self) -> None:
        """Continue at the step of the checkpoints, if there are any."""
        work, progress = self._work, load_progress(self._folder)
        if not has_checkpoints(self._folder):
            if work.after:
                self._say("batchml notice: this trial has no checkpoint, so it begins anew")
            self._work = work._replace(after=0)
        elif progress is not None and (not work.limit or progress.step < work.limit):
            self._work = work._replace(after=progress.step, shift=progress.shift)

    def start(self, running: RunningAttempt) -> None:
        """To be called when the command is about to start."""
        if self._sender is not None:
            self._sender.start()
        if self._work.is_main:
            store = open_store(self._url, self._environ, limits=BRIEF)
            self._watch = TrialWatch(self._work, store, running, running.env.metrics, self._say)
            self._watch_metrics_file(running.env.metrics)

    def _watch_metrics_file(self, metrics: str) -> None:
        """Watch for reports if the program waits for decisions; otherwise `tick` reads them.

        Not always, because to close such a descriptor takes the kernel 15 ms at the end.
        """
        if self._work.may_be_pruned or self._work.is_part:
            try:
                self.changes = changes_of(metrics)
            except OSError:
                pass

    def read_output(self, lines: Sequence[bytes]) -> None:
        """Lines that the program has printed."""
        if self._watch is not None:
            self._watch.read_output(lines)

    def read_reports(self) -> None:
        """The metrics file has changed."""
        try:
            os.read(self.changes, 65_536)
        except BlockingIOError:
            pass
        if self._watch is not None:
            self._watch.read_reports()

    def tick(self, now: float) -> None:
        if self._watch is not None:
            self._watch.tick(now)
            self._save_progress(self._watch.progress)

    def _save_progress(self, progress: TrialProgress) -> None:
        if progress != self._progress:
            self._progress = progress
            save_progress(self._folder, progress)

    def finish(self) -> None:
        """Part of the plug-in interface; the work is done in `end`."""

    def end(self, code: int, was_signalled: bool, why: str = "") -> int:
        """Report the end of the trial; the exit code of the container.

        `why`: the reason why the command did not start.
        """
        if not self._work.is_main:
            return code
        store = open_store(self._url, self._environ)
        watch = self._watch or TrialWatch(self._work, store, _NotStarted(), "", self._say)
        ending = watch.ending(code, was_signalled, why)
        self._save_progress(watch.progress)
        trouble = self._sender.finish() if self._sender is not None else []
        if trouble:
            self._say(f"batchml: checkpoints could not be stored: {trouble[0]}")
        return watch.send_end(ending, store, time.sleep)


class _NotStarted:
    """A program that did not start."""

    def stop(self, reason: str, code: int) -> None:
        pass

    def request_stop(self) -> None:
        pass
