"""The history: what is written survives, what is torn is passed over, and reading is quick."""

import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.errors import StateDamaged
from batchml.history import History
from batchml.model.run import Attempt, JobStatus, MetricRange, Record, Run, run_from_record

ID = "6b0e0000-0000-4000-8000-{:012d}"


def record(number: int, **more: object) -> Record:
    values = {"key": f"2{number:016d}", "name": "train", "env": "local", "queue": "default",
              "job_name": f"train-2{number:016d}", "at": number}  # fmt: skip
    return Record(**{**values, **more})  # type: ignore[arg-type]


def ended(number: int, **more: object) -> Run:
    values = {"job_id": ID.format(number), "name": "train", "queue": "default",
              "status": JobStatus.FAILED, "status_reason": "Essential container in task exited",
              "exit_code": 3, "created_at": number, "started_at": number + 1, "stopped_at": 9,
              "attempts": (Attempt(exit_code=3, log_stream="s", host="i-1"),)}  # fmt: skip
    return Run(**{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history.jsonl")


def test_a_run_is_one_record_from_its_intent_to_its_end(history: History) -> None:
    history.intend(record(1, params={"lr": 0.1}))
    history.add_job_id("2" + "0" * 15 + "1", ID.format(1))
    history.add_end(ended(1), {"loss": 0.5}, 0.25)  # knows the id only, not the key
    (found,) = history.newest_first("local")
    assert (found.job_id, found.params, found.status) == (ID.format(1), {"lr": 0.1}, "FAILED")
    assert (found.outcome, found.metrics, found.cost) == ("app-error", {"loss": 0.5}, 0.25)
    run = run_from_record(found)
    assert run is not None
    assert run.attempts == ended(1).attempts
    assert run.exit_code == 3


def test_an_end_seen_again_without_its_metrics_does_not_take_them_away(history: History) -> None:
    history.intend(record(1))
    history.add_job_id(record(1).key, ID.format(1))
    history.add_end(ended(1), {"loss": 0.5})
    history.add_ends([ended(1)])
    (found,) = history.newest_first()
    assert found.metrics == {"loss": 0.5}
    assert found.measured


def test_the_first_least_and_greatest_values_are_kept_with_the_last(history: History) -> None:
    history.intend(record(1, directions={"acc": "max"}))
    history.add_job_id(record(1).key, ID.format(1))
    history.add_end(ended(1), {"acc": 0.5}, ranges={"acc": MetricRange(0.1, 0.1, 0.7)})
    history.add_ends([ended(1)])
    (found,) = history.newest_first()
    assert found.ranges == {"acc": MetricRange(0.1, 0.1, 0.7)}
    assert found.directions == {"acc": "max"}


def test_ends_of_children_and_of_runs_that_go_on_are_not_kept(
    history: History, tmp_path: Path
) -> None:
    history.add_end(ended(1, job_id=ID.format(1) + ":3"))
    history.add_end(ended(1, status=JobStatus.RUNNING))
    assert not (tmp_path / "history.jsonl").exists()


def test_who_only_looks_makes_no_state_folder(tmp_path: Path) -> None:
    history = History(tmp_path / "state" / "history.jsonl")
    history.add_ends([ended(1)])
    assert history.newest_first() == history.recent() == history.unconfirmed("local") == []
    assert not (tmp_path / "state").exists()


def test_an_intent_is_open_until_it_is_submitted_or_refused(history: History) -> None:
    history.intend(record(1), record(2), record(3), record(4, env="dev"))
    history.add_job_id(record(1).key, ID.format(1))
    history.add_refusal(record(2).key, "no such queue")
    assert [each.key for each in history.unconfirmed("local")] == [record(3).key]
    assert [each.key for each in history.unconfirmed("dev")] == [record(4).key]
    assert [each.refused for each in history.newest_first("local")] == ["", "no such queue", ""]


def test_an_intent_that_cannot_be_written_is_an_error_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="No such file"):
        History(tmp_path / "nowhere" / "history.jsonl").intend(record(1))


def test_lines_of_the_first_version_are_read(history: History, tmp_path: Path) -> None:
    line = {"job_id": ID.format(1), "name": "n", "env": "local", "queue": "q", "at": 7}
    (tmp_path / "history.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    history.add_ends([ended(1)])
    (found,) = history.newest_first("local")
    assert (found.name, found.at, found.status, found.key) == ("n", 7, "FAILED", "")


def test_what_comes_after_a_torn_line_is_whole(history: History, tmp_path: Path) -> None:
    history.intend(record(1))
    with open(tmp_path / "history.jsonl", "ab") as file:
        file.write(b'{"key": "2torn", "na')
    history.intend(record(2))
    assert [each.at for each in history.newest_first("local")] == [2, 1]


@given(st.data())
@settings(max_examples=15)
def test_cut_anywhere_every_whole_line_is_read(data: st.DataObject) -> None:
    lines = [msgspec.json.encode(record(number)) for number in range(5)]
    whole = b"".join(line + b"\n" for line in lines)
    cut = data.draw(st.integers(0, len(whole)))
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"history-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / "history.jsonl"
    path.write_bytes(whole[:cut])
    history = History(path)
    before = history.newest_first()
    # A last line without its newline may be whole all the same.
    assert len(before) in (whole[:cut].count(b"\n"), whole[:cut].count(b"\n") + 1)
    history.add(record(9))
    assert [each.at for each in history.newest_first()] == [9, *(each.at for each in before)]
    path.unlink()


@given(st.binary(max_size=200))
@settings(max_examples=15)
def test_nothing_in_the_file_breaks_reading(noise: bytes) -> None:
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"history-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / "noise.jsonl"
    path.write_bytes(noise + b'\n[1]\n{"key": 5}\n{"key": "k", "env": "e", "at": "late"}\n')
    history = History(path)
    history.add(record(1))
    history.names("e")
    assert list(history.records("e")) == []
    assert history.newest_first("local") == [record(1)]
    assert history.unconfirmed("local") == [record(1)]
    path.unlink()


def test_one_environment_is_forgotten_and_no_other(history: History) -> None:
    history.intend(record(1), record(2, env="dev"))
    history.forget("local")
    history.add_job_id(record(1).key, ID.format(1))  # too late: nobody knows it any more
    history.intend(record(3))
    assert [each.at for each in history.newest_first()] == [3, 2]
    assert [each.at for each in history.unconfirmed("local")] == [3]


def test_lines_are_read_whatever_lies_before(history: History, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"x" * 2_000_000 + b"\n")
    history.intend(record(1), record(2))
    assert [each.at for each in history.recent("local")] == [2, 1]


def test_ten_thousand_runs_are_read_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    spec = {"image": "pytorch", "command": ["python", "train.py", "--lr", "{lr}"], "params": {}}
    with open(path, "wb") as file:
        for number in range(10_000):
            made = record(number, params={"lr": 0.1}, spec=spec, command=("python", "train.py"))
            settled = {"key": made.key, "job_id": ID.format(number)}
            end = {**settled, "status": "SUCCEEDED", "metrics": {"loss": 0.1}}
            for line in (made, settled, end):
                file.write(msgspec.json.encode(line) + b"\n")
    history = History(path)
    times = []
    for _ in range(5):
        before = time.process_time()
        assert len(history.newest_first("local")) == 10_000
        times.append(time.process_time() - before)
    assert min(times) < 0.25, times  # 0.1 s on a machine that does nothing else


def test_names_are_those_of_all_runs_and_the_rest_is_read_when_asked_for(history: History) -> None:
    history.intend(record(1), record(2, name="other"), record(3), record(4, env="dev"))
    history.add_job_id(record(1).key, ID.format(1))
    history.add_refusal(record(2).key, "no such queue")
    history.add_job_id(record(4).key, ID.format(4))
    history.add_end(ended(1), {"acc": 0.5})
    whole = history.newest_first("local")
    assert [(each.key, each.job_id, each.name, each.job_name, each.refused) for each in whole] == [
        (each.key, each.job_id, each.name, each.job_name, each.refused)
        for each in history.names("local")
    ]
    known = history.records("local")
    assert list(known) == [known.get(ID.format(1))] == [whole[2]]
    assert known.get("") is known.get(ID.format(4)) is None
    assert [each.at for each in history.records()] == [4, 1]


def test_what_is_no_text_of_unicode_is_kept_all_the_same(history: History) -> None:
    history.intend(record(1, params={"p": "caf\udce9"}, tags={"\ud800": "x"}, command=("a\udcff",)))
    history.add_refusal(record(1).key, "no \udcff")
    (found,) = history.newest_first()
    assert (found.params, found.tags, found.command) == ({"p": "caf?"}, {"?": "x"}, ("a?",))
    assert found.refused == "no ?"


def test_a_history_that_cannot_be_read_is_named_with_what_to_do(history: History) -> None:
    history.path.mkdir(parents=True)
    with pytest.raises(StateDamaged, match=r"history\.jsonl cannot be read: Is a directory\. It h"):
        history.names("local")


def test_what_others_add_is_read_and_a_file_that_was_replaced_is_read_again(
    history: History, tmp_path: Path
) -> None:
    history.intend(record(1), record(2))
    assert [each.at for each in history.newest_first()] == [2, 1]
    History(tmp_path / "history.jsonl").intend(record(3))
    history.add_job_id(record(1).key, ID.format(1))
    assert [each.at for each in history.newest_first()] == [3, 2, 1]
    assert [each.at for each in history.records()] == [1]
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[1:3]) + b" " * 4096 + b"\n")  # longer, and the same inode
    assert [each.at for each in history.newest_first()] == [3, 2]
    path.write_bytes(whole[0])
    assert [each.at for each in history.newest_first()] == [1]
    path.write_bytes(b"")
    assert history.newest_first() == []


def test_a_line_that_is_written_while_it_is_read_counts_when_it_is_whole(
    history: History, tmp_path: Path
) -> None:
    history.intend(record(1), record(2))
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [each.at for each in history.newest_first()] == [1]
    path.write_bytes(whole)
    assert [each.at for each in history.newest_first()] == [2, 1]
