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
        self.existing_path = ""  # empty before the first use

    def path(self) -> str:
        """Make the folder if needed, and return its path. Raises OSError."""
        if not self.existing_path:
            try:
                self.existing_path = tempfile.mkdtemp(prefix=TEMPORARY)
            except FileNotFoundError:  # a read-only image
                self.existing_path = tempfile.mkdtemp(prefix=TEMPORARY, dir="/dev/shm")
        return self.existing_path

    def remove(self) -> None:
        if self.existing_path:
            try:
                shutil.rmtree(self.existing_path, ignore_errors=True)
            except RecursionError:
                pass  # too deep for Python; it is deleted with the container


def make_folders(env: RuntimeEnv, temporary: TemporaryFolder) -> RuntimeEnv:
    """Make the folders of outputs and checkpoints, and return `env` with all paths of a run.

    Outside a run only the folders that `env` names are made. Raises OSError.
    """
    for folder in (env.output_dir, env.checkpoint_dir):
        if folder:
            os.makedirs(folder, exist_ok=True)
    if not env.is_run:
        return env
    return env._replace(
        output_dir=env.output_dir or _make_folder(temporary, "output"),
        checkpoint_dir=(
            env.checkpoint_dir
            or _workspace_checkpoints(env)
            or _make_folder(temporary, _CHECKPOINT)
        ),
        metrics=env.metrics or os.path.join(temporary.path(), "metrics"),
        stop_file=env.stop_file or os.path.join(temporary.path(), "stop"),
    )


def folder_variables(env: RuntimeEnv) -> Dict[str, str]:
    """The command's variables with the run's id, attempt and paths."""
    variables = {
        "BATCHML_RUN": env.run,
        "BATCHML_ATTEMPT": str(env.attempt),
        "BATCHML_OUTPUT_DIR": env.output_dir,
        "BATCHML_CHECKPOINT_DIR": env.checkpoint_dir,
        "BATCHML_METRICS": env.metrics,
        "BATCHML_STOP_FILE": env.stop_file,
    }
    return {name: value for name, value in variables.items() if value} if env.is_run else {}


def _make_folder(temporary: TemporaryFolder, name: str) -> str:
    path = os.path.join(temporary.path(), name)
    os.makedirs(path, exist_ok=True)
    return path


def _workspace_checkpoints(env: RuntimeEnv) -> str:
    """The run's checkpoint folder in the workspace, where later attempts find it, too.

    Empty without a workspace, and if the folder cannot be made.
    """
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


def is_kept_in_store(env: RuntimeEnv) -> bool:
    """Whether checkpoints are kept in the run's store, because their folder is temporary.

    A trial's checkpoints are kept in the sweep's store.
    """
    above, name = os.path.split(env.checkpoint_dir)
    is_temporary = name == _CHECKPOINT and os.path.basename(above).startswith(TEMPORARY)
    return env.is_run and bool(env.store) and not env.sweep and is_temporary


def enter_code_folder() -> str:
    """Change to a folder for the run's code, and return its path.

    This is the working directory, or a new folder if the working directory cannot be written or is
    `/`, where a job's `bin/` or `etc/` would overwrite the image's.
    """
    folder = os.getcwd()
    if folder == os.sep or not os.access(folder, os.W_OK):
        folder = tempfile.mkdtemp(prefix="job-")
        os.chdir(folder)
    return folder


# --- Leftovers ------------------------------------------------------------------------------------
# Files that a command writes into its working folder are lost with the attempt.


MAX_NAMED = 3  # files that the message names
MAX_ENTRIES = 20_000  # files and folders; a folder with more is not checked

FileState = Tuple[int, int]  # size, time of the last change in ns
_CACHES = ("__pycache__", ".cache", ".ipynb_checkpoints", ".pytest_cache", ".git")


class WorkingFolder:
    """Compares the working folder after the command with its content before the command.

    `kept` are folders that outlive the attempt. If the command works in one of them, nothing is
    lost, and nothing is reported.
    """

    def __init__(
        self, folder: str, kept: Sequence[str], before: Optional[Dict[str, FileState]] = None
    ) -> None:
        """`before`: the content before the command, if another process has read it."""
        self._folder = os.path.realpath(folder)
        self._kept = [os.path.realpath(path) for path in kept if path]
        self.before: Optional[Dict[str, FileState]] = None  # None: nothing will be reported
        if not self._is_kept():
            self.before = self._scan() if before is None else before

    def describe_leftovers(
        self, advice: str = "which is not kept: write {} to BATCHML_OUTPUT_DIR"
    ) -> str:
        """One line that names the files that will be lost, the largest first; empty without any.

        `advice` ends the sentence after "the working folder, "; its {} becomes "it" or "them".
        """
        before = self.before
        after = self._scan() if before is not None else None
        if not after or before is None:
            return ""
        sizes = {name: state[0] for name, state in after.items() if before.get(name) != state}
        if not sizes:
            return ""
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        words = [f"{name} ({size_text(sizes[name])})" for name in names[:MAX_NAMED]]
        if len(names) > MAX_NAMED:
            words.append(f"{len(names) - MAX_NAMED} more")
        listed = ", ".join(words[:-1]) + " and " + words[-1] if words[1:] else words[0]
        was, them = ("was", "it") if len(names) == 1 else ("were", "them")
        return f"{listed} {was} written to the working folder, {advice.format(them)}"

    def _is_kept(self) -> bool:
        return any(
            self._folder == path or self._folder.startswith(path.rstrip(os.sep) + os.sep)
            for path in self._kept
        )

    def _scan(self) -> Optional[Dict[str, FileState]]:
        """Path below the folder -> state, of regular files; None if there are too many."""
        found: Dict[str, FileState] = {}
        count, left = 0, [""]
        try:
            device = os.lstat(self._folder).st_dev
        except OSError:
            return None
        while left:
            below = left.pop()
            for entry in list_entries(os.path.join(self._folder, below)):
                count += 1
                if count > MAX_ENTRIES:
                    return None
                if entry.name in _CACHES or entry.name.startswith(".batchml"):
                    continue
                path = os.path.join(below, entry.name)
                try:
                    state = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                if state.st_dev != device:
                    continue  # another volume, which may outlive the attempt
                if stat.S_ISREG(state.st_mode):
                    found[path] = (state.st_size, state.st_mtime_ns)
                elif stat.S_ISDIR(state.st_mode) and entry.path not in self._kept:
                    left.append(path)
        return found


def watch_working_folder(
    env: RuntimeEnv, data: str, temporary: str, in_aws: bool
) -> Optional[WorkingFolder]:
    """A comparison of the current folder, if the folder is lost with the attempt; else None.

    `data` is the folder of data sets, `temporary` the attempt's temporary folder.
    """
    if not env.is_run:
        return None
    try:
        folder = os.getcwd()
        if in_aws and os.stat(folder).st_dev != os.stat(os.sep).st_dev:
            return None  # a volume, which may outlive the attempt
    except OSError:
        return None
    kept = [env.output_dir, env.checkpoint_dir, env.workspace, data, temporary]
    return WorkingFolder(folder, kept)


def size_text(size: int) -> str:
    """A number of bytes as text: `812 B`, `4.2 MiB`."""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def list_entries(folder: str) -> "List[os.DirEntry[str]]":
    """The files and folders in a folder; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # removed meanwhile, or not readable
