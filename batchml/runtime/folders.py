"""The folders and files of an attempt: those that it was given, and in AWS those made here."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Dict, Optional

from batchml.runtime.env import RuntimeEnv

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
