"""Runs and their numbered changes."""

import asyncio
import json
from typing import Any

from msgspec.structs import replace

from batchml.dashboard.html import tag
from batchml.dashboard.hub import (
    QUIET_PACE,
    Change,
    Hub,
    RunTable,
    change_document,
    event,
    runs_to_read,
)
from batchml.dashboard.run import state_panel
from batchml.dashboard.runs import (
    count_of,
    matching,
    runs_document,
    runs_page,
    searched,
    state_of,
    state_text,
)
from batchml.model.run import JobStatus, Run
from batchml.runs.search import FoundRun

NASTY = "</script><img src=x onerror=alert(1)>\x00\u202e\x1b[31m__proto__\r\nid: 9\n\n"


def run(job_id: str, status: str = "RUNNING", **more: Any) -> Run:
    return Run(job_id, more.pop("name", job_id), "q", JobStatus(status), created_at=1, **more)


def found(job_id: str, status: str = "RUNNING", **more: Any) -> FoundRun:
    return FoundRun(run(job_id, status, **more), None)


def test_only_changes_are_noted_and_numbered() -> None:
    table = RunTable()
    assert table.take([found("a"), found("b")]) == Change(1, (found("a"), found("b")))
    assert table.take([found("a")]) is None
    assert table.take([found("a", "SUCCEEDED"), found("b")]) == Change(
        2, (found("a", "SUCCEEDED"),)
    )
    assert table.since(2) == []
    assert [change.revision for change in table.since(0) or ()] == [1, 2]
    assert table.since(3) is None, "of another server"


def test_a_tab_that_missed_too_much_reloads() -> None:
    table = RunTable()
    for number in range(600):
        table.take([found(str(number))])
    assert table.since(50) is None
    assert len(table.since(100) or ()) == 500


def test_what_is_read_again() -> None:
    before = {"a": run("a"), "b": run("b"), "c": run("c", "RUNNABLE")}
    after = {"a": run("a"), "c": run("c", "STARTING"), "d": run("d")}
    assert runs_to_read(before, after) == ({"b", "c"}, True)
    assert runs_to_read(before, before) == (set(), False)


def test_an_event_is_one_block_whatever_its_texts_are() -> None:
    sent = event("runs", {"text": NASTY})
    assert sent.count(b"\n\n") == 1 and sent.endswith(b"\n\n")
    data = next(line for line in sent.split(b"\n") if line.startswith(b"data: "))
    assert json.loads(data[6:]) == {"text": NASTY}


def test_texts_of_others_stay_texts() -> None:
    nasty = found(NASTY, name=NASTY, params={NASTY: NASTY}, tags={NASTY: NASTY})
    page = str(runs_page([nasty], 1, 0, NASTY, "name,params,status", NASTY))
    for bad in ("<img", "\x00", "\u202e", "\x1b"):
        assert bad not in page
    assert "&lt;img src=x" in page


def test_attributes_are_escaped_and_false_ones_left_out() -> None:
    made = str(tag("a", "x", href='"><b', class_="k", hidden=False, data_id=None, defer=True))
    assert made == '<a href="&quot;&gt;&lt;b" class="k" defer>x</a>'


def test_the_document_has_a_value_for_each_run_and_no_infinity() -> None:
    runs = [found("a"), found("b", "SUCCEEDED", params={"lr": float("inf")})]
    document = runs_document(runs, 4, 1000, "name,lr,status")
    json.dumps(document, allow_nan=False)
    assert document["ids"] == ["a", "b"] and document["revision"] == 4
    assert [len(each) for each in document["texts"]] == [2, 2, 2]
    assert document["states"] == ["running", "succeeded"]


def test_the_search_finds_names_states_parameters_and_tags() -> None:
    one = found("a", "FAILED", name="lenet", params={"lr": "0.1"}, tags={"team": "vision"})
    other = found("b", name="bert")
    for words in ("LENET", "lr=0.1", "team=vis", "failed", "lenet vision", ""):
        assert one in matching([one, other], words), words
    assert matching([one, other], "lenet bert") == []
    assert "team=vision" in searched(one)


def test_states_have_words_for_every_status() -> None:
    states = {status: state_of(found("a", status.value)) for status in JobStatus}
    assert set(states.values()) == {"waiting", "starting", "running", "succeeded", "failed"}
    assert state_of(FoundRun(None, None)) == "unknown"
    array = found("a", "PENDING", array_size=4, children={"RUNNING": 1, "RUNNABLE": 3})
    assert state_of(array) == "running", "AWS Batch calls it PENDING as long as its children run"


def test_a_cancelled_run_says_so_everywhere_and_is_no_failed_one_for_the_search() -> None:
    """AWS Batch calls it FAILED, as it does an array of which a part was cancelled."""
    one = found("a", "FAILED", is_cancelled=True)
    array = found("b", "FAILED", is_terminated=True, array_size=6, children={"FAILED": 2})
    failed = found("c", "FAILED")
    runs = [one, array, failed]
    assert list(map(state_text, runs)) == ["CANCELLED", "CANCELLED, 2 of 6", "FAILED"]
    assert runs_document(runs, 1, 0, "Status")["texts"][0] == list(map(state_text, runs))
    page = str(runs_page(runs, 1, 0, "e", "status")).partition("</table>")[0]
    assert page.count("> CANCELLED") == 2 and page.count("> FAILED<") == 1
    assert "> CANCELLED<" in str(state_panel(one.run or run("a"), 0))
    assert matching(runs, "failed") == [failed] and matching(runs, "cancelled") == [one, array]


def test_a_search_without_a_match_is_no_empty_environment() -> None:
    page = str(runs_page([], 1, 0, "e", "", words="zz<z", total=25))
    assert "No run has all of these words: zz&lt;z" in page and "No runs yet" not in page
    assert "0 of 25 runs" in page and 'id="runs"' in page and 'value="zz&lt;z"' in page
    none = str(runs_page([], 1, 0, "e", ""))
    assert "No runs yet" in none and "all of these words" not in none
    assert 'id="no-match" hidden' in str(runs_page([found("a")], 1, 0, "e", ""))
    assert [count_of(1, 1, "run"), count_of(2, 2, "run")] == ["1 run", "2 runs"]


def test_a_change_after_the_snapshot_is_not_lost() -> None:
    """A tab says which revision its document has, and gets what came since."""
    table = RunTable()
    table.take([found("a")])
    at = table.revision
    table.take([replace(found("a"), run=run("a", "SUCCEEDED"))])
    (missed,) = table.since(at) or [Change(0)]
    assert missed.runs[0].run is not None and missed.runs[0].run.status is JobStatus.SUCCEEDED


def hub(now: list[float]) -> Hub:
    return Hub(None, lambda: now[0], pace=1.0)  # type: ignore[arg-type]


def test_a_stream_begins_with_the_revision_and_ends_with_the_hub() -> None:
    async def whole() -> bytes:
        made = hub([0.0])
        stream = made.events()
        parts = [await anext(stream)]
        made.stop()
        parts += [part async for part in stream]
        assert not made.has_listeners
        # A browser that connects once more while the server ends does not keep it.
        parts += [part async for part in made.events()]
        return b"".join(parts)

    sent = asyncio.run(whole())
    assert sent.count(b"event: hello") == sent.count(b"event: end") == 2
    assert sent.startswith(b"retry: 1000\n\n")


def test_a_change_says_which_runs_and_not_their_texts() -> None:
    change = Change(3, (found("a"), found("b", "FAILED", name=NASTY)))
    assert change_document(change) == {"revision": 3, "ids": ["a", "b"], "ended": [False, True]}


def test_without_a_page_in_view_the_environment_is_asked_rarely() -> None:
    now = [0.0]
    made = hub(now)
    watched = [made.is_watched]  # at first, as the browser is on its way
    now[0] = QUIET_PACE + 1
    watched.append(made.is_watched)
    made.touch()
    watched.append(made.is_watched)
    assert watched == [True, False, True]
