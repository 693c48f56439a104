"""The folders of an attempt: outputs, checkpoints, temporary files, and the working folder."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from typing import Dict, List, Optional, Sequence, Tuple

from batchml.runtime.protocol.variables import RuntimeEnv

TEMPORARY = "batchml-"  # begins the name of an attempt's temporary folder
_CHECKPOINT = "checkpoint"


class TemporaryFolder:
    """A folder that is made at the first use, and removed at the end of the attempt."""

    def __init__(self) -> None:
        self._path = ""

    @property
    def made(self) -> str:
        """The path; empty before the first use."""
        return self._path

    def path(self) -> str:
        """Make the folder if needed, and return its path. Raises OSError."""
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
                pass  # too deep for Python; it is deleted with the container


def make_folders(env: RuntimeEnv, temporary: TemporaryFolder) -> RuntimeEnv:
    """Make the folders of outputs and checkpoints, and return `env` with all paths that a run has.

    Outside a run only folders that were given are made. Raises OSError.
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


def folder_variables(env: RuntimeEnv) -> Dict[str, str]:
    """The command's variables with the run's id, attempt and paths."""
    found = {
        "BATCHML_RUN": env.run,
        "BATCHML_ATTEMPT": str(env.attempt),
        "BATCHML_OUTPUT_DIR": env.output_dir,
        "BATCHML_CHECKPOINT_DIR": env.checkpoint_dir,
        "BATCHML_METRICS": env.metrics,
        "BATCHML_STOP_FILE": env.stop_file,
    }
    return {name: value for name, value in found.items() if value} if env.is_run else {}


def _made(temporary: TemporaryFolder, name: str) -> str:
    path = os.path.join(temporary.path(), name)
    os.makedirs(path, exist_ok=True)
    return path


def _checkpoints(env: RuntimeEnv) -> str:
    """The folder in the workspace, where every attempt finds it; empty if it cannot be written."""
    if not (env.workspace and env.key):
        return ""
    path = workspace_folder(env.workspace, env.key, env.array_index)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return ""
    return path


def workspace_folder(workspace: str, key: str, child: Optional[int]) -> str:
    """The checkpoint folder in a workspace of a run, or of one child of an array."""
    parts = [workspace, ".batchml", "runs", key]
    if child is not None:
        parts.append(str(child))
    return os.path.join(*parts, _CHECKPOINT)


def loses_checkpoints(env: RuntimeEnv) -> bool:
    """Whether the checkpoint folder is lost with the attempt: not given, and not in a workspace."""
    above, name = os.path.split(env.checkpoint_dir)
    return env.is_run and name == _CHECKPOINT and os.path.basename(above).startswith(TEMPORARY)


def is_kept_in_store(env: RuntimeEnv) -> bool:
    """Whether checkpoints are kept in the run's store. A sweep keeps those of its trials."""
    return bool(env.store) and not env.sweep and loses_checkpoints(env)


def enter_code_folder() -> str:
    """Change to a folder for the run's code, and return its path.

    It is the working directory, unless that is `/`, where a job's `bin/` or `etc/` would overwrite
    the image's, or cannot be written.
    """
    folder = os.getcwd()
    if folder == os.sep or not os.access(folder, os.W_OK):
        folder = tempfile.mkdtemp(prefix="job-")
        os.chdir(folder)
    return folder


# --- Leftovers ------------------------------------------------------------------------------------
# Files that a command writes into its working folder are lost with the attempt.


NAMED = 3  # files that are named in the message
MAX_ENTRIES = 20_000  # files and folders; a folder with more is not checked

_State = Tuple[int, int]  # size, time of the last change
_NOT_MISSED = ("__pycache__", ".cache", ".ipynb_checkpoints", ".pytest_cache", ".git")


class WorkingFolder:
    """Compares the working folder after the command with its content before.

    `kept` are folders that outlive the attempt. If the command works in one of them, nothing is
    lost, and nothing is reported.
    """

    def __init__(
        self, folder: str, kept: Sequence[str], before: Optional[Dict[str, _State]] = None
    ) -> None:
        """`before`: the content, if another process has read it as `found`."""
        self._folder = os.path.realpath(folder)
        self._kept = [os.path.realpath(path) for path in kept if path]
        self._before = None if self._is_kept() else self._scan() if before is None else before

    @property
    def found(self) -> Optional[Dict[str, _State]]:
        """The content before the command; None if nothing will be reported."""
        return self._before

    def describe_leftovers(
        self, advice: str = "which is not kept: write {} to BATCHML_OUTPUT_DIR"
    ) -> str:
        """One line that names the files that will be lost, the largest first; empty without any.

        `advice` follows "the working folder, "; its {} becomes "it" or "them".
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
        was, them = ("was", "it") if len(names) == 1 else ("were", "them")
        return f"{listed} {was} written to the working folder, {advice.format(them)}"

    def _is_kept(self) -> bool:
        return any(
            self._folder == path or self._folder.startswith(path.rstrip(os.sep) + os.sep)
            for path in self._kept
        )

    def _scan(self) -> Optional[Dict[str, _State]]:
        """Path below the folder -> state, of regular files; None if there are too many."""
        found: Dict[str, _State] = {}
        count, left = 0, [""]
        try:
            device = os.lstat(self._folder).st_dev
        except OSError:
            return None
        while left:
            below = left.pop()
            for entry in _entries(os.path.join(self._folder, below)):
                count += 1
                if count > MAX_ENTRIES:
                    return None
                if entry.name in _NOT_MISSED or entry.name.startswith(".batchml"):
                    continue
                path = os.path.join(below, entry.name)
                try:
                    state = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                if state.st_dev != device:
                    continue  # a volume, which may outlive the attempt
                if stat.S_ISREG(state.st_mode):
                    found[path] = (state.st_size, state.st_mtime_ns)
                elif stat.S_ISDIR(state.st_mode) and entry.path not in self._kept:
                    left.append(path)
        return found


def watch_working_folder(
    env: RuntimeEnv, data: str, temporary: str, is_container: bool
) -> Optional[WorkingFolder]:
    """The current folder, if it is lost with the attempt; else None.

    `data` is the folder of data sets, `temporary` the attempt's temporary folder.
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
        return []  # removed meanwhile, or not readable
