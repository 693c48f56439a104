"""`batchml.local.store.journal`: the journal on disk. docs/behaviours.md B80-B85, B195."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from batchml.errors import DiskFull, JournalBusy, LocalServerError, StateDamaged
from batchml.local.batch.engine import next_deadline, restore, step
from batchml.local.batch.events import (
    NO_PROOF,
    AttemptEnded,
    AttemptExit,
    DropRecord,
    Effect,
    LogEnd,
    PrepareAttempt,
    SaveJob,
    SaveRecord,
    SaveSpec,
    StopAttempt,
)
from batchml.local.batch.state import (
    BatchState,
    ComputeEnvironment,
    Job,
    JobAttempt,
    JobDefinition,
    JobQueue,
    Nodes,
    SubmittedSpec,
)
from batchml.local.logs.files import StreamIndex
from batchml.local.machine import MachineCapacity, Needs
from batchml.local.store.journal import SCHEMA, JobFilter, Journal, LogStream, RememberedCall
from batchml.model.run import JobStatus

MACHINE = MachineCapacity(4, 8192, ("GPU-a",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def spec(number: int, **more: Any) -> SubmittedSpec:
    known: dict[str, Any] = {
        "id": f"job-{number}",
        "name": f"name-{number}",
        "queue": "q",
        "definition": "d:1",
        "container": {"image": "i", "command": ["a", "ü\n"]},
        "needs": Needs(1, 64, 1),
        "created_at": 1_000 + number,
    }
    return SubmittedSpec(**known | more)


def job(
    number: int,
    status: JobStatus = JobStatus.RUNNABLE,
    of: SubmittedSpec | None = None,
    **more: Any,
) -> Job:
    return Job(f"job-{number}", of or spec(number), number, status, **more)


def save(one: Job) -> list[Effect]:
    """What the engine asks for when such a job is submitted."""
    return [SaveSpec(one.spec), SaveJob(one, not one.status.is_terminal)]


ATTEMPT = JobAttempt(1, "t" * 32, "ce", ("GPU-a",), "/aws/batch/job", "d/default/t", 5)
FULL_JOB = job(
    1, JobStatus.RUNNING, attempt=ATTEMPT, attempts=({"container": {"exitCode": 3}},),
    waiting_for=("x", "y"), tags={"k": "v"}, terminated=True, stop_reason="why", started_at=5,
    of=spec(1, depends_on=({"jobId": "x"},), retry={"attempts": 3}, timeout=60,
            parameters={"p": "1"}, consumables=(("licence", 2),), nodes=Nodes(2, 1)),
)  # fmt: skip
RECORDS = [
    SaveRecord(
        "environment", "ce", ComputeEnvironment("ce", {"state": "ENABLED", "type": "MANAGED"})
    ),
    SaveRecord("queue", "q", JobQueue("q", {"state": "ENABLED", "priority": 1})),
    SaveRecord("definition", "d:1", JobDefinition("d", {"status": "INACTIVE"}, 1)),
    SaveRecord("definition", "d:12", JobDefinition("d", {"status": "ACTIVE"}, 12)),
]


def kept(path: Path, *effects: Effect) -> BatchState:
    """What a server that starts after a commit of `effects` finds."""
    store = Journal(path)
    store.commit(effects)
    store.close()
    store = Journal(path)
    state = store.load(MACHINE)
    store.close()
    return state


def test_what_was_committed_is_there_at_the_next_start(path: Path) -> None:
    state = kept(path, *RECORDS, *save(FULL_JOB), *save(job(7)))
    assert dict(state.jobs) == {"job-1": FULL_JOB, "job-7": job(7)}
    assert state.environments["ce"].detail == {"state": "ENABLED", "type": "MANAGED"}
    assert state.queues["q"] == JobQueue("q", {"state": "ENABLED", "priority": 1})
    assert set(state.definitions) == {"d:1", "d:12"}
    assert dict(state.revisions) == {"d": 12}
    assert state.sequence == 7
    assert state.machine == state.free == MACHINE


def test_the_state_includes_a_commit_after_the_journal_was_opened(path: Path) -> None:
    kept(path, *save(job(1)), *save(job(2)))
    store = Journal(path)
    store.commit([SaveJob(job(1, JobStatus.SUCCEEDED), False), *save(job(3))])
    assert sorted(store.load(MACHINE).jobs) == ["job-2", "job-3"]


def test_a_finished_job_leaves_the_state_and_stays_in_the_store(path: Path) -> None:
    ended = job(9, JobStatus.SUCCEEDED)
    store = Journal(path)
    store.commit([*save(job(9)), SaveJob(ended, False)])
    assert dict(store.load(MACHINE).jobs) == {}
    assert store.load(MACHINE).sequence == 9
    assert store.jobs(["job-9", "nope"]) == {"job-9": ended}
    assert store.jobs([]) == {}


def test_a_dropped_record_is_gone(path: Path) -> None:
    assert "q" not in kept(path, *RECORDS, DropRecord("queue", "q")).queues


def test_jobs_are_listed_newest_first_by_queue_and_status_in_pages(path: Path) -> None:
    store = Journal(path)
    mine = [job(n, JobStatus.FAILED if n % 2 else JobStatus.RUNNABLE) for n in range(1, 8)]
    other = job(99, of=spec(99, queue="other"))
    store.commit([effect for one in (*mine, other) for effect in save(one)])

    def ids(status: str | None, below: int | None, limit: int) -> list[int]:
        return [j.sequence for j in store.list_jobs("q", JobFilter(status), below, limit)]

    assert ids(None, None, 100) == [7, 6, 5, 4, 3, 2, 1]
    assert ids("FAILED", None, 100) == [7, 5, 3, 1]
    assert ids("FAILED", 5, 1) == [3]
    assert ids(None, 3, 100) == [2, 1]


def test_jobs_with_a_rare_prefix_are_found_without_reading_the_others(path: Path) -> None:
    """For AWS's filter JOB_NAME: a name without regard to case, or a prefix with `*`."""
    store = Journal(path)
    names = {1: "rare-1", 3: "Rare-3", 4: "rare-4"}
    owners = {4: "other"}
    for first, last in ((1, 500), (501, 4000)):
        specs = [
            spec(n, name=names.get(n, f"name-{n}"), queue=owners.get(n, "q"))
            for n in range(first, last + 1)
        ]
        jobs = [job(each.created_at - 1_000, JobStatus.SUCCEEDED, each) for each in specs]
        store.commit([effect for each in jobs for effect in save(each)])
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        store._reader.set_progress_handler(count, 1)
        rare = store.list_jobs("q", JobFilter(names=["RARE-*", "none*"]), None, 101)
        store._reader.set_progress_handler(None, 1)
        assert [each.id for each in rare] == ["job-3", "job-1"]
        assert steps < 500
        below = store.list_jobs("q", JobFilter(names=["rare-*"]), 3, 101)
        assert [each.id for each in below] == ["job-1"]
        common = store.list_jobs("q", JobFilter(names=["name-*"]), None, 2)
        assert [each.id for each in common] == [f"job-{last}", f"job-{last - 1}"]
    store.close()


def test_streams_are_found_by_name_and_by_prefix(path: Path) -> None:
    store = Journal(path)
    launches = [
        PrepareAttempt(job(n), replace(ATTEMPT, task_id=f"t{n}", log_stream=name))
        for n, name in enumerate(["a/1", "a/2", "b/1", "a%/1"])
    ]
    store.commit([*launches, launches[0], StopAttempt("t0")])
    streams = StreamIndex(path)
    assert [s.name for s in streams.all("/aws/batch/job")] == ["a%/1", "a/1", "a/2", "b/1"]
    assert [s.name for s in streams.all("/aws/batch/job", "a/")] == ["a/1", "a/2"]
    assert streams.all("/other") == []
    assert streams.one("/aws/batch/job", "b/1") == LogStream("/aws/batch/job", "b/1", "t2", 1002)
    assert streams.one("/aws/batch/job", "c") is None
    assert streams.groups() == {"/aws/batch/job": 1000}
    streams.close()


def test_an_old_answer_is_kept_until_it_is_forgotten(path: Path) -> None:
    """B61."""
    store = Journal(path)
    calls = [RememberedCall("old", "x", b"{}", 10), RememberedCall("new", "y", b'{"a":1}', 20)]
    store.commit([], calls)
    store.close()
    store = Journal(path)
    assert [store.remembered_call(key) for key in ("old", "new", "none")] == [*calls, None]
    store.forget_calls(20)
    assert store.remembered_call("old") is None
    assert store.remembered_call("new") == calls[1]


class Unwritable(JobQueue, frozen=True):
    """A record that cannot be encoded."""

    what: object = object()


def test_effects_are_kept_all_or_none_and_the_store_goes_on(path: Path) -> None:
    """B82."""
    store = Journal(path)
    broken = SaveRecord("queue", "bad", Unwritable("bad", {}))
    with pytest.raises(TypeError):
        store.commit([*save(job(1)), broken], [RememberedCall("k", "d", b"", 1)])
    assert dict(store.load(MACHINE).jobs) == {}
    assert store.remembered_call("k") is None
    store.commit(save(job(2)))
    assert list(store.load(MACHINE).jobs) == ["job-2"]


def test_nothing_of_a_commit_that_fails_on_disk_is_kept(path: Path) -> None:
    store = Journal(path)
    store.commit(save(job(1)))
    with sqlite3.connect(path) as other:
        other.execute("CREATE TRIGGER no BEFORE INSERT ON calls BEGIN SELECT raise(FAIL, 'x'); END")
    with pytest.raises(LocalServerError):
        store.commit(save(job(2)), [RememberedCall("k", "d", b"", 1)])
    assert list(store.load(MACHINE).jobs) == ["job-1"]


def test_a_full_disk_is_named_and_loses_nothing(path: Path) -> None:
    """B83."""
    store = Journal(path)
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
        Journal(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize("content", [b"not a database, for sure " * 100, b"\0" * 5000])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StateDamaged, match=r"batchml local reset"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_truncated_journal_is_refused(path: Path) -> None:
    kept(path, *(effect for n in range(500) for effect in save(job(n))))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateDamaged):
        Journal(path)


@pytest.mark.parametrize("body", [b"", b"{", b'{"id": 1}', b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_refused(path: Path, body: bytes) -> None:
    kept(path, *save(job(1)))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE jobs SET body = ?", (body,))
    db.close()
    store = Journal(path)
    with pytest.raises(StateDamaged, match=r"cannot be read"):
        store.load(MACHINE)


def test_only_its_user_can_read_the_journal(path: Path) -> None:
    Journal(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_passes_is_no_damage(tmp_path: Path) -> None:
    store = Journal(tmp_path / "journal.db")
    store._writer.execute("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalBusy):
        store.commit([])
    other.execute("ROLLBACK")
    store.commit([])
    other.close()
    store.close()


# --- the format before ------------------------------------------------------------------------

FORMAT_1 = """
CREATE TABLE records (kind TEXT, key TEXT, body BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, sequence INTEGER, queue TEXT, name TEXT, status TEXT,
    created_at INTEGER, live INTEGER, body BLOB
) WITHOUT ROWID;
CREATE INDEX jobs_live ON jobs (sequence) WHERE live;
CREATE INDEX jobs_by_status ON jobs (queue, status, sequence);
CREATE INDEX jobs_by_age ON jobs (queue, sequence);
CREATE TABLE streams (
    log_group TEXT, stream TEXT, task_id TEXT, created_at INTEGER, PRIMARY KEY (log_group, stream)
) WITHOUT ROWID;
CREATE TABLE calls (key TEXT PRIMARY KEY, digest TEXT, answer BLOB, at INTEGER) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
OLD_ATTEMPT = {
    "number": 2, "task_id": "t2", "environment": "ce", "gpus": ["GPU-a"],
    "log_group": "/aws/batch/job", "log_stream": "d/default/t2", "started_at": 7,
}  # fmt: skip


def old_job(number: int, status: str, **more: Any) -> dict[str, Any]:
    """A job as format 1 kept it: all in one, and with every member."""
    return {
        "id": f"job-{number}", "name": f"name-{number}", "queue": "q", "definition": "d:1",
        "container": {"image": "i", "command": ["a", "ü"]},
        "needs": {"vcpus": 2, "memory": 64, "gpus": 1}, "created_at": 1000 + number,
        "sequence": number, "status": status, "status_reason": "", "started_at": None,
        "stopped_at": None, "exit_code": None, "reason": "", "retry": {"attempts": 3},
        "timeout": 60, "parameters": {"p": "1"}, "depends_on": [], "waiting_for": [],
        "dependency_failed": False, "tags": {"k": "v"}, "propagate_tags": True, "attempts": [],
        "attempt": None, "stop_reason": "", "cancelled": False, "terminated": False,
        "timed_out": False, **more,
    }  # fmt: skip


OLD_JOBS = [
    old_job(1, "SUCCEEDED", exit_code=0, attempts=[{"container": {"exitCode": 0}}]),
    old_job(2, "RUNNING", started_at=7, attempt=OLD_ATTEMPT, attempts=[{"stoppedAt": 5}]),
    old_job(3, "PENDING", waiting_for=["job-2"], depends_on=[{"jobId": "job-2"}]),
    old_job(4, "RUNNABLE"),
    old_job(5, "FAILED", terminated=True, stop_reason="why", status_reason="why"),
]


def format_1(path: Path, *bodies: bytes) -> None:
    """A journal of format 1 with a queue, a stream, an answer, and OLD_JOBS or these bodies."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(FORMAT_1)
    detail = {"state": "ENABLED", "priority": 1, "computeEnvironmentOrder": []}
    queue = msgspec.json.encode(JobQueue("q", detail))
    db.execute("INSERT INTO records VALUES (?, ?, ?)", ("queue", "q", queue))
    db.execute("INSERT INTO streams VALUES ('/aws/batch/job', 'd/default/t2', 't2', 1002)")
    db.execute("INSERT INTO calls VALUES ('k', 'x', ?, 9)", (b"{}",))
    for place, old in enumerate(OLD_JOBS):
        body = bodies[place] if place < len(bodies) else msgspec.json.encode(old)
        live = old["status"] not in ("SUCCEEDED", "FAILED")
        row = (old["id"], old["sequence"], "q", old["name"], old["status"], old["created_at"])
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, live, body))
    db.commit()
    db.close()


def rows_of(path: Path) -> dict[str, list[Any]]:
    db = sqlite3.connect(path)
    tables = ("records", "jobs", "streams", "calls", "sqlite_master")
    found = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    found["version"] = db.execute("PRAGMA user_version").fetchall()
    db.close()
    return found


def test_a_journal_of_the_format_before_is_taken_over(path: Path) -> None:
    """B195: jobs and their order, those that run, those that have ended, streams and answers."""
    format_1(path)
    before = rows_of(path)
    store = Journal(path)
    state = store.load(MACHINE)
    assert sorted(state.jobs) == ["job-2", "job-3", "job-4"]
    assert (state.sequence, sorted(state.queues)) == (5, ["q"])
    running = state.jobs["job-2"]
    assert running.attempt == JobAttempt(
        2, "t2", "ce", ("GPU-a",), "/aws/batch/job", "d/default/t2", 7
    )
    assert running.spec == SubmittedSpec(
        id="job-2", name="name-2", queue="q", definition="d:1",
        container={"image": "i", "command": ["a", "ü"]}, needs=Needs(2, 64, 1), created_at=1002,
        retry={"attempts": 3}, timeout=60, parameters={"p": "1"}, propagate_tags=True,
    )  # fmt: skip
    assert (running.attempts, running.tags) == (({"stoppedAt": 5},), {"k": "v"})
    assert state.jobs["job-3"].waiting_for == ("job-2",)
    assert state.jobs["job-3"].spec.depends_on == ({"jobId": "job-2"},)
    ended = store.jobs(["job-1", "job-5"])
    assert (ended["job-1"].exit_code, ended["job-1"].attempts[0]["container"]) == (
        0,
        {"exitCode": 0},
    )
    assert (ended["job-5"].terminated, ended["job-5"].status_reason) == (True, "why")
    listed = store.list_jobs("q", JobFilter(), None, 9)
    assert [one.id for one in listed] == [f"job-{number}" for number in (5, 4, 3, 2, 1)]
    assert [one.id for one in store.list_jobs("q", JobFilter(names=["NAME-4"]), None, 9)] == [
        "job-4"
    ]
    streams = StreamIndex(store.path)
    assert streams.one("/aws/batch/job", "d/default/t2") is not None
    streams.close()
    assert store.remembered_call("k") == RememberedCall("k", "x", b"{}", 9)
    store.commit(save(job(6)))
    store.close()
    assert rows_of(path.with_suffix(".v1")) == before
    assert path.with_suffix(".v1").stat().st_mode & 0o777 == 0o600
    store = Journal(path)
    assert sorted(store.load(MACHINE).jobs) == ["job-2", "job-3", "job-4", "job-6"]
    store.close()


def test_a_journal_without_proofs_of_logs_gets_them_and_loses_nothing(path: Path) -> None:
    """B195, B262: attempts that have ended have none; one that goes on may still get one."""
    store = Journal(path)
    attempts = [JobAttempt(1, f"t{n}", "ce", (), "/g", f"s{n}") for n in range(2)]
    ended = job(1, JobStatus.SUCCEEDED)
    going_on = job(2, JobStatus.RUNNING, attempt=attempts[1])
    store.commit([*save(ended), *save(going_on), PrepareAttempt(ended, attempts[0])])
    store.commit([PrepareAttempt(going_on, attempts[1])])
    store.close()
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE log_ends; PRAGMA user_version = 2;")
    db.close()
    before = rows_of(path)
    store = Journal(path)
    assert sorted(store.load(MACHINE).jobs) == ["job-2"]
    streams = StreamIndex(store.path)
    assert streams.log_end("t0") == LogEnd(doubt=NO_PROOF)
    assert streams.log_end("t1") is None
    streams.close()
    store.close()
    after = rows_of(path)
    assert (after["version"], after["streams"]) == ([(SCHEMA,)], before["streams"])
    assert after["jobs"] == before["jobs"]


def test_a_server_goes_on_with_the_jobs_of_the_format_before(path: Path) -> None:
    """B195."""
    format_1(path)
    store = Journal(path)
    state = restore(store.load(MACHINE), 8)
    assert state.free == MachineCapacity(2, 8192 - 64)
    assert dict(state.by_task) == {"t2": "job-2"}
    assert next_deadline(state) == 60_007
    state, _ = step(state, AttemptEnded("t2", AttemptExit(code=0), 9))
    assert state.jobs["job-3"].status is JobStatus.RUNNABLE
    store.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"{}", b"\xff", b'{"id": "job-1"}',
     msgspec.json.encode(old_job(1, "DONE")), msgspec.json.encode(old_job(1, "RUNNING", needs=1))],
)  # fmt: skip
def test_a_broken_journal_of_the_format_before_is_refused_and_left_as_it_is(
    path: Path, body: bytes
) -> None:
    """B84, B195."""
    format_1(path, body)
    before = rows_of(path)
    for _ in range(2):
        with pytest.raises(StateDamaged, match=r"cannot be read"):
            Journal(path)
        assert rows_of(path) == before


def test_no_space_to_take_over_a_journal_leaves_it_as_it_is(path: Path, tmp_path: Path) -> None:
    """B83, B195."""
    big = old_job(1, "SUCCEEDED", container={"image": "i" * 500_000, "command": []})
    format_1(path, msgspec.json.encode(big))
    before = rows_of(path)
    path.with_suffix(".v1").mkdir()  # no copy can be made
    with pytest.raises(LocalServerError):
        Journal(path)
    assert rows_of(path) == before
    path.with_suffix(".v1").rmdir()
    store = Journal(path)
    assert store.jobs(["job-1"])["job-1"].container["image"] == "i" * 500_000
    store.close()


# --- arrays -----------------------------------------------------------------------------------


def test_the_children_of_an_array_share_what_was_submitted_on_disk_too(path: Path) -> None:
    """B120."""
    whole = Job("a", spec(1, id="a", array_size=3), 1, JobStatus.PENDING)
    made = [Job(f"a:{n}", whole.spec, 2 + n, JobStatus.RUNNABLE, index=n) for n in range(3)]
    over = replace(made[1], status=JobStatus.FAILED)
    store = Journal(path)
    store.commit([SaveSpec(whole.spec), *(SaveJob(one, True) for one in (whole, *made))])
    store.commit([SaveJob(over, False)])
    state = store.load(MACHINE)
    assert dict(state.counts) == {"a": {"FAILED": 1}}
    assert len({id(one.spec) for one in state.jobs.values()}) == 1
    assert store.ended_children("a") == {"a:1": "FAILED"}
    assert [one.id for one in store.list_jobs("q", JobFilter(), None, 9)] == ["a"]
    assert [one.id for one in store.list_jobs("a", JobFilter(), None, 2)] == ["a:2", "a:1"]
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM specs").fetchone() == (1,)
    db.close()
    store.close()


def test_a_job_whose_spec_is_missing_is_damage(path: Path) -> None:
    kept(path, *save(job(1)))
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM specs")
    db.close()
    store = Journal(path)
    with pytest.raises(StateDamaged, match=r"spec job-1 is missing"):
        store.load(MACHINE)
    store.close()
