"""Where a trial's checkpoints are, so that each of its waves finds them.

Beside them stands how far the trial had come: a program that goes on from one may print no step.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Callable, List, NamedTuple, Optional

from batchml.runtime.protocol.sweep_store import checkpoint_prefix
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.files import read_json
from batchml.runtime.storage.store import Store
from batchml.runtime.sweep.assignment import Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.checkpoint.remote import Kept

_PLACE = ".batchml-step"
_NONE = (".batchml-", ".saving-", ".removing-")  # how names begin that are no checkpoint's


class Place(NamedTuple):
    """How far a trial came, and by how much its steps are more than what it prints."""

    step: int
    shift: Optional[int]  # None: it prints none


def checkpoint_folder(env: RuntimeEnv, work: Work) -> str:
    """Where every wave of the trial finds its checkpoints; empty where no folder is shared.

    Emptied for a trial that begins anew.
    """
    if "://" not in env.sweep:
        path = os.path.join(env.sweep, *checkpoint_prefix(work.entry.trial).split("/")[:-1])
    elif env.workspace:
        parts = (".batchml", "sweeps", work.course.key, str(work.entry.trial), "checkpoint")
        path = os.path.join(env.workspace, *parts)
    else:
        return ""
    if work.is_main and not work.entry.resumes and env.attempt == 1:
        shutil.rmtree(path, ignore_errors=True)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return ""
    return path


def fetch_checkpoints(
    board: Store, work: Work, attempt: int, folder: str, say: Callable[[str], None]
) -> Kept:
    """Bring what earlier waves and attempts kept on the board; what keeps what comes.

    Raises StoreError and OSError.
    """
    from batchml.runtime.checkpoint.remote import Kept, bring

    prefix = checkpoint_prefix(work.entry.trial)
    if not work.entry.resumes and attempt == 1:
        board.delete(*board.keys(prefix))  # it begins anew
    else:
        bring(board, prefix, folder, say)
    return Kept(folder, board, prefix)


def has_checkpoints(folder: str) -> bool:
    return bool(_names(folder))


def remember(folder: str, place: Place) -> None:
    """Note beside the checkpoints, if there are any, how far the trial came."""
    if has_checkpoints(folder):
        try:
            with open(os.path.join(folder, _PLACE), "w", encoding="ascii") as file:
                json.dump(place, file)
        except OSError:
            pass  # a full disk: the trial itself will have more to say


def recall(folder: str) -> Optional[Place]:
    """How far an earlier attempt or wave came; None where that is not known."""
    try:
        step, shift = read_json(os.path.join(folder, _PLACE))
        return Place(int(step), None if shift is None else int(shift))
    except (OSError, TypeError, ValueError):
        return None


def _names(folder: str) -> List[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(_NONE)]
    except OSError:
        return []
