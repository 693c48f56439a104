"""Which folder a journal belongs to: copies, moves, restored backups, other machines."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.errors import LocalServerError
from batchml.local.batch.events import BeginAttempt, Effect, PrepareAttempt, SaveJob, SaveSpec
from batchml.local.batch.state import Job
from batchml.local.executors.record import AttemptCondition, AttemptEvidence, RunnerRecord
from batchml.local.home import Home
from batchml.local.store import adopt, identity
from batchml.local.store.journal import Journal
from batchml.model.run import JobStatus
from batchml.runtime.storage.files import write_json
from tests.support.executor_rig import attempt_of, job_of

COPIES = "is a copy of"
OLDER = "holds a journal that is older than its other files"


def claimed(home: Home) -> Home:
    """A state folder that a server has served from."""
    home.prepare()
    store = Journal(home.journal)
    own = identity.observe(home)
    store.set_identity(own)
    store.close()
    identity.write_identity(home, own)
    return home


def verdict(home: Home) -> str:
    """Why the folder may only be read."""
    store = Journal(home.journal, why_read_only=partial(identity.why_read_only, home))
    store.close()
    return store.read_only


@pytest.fixture
def folder(tmp_path: Path) -> Home:
    return claimed(Home(tmp_path / "home"))


def launch(home: Home, *, begun: bool) -> Job:
    """Commit the start of an attempt, as a server does."""
    job = job_of(["true"])
    attempt = attempt_of(job, may_have_begun=begun)
    job = replace(job, status=JobStatus.STARTING, attempt=attempt, sequence=7)
    store = Journal(home.journal)
    effects: list[Effect] = [SaveSpec(job.spec), SaveJob(job, True), PrepareAttempt(job, attempt)]
    store.commit([*effects, BeginAttempt(attempt.task_id)] if begun else effects)
    store.close()
    return job


def test_a_folder_is_its_own_also_after_a_move_and_a_reboot(folder: Home, tmp_path: Path) -> None:
    assert verdict(folder) == ""
    moved = Home(tmp_path / "moved")
    folder.root.rename(moved.root)
    assert verdict(moved) == ""
    assert identity.read_identity(moved) is not None


def test_a_copy_is_recognized_by_its_inodes(folder: Home, tmp_path: Path) -> None:
    copy = Home(tmp_path / "copy")
    shutil.copytree(folder.root, copy.root)
    assert verdict(copy) == f"is a copy of {folder.root}"
    assert identity.read_identity(copy) is None
    assert verdict(folder) == ""


def test_a_copy_that_takes_the_place_of_its_folder_is_a_copy(folder: Home, tmp_path: Path) -> None:
    shutil.copytree(folder.root, tmp_path / "backup")
    folder.root.rename(tmp_path / "before")
    (tmp_path / "backup").rename(folder.root)
    assert verdict(folder) == "is a copy"


def test_a_restored_journal_is_recognized(folder: Home, tmp_path: Path) -> None:
    shutil.copy2(folder.journal, tmp_path / "journal.db")
    os.replace(tmp_path / "journal.db", folder.journal)
    assert "replaced by a copy" in verdict(folder)


def test_an_older_journal_over_a_newer_one_is_recognized_by_the_position(
    folder: Home, tmp_path: Path
) -> None:
    shutil.copy2(folder.journal, tmp_path / "journal.db")
    launch(folder, begun=True)
    folder.journal.write_bytes((tmp_path / "journal.db").read_bytes())  # in place: the same inode
    assert verdict(folder).startswith(OLDER)


def _begun(folder: Path) -> None:
    write_json(str(folder / "runner.json"), {"pid": 1, "may_have_begun": True})


def _ended(folder: Path) -> None:
    write_json(str(folder / "exit.json"), {"code": 0})


def _prepared(folder: Path) -> None:
    write_json(str(folder / "runner.json"), {"pid": 1})


@pytest.mark.parametrize(("write", "older"), [(_begun, OLDER), (_ended, OLDER), (_prepared, "")])
def test_attempts_that_began_and_that_the_journal_does_not_know_make_it_an_older_one(
    folder: Home, write: Callable[[Path], None], older: str
) -> None:
    """A folder alone is made before the commit that a killed server never made."""
    folder.attempt("0" * 32).mkdir()
    write(folder.attempt("0" * 32))
    assert verdict(folder).startswith(older)
    assert bool(verdict(folder)) == bool(older)


def test_what_differs_says_which_kind_of_copy_it_is(folder: Home) -> None:
    own = identity.observe(folder, "i")
    there = replace(own, boot="b", machine="m")
    elsewhere = replace(own, boot="c", machine="n")
    assert identity.difference(own, own) == ""
    assert identity.difference(there, elsewhere).startswith("comes from another machine")
    # Two containers of one machine may have machine ids of their own.
    assert identity.difference(replace(there, machine="n"), replace(there, machine="m")) == ""
    disk = replace(own, file_system=own.file_system + 1, device=own.device + 1)
    assert identity.difference(own, disk).endswith("on another disk")
    # After a reboot, devices are numbered anew and some file systems take their ids from that.
    assert identity.difference(own, replace(disk, boot="c")) == ""
    assert identity.difference(own, replace(disk, boot="c", path="/elsewhere")) != ""
    nameless = replace(own, file_system=0)
    assert identity.difference(nameless, replace(nameless, device=0)).endswith("on another disk")


def test_a_copy_is_adopted_and_leaves_what_is_the_others_alone(
    folder: Home, tmp_path: Path
) -> None:
    running, waiting = launch(folder, begun=True), launch(folder, begun=False)
    folder.keys()
    assert adopt.inspect_copy(folder) is None
    copy = Home(tmp_path / "copy")
    shutil.copytree(folder.root, copy.root)
    unknown = copy.attempt("f" * 32)
    unknown.mkdir()
    _begun(unknown)
    found = adopt.inspect_copy(copy)
    assert found == adopt.FolderCopy(f"{COPIES} {folder.root}", running=1, waiting=1, unknown=1)

    adopt.adopt(copy)
    assert verdict(copy) == ""
    assert (copy.local / adopt.SET_ASIDE / unknown.name / "runner.json").exists()
    assert copy.keys() != folder.keys()
    store = Journal(copy.journal)
    now = store.identity()
    assert now is not None
    assert now.adopted_from == str(folder.root)
    assert store.jobs([running.id, waiting.id]).keys() == {running.id, waiting.id}
    store.close()
    before = Journal(folder.journal)
    kept = before.identity()
    before.close()
    assert kept is not None
    assert kept.id != now.id


def test_an_adoption_that_was_cut_off_leaves_a_copy(folder: Home, tmp_path: Path) -> None:
    copy = Home(tmp_path / "copy")
    shutil.copytree(folder.root, copy.root)
    unknown = copy.attempt("f" * 32)
    unknown.mkdir()
    _begun(unknown)
    (copy.local / adopt.SET_ASIDE).write_text("in the way")
    with pytest.raises((LocalServerError, OSError)):
        adopt.adopt(copy)
    assert verdict(copy).startswith(COPIES)


def test_a_look_at_a_copy_changes_nothing(folder: Home, tmp_path: Path) -> None:
    copy = Home(tmp_path / "copy")
    launch(folder, begun=True)
    shutil.copytree(folder.root, copy.root)
    before = copy.journal.read_bytes()
    assert verdict(copy).startswith(COPIES)
    assert copy.journal.read_bytes() == before


RUNNER = RunnerRecord(pid=1)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (AttemptEvidence(has_ended=True, is_held=True, record=RUNNER), AttemptCondition.ENDED),
        (AttemptEvidence(is_held=True, record=RUNNER), AttemptCondition.LIVES),
        (AttemptEvidence(is_held=True), AttemptCondition.BEGINS),
        (
            AttemptEvidence(record=RunnerRecord(pid=1, never_began=True)),
            AttemptCondition.NEVER_BEGAN,
        ),
        (AttemptEvidence(record=RUNNER), AttemptCondition.GONE),
        (AttemptEvidence(), AttemptCondition.UNKNOWN),
        (AttemptEvidence(error="input/output error"), AttemptCondition.UNKNOWN),
    ],
)
def test_only_a_record_that_says_so_proves_that_a_program_never_began(
    evidence: AttemptEvidence, expected: AttemptCondition
) -> None:
    assert evidence.condition is expected
