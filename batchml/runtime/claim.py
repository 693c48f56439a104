"""One submission, one run: who of two jobs with the same key may go on.

A submission whose answer was lost may, very rarely, have become two jobs. Each of them starts
here, and only the first to say so in the store trains. A later attempt of the same job finds its
own name there.
"""

from __future__ import annotations

from typing import Optional

from batchml.runtime.codes import DUPLICATE as DUPLICATE
from batchml.runtime.env import RuntimeEnv
from batchml.runtime.store import Store

_TRIES = 3


def claim(store: Store, env: RuntimeEnv, key: str = "") -> Optional[str]:
    """The id of the job that has this run's claim; None when it is this one.

    `key` names another claim than that of the run. The nodes of a job claim together.
    Raises StoreError when the store cannot be had.
    """
    ours = env.run.partition("#")[0]
    if not ours:  # not in Batch
        return None
    key = key or f"claims/{_follower(env)}{env.array_index or 0}"
    for _ in range(_TRIES):
        if store.create(key, ours.encode()):
            return None
        holder = store.get(key)
        if holder is not None:  # else it was removed between the two calls
            name = holder.decode("utf-8", "replace").strip()
            return None if name == ours else name
    return None


def _follower(env: RuntimeEnv) -> str:
    """A job that follows one which was cancelled in another queue: of several such, one runs."""
    return f"after-{env.moved}/" if env.moved else ""


def refusal(holder: str) -> str:
    """What the second job says before it ends."""
    return f"batchml: this is a second run of one submission; {holder} goes on. Nothing was run."
