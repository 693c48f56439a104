"""A journal that is cut off or has a bit turned over: read as it was, or refused. Never less.

docs/behaviours.md B82, B84; docs/durability.md. BATCHML_TORTURE=20 looks at twenty times as many.
"""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from batchml.errors import LocalServerError, StateDamaged
from batchml.local.batch.events import SaveJob, SaveSpec
from batchml.local.batch.state import BatchState, Job, JobQueue, SubmittedSpec
from batchml.local.machine import MachineCapacity, Needs
from batchml.local.store.journal import Journal, RememberedCall
from batchml.model.run import JobStatus
from tests.local.test_journal import RECORDS
from tests.support.generate import TORTURE

MACHINE = MachineCapacity(4, 8192, ())
PAGE = 4096
FILES = ("journal.db", "journal.db-wal", "journal.db-shm")
_CUTS = 36 * TORTURE
_FLIPS = TORTURE  # of each page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal whose last commits are in its write-ahead log, as a killed server leaves it."""
    alive, made = tmp_path_factory.mktemp("alive"), tmp_path_factory.mktemp("journal")
    store = Journal(alive / "journal.db")
    store.commit(RECORDS)
    for number in range(300):
        job = _job(number)
        store.commit(
            [SaveSpec(job.spec), SaveJob(job, number % 3 == 0)],
            [RememberedCall(f"call-{number}", "d", b"{}", number)],
        )
    for file in alive.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    store.close()
    return made


def _job(number: int) -> Job:
    container = {"image": "i", "command": ["x" * 600]}
    spec = SubmittedSpec(f"job-{number}", f"n{number}", "q", "d:1", container, Needs(1, 64), number)
    return Job(spec.id, spec, number, JobStatus.RUNNABLE if number % 3 == 0 else JobStatus.FAILED)


@pytest.fixture
def image(folder: Path, tmp_path: Path) -> Path:
    """A copy of it; the path of the main file."""
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path / "journal.db"


def beside(journal: Path, suffix: str) -> Path:
    return journal.with_name(journal.name + suffix)


def content(path: Path) -> tuple[BatchState, set[str], set[str]]:
    """The state, all jobs and all remembered calls of a journal. Raises LocalServerError."""
    before = files(path.parent)
    try:
        store = Journal(path)
    except LocalServerError:
        assert files(path.parent) == before, "nothing was changed"
        raise
    try:
        state = store.load(MACHINE)
        jobs = set(store.jobs([f"job-{number}" for number in range(300)]))
        calls = {f"call-{n}" for n in range(300) if store.remembered_call(f"call-{n}")}
        return state, jobs, calls
    finally:
        store.close()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES}


def refused_or_whole(image: Path, what: str) -> bool:
    """True when a damaged journal was refused, and left as it was."""
    try:
        state, jobs, calls = content(image)
    except LocalServerError:
        return True
    assert len(state.jobs) == 100, what
    assert (len(jobs), len(calls)) == (300, 300), what
    assert state.queues["q"] == JobQueue("q", {"state": "ENABLED", "priority": 1}), what
    assert set(state.definitions) == {"d:1", "d:12"}, what
    return False


def test_what_a_killed_server_left_is_whole(image: Path) -> None:
    assert beside(image, "-wal").stat().st_size > 100 * PAGE
    assert not refused_or_whole(image, "untouched")


def test_without_its_index_a_log_is_whole(image: Path) -> None:
    beside(image, "-shm").unlink()
    assert not refused_or_whole(image, "no index")


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_file_that_was_cut_off_is_refused_or_not_needed(
    folder: Path, image: Path, suffix: str, part: int
) -> None:
    whole = files(folder)
    chance = random.Random(f"{suffix} {part}")
    size = len(whole[f"journal.db{suffix}"])
    cuts = [0, size - 1] if part == 0 else []
    cuts += [chance.randrange(size) for _ in range(_CUTS // 6)]
    cuts += [chance.randrange(size // PAGE + 1) * PAGE for _ in range(_CUTS // 6)]
    for cut in cuts:
        for name, data in whole.items():
            (image.parent / name).write_bytes(data)
        beside(image, suffix).write_bytes(whole[f"journal.db{suffix}"][:cut])
        refused_or_whole(image, f"journal.db{suffix} cut at {cut} of {size}")


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_flipped_bit_is_refused_or_does_no_harm(folder: Path, image: Path, suffix: str) -> None:
    whole = files(folder)
    chance = random.Random(suffix)
    name = f"journal.db{suffix}"
    pages = range(len(whole[name]) // PAGE)
    for page in pages if TORTURE > 1 else chance.sample(pages, min(len(pages), 60)):
        for _ in range(_FLIPS):
            for other, data in whole.items():
                (image.parent / other).write_bytes(data)
            bit = chance.randrange(page * PAGE * 8, (page + 1) * PAGE * 8)
            flipped = bytearray(whole[name])
            flipped[bit // 8] ^= 1 << bit % 8
            (image.parent / name).write_bytes(flipped)
            refused_or_whole(image, f"{name}, bit {bit % 8} of byte {bit // 8}")


def test_a_log_that_was_deleted_is_missed(image: Path) -> None:
    beside(image, "-wal").unlink()
    for _ in range(2):
        assert refused_or_whole(image, "no log")


def test_a_journal_that_has_lost_all_it_held_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """Its log and the index of that are gone, before anything was moved to the main file."""
    path = tmp_path / "journal.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    before = files(tmp_path)
    assert before["journal.db"]
    with pytest.raises(StateDamaged, match="holds nothing"):
        Journal(path, may_be_new=False)
    assert files(tmp_path) == before
    Journal(path).close()
    Journal(path, may_be_new=False).close()


def test_a_copy_that_sqlite_made_is_taken(image: Path, tmp_path: Path) -> None:
    """It has no write-ahead log yet."""
    copy = tmp_path / "copy.db"
    with closing(sqlite3.connect(image)) as db:
        db.execute("VACUUM INTO ?", (str(copy),))
    assert not refused_or_whole(copy, "a copy")
