"""The kept results: one file for each kind of machine, and what `make bench` says of them."""

import pytest

from benchmarks.__main__ import BENCHMARKS, LIMIT, chosen, missing, report
from benchmarks.results import Machine, Results, from_json, merge, to_json
from benchmarks.rows import Curve, Finding, LeftOut, Row

MACHINE = Machine("Intel(R) Xeon(R) Processor @ 2.60GHz", 2, 24, "Linux x86_64")
CURVE = Curve(
    name="curves/x", title="X", axis="jobs", unit="us", how="so", points=[(1, 2.0), (10, 3.0)]
)


def row(name: str, ours: float) -> Row:
    return Row(name=name, measured="x", unit="ms", ours=ours)


def kept(*rows: Row, date: str = "2026-11-01") -> Results:
    return merge(
        Results(MACHINE), rows, [CURVE], date=date, commit="abc", versions={"python": "3.11"},
        modules=["array", "logs"],
    )  # fmt: skip


def test_machines_of_a_kind_have_the_same_processor_as_often() -> None:
    assert MACHINE.kind == "2x-intel-xeon"
    assert Machine("AMD EPYC 9R14", 96, 188, "").kind == "96x-amd-epyc-9r14"


def test_a_run_of_some_rows_leaves_the_others_with_their_date_and_commit() -> None:
    before = kept(row("array/a", 1.0), row("logs/b", 2.0))
    after = merge(
        before, [row("logs/b", 3.0)], [], date="2026-11-28", commit="def", versions={},
        modules=["array", "logs"],
    )  # fmt: skip
    assert after.rows["array/a"].commit == "abc" and after.rows["array/a"].date == "2026-11-01"
    assert after.rows["logs/b"].row.ours == 3.0 and after.rows["logs/b"].commit == "def"
    assert after.curves == before.curves


def test_rows_of_benchmarks_that_are_gone_go_too() -> None:
    after = merge(
        kept(row("array/a", 1.0)), [], [], date="", commit="", versions={}, modules=["logs"]
    )
    assert after.rows == {}


def test_results_are_read_as_they_were_written_but_for_digits_that_say_nothing() -> None:
    written = kept(row("array/a", 1 / 3))
    text = to_json(written)
    assert from_json(text).rows["array/a"].row.ours == 0.3333
    assert to_json(from_json(text)) == text
    assert len(text.splitlines()) > 20  # git shows which row has changed


def test_the_report_begins_with_what_got_worse_and_ends_with_what_was_not_measured() -> None:
    found: list[Finding] = [
        row("array/a", 2.0), row("logs/b", 2.0), CURVE,
        LeftOut(name="tail", why="no AWS CLI"), LeftOut(name="ddp", why="ValueError", failed=True),
    ]  # fmt: skip
    lines = report(found, kept(row("array/a", 1.0), row("logs/b", 2.0))).splitlines()
    assert lines[0] == "WORSE: array/a: x: 1 -> 2 ms (+100%, noise 70%)"
    assert lines[1] == "" and lines[3].startswith("array/a") and lines[4].startswith("logs/b")
    assert lines[-2:] == ["left out: tail: no AWS CLI", "FAILED: ddp: ValueError"]


def test_make_bench_takes_fifteen_minutes_at_most_and_leaves_slow_ones_to_their_names() -> None:
    plain = chosen([])
    assert sum(each.seconds for each in plain) < LIMIT < 15 * 60
    assert {each.name for each in BENCHMARKS} - {each.name for each in plain} == {
        each.name for each in BENCHMARKS if each.left_out
    }
    assert [each.name for each in chosen(["threads", "array/plain"])] == ["array", "threads"]
    with pytest.raises(SystemExit, match="no benchmark is named arry/plain; there are startup,"):
        chosen(["arry/plain"])


def test_a_name_for_which_nothing_was_found_is_missed() -> None:
    found: list[Finding] = [row("array/a", 1.0), LeftOut(name="tail", why="it failed")]
    assert missing(found, ["array", "array/b", "tail/logs"]) == ["array/b"]
