"""Outputs on their way to the store: while the run goes on, and what is left at its end."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from typing import Callable, Dict, List, Optional, Tuple

from batchml.runtime.storage.store import Store

# --- polling in the background --------------------------------------------------------------------
# Looking again and again, from a thread, so that a run's output never waits for the store.


class Looks:
    """Calls `look` every so often until it is ended. What it raises goes to `failed`."""

    def __init__(
        self, look: Callable[[], object], failed: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._look, self._failed = look, failed
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self, every: float) -> None:
        """`every`: seconds between two looks."""
        thread = threading.Thread(target=self._go_round, args=(every,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: then all goes at the end
            return
        self._thread = thread

    def end(self) -> None:
        """No look is under way when this returns, and none follows."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _go_round(self, every: float) -> None:
        while not self._over.wait(every):
            try:
                self._look()
            except Exception as error:
                self._failed(error)


# --- outputs --------------------------------------------------------------------------------------


EVERY = 60.0  # seconds between two looks
_AT_ONCE = 8  # files; a small one is mostly waiting for S3

_State = Tuple[int, int]  # size, time of the last change
_Said = Tuple[str, str]  # name, what went wrong


def prefix_of(environ: Mapping[str, str]) -> str:
    """Where in a run's store the outputs of this container go.

    `output/`, for the child of an array `output/INDEX/`, for a node that is not the main one
    `output/node-INDEX/`.
    """
    index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX")
    if index:
        return f"output/{index}/"
    node = environ.get("AWS_BATCH_JOB_NODE_INDEX")
    if node and node != environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX"):
        return f"output/node-{node}/"
    return "output/"


class Outputs:
    """Sends the files of a folder, each when it is new or changed.

    While the run goes on, a file is sent once it has rested from one look to the next, from a
    thread, so that the run's output never waits for S3. At the end everything is sent that is not
    there yet.
    """

    def __init__(self, folder: str, store: Store, prefix: str) -> None:
        self._folder = folder
        self._store = store
        self._prefix = prefix
        self._sent: Dict[str, _State] = {}
        self._seen: Dict[str, _State] = {}
        self._away = False  # the store did not answer: the next look asks again
        self._looks = Looks(self.look)  # the end tells what could not be sent

    def start(self, every: float = EVERY) -> None:
        self._looks.start(every)

    def finish(self) -> List[str]:
        """Send the rest; what could not be sent, as a line for each file."""
        self._looks.end()
        return [f"{name}: {why}" for name, why in self.send(files_of(self._folder)).items()]

    def look(self) -> None:
        """Send what has rested since the last look."""
        now = files_of(self._folder)
        self.send({name: state for name, state in now.items() if self._seen.get(name) == state})
        self._seen = now

    def send(self, files: Mapping[str, _State]) -> Dict[str, str]:
        """Send those that are not there in this state; what went wrong, by name."""
        names = [name for name in sorted(files) if self._sent.get(name) != files[name]]
        self._away = False
        said = self._each(names, lambda name: (name, self._send_one(name, files[name])))
        return {name: trouble for name, trouble in said if trouble}

    def _each(self, names: List[str], send: Callable[[str], _Said]) -> List[_Said]:
        if len(names) > _AT_ONCE:
            from concurrent.futures import ThreadPoolExecutor

            try:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    return list(pool.map(send, names))
            except RuntimeError:  # no thread to be had
                pass
        return [send(name) for name in names]

    def _send_one(self, name: str, state: _State) -> str:
        """What went wrong; empty for a file that is there now."""
        if self._sent.get(name) == state:
            return ""
        if self._away:
            return "not tried any more"
        try:
            self._store.put_file(self._prefix + name, os.path.join(self._folder, name))
        except Exception as error:  # a name that is not text, say; the others go on
            self._away = self._away or bool(getattr(error, "temporary", False))
            return " ".join(str(error).split()) or type(error).__name__
        self._sent[name] = state
        return ""


def files_of(folder: str) -> Dict[str, _State]:
    """Path below the folder -> state, of the regular files, or links to such, that are there."""
    found: Dict[str, _State] = {}
    left = [""]
    while left:  # os.walk, which calls itself, ends where folders lie deeper than the stack
        below = left.pop()
        try:
            entries = list(os.scandir(os.path.join(folder, below)))
        except OSError:
            continue  # gone again, or not ours to look into
        for entry in entries:
            path = os.path.join(below, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    left.append(path)
                    continue
                state = entry.stat()
            except OSError:
                continue  # gone again, or a link to nothing
            if stat.S_ISREG(state.st_mode):
                found[path] = (state.st_size, state.st_mtime_ns)
    return found
