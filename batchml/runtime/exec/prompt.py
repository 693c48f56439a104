"""A shell inside a run says in its prompt where it is: `(alloc 47cc2814) `, `(run 47cc2814) `."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Dict, Optional

from batchml.runtime.storage.files import is_locked

KIND = "BATCHML_SEAT"  # what the run is held for: "alloc", "notebook"

_ID = 8  # characters of a run's id that are shown, as in `batchml ls`
_PLAIN = ("sh", "dash", "ash")  # take PS1 from their environment


def prompted(environ: Mapping[str, str], shell: str) -> Dict[str, str]:
    """Variables that put the run before a shell's prompt, whatever its files make of that.

    Bash does PROMPT_COMMAND before each prompt, after its files were read; a file that sets that
    variable wins. Other shells than these are left as they are.
    """
    run, name = environ.get("AWS_BATCH_JOB_ID", ""), os.path.basename(shell)
    if not run:
        return {}
    kind = "alloc" if environ.get(KIND) == "alloc" else "run"
    parts = run.replace("#", ":").split(":")
    mark = f"({kind} {':'.join([parts[0][:_ID], *parts[1:]])}) "
    if name in _PLAIN:
        return {"PS1": f"{mark}$ "}
    if name != "bash":
        return {}
    ours = f'case "$PS1" in *"{mark}"*) ;; *) PS1="{mark}$PS1";; esac'
    theirs = environ.get("PROMPT_COMMAND", "").strip().strip(";")
    return {"PROMPT_COMMAND": f"{ours}; {theirs}" if theirs else ours}


# --- who is inside a run --------------------------------------------------------------------------
# Who sits inside a run: a shell, or a command that was sent in. A program can ask how many do.
#
# A seat is a locked file beside the attempt's other files. The kernel drops the lock with the
# process that holds it, so a seat never outlives its holder, however that one ended.


_FOLDER = ".batchml-seats"
_TAKEN = ".seat"


@contextmanager
def taken(environ: Mapping[str, str]) -> Iterator[None]:
    """Hold a seat in the run whose variables these are.

    Where nothing can be written, as in a read-only image, there is no seat and all else goes on.
    """
    path, file = "", None
    with suppress(OSError):
        path, file = _take(folder_of(environ))
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                os.unlink(path)
            os.close(file)


def count(environ: Mapping[str, str]) -> int:
    """How many seats are held now. What dead holders left is removed."""
    folder = folder_of(environ)
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return sum(_is_held(os.path.join(folder, name)) for name in names if name.endswith(_TAKEN))


def folder_of(environ: Mapping[str, str]) -> str:
    """Beside the file of metrics, which is the attempt's own; else below the system's folder."""
    metrics = environ.get("BATCHML_METRICS", "")
    if metrics:
        return os.path.join(os.path.dirname(metrics), _FOLDER)
    run = environ.get("AWS_BATCH_JOB_ID", "run").replace(os.sep, "-")
    return os.path.join(tempfile.gettempdir(), f"{_FOLDER[1:]}-{run}")


def _take(folder: str) -> tuple[str, Optional[int]]:
    """It gets its name once it is locked: whoever counts would remove it before."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, os.urandom(8).hex())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, path + _TAKEN)
    except BaseException:
        os.close(file)
        raise
    return path + _TAKEN, file


def _is_held(path: str) -> bool:
    try:
        if is_locked(path):
            return True
    except OSError:
        return False
    with suppress(OSError):
        os.unlink(path)
    return False
