"""One attempt at a trial in its container: before, while, and after its command runs.

A trial may run in several batches, which share its checkpoints. Its progress is stored beside them,
because a program that continues may print no step numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, Optional

from batchml.runtime.entry.attempt import RunningAttempt
from batchml.runtime.processes import changes_of
from batchml.runtime.protocol.sweep import checkpoint_prefix
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.files import read_json
from batchml.runtime.storage.store import BRIEF, Store, no_check
from batchml.runtime.sweep.assignment import TrialAssignment, TrialProgress, claim_trial
from batchml.runtime.sweep.watch import TrialWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.checkpoint.remote import CheckpointSender


class TrialAttempt:
    """One attempt at a trial, as an attempt plug-in.

    The constructor finds and claims the trial. It raises NotStarted and StoreError.
    """

    def __init__(
        self,
        env: RuntimeEnv,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        check: Callable[[], None] = no_check,
    ) -> None:
        self._environ, self._url, self._attempt, self._say = environ, env.sweep, env.attempt, say
        self._assignment = claim_trial(open_store(env.sweep, environ, check), env, environ)
        self._folder = shared_checkpoint_folder(env, self._assignment)
        self.env = env._replace(checkpoint_dir=self._folder, grace=self._assignment.contract.grace)
        self._progress = TrialProgress(0, None)
        # sends checkpoints to the store, if the nodes share no folder
        self._sender: Optional[CheckpointSender] = None
        self._watch: Optional[TrialWatch] = None
        self.changes = -1  # a descriptor that is readable when the program has reported

    def command(self) -> List[str]:
        return self._assignment.command()

    def variables(self) -> Dict[str, str]:
        """The variables of the program that only a trial has."""
        return self._assignment.variables()

    def fetch_checkpoints(self, folder: str) -> None:
        """Fetch checkpoints into `folder` if no folder is shared. Raises StoreError and OSError."""
        if not self._folder and self._assignment.is_main:
            store = open_store(self._url, self._environ)
            self._sender = open_checkpoint_sender(
                store, self._assignment, self._attempt, folder, self._say
            )
        self._folder = folder
        self._continue_from_checkpoint()

    def _continue_from_checkpoint(self) -> None:
        """Continue at the step of the checkpoints, if there are any."""
        assignment, progress = self._assignment, load_progress(self._folder)
        if not has_checkpoints(self._folder):
            if assignment.after:
                self._say("batchml notice: this trial has no checkpoint, so it starts from scratch")
            self._assignment = assignment._replace(after=0)
        elif progress is not None and (not assignment.limit or progress.step < assignment.limit):
            self._assignment = assignment._replace(after=progress.step, shift=progress.shift)

    def start(self, running: RunningAttempt) -> None:
        """Begin to watch; call this when the command is about to start."""
        if self._sender is not None:
            self._sender.start()
        if self._assignment.is_main:
            store = open_store(self._url, self._environ, limits=BRIEF)
            self._watch = TrialWatch(
                self._assignment, store, running, running.env.metrics, self._say
            )
            self._watch_metrics_file(running.env.metrics)

    def _watch_metrics_file(self, metrics: str) -> None:
        """Notice reports at once if the program waits for decisions; otherwise `tick` reads them.

        This is not done always, because the kernel takes 15 ms to close such a descriptor.
        """
        if self._assignment.may_be_pruned or self._assignment.may_continue:
            try:
                self.changes = changes_of(metrics)
            except OSError:
                pass

    def read_output(self, lines: Sequence[bytes]) -> None:
        """Take lines that the program has printed."""
        if self._watch is not None:
            self._watch.read_output(lines)

    def read_reports(self) -> None:
        """Read the metrics file, after `changes` became readable."""
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
        """Required by the plug-in interface. Does nothing: `end` reports the end of the trial."""

    def end(self, code: int, was_signalled: bool, why: str = "") -> int:
        """Report the end of the trial; return the exit code of the container.

        `was_signalled`: a signal from outside requested a stop. `why`: the reason why the command
        did not start.
        """
        if not self._assignment.is_main:
            return code
        store = open_store(self._url, self._environ)
        watch = self._watch or TrialWatch(self._assignment, store, _NoProgram(), "", self._say)
        ending = watch.ending(code, was_signalled, why)
        self._save_progress(watch.progress)
        trouble = self._sender.finish() if self._sender is not None else []
        if trouble:
            self._say(f"batchml: checkpoints could not be stored: {trouble[0]}")
        return watch.send_end(ending, store, time.sleep)


class _NoProgram:
    """A program that did not start."""

    def stop(self, reason: str, code: int) -> None:
        pass

    def request_stop(self) -> None:
        pass


# --- The checkpoints of a trial -------------------------------------------------------------------


_PROGRESS_FILE = ".batchml-step"
_OTHER_PREFIXES = (".batchml-", ".saving-", ".removing-")  # names that are not checkpoints


def shared_checkpoint_folder(env: RuntimeEnv, assignment: TrialAssignment) -> str:
    """Make and return the folder of the trial's checkpoints; "" if its batches share no folder.

    For a trial that starts from scratch the folder is emptied.
    """
    if "://" not in env.sweep:
        path = os.path.join(env.sweep, *checkpoint_prefix(assignment.entry.trial).split("/")[:-1])
    elif env.workspace:
        key, trial = assignment.contract.key, str(assignment.entry.trial)
        path = os.path.join(env.workspace, ".batchml", "sweeps", key, trial, "checkpoint")
    else:
        return ""
    if assignment.is_main and not assignment.entry.resumes and env.attempt == 1:
        shutil.rmtree(path, ignore_errors=True)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return ""
    return path


def open_checkpoint_sender(
    store: Store, assignment: TrialAssignment, attempt: int, folder: str, say: Callable[[str], None]
) -> CheckpointSender:
    """Fetch the checkpoints of earlier batches and attempts; return the sender of new checkpoints.

    Raises StoreError and OSError.
    """
    from batchml.runtime.checkpoint.remote import CheckpointSender, fetch_newest

    prefix = checkpoint_prefix(assignment.entry.trial)
    if not assignment.entry.resumes and attempt == 1:
        store.delete(*store.keys(prefix))  # the trial starts from scratch
    else:
        fetch_newest(store, prefix, folder, say)
    return CheckpointSender(folder, store, prefix)


def has_checkpoints(folder: str) -> bool:
    try:
        return any(not name.startswith(_OTHER_PREFIXES) for name in os.listdir(folder))
    except OSError:
        return False


def save_progress(folder: str, progress: TrialProgress) -> None:
    """Store the trial's progress beside its checkpoints, if there are any."""
    if has_checkpoints(folder):
        try:
            with open(os.path.join(folder, _PROGRESS_FILE), "w", encoding="ascii") as file:
                json.dump(progress, file)
        except OSError:
            pass  # a full disk, which the program itself will report


def load_progress(folder: str) -> Optional[TrialProgress]:
    """The progress of an earlier attempt or batch; None if it is unknown."""
    try:
        step, shift = read_json(os.path.join(folder, _PROGRESS_FILE))
        return TrialProgress(int(step), None if shift is None else int(shift))
    except (OSError, TypeError, ValueError):
        return None
