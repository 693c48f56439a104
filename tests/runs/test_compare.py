"""What two runs requested, side by side."""

from batchml.model.run import JobStatus, Record, Run
from batchml.runs.compare.facts import RunDifference, compare
from batchml.runs.search import FoundRun


def one(**more: object) -> FoundRun:
    values = {"job_id": "a", "name": "train", "queue": "q", "status": JobStatus.SUCCEEDED,
              "created_at": 1000, "started_at": 3000, "stopped_at": 10_000, "vcpus": 2,
              "image": "x:1", "command": ("train", "0.1"), "params": {"lr": 0.1},
              "exit_code": 0}  # fmt: skip
    record = Record(commit="aaaa", dirty=False, code="/here/1.tar", metrics={"loss": 0.5}, cost=1.0)
    return FoundRun(Run(**{**values, **more}), record)  # type: ignore[arg-type]


def differing(left: FoundRun, right: FoundRun) -> dict[str, tuple[object, object]]:
    found = compare(left, right)
    return {each.what: (each.left, each.right) for each in found if not each.same}


def test_a_run_does_not_differ_from_itself() -> None:
    assert differing(one(), one()) == {}
    assert compare(one(), one()) != []


def test_parameters_come_before_code_and_command() -> None:
    other = FoundRun(
        one(params={"lr": 0.2, "new": True}, command=("train", "0.2"), stopped_at=5000).run,
        Record(commit="bbbb", dirty=True, code="s3://b/code/2.tar", metrics={"loss": 0.25}),
    )
    assert list(differing(one(), other).items()) == [
        ("params.lr", (0.1, 0.2)),
        ("params.new", (None, True)),
        ("commit", ("aaaa", "bbbb")),
        ("uncommitted", (False, True)),
        ("code", ("1", "2")),
        ("command", ("train 0.1", "train 0.2")),
    ]


def test_the_same_code_at_another_place_is_the_same() -> None:
    left, right = one(), one()
    assert right.record is not None
    moved = FoundRun(right.run, Record(commit="aaaa", dirty=False, code="s3://b/code/1.tar"))
    assert "code" not in differing(left, moved)


def test_a_forgotten_run_is_compared_by_what_was_asked_for() -> None:
    forgotten = FoundRun(None, Record(name="train", queue="q", image="x:1", vcpus=4, at=1000))
    assert differing(one(), forgotten)["vcpus"] == (2, 4)


def test_results_are_no_differences() -> None:
    found = differing(one(), one(status=JobStatus.RUNNING, stopped_at=None, exit_code=None))
    assert found == {}


def test_only_numbers_change_by_a_number() -> None:
    assert RunDifference("a", 1, 1.5).change == 0.5
    assert RunDifference("a", True, 2).change is None
    assert RunDifference("a", None, 2).change is None
    assert RunDifference("a", "1", "2").change is None
