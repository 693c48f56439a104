"""The folders and files of an attempt: those that it was given, and in AWS those made here."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from typing import Dict, List, Optional, Sequence, Tuple

from batchml.runtime.protocol.variables import RuntimeEnv

TEMPORARY = "batchml-"  # how the name of an attempt's own folder begins
_CHECKPOINT = "checkpoint"


class Temporary:
    """A folder that is made when it is first needed and goes with the attempt."""

    def __init__(self) -> None:
        self._path = ""

    @property
    def made(self) -> str:
        """Its path; empty while it was not needed."""
        return self._path

    def path(self) -> str:
        """Raises OSError where nothing can be written."""
        if not self._path:
            try:
                self._path = tempfile.mkdtemp(prefix=TEMPORARY)
            except FileNotFoundError:  # a read-only image
                self._path = tempfile.mkdtemp(prefix=TEMPORARY, dir="/dev/shm")
        return self._path

    def remove(self) -> None:
        if self._path:
            try:
                shutil.rmtree(self._path, ignore_errors=True)
            except RecursionError:
                pass  # too deep for Python; the container goes, and this with it


def arrange(env: RuntimeEnv, temporary: Temporary) -> RuntimeEnv:
    """`env` with a place for everything that a run is promised. Raises OSError.

    What was given is made if it is not there. Outside a run nothing is added.
    """
    for folder in (env.output_dir, env.checkpoint_dir):
        if folder:
            os.makedirs(folder, exist_ok=True)
    if not env.is_run:
        return env
    return env._replace(
        output_dir=env.output_dir or _made(temporary, "output"),
        checkpoint_dir=env.checkpoint_dir or _checkpoints(env) or _made(temporary, _CHECKPOINT),
        metrics=env.metrics or os.path.join(temporary.path(), "metrics"),
        stop_file=env.stop_file or os.path.join(temporary.path(), "stop"),
    )


def variables(env: RuntimeEnv) -> Dict[str, str]:
    """What the command sees of it."""
    found = {
        "BATCHML_RUN": env.run,
        "BATCHML_ATTEMPT": str(env.attempt),
        "BATCHML_OUTPUT_DIR": env.output_dir,
        "BATCHML_CHECKPOINT_DIR": env.checkpoint_dir,
        "BATCHML_METRICS": env.metrics,
        "BATCHML_STOP_FILE": env.stop_file,
    }
    return {name: value for name, value in found.items() if value} if env.is_run else {}


def _made(temporary: Temporary, name: str) -> str:
    path = os.path.join(temporary.path(), name)
    os.makedirs(path, exist_ok=True)
    return path


def _checkpoints(env: RuntimeEnv) -> str:
    """In the workspace, where every attempt of the run finds it; empty without one to write to."""
    if not (env.workspace and env.key):
        return ""
    path = workspace_folder(env.workspace, env.key, env.array_index)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return ""
    return path


def workspace_folder(workspace: str, key: str, child: Optional[int]) -> str:
    """Where in a workspace the run of a key, or a child of it, has its checkpoints."""
    parts = [workspace, ".batchml", "runs", key]
    if child is not None:
        parts.append(str(child))
    return os.path.join(*parts, _CHECKPOINT)


def loses_checkpoints(env: RuntimeEnv) -> bool:
    """Whether the checkpoint folder goes with the attempt: neither given, nor in a workspace."""
    above, name = os.path.split(env.checkpoint_dir)
    return env.is_run and name == _CHECKPOINT and os.path.basename(above).startswith(TEMPORARY)


def is_kept(env: RuntimeEnv) -> bool:
    """Whether checkpoints are kept in the run's store. A trial's are on its sweep's board."""
    return bool(env.store) and not env.sweep and loses_checkpoints(env)


def own_folder() -> str:
    """The folder that the run's code goes into, which becomes the working directory.

    An image that names none works in `/`, where a job's `bin/` or `etc/` would lie over its own;
    in another it may not write.
    """
    folder = os.getcwd()
    if folder == os.sep or not os.access(folder, os.W_OK):
        folder = tempfile.mkdtemp(prefix="job-")
        os.chdir(folder)
    return folder


# --- leftovers ------------------------------------------------------------------------------------
# Files that a command writes into its working folder, which goes away with the attempt.


NAMED = 3  # files
MAX_ENTRIES = 20_000  # that are looked at; of a folder with more nothing is said

_State = Tuple[int, int]  # size, time of the last change
_NOT_MISSED = ("__pycache__", ".cache", ".ipynb_checkpoints", ".pytest_cache", ".git")


class WorkingFolder:
    """What is in it when the command begins, so that its end can tell what was added or changed.

    `kept` are folders that outlive the attempt: where the command works in one of those, nothing
    is lost, and nothing is said.
    """

    def __init__(
        self, folder: str, kept: Sequence[str], before: Optional[Dict[str, _State]] = None
    ) -> None:
        """`before`: what another process found in it, `found` there; looked for unless given."""
        self._folder = os.path.realpath(folder)
        self._kept = [os.path.realpath(path) for path in kept if path]
        self._before = None if self._is_kept() else self._scan() if before is None else before

    @property
    def found(self) -> Optional[Dict[str, _State]]:
        """What was in it as the command began; None where nothing will be said of it."""
        return self._before

    def told(self, advice: str = "which is not kept: write {} to BATCHML_OUTPUT_DIR") -> str:
        """One line that names what will be gone, the largest first; empty where that is nothing.

        `advice`: what follows "the working folder, "; its {} becomes "it" or "them".
        """
        after = self._scan() if self._before is not None else None
        if not after or self._before is None:
            return ""
        before = self._before
        sizes = {name: state[0] for name, state in after.items() if before.get(name) != state}
        if not sizes:
            return ""
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        words = [f"{name} ({size_text(sizes[name])})" for name in names[:NAMED]]
        if len(names) > NAMED:
            words.append("1 more" if len(names) == NAMED + 1 else f"{len(names) - NAMED} more")
        listed = ", ".join(words[:-1]) + " and " + words[-1] if words[1:] else words[0]
        was, which = ("was", "it") if len(names) == 1 else ("were", "them")
        return f"{listed} {was} written to the working folder, {advice.format(which)}"

    def _is_kept(self) -> bool:
        return any(
            self._folder == path or self._folder.startswith(path.rstrip(os.sep) + os.sep)
            for path in self._kept
        )

    def _scan(self) -> Optional[Dict[str, _State]]:
        """Path below the folder -> state, of regular files; None where it is too much to look."""
        found: Dict[str, _State] = {}
        seen, left = 0, [""]
        try:
            device = os.lstat(self._folder).st_dev
        except OSError:
            return None
        while left:
            below = left.pop()
            for entry in _entries(os.path.join(self._folder, below)):
                seen += 1
                if seen > MAX_ENTRIES:
                    return None
                if entry.name in _NOT_MISSED or entry.name.startswith(".batchml"):
                    continue
                path = os.path.join(below, entry.name)
                try:
                    state = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone again
                if state.st_dev != device:
                    continue  # a volume, which may outlive the attempt
                if stat.S_ISREG(state.st_mode):
                    found[path] = (state.st_size, state.st_mtime_ns)
                elif stat.S_ISDIR(state.st_mode) and entry.path not in self._kept:
                    left.append(path)
        return found


def watch(
    env: RuntimeEnv, data: str, temporary: str, is_container: bool
) -> Optional[WorkingFolder]:
    """The current folder, if it goes away with the attempt; None where nobody would miss it.

    `data` is the folder of data sets, `temporary` that of the attempt's own files.
    """
    if not env.is_run:
        return None
    try:
        folder = os.getcwd()
        if is_container and os.stat(folder).st_dev != os.stat(os.sep).st_dev:
            return None  # a volume
    except OSError:
        return None
    kept = [env.output_dir, env.checkpoint_dir, env.workspace, data, temporary]
    return WorkingFolder(folder, kept)


def size_text(size: int) -> str:
    """`812 B`, `4.2 MiB`"""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def _entries(folder: str) -> "List[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # gone again, or not ours to look into
