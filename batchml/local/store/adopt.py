"""Turn a copy or a restored backup of a state folder into an independent folder.

It gets a new identity and new keys. Attempts that had begun when the copy was made belong to the
original folder, so they end here as lost hosts. Waiting jobs start here as well.
"""

import os
from functools import partial
from pathlib import Path

from msgspec import Struct

from batchml.errors import LocalServerError
from batchml.local.home import Home
from batchml.local.machine import read_machine
from batchml.local.store import identity
from batchml.local.store.journal import Journal

SET_ASIDE = "set-aside"  # a folder for attempts that the journal does not contain

# Files of the original folder or of its servers, which adopting deletes.
_DELETED = ("keys.json", "groups.json", "network.json", "identity.json")


class FolderCopy(Struct, frozen=True):
    """A state folder whose journal belongs to another folder, or is older than the folder's files,
    and the effects of adopting it.
    """

    why: str  # as from `identity.why_read_only`
    running: int  # attempts that had begun, and end here as lost hosts
    waiting: int  # jobs that wait, and start here as well
    unknown: int  # attempts that the journal does not contain


def inspect_copy(home: Home) -> FolderCopy | None:
    """The effects of adopting a folder; None when the folder is the journal's own."""
    journal = Journal(home.journal, why_read_only=partial(identity.why_read_only, home))
    try:
        if not journal.read_only:
            return None
        jobs = journal.load(read_machine()).jobs.values()
        begun = [job for job in jobs if job.attempt is not None and job.attempt.may_have_begun]
        single = [job for job in jobs if not job.is_array and not job.is_multinode]
        unknown = identity.unknown_attempts(home, journal.facts())
        return FolderCopy(journal.read_only, len(begun), len(single) - len(begun), len(unknown))
    finally:
        journal.close()


def adopt(home: Home) -> None:
    """Make a folder independent. The caller holds its lock, so no server runs.

    The new identity is committed last: if this is interrupted, the folder is still a copy.
    `position`, which proves that a journal was restored in place, is deleted after that.
    """
    journal = Journal(home.journal)
    try:
        kept = journal.identity()
        for task_id in identity.unknown_attempts(home, journal.facts()):
            _set_aside(home, task_id)
        for name in _DELETED:
            (home.local / name).unlink(missing_ok=True)
        journal.set_identity(identity.identity_of_copy(home, kept))
        home.position.unlink(missing_ok=True)
    finally:
        journal.close()


def _set_aside(home: Home, task_id: str) -> None:
    """Move an attempt's folder away, so that it is not taken for one of this journal's attempts."""
    target: Path = home.local / SET_ASIDE
    target.mkdir(mode=0o700, exist_ok=True)
    try:
        os.rename(home.attempt(task_id), target / task_id)
    except OSError as error:
        raise LocalServerError(
            f"{home.attempt(task_id)} cannot be moved to {target}: {error.strerror}. Move it away, "
            f"then try again."
        ) from error
