"""Send a run's outputs to its store: new files while the run goes on, the rest at its end."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, Optional, Tuple

from batchml.runtime.entry.folders import FileState, list_entries
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import is_main_node
from batchml.runtime.storage.store import Store

# --- Polling --------------------------------------------------------------------------------------


class StorePoller:
    """Calls `poll` regularly from a thread, so that the log of the run never waits for a store.

    An exception that `poll` raises is passed to `on_error`.
    """

    def __init__(
        self, poll: Callable[[], object], on_error: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._poll, self._on_error = poll, on_error
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self, interval: float) -> None:
        """`interval`: seconds between two calls."""
        thread = threading.Thread(target=self._run, args=(interval,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: everything is sent at the end
            return
        self._thread = thread

    def end(self) -> None:
        """Wait until the current call has returned, and make no other."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, interval: float) -> None:
        while not self._over.wait(interval):
            try:
                self._poll()
            except Exception as error:
                self._on_error(error)


# --- Outputs --------------------------------------------------------------------------------------


EVERY = 60.0  # seconds between two polls
KEPT = "work"  # the folder of the working folder's files among the outputs
_PARALLEL = 8  # files that are sent at once: sending a small file is mostly waiting for S3

_Result = Tuple[str, str]  # name, error


def output_prefix(environ: Mapping[str, str]) -> str:
    """The prefix of this container's outputs in the run's store.

    `output/`; for the child of an array `output/INDEX/`; for a node that is not the main node
    `output/node-INDEX/`.
    """
    index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX")
    if index:
        return f"output/{index}/"
    if is_main_node(environ):
        return "output/"
    return f"output/node-{environ['AWS_BATCH_JOB_NODE_INDEX']}/"


class OutputSender:
    """Sends the new and changed files of a folder to a store.

    While the run goes on, a file is sent once it has not changed between two polls. `finish` sends
    all files that the store does not have yet.
    """

    def __init__(
        self, folder: str, store: Store, prefix: str, sent: Optional[Mapping[str, FileState]] = None
    ) -> None:
        """`sent`: files that the store has already."""
        self._folder = folder
        self._store = store
        self._prefix = prefix
        self.sent: Dict[str, FileState] = dict(sent or {})
        self._before: Mapping[str, FileState] = {}  # at the last poll
        self._links = False
        self._store_failed = (
            False  # the store did not answer: the other files wait for a later poll
        )
        self._poller = StorePoller(self.poll)  # `finish` reports what could not be sent

    def start(self, interval: float = EVERY) -> None:
        self._poller.start(interval)

    def finish(self) -> List[str]:
        """Send the remaining files. Return a line for each file that could not be sent."""
        self._poller.end()
        return [f"{name}: {why}" for name, why in self.send(files_of(self._folder)).items()]

    def poll(self) -> None:
        """Send the files that have not changed since the last poll."""
        now = files_of(self._folder)
        self.send(self._unchanged(now))
        self._before = now

    def mirror(self, files: Mapping[str, FileState], is_last: bool = False) -> Dict[str, str]:
        """Make the store have these files, and no other that was sent before.

        Unless `is_last`, only files that have not changed since the last call are sent, and only
        files that two calls miss are removed. Return errors by name. Raises StoreError.
        """
        # Before the end a link would be no copy: the program may write to the file again.
        self._links = is_last
        sent = files if is_last else self._unchanged(files)
        # The oldest first: a file that names the newest checkpoint is written after it.
        errors = self.send(sent, sorted(sent, key=lambda name: (sent[name][1], name)))
        gone = set(self.sent) - set(files) - set(() if is_last else self._before)
        if gone:
            self._store.delete(*(self._prefix + name for name in sorted(gone)))
        self.sent = {name: state for name, state in self.sent.items() if name not in gone}
        self._before = files
        return errors

    def _unchanged(self, files: Mapping[str, FileState]) -> Dict[str, FileState]:
        return {name: state for name, state in files.items() if self._before.get(name) == state}

    def send(self, files: Mapping[str, FileState], order: Sequence[str] = ()) -> Dict[str, str]:
        """Send the files that the store does not have in this state, by name or in `order`. Return
        errors by name.
        """
        names = [name for name in order or sorted(files) if self.sent.get(name) != files[name]]
        self._store_failed = False
        results = self._send_all(names, lambda name: (name, self._send_one(name, files[name])))
        return {name: error for name, error in results if error}

    def _send_all(self, names: List[str], send: Callable[[str], _Result]) -> List[_Result]:
        if len(names) > _PARALLEL:
            from concurrent.futures import ThreadPoolExecutor

            try:
                with ThreadPoolExecutor(_PARALLEL) as pool:
                    return list(pool.map(send, names))
            except RuntimeError:  # no thread can be started
                pass
        return [send(name) for name in names]

    def _send_one(self, name: str, state: FileState) -> str:
        """Send a file. Return the error; empty if the store has the file now."""
        if self.sent.get(name) == state:  # sent before the pool failed to start a thread
            return ""
        if self._store_failed:
            return "not tried any more"
        try:
            put = self._store.link_file if self._links else self._store.put_file
            put(self._prefix + name, os.path.join(self._folder, name))
        except Exception as error:  # for example a name that is not text; the others are sent
            self._store_failed = self._store_failed or bool(getattr(error, "temporary", False))
            return error_line(error)
        self.sent[name] = state
        return ""


def files_of(folder: str) -> Dict[str, FileState]:
    """Path below the folder -> state, of regular files and links to regular files."""
    found: Dict[str, FileState] = {}
    left = [""]
    while left:  # os.walk is recursive, and fails for folders deeper than Python's stack
        below = left.pop()
        for entry in list_entries(os.path.join(folder, below)):
            path = os.path.join(below, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    left.append(path)
                    continue
                state = entry.stat()
            except OSError:
                continue  # removed meanwhile, or a broken link
            if stat.S_ISREG(state.st_mode):
                found[path] = (state.st_size, state.st_mtime_ns)
    return found
