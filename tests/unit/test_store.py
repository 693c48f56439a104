"""`batchml.local.store`: the journal on disk. docs/behaviours.md B80-B85."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.errors import DiskFull, JournalBusy, LocalServerError, StateDamaged
from batchml.local.messages import (
    DropRecord,
    Effect,
    Launch,
    SaveJob,
    SaveRecord,
    SaveSpec,
    Stop,
)
from batchml.local.state import (
    Attempt,
    Definition,
    Environment,
    Job,
    Machine,
    Needs,
    Nodes,
    Queue,
    Spec,
    State,
)
from batchml.local.store import RememberedCall, Store, Stream, Wanted
from batchml.model.status import JobStatus

MACHINE = Machine(4, 8192, ("GPU-a",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def spec(number: int, **more: Any) -> Spec:
    known: dict[str, Any] = {
        "id": f"job-{number}",
        "name": f"name-{number}",
        "queue": "q",
        "definition": "d:1",
        "container": {"image": "i", "command": ["a", "ü\n"]},
        "needs": Needs(1, 64, 1),
        "created_at": 1_000 + number,
    }
    return Spec(**known | more)


def job(
    number: int, status: JobStatus = JobStatus.RUNNABLE, of: Spec | None = None, **more: Any
) -> Job:
    return Job(f"job-{number}", of or spec(number), number, status, **more)


def save(one: Job) -> list[Effect]:
    """What the engine asks for when such a job is submitted."""
    return [SaveSpec(one.spec), SaveJob(one, not one.status.is_terminal)]


ATTEMPT = Attempt(1, "t" * 32, "ce", ("GPU-a",), "/aws/batch/job", "d/default/t", 5)
FULL_JOB = job(
    1, JobStatus.RUNNING, attempt=ATTEMPT, attempts=({"container": {"exitCode": 3}},),
    waiting_for=("x", "y"), tags={"k": "v"}, terminated=True, stop_reason="why", started_at=5,
    of=spec(1, depends_on=({"jobId": "x"},), retry={"attempts": 3}, timeout=60,
            parameters={"p": "1"}, consumables=(("licence", 2),), nodes=Nodes(2, 1)),
)  # fmt: skip
RECORDS = [
    SaveRecord("environment", "ce", Environment("ce", {"state": "ENABLED", "type": "MANAGED"})),
    SaveRecord("queue", "q", Queue("q", {"state": "ENABLED", "priority": 1})),
    SaveRecord("definition", "d:1", Definition("d", 1, {"status": "INACTIVE"})),
    SaveRecord("definition", "d:12", Definition("d", 12, {"status": "ACTIVE"})),
]


def kept(path: Path, *effects: Effect) -> State:
    """What a server that starts after a commit of `effects` finds."""
    store = Store(path)
    store.commit(effects)
    store.close()
    store = Store(path)
    state = store.load(MACHINE)
    store.close()
    return state


def test_what_was_committed_is_there_at_the_next_start(path: Path) -> None:
    state = kept(path, *RECORDS, *save(FULL_JOB), *save(job(7)))
    assert dict(state.jobs) == {"job-1": FULL_JOB, "job-7": job(7)}
    assert state.environments["ce"].detail == {"state": "ENABLED", "type": "MANAGED"}
    assert state.queues["q"] == Queue("q", {"state": "ENABLED", "priority": 1})
    assert set(state.definitions) == {"d:1", "d:12"}
    assert dict(state.revisions) == {"d": 12}
    assert state.sequence == 7
    assert state.machine == state.free == MACHINE


def test_a_finished_job_leaves_the_state_and_stays_in_the_store(path: Path) -> None:
    ended = job(9, JobStatus.SUCCEEDED)
    store = Store(path)
    store.commit([*save(job(9)), SaveJob(ended, False)])
    assert dict(store.load(MACHINE).jobs) == {}
    assert store.load(MACHINE).sequence == 9
    assert store.jobs(["job-9", "nope"]) == {"job-9": ended}
    assert store.jobs([]) == {}


def test_a_dropped_record_is_gone(path: Path) -> None:
    assert "q" not in kept(path, *RECORDS, DropRecord("queue", "q")).queues


def test_jobs_are_listed_newest_first_by_queue_and_status_in_pages(path: Path) -> None:
    store = Store(path)
    mine = [job(n, JobStatus.FAILED if n % 2 else JobStatus.RUNNABLE) for n in range(1, 8)]
    other = job(99, of=spec(99, queue="other"))
    store.commit([effect for one in (*mine, other) for effect in save(one)])

    def ids(status: str | None, below: int | None, limit: int) -> list[int]:
        return [j.sequence for j in store.listed("q", Wanted(status), below, limit)]

    assert ids(None, None, 100) == [7, 6, 5, 4, 3, 2, 1]
    assert ids("FAILED", None, 100) == [7, 5, 3, 1]
    assert ids("FAILED", 5, 1) == [3]
    assert ids(None, 3, 100) == [2, 1]


def test_streams_are_found_by_name_and_by_prefix(path: Path) -> None:
    store = Store(path)
    launches = [
        Launch(job(n), replace(ATTEMPT, task_id=f"t{n}", log_stream=name))
        for n, name in enumerate(["a/1", "a/2", "b/1", "a%/1"])
    ]
    store.commit([*launches, launches[0], Stop("t0")])
    assert [s.name for s in store.streams("/aws/batch/job")] == ["a%/1", "a/1", "a/2", "b/1"]
    assert [s.name for s in store.streams("/aws/batch/job", "a/")] == ["a/1", "a/2"]
    assert store.streams("/other") == []
    assert store.stream("/aws/batch/job", "b/1") == Stream("/aws/batch/job", "b/1", "t2", 1002)
    assert store.stream("/aws/batch/job", "c") is None
    assert store.log_groups() == {"/aws/batch/job": 1000}


def test_an_old_answer_is_kept_until_it_is_forgotten(path: Path) -> None:
    """B61."""
    store = Store(path)
    calls = [RememberedCall("old", "x", b"{}", 10), RememberedCall("new", "y", b'{"a":1}', 20)]
    store.commit([], calls)
    store.close()
    store = Store(path)
    assert [store.remembered(key) for key in ("old", "new", "none")] == [*calls, None]
    store.forget_calls(20)
    assert store.remembered("old") is None
    assert store.remembered("new") == calls[1]


class Unwritable(Queue, frozen=True):
    """A record that cannot be encoded."""

    what: object = object()


def test_effects_are_kept_all_or_none_and_the_store_goes_on(path: Path) -> None:
    """B82."""
    store = Store(path)
    broken = SaveRecord("queue", "bad", Unwritable("bad", {}))
    with pytest.raises(TypeError):
        store.commit([*save(job(1)), broken], [RememberedCall("k", "d", b"", 1)])
    assert dict(store.load(MACHINE).jobs) == {}
    assert store.remembered("k") is None
    store.commit(save(job(2)))
    assert list(store.load(MACHINE).jobs) == ["job-2"]


def test_nothing_of_a_commit_that_fails_on_disk_is_kept(path: Path) -> None:
    store = Store(path)
    store.commit(save(job(1)))
    with sqlite3.connect(path) as other:
        other.execute("CREATE TRIGGER no BEFORE INSERT ON calls BEGIN SELECT raise(FAIL, 'x'); END")
    with pytest.raises(LocalServerError):
        store.commit(save(job(2)), [RememberedCall("k", "d", b"", 1)])
    assert list(store.load(MACHINE).jobs) == ["job-1"]


def test_a_full_disk_is_named_and_loses_nothing(path: Path) -> None:
    """B83."""
    store = Store(path)
    store.commit(save(job(1)))
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    big = job(2, of=spec(2, container={"image": "i" * 200_000, "command": []}))
    with pytest.raises(DiskFull, match=r"Free some space"):
        store.commit(save(big))
    assert list(store.load(MACHINE).jobs) == ["job-1"]
    store._writer.execute("PRAGMA max_page_count = 1000000")
    store.commit(save(big))
    assert sorted(store.load(MACHINE).jobs) == ["job-1", "job-2"]


def test_a_journal_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    kept(path, *save(job(1)))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LocalServerError, match=r"newer batchml.*BATCHML_HOME"):
        Store(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize("content", [b"not a database, for sure " * 100, b"\0" * 5000])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StateDamaged, match=r"batchml local reset"):
        Store(path)
    assert path.read_bytes() == content


def test_a_truncated_journal_is_refused(path: Path) -> None:
    kept(path, *(effect for n in range(500) for effect in save(job(n))))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateDamaged):
        Store(path)


@pytest.mark.parametrize("body", [b"", b"{", b'{"id": 1}', b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_refused(path: Path, body: bytes) -> None:
    kept(path, *save(job(1)))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE jobs SET body = ?", (body,))
    db.close()
    store = Store(path)
    with pytest.raises(StateDamaged, match=r"cannot be read"):
        store.load(MACHINE)


def test_only_its_user_can_read_the_journal(path: Path) -> None:
    Store(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_passes_is_no_damage(tmp_path: Path) -> None:
    store = Store(tmp_path / "journal.db")
    store._writer.execute("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalBusy):
        store.commit([])
    other.execute("ROLLBACK")
    store.commit([])
    other.close()
    store.close()
