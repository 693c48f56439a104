"""The index of the history: it finds what reading every line finds, whatever happens to it."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchml.history import History, HistoryRecords, IndexNotice
from batchml.model.group import is_listed
from batchml.model.run import JobStatus, MetricRange, Record, Run, RunName, run_from_record
from batchml.runs.metrics.conditions import MetricCondition
from batchml.runs.search import FoundRun, RunFilter, lacks_ranges, matches, to_query
from tests.support.fakes import FakeClock
from tests.support.known_runs import KnownList

PROJECTS = ("", "vision", "digits")
NAMES = ("train", "4abc", "eval")
PARAMS: tuple[dict[str, object], ...] = (
    {"lr": 0.1}, {"lr": "0.10", "on": True}, {"lr": -0.0}, {"lr": 1, "big": 10**400},
    {"seed": "{index}"}, {"lr": [1, "a"]},
)  # fmt: skip
COMMITS = ("", "0a1b2c3d4e")
FILTERS = (
    RunFilter(tags={"team": "v"}), RunFilter(tags={"team": "v", "batchml:key": "2"}),
    RunFilter(params={"lr": "0.1"}), RunFilter(params={"lr": "1e-1"}),
    RunFilter(params={"lr": "0.10"}), RunFilter(params={"lr": "0"}),
    RunFilter(params={"lr": "1.0", "big": str(10**400)}), RunFilter(params={"on": "TRUE"}),
    RunFilter(params={"seed": "3"}), RunFilter(params={"lr": "[1, 'a']"}, name="train"),
    RunFilter(commit="0a1b"), RunFilter(commit="0a1b2c", params={"lr": "0.1"}),
    RunFilter(tags={"batchml:sweep": "s"}, params={"lr": "9"}),
)  # fmt: skip


def job_id(number: int) -> str:
    return f"{number:04x}0000-0000-4000-8000-{number:012d}"


def key(number: int) -> str:
    return f"2{number:016d}"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history.jsonl")


def index_of(history: History) -> Path:
    return history.path.with_suffix(".index")


def write(history: History, *numbers: int, **more: object) -> None:
    for number in numbers:
        values = {"key": key(number), "name": "train", "job_name": f"train-{key(number)}",
                  "env": "local", "at": number}  # fmt: skip
        history.intend(Record(**{**values, **more}))  # type: ignore[arg-type]
        history.add_job_id(key(number), job_id(number))


def times(history: History) -> list[int]:
    return [each.at for each in history.newest_first("local")]


# --- It finds what reading every line finds -------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("intend", "id", "refuse", "end", "end of a job", "lost", "start", "move", "forget",
             "torn", "reopen")
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=40,
)  # fmt: skip


@given(steps=STEPS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_index_agrees_with_the_lines_after_any_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[str, int, int]]
) -> None:
    history = History(tmp_path_factory.mktemp("h") / "history.jsonl")
    for step, number, other in steps:
        take(history, step, number, other)
        if other == 0:
            times(history)  # the index takes in the lines so far
    fresh = History(history.path)
    index_of(history).unlink(missing_ok=True)
    again = History(history.path)
    for each in (fresh, again):
        check(history, each)


def take(history: History, step: str, number: int, other: int) -> None:
    if step == "intend":
        name, project = NAMES[other % 3], PROJECTS[number % 3]
        tags = {"batchml:sweep": "s"} if other == 5 else {"team": "vt"[other % 2]}
        record = Record(
            key=key(number), name=name, job_name=f"{name}-{key(number)}", env=("local", "dev")[
                other % 2
            ], at=number, project=project, tags=tags, queue="q", fallback="q2:60",
            params=PARAMS[other], commit=COMMITS[number % 2], patterns={"acc": "x"},
        )  # fmt: skip
        history.intend(record)
    elif step == "id":
        history.add_job_id(key(number), job_id(10 * number + other))
    elif step == "refuse":
        history.add_refusal(key(number), "no")
    elif step in ("end", "end of a job"):
        status = (JobStatus.SUCCEEDED, JobStatus.FAILED)[other % 2]
        run = Run(
            job_id(10 * number + other), "n", "q", status,
            key=key(number) if step == "end" else "", exit_code=other,
        )  # fmt: skip
        value = float(other)
        found = {"loss": value} if other < 4 else {"loss:0": value, "loss:1": 0.0}
        ranges = {name: MetricRange(0.0, 0.0, each) for name, each in found.items()}
        history.add_end(run, found if other else None, ranges=ranges if other > 1 else None)
    elif step == "lost":
        history.add_lost([job_id(10 * number + other)])
    elif step == "start":
        history.add_starts({job_id(10 * number + other): 7})
    elif step == "move":
        before = job_id(10 * number + other)
        moved = Record(
            key=key(number), moved=before, env="local", name="train", queue="q2",
            project=PROJECTS[number % 3],
        )  # fmt: skip
        history.intend(moved)
        history.add_job_id(key(number), job_id(10 * number + (other + 1) % 6))
    elif step == "forget":
        history.forget(("local", "dev")[other % 2])
    elif step == "torn" and history.path.exists():
        with open(history.path, "ab") as file:
            file.write(b'{"key": "2torn", "na')


def check(history: History, again: History) -> None:
    every = [name for env in ("local", "dev") for _, name in reference(history.path, env)]
    assert set(again.projects()) == {each.project for each in every if each.project}
    for env in ("local", "dev"):
        kept = reference(history.path, env)
        assert again.newest_first(env) == [record for record, _ in kept if record is not None]
        names = [name for _, name in kept]
        found, known = again.names(env), KnownList(names)
        assert list(found) == names
        words = [word for each in names for word in (each.key, each.job_name, each.job_id[:6])]
        for word in (*NAMES, *filter(None, words), "0", "nothing"):
            assert found.named(word) == known.named(word), word
        for project in PROJECTS:
            assert found.newest(project, 2) == known.newest(project, 2)
        records = again.records(env)
        whole = [record for record, _ in kept if record is not None and record.job_id]
        assert list(records) == whole
        for condition in (
            MetricCondition("loss", ">", 1.0), MetricCondition("loss", "<=", 0.0, "min"),
            MetricCondition("loss:1", "=", 0.0), MetricCondition("loss", "!=", 2.0, "best"),
        ):  # fmt: skip
            may = list(records.matching(to_query(RunFilter(metrics=(condition,)))))
            for each in whole:
                is_read = each.measured and not (
                    condition.function != "last" and lacks_ranges(each)
                )
                if condition.holds(each) or not (is_read or each.lost):
                    assert each in may
        check_filters(records, whole)
        columns = again.column_names(env)
        listed = [each for each in whole if is_listed(each)]
        theirs = known_of(listed)
        assert {
            "param": {name for each in listed for name in each.params},
            "metric": {name for each in listed for name in (*each.metrics, *each.patterns)},
        } == {kind: each & theirs for kind, each in columns.items()}
        for status in ("RUNNING", "FAILED"):
            query = to_query(RunFilter(states=frozenset({status}), project="vision"))
            may = list(records.matching(query))
            of_project = [each for each in whole if each.project == "vision"]
            wanted = [each for each in of_project if each.status == status]
            wanted += [each for each in of_project if not each.status and not each.lost]
            assert all(each in may for each in wanted)
            assert all(each.status in ("", status) or each.moved for each in may)


def known_of(records: Sequence[Record]) -> set[str]:
    return {name for each in records for name in (*each.params, *each.metrics, *each.patterns)}


def check_filters(records: HistoryRecords, whole: Sequence[Record]) -> None:
    """The index leaves out no run that matches, and none whose end is not known."""
    for filters in FILTERS:
        may = [each.job_id for each in records.matching(to_query(filters))]
        for each in whole:
            found = FoundRun(run_from_record(each), each)
            is_open = not each.has_ended and not each.lost
            is_trial = bool(filters.params and found.sweep) and not filters.leaves_out_sweeps
            if matches(found, filters) or (is_open and not filters.name) or is_trial:
                assert each.job_id in may, (filters, each)


def test_of_many_runs_the_index_finds_those_with_a_tag_a_parameter_and_a_commit(
    history: History,
) -> None:
    write(history, *range(300), tags={"team": "v"}, params={"lr": 0.1}, commit="0a1b2c")
    write(history, 300, tags={"team": "t", "batchml:key": "2"}, params={"lr": 0.2}, commit="ffff00")
    history.add_ends(
        Run(job_id(each), "n", "q", JobStatus.SUCCEEDED, key=key(each)) for each in range(301)
    )
    write(history, 301, tags={"team": "v"}, params={"lr": 0.1}, commit="0a1b2c")  # it runs
    records = History(history.path).records("local")
    for filters in (
        RunFilter(tags={"team": "t"}), RunFilter(params={"lr": "2e-1"}), RunFilter(commit="ffff"),
    ):  # fmt: skip
        assert [each.at for each in records.matching(to_query(filters))] == [301, 300]


def test_an_index_that_takes_long_is_said_with_what_it_has_read(history: History) -> None:
    write(history, *range(3))
    size = history.path.stat().st_size
    read: list[tuple[int, int]] = []
    assert len(times(History(history.path, lambda *done: read.append(done)))) == 3
    assert read == [(0, size), (size, size)]
    clock, said = FakeClock(), list[str]()
    notice = IndexNotice(clock, said.append)
    for seconds in range(17):
        notice(seconds << 20, 16 << 20)
        clock.sleep(1)
    assert said == [
        "Making the index of the history: 6% of 16 MiB",
        "Making the index of the history: 69% of 16 MiB",
    ]


def reference(path: Path, env: str) -> list[tuple[Record | None, RunName]]:
    """The runs of an environment by reading all lines, the newest first."""
    runs: dict[str, dict[str, object]] = {}
    key_of: dict[str, str] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            read = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if read.get("forgotten"):
            runs = {each: run for each, run in runs.items() if run["env"] != read["forgotten"]}
            continue
        job = read.get("job_id", "")
        if job and (read.get("env") or read.get("key") in runs):
            key_of[job] = read.get("key") or key_of.get(job, job)
        identity = read.get("key") or key_of.get(job, job)
        if identity not in runs:
            if read.get("env"):
                runs[identity] = {"env": read["env"], "first": read, "job": job, "lines": [read],
                                  "refused": read.get("refused", ""), "moved": ""}  # fmt: skip
            continue
        run = runs[identity]
        if read.get("moved"):
            run |= {"moved": read["moved"], "refused": "", "lines": []}
        elif run["moved"] and job == run["moved"]:
            continue
        run["job"] = job or run["job"]
        run["refused"] = read.get("refused") or run["refused"]
        run["lines"] = [*run["lines"], read]  # type: ignore[misc]
    found: list[tuple[Record | None, RunName]] = []
    for run in reversed(runs.values()):
        if run["env"] == env:
            merged: dict[str, object] = {}
            for line_ in run["lines"]:  # type: ignore[attr-defined]
                merged |= line_
            name = {k: v for k, v in run["first"].items() if k in RunName.__struct_fields__}  # type: ignore[attr-defined]
            name |= {"job_id": run["job"], "refused": run["refused"], "moved": run["moved"]}
            found.append((msgspec.convert(merged, Record), msgspec.convert(name, RunName)))
    return found


def test_a_report_that_fails_is_no_error_of_the_history(history: History) -> None:
    write(history, 1, 2)

    def fail(read: int, size: int) -> None:
        raise BrokenPipeError

    assert len(list(History(history.path, fail).names("local"))) == 2


def test_of_a_name_the_newest_runs_of_the_project_are_found(history: History) -> None:
    write(history, *range(400), project="digits")
    write(history, 400, project="vision")
    write(history, 401)
    write(history, *range(402, 500), project="other")
    found = [each.project for each in history.names("local").named("train", "vision")]
    assert sorted(found) == ["", "digits", "vision"]  # one is enough to say where it is
    newest = history.names("local").named("train", "digits")
    assert newest[3].key == key(398) and len(newest) < 400


# --- Whatever happens to it -----------------------------------------------------------------------


def test_an_index_that_is_missing_damaged_or_of_another_version_is_made_again(
    history: History,
) -> None:
    write(history, 1, 2)
    assert times(history) == [2, 1]
    index = index_of(history)
    assert index.stat().st_mode & 0o077 == 0
    whole = index.read_bytes()
    for damage in (b"", b"not a database" * 500, whole[: len(whole) // 2], whole[:4096]):
        index.write_bytes(damage)
        assert times(History(history.path)) == [2, 1]
        assert times(History(history.path)) == [2, 1]
    index.unlink()
    assert times(History(history.path)) == [2, 1]
    database = sqlite3.connect(index)
    database.execute("PRAGMA user_version = 999")
    database.close()
    assert times(History(history.path)) == [2, 1]


def test_each_page_of_the_index_may_be_damaged(history: History) -> None:
    write(history, *range(40))
    assert len(times(history)) == 40
    index = index_of(history)
    whole = index.read_bytes()
    for start in range(0, len(whole), 4096):
        index.write_bytes(whole[:start] + os.urandom(4096) + whole[start + 4096 :])
        again = History(history.path)
        assert times(again) == list(range(40))[::-1], start
        assert len(list(again.records("local"))) == 40


def test_an_index_that_is_behind_takes_in_what_is_missing(history: History) -> None:
    write(history, 1)
    assert times(history) == [1]
    before = index_of(history).read_bytes()
    write(history, 2)
    history.add_ends([Run(job_id(1), "train", "q", JobStatus.FAILED)])
    assert times(history) == [2, 1]
    index_of(history).write_bytes(before)  # as from a backup
    (second, first) = History(history.path).newest_first("local")
    assert (second.at, first.at, first.status) == (2, 1, "FAILED")


def test_an_index_ahead_of_a_history_from_a_backup_is_made_again(history: History) -> None:
    write(history, 1)
    before = history.path.read_bytes()
    write(history, 2)
    assert times(history) == [2, 1]
    history.path.write_bytes(before)
    assert times(History(history.path)) == [1]


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"train"', b'"trail"'), (key(2).encode(), key(7).encode()), (b'"name"', b'"nam"   ')],
)
def test_an_edit_in_place_that_keeps_size_and_end_is_taken_in(
    history: History, old: bytes, new: bytes
) -> None:
    write(history, *range(1, 12))
    assert len(times(history)) == 11
    before = os.stat(history.path)
    text = history.path.read_bytes()
    half = len(text) // 2  # the end of the file stays
    edited = text[:half].replace(old, new).ljust(half)[:half] + text[half:]
    while os.stat(history.path).st_ctime_ns == before.st_ctime_ns:
        history.path.write_bytes(edited)
    after = os.stat(history.path)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size) and edited != text
    for again in (history, History(history.path)):
        check(history, again)
    changed = history.names("local").named("trail" if b"trail" in new else new.decode())
    assert bool(changed) == (b"nam" not in new)


def test_processes_that_take_in_the_same_lines_do_not_make_the_index_again(
    history: History,
) -> None:
    """One waits for the other with a state of the file from before its last lines."""
    write(history, 1)
    assert times(history) == [1]
    other = History(history.path)
    assert times(other) == [1]
    index = history._index
    assert index is not None
    write(history, 2)
    with open(history.path, "rb") as file:
        before = os.fstat(file.fileno())
        write(history, 3)
        assert times(other) == [3, 2, 1]
        made: list[str] = []
        assert index._database is not None
        index._database.set_trace_callback(made.append)
        index._update(file.fileno(), before)
    assert not [each for each in made if "CREATE" in each]
    assert times(history) == [3, 2, 1]


def test_a_history_on_a_disk_that_takes_nothing_is_read(history: History) -> None:
    write(history, 1, 2)
    index_of(history).mkdir()  # nothing can be written there, by whatever user
    assert times(history) == [2, 1]
    write(history, 3)
    assert times(history) == [3, 2, 1]
    assert [each.key for each in history.names("local").named("train")] == [
        key(3), key(2), key(1)
    ]  # fmt: skip


def test_an_index_that_another_process_holds_is_not_waited_for_for_ever(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(history, 1)
    assert times(history) == [1]
    holder = sqlite3.connect(index_of(history), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr("batchml.history_index._BUSY_LIMIT", 0.05)
    write(history, 2)
    assert times(History(history.path)) == [2, 1]
    holder.execute("ROLLBACK")
    assert times(history) == [2, 1]


def test_an_index_that_another_process_holds_while_it_is_read_is_made_in_memory(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchml.history_index._BUSY_LIMIT", 0.05)
    write(history, 1, 2)
    names = history.names("local")
    holder = sqlite3.connect(index_of(history), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert [each.key for each in names] == [key(2), key(1)]
    holder.execute("ROLLBACK")
    assert times(History(history.path)) == [2, 1]


_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from batchml.history import History
from tests.runs.test_history_index import times
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
print(times(History(Path(sys.argv[1]))) == list(range(60))[::-1])
"""


@pytest.mark.parametrize("room", [0, 4096, 40_000])
def test_where_no_more_can_be_written_the_history_is_read(history: History, room: int) -> None:
    write(history, *range(30))
    if room == 40_000:  # an index that is there and cannot grow
        assert len(times(history)) == 30
    write(history, *range(30, 60))
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(history.path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert times(History(history.path)) == list(range(60))[::-1]
    (damage,) = sqlite3.connect(index_of(history)).execute("PRAGMA integrity_check")
    assert damage == ("ok",)


_WRITER = """
import sys
from pathlib import Path
from batchml.history import History
from tests.runs.test_history_index import times, write
history, first = History(Path(sys.argv[1])), int(sys.argv[2])
print(flush=True)
for number in range(first, first + 40):
    write(history, number)
    assert number in times(history)
"""


def test_several_processes_write_and_read_at_once(history: History) -> None:
    command = [sys.executable, "-c", _WRITER, str(history.path)]
    processes = [subprocess.Popen([*command, str(first)]) for first in (0, 100, 200)]
    assert [each.wait(120) for each in processes] == [0, 0, 0]
    expected = {*range(40), *range(100, 140), *range(200, 240)}
    assert set(times(history)) == expected
    assert set(times(History(history.path))) == expected
    (damage,) = sqlite3.connect(index_of(history)).execute("PRAGMA integrity_check")
    assert damage == ("ok",)


def test_a_reader_that_is_killed_leaves_an_index_that_is_right(history: History) -> None:
    for round_ in range(6):
        command = [sys.executable, "-c", _WRITER, str(history.path), str(100 * round_)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        time.sleep(0.01 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        again = History(history.path)
        assert times(again) == [
            record.at for record, _ in reference(history.path, "local") if record
        ]
        (damage,) = sqlite3.connect(index_of(history)).execute("PRAGMA integrity_check")
        assert damage == ("ok",)
