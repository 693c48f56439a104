"""Shells and commands inside a run: their prompt, and the lock files by which they are counted."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Dict

from batchml.runtime.storage.files import is_locked

HELD_FOR = "BATCHML_SEAT"  # the command that keeps the run open for a person: "alloc", "notebook"

_ID_LENGTH = 8  # characters of a run's id in the prompt, as in `batchml ls`
_PLAIN = ("sh", "dash", "ash")  # shells that take PS1 from the environment


def prompt_variables(environ: Mapping[str, str], shell: str) -> Dict[str, str]:
    """Return variables that put the name of the run before a shell's prompt: `(alloc 47cc2814) `.

    Bash runs PROMPT_COMMAND before each prompt, after its startup files; a startup file that sets
    PROMPT_COMMAND wins. Shells other than bash and the plain ones keep their prompt.
    """
    run, name = environ.get("AWS_BATCH_JOB_ID", ""), os.path.basename(shell)
    if not run:
        return {}
    kind = "alloc" if environ.get(HELD_FOR) == "alloc" else "run"
    parts = run.replace("#", ":").split(":")
    mark = f"({kind} {':'.join([parts[0][:_ID_LENGTH], *parts[1:]])}) "
    if name in _PLAIN:
        return {"PS1": f"{mark}$ "}
    if name != "bash":
        return {}
    ours = f'case "$PS1" in *"{mark}"*) ;; *) PS1="{mark}$PS1";; esac'
    theirs = environ.get("PROMPT_COMMAND", "").strip().strip(";")
    return {"PROMPT_COMMAND": f"{ours}; {theirs}" if theirs else ours}


# --- Presence files -------------------------------------------------------------------------------
# A presence file is a locked file beside the attempt's other files. The kernel drops the lock when
# the process ends, however it ends.


_FOLDER = ".batchml-seats"
_LOCKED = ".seat"


@contextmanager
def hold_presence(environ: Mapping[str, str]) -> Iterator[None]:
    """Hold a presence file during the block, in the run that has these variables.

    If no file can be written, as in a read-only image, the block runs without one.
    """
    path, file = "", -1
    with suppress(OSError):
        path, file = _make_locked(folder_of(environ))
    try:
        yield
    finally:
        if file >= 0:
            with suppress(OSError):
                os.unlink(path)
            os.close(file)


def count(environ: Mapping[str, str]) -> int:
    """Count the presence files that are locked now. Files of ended processes are removed."""
    folder = folder_of(environ)
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return sum(_is_held(os.path.join(folder, name)) for name in names if name.endswith(_LOCKED))


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the folder of presence files: beside the attempt's metrics, else in the temporary
    folder.
    """
    metrics = environ.get("BATCHML_METRICS", "")
    if metrics:
        return os.path.join(os.path.dirname(metrics), _FOLDER)
    run = environ.get("AWS_BATCH_JOB_ID", "run").replace(os.sep, "-")
    return os.path.join(tempfile.gettempdir(), f"{_FOLDER[1:]}-{run}")


def _make_locked(folder: str) -> tuple[str, int]:
    """Make a presence file; return its path and descriptor.

    It gets its suffix once it is locked, because `count` removes unlocked files with that suffix.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, os.urandom(8).hex())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, path + _LOCKED)
    except BaseException:
        os.close(file)
        raise
    return path + _LOCKED, file


def _is_held(path: str) -> bool:
    """Say whether a presence file is locked; remove it if not."""
    try:
        if is_locked(path):
            return True
    except OSError:
        return False
    with suppress(OSError):
        os.unlink(path)
    return False
