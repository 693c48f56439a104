"""The folders of an attempt: outputs, checkpoints, temporary files, and the working folder."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from typing import Dict, List, Optional, Tuple

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
        if folder and not os.path.isdir(folder):
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


# --- Files ----------------------------------------------------------------------------------------


FileState = Tuple[int, int]  # size, time of the last change in ns


def size_text(size: float) -> str:
    """A number of bytes as text, rounded up as `ls -lh` does: `812 B`, `4.2 MiB`, `28 GiB`.

    A size just above a limit is never shown as the limit.
    """
    amount, unit = size, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount <= 1023:
            break
        amount, unit = amount / 1024, larger
    if unit == "B" or amount > 9.9:
        return f"{math.ceil(amount)} {unit}"
    return f"{math.ceil(amount * 10) / 10:.1f} {unit}"


def real_path(path: str) -> str:
    """As `os.path.realpath`, in three system calls where Linux resolves the path."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            return os.readlink(f"/proc/self/fd/{place}")
        finally:
            os.close(place)
    except (OSError, AttributeError):  # a part of it is missing, or another system
        return os.path.realpath(path)


def list_entries(folder: str) -> "List[os.DirEntry[str]]":
    """The files and folders in a folder; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # removed meanwhile, or not readable
