"""Turn a copy or a restored backup of a state folder into an independent folder.

It gets a new identity and new keys. Attempts that had begun when the copy was made belong to the
original folder: here they end as lost hosts. Waiting jobs start here as well.
"""

import os
from functools import partial
from pathlib import Path

from msgspec import Struct

from batchml.errors import LocalServerError
from batchml.local.ecs import read_machine
from batchml.local.home import Home
from batchml.local.store import identity
from batchml.local.store.journal import Store

SET_ASIDE = "set-aside"  # attempts that the journal does not know

# Files of the original folder or of its servers; adopting deletes them.
_DELETED = ("keys.json", "groups.json", "network.json", "identity.json")


class Copy(Struct, frozen=True):
    """A state folder whose journal belongs to another folder, or is older than its files."""

    why: str  # as `identity.difference`
    running: int  # attempts that had begun: they end here as lost hosts
    waiting: int  # jobs that start here as well
    unknown: int  # attempts in the folder that the journal does not know


def look(home: Home) -> Copy | None:
    """What adopting a folder would do; None when it is the one that its journal belongs to."""
    store = Store(home.journal, judge=partial(identity.judge, home))
    try:
        if not store.read_only:
            return None
        jobs = store.load(read_machine()).jobs.values()
        begun = [job for job in jobs if job.attempt is not None and job.attempt.may_have_begun]
        single = [job for job in jobs if not job.is_array and not job.is_multinode]
        unknown = identity.unknown_attempts(home, store.journal())
        return Copy(store.read_only, len(begun), len(single) - len(begun), len(unknown))
    finally:
        store.close()


def adopt(home: Home) -> None:
    """Make a folder independent. Its lock is held, and no server runs.

    The new identity is committed last: when this is cut off, the folder is still a copy. What
    proves that a journal was restored in place (`position`) is deleted after that.
    """
    store = Store(home.journal)
    try:
        kept = store.identity()
        for task_id in identity.unknown_attempts(home, store.journal()):
            _set_aside(home, task_id)
        for name in _DELETED:
            (home.local / name).unlink(missing_ok=True)
        store.belongs_to(identity.adopted(home, kept))
        home.position.unlink(missing_ok=True)
    finally:
        store.close()


def _set_aside(home: Home, task_id: str) -> None:
    """Keep an attempt's folder where nobody takes it for one of this journal's."""
    place: Path = home.local / SET_ASIDE
    place.mkdir(mode=0o700, exist_ok=True)
    try:
        os.rename(home.attempt(task_id), place / task_id)
    except OSError as error:
        raise LocalServerError(
            f"{home.attempt(task_id)} cannot be moved to {place}: {error.strerror}. Move it away, "
            f"then try again."
        ) from error
