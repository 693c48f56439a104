"""Children of an array that was run again in part are called by their first numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.model.explanation import Explanation
from batchml.model.names import short_id
from batchml.model.numbering import (
    format_ranges,
    original_id,
    original_numbers,
    rerun_id,
    shown_id,
    shown_params,
)
from batchml.model.run import JobStatus, Record, Run
from batchml.runs import outputs
from batchml.runs.outputs import OutputEntry
from batchml.runs.rerun.resubmit import RenumberedDiagnosis
from batchml.runs.rerun.rules import Numbering
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import ContactLost, OutputLine, RunEnded, RunMessage
from batchml.runtime.protocol.variables import ARRAY_MAP

NUMBERS = st.sets(st.integers(0, 9_999), min_size=1, max_size=9).map(lambda it: tuple(sorted(it)))


def run(**environment: str) -> Run:
    return Run("id", "n", "q", JobStatus.RUNNING, environment=environment)


def test_numbers_are_known_from_aws_or_from_what_is_kept_here() -> None:
    record = Record(job_id="id", spec={"env": {ARRAY_MAP: "2 4-5"}})
    assert original_numbers(run(**{ARRAY_MAP: "2 4-5"}), None) == (2, 4, 5)
    assert original_numbers(None, record) == original_numbers(run(), record) == (2, 4, 5)
    assert original_numbers(run(), Record()) == original_numbers(None, None) == ()
    assert original_numbers(run(**{ARRAY_MAP: "what; else"}), None) == ()


@given(NUMBERS)
@settings(max_examples=30)
def test_an_id_by_the_first_number_is_that_of_the_child_and_back(first: tuple[int, ...]) -> None:
    for index, number in enumerate(first):
        named = original_id(f"id:{index}", first)
        assert named == f"id:{number}"
        assert rerun_id(named, first) == (f"id:{index}" if len(first) > 1 else "id")
    assert rerun_id(f"id:{first[-1] + 1}", first) is None


def test_an_id_for_users_is_short_and_has_the_first_number() -> None:
    child = replace(run(**{ARRAY_MAP: "2 4"}), job_id="3f2a1b0c-5e08-49e2-bc82-92ab2c0edc4c:1")
    assert short_id(shown_id(child)) == short_id(FoundRun(child, None).shown_id) == "3f2a1b0c:4"
    assert short_id("3f2a1b0c-5e08-49e2-bc82-92ab2c0edc4c#1") == "3f2a1b0c#1"


def test_parameters_have_the_number_of_the_child_or_those_of_all() -> None:
    child = replace(run(**{ARRAY_MAP: "2 4-5"}), array_index=1)
    array, plain = replace(run(), array_size=4), run()
    partial = replace(run(**{ARRAY_MAP: "2 4-5"}), array_size=3)
    shown = [shown_params({"seed": "{index}"}, each) for each in (child, array, partial, plain)]
    assert [each["seed"] for each in shown] == [4, "0-3", "2,4-5", "{index}"]


@pytest.mark.parametrize("job_id", ["id", "id:3", "id#1"])
def test_where_nothing_was_renumbered_ids_stay(job_id: str) -> None:
    assert (original_id(job_id, ()), rerun_id(job_id, ())) == (job_id, job_id)
    assert rerun_id("id#1", (2, 4)) == "id#1"


def test_what_is_told_of_a_child_has_its_first_number() -> None:
    numbers, parent = Numbering(), run(**{ARRAY_MAP: format_ranges([2, 4])})
    lines = [OutputLine(1, "[0] Child 1", "0/2"), OutputLine(1, "x", "1"), OutputLine(1, "own")]
    told: list[Any] = [RunMessage(parent, "Child 1 FAILED: 0"),
                       RunMessage(parent, "[0] no log"),
                       ContactLost("Child 1"), RunEnded(parent)]  # fmt: skip
    assert list(numbers.renumber([*lines, *told])) == [*lines, *told]  # nothing is known yet
    numbers.learn(None)
    numbers.learn(parent)
    assert list(numbers.renumber(lines)) == [
        OutputLine(1, "[0] Child 1", "2/2"), OutputLine(1, "x", "4"), OutputLine(1, "own"),
    ]  # fmt: skip
    texts = [each.text for each in numbers.renumber(told) if isinstance(each, RunMessage)]
    assert texts == ["Child 4 FAILED: 0", "[2] no log"]
    assert list(numbers.renumber(told))[2:] == told[2:]


def test_outputs_come_under_the_first_numbers_from_where_they_lie() -> None:
    fetched: list[str] = []

    class Lying:
        left_out = ("1/link: not a file",)

        def entries(self) -> list[OutputEntry]:
            return [OutputEntry("0/2/m", 1, 1), OutputEntry("1/m", 1, 1)]

        def fetch(self, entry: OutputEntry, path: Any) -> None:
            fetched.append(entry.name)

    source: Any = outputs.RenumberedOutputs(Lying(), (2, 4))
    entries = list(source.entries())
    assert [entry.name for entry in entries] == ["2/2/m", "4/m"]
    assert source.left_out == ["4/link: not a file"]
    for entry in entries:
        source.fetch(entry, None)
    assert fetched == ["0/2/m", "1/m"]


def test_an_explanation_calls_children_by_their_first_numbers() -> None:
    answers = {
        "describe_jobs": {"jobs": [job("id", environment=[{"name": ARRAY_MAP, "value": "2 4"}])]},
        "list_jobs": {"jobSummaryList": [child(1), child(0)]},
    }
    session: Any = SimpleNamespace(client=lambda _, attempts=5: Answering(answers))
    diagnosis = RenumberedDiagnosis(session, "id", None)
    (array,) = diagnosis.runs(["id"])
    children = diagnosis.children(array, "FAILED")
    assert [(each.job_id, each.array_index) for each in children] == [("id:0", 2), ("id:1", 4)]
    told = Explanation("c", "v id:1", ("child 4 of 2", "child 4 of 2 cats", "x:1"), "", "logs id:0")
    assert diagnosis.named(told) == Explanation(
        "c", "v id:4", ("child 4", "child 4 of 2 cats", "x:1"), "", "logs id:2"
    )
    answers["get_log_events"] = {"events": [{"message": "kept: batchml get id:1"}]}
    (line,) = diagnosis.last_lines("group", "stream") or ()
    assert diagnosis.named(Explanation("c", "v", (line,), "", "")).evidence == (
        "kept: batchml get id:1",
    )
    assert RenumberedDiagnosis(session, "other", None).named(told) == told


def job(job_id: str, **container: Any) -> dict[str, Any]:
    return {"jobId": job_id, "jobName": "n", "jobQueue": "q", "jobDefinition": "d",
            "status": "FAILED", "container": container, "arrayProperties": {"size": 2}}  # fmt: skip


def child(index: int) -> dict[str, Any]:
    return {"jobId": f"id:{index}", "jobName": "n", "arrayProperties": {"index": index},
            "status": "FAILED", "createdAt": 1}  # fmt: skip


class Answering:
    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return lambda **_: self._answers[name]
