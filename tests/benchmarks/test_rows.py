"""What counts as noise, what as worse, and how it is said."""

from collections.abc import Iterator

import msgspec
import pytest

from benchmarks.rows import (
    ALONE_NOISE,
    PAIRED_NOISE,
    Curve,
    Finding,
    LeftOut,
    Row,
    alone,
    headline,
    is_wanted,
    noise,
    number,
    paired,
    spread_of,
    table,
    verdict,
    worse_rows,
)
from benchmarks.running import _until_complete


def row(
    ratio: float, spread: float | None = 0.0, name: str = "startup/help", **more: object
) -> Row:
    fields = {
        "measured": "batchml --help", "unit": "ms", "ours": 30.0 * ratio, "beside": "python",
        "theirs": 30.0, "ratio": ratio, "spread": spread, **more,
    }  # fmt: skip
    return Row(name=name, **fields)  # type: ignore[arg-type]


def single(value: float, spread: float | None = 0.0) -> Row:
    return Row(name="server/idle", measured="idle", unit="%", ours=value, spread=spread)


def test_a_row_of_pairs_has_the_median_of_their_ratios() -> None:
    """Not the ratio of the medians: the machine was slow during the second pair."""
    found = paired("a/b", "x", "ms", [(20, 10), (90, 30), (21, 10)], beside="y", goal=2)
    assert (found.ours, found.theirs, found.ratio) == (21, 10, 2.1)
    assert found.value == 2.1 and found.meets_goal is False and found.module == "a"


def test_the_spread_is_that_of_the_quartiles() -> None:
    assert spread_of([1.0, 1.1, 0.9, 1.0, 5.0]) == pytest.approx(0.1)  # one outlier is no spread
    assert spread_of([1.0, 2.0]) is None
    assert spread_of([0.0, 0.0, 0.0]) is None


def test_one_measurement_is_noisier_than_several_and_a_value_alone_than_a_ratio() -> None:
    assert noise(row(2.0, 0.01)) == PAIRED_NOISE < noise(row(2.0, None))
    assert noise(single(2.0)) == ALONE_NOISE > PAIRED_NOISE
    assert noise(row(2.0, 0.4)) == 0.4


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (row(2.0), row(2.0), "same"),
        (row(2.19), row(2.0), "same"),
        (row(2.21), row(2.0), "worse"),
        (row(1.80), row(2.0), "better"),
        (row(2.21, 0.3), row(2.0), "same"),  # the pairs of now are far apart
        (row(2.21), row(2.0, 0.3), "same"),  # or those of then
        (row(2.0), None, "new"),
        (row(9.0, measured="1,000 of them"), row(2.0), "new"),  # another size
        (row(9.0, beside="another tool"), row(2.0), "new"),
        (row(2.21, smaller=False), row(2.0, smaller=False), "better"),
        (row(1.80, smaller=False), row(2.0, smaller=False), "worse"),
        (single(1.3), single(1.0), "same"),
        (single(1.4), single(1.0), "worse"),
        (single(1.0), single(0.0), "same"),  # less than the clock can tell
    ],
)
def test_worse_is_more_than_the_noise_of_both(now: Row, before: Row | None, expected: str) -> None:
    assert verdict(now, before) == expected


def test_what_got_worse_is_said_first_and_the_worst_at_the_top() -> None:
    rows = [row(2.0), row(3.0, name="a/b"), row(9.0, name="c/d")]
    kept = {each.name: row(2.0, name=each.name) for each in rows}
    assert [now.name for now, _ in worse_rows(rows, kept)] == ["c/d", "a/b"]
    first, second = headline(rows, kept)
    assert first == "WORSE: c/d: batchml --help: 2 -> 9 (+350%, noise 10%)"
    assert second.startswith("WORSE: a/b")
    assert headline(rows[:1], kept) == [
        "No row got worse by more than its noise (1 of 1 compared)."
    ]
    assert headline(rows[:1], {}) == ["No row got worse by more than its noise (0 of 1 compared)."]


def test_the_table_has_a_line_for_each_row() -> None:
    rows = [row(2.0, goal=1.5), alone("server/array", "an array", "ms", [1200.0], goal=2000)]
    text = table(rows, {"startup/help": row(1.0)}).splitlines()
    assert len(text) == 3
    assert text[1].split() == [
        "startup/help", "60", "ms", "30", "python", "x2", "0%", "<=1.5", "not", "met",
        "+100%", "WORSE",
    ]  # fmt: skip
    assert text[2].split() == ["server/array", "1,200", "ms", "<=2,000", "met", "new"]


def test_numbers_have_three_digits() -> None:
    assert [number(each) for each in (1234.5, 12.345, 0.0, 0.00012, None)] == [
        "1,234", "12.3", "0", "1.2e-04", "",
    ]  # fmt: skip


def test_rows_are_wanted_by_their_name_or_their_module() -> None:
    assert is_wanted("array/plain", [])
    assert is_wanted("array/plain", ["logs", "array"]) and is_wanted("array/plain", ["array/plain"])
    assert not is_wanted("array/plain", ["array/plain_tsp", "arr"])


def test_a_benchmark_ends_once_the_rows_that_are_named_have_come() -> None:
    closed = []

    def findings() -> Iterator[Finding]:
        try:
            yield row(1.0, name="m/a")
            yield LeftOut(name="m/b", why="no tool")
            yield row(1.0, name="m/c")
        finally:
            closed.append(True)

    assert [each.name for each in _until_complete(findings(), ["m/b"])] == ["m/b"]
    assert closed == [True]
    assert [each.name for each in _until_complete(findings(), [])] == ["m/a", "m/b", "m/c"]
    assert [each.name for each in _until_complete(findings(), ["m", "m/a"])] == [
        "m/a",
        "m/b",
        "m/c",
    ]


def test_a_curve_grows_by_its_cost_a_unit() -> None:
    """The smallest size does not count: it has the cost of the start in it."""
    points = [(100, 9.0), (1_000, 2.0), (100_000, 3.0)]
    curve = Curve(name="c/x", title="t", axis="jobs", unit="us a job", how="h", points=points)
    assert curve.growth() == 1.5
    whole = [(100, 1.0), (1_000, 1.0), (100_000, 200.0)]
    assert msgspec.structs.replace(curve, points=whole, whole=True).growth() == 2.0
