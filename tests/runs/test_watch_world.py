"""Following in a scripted AWS that does everything wrong that AWS may do (support/watch_world.py).

Sixty runs by chance but repeatably; BATCHML_TORTURE=20 makes them a thousand. A failure names the
number of its run: `a_run(number)` makes it again.
"""

import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from batchml.context import PollIntervals
from batchml.runs.watch.events import (
    MARKED,
    QUIET,
    SHORT,
    LogClosed,
    LogOpened,
    OutputLine,
    PollingPaused,
    RunEnded,
    RunEvent,
)
from batchml.runs.watch.follow import follow
from tests.support.watch_world import Job, Trouble, Try, World, attempt

RUNS = 60 if "BATCHML_TORTURE" not in os.environ else 50 * int(os.environ["BATCHML_TORTURE"])
PACE = PollIntervals(
    startup_limit=600.0
)  # half of the calls fail: the first to succeed may be late


class Case(NamedTuple):
    world: World
    trouble: Trouble
    jobs: list[Job]
    sep: str
    marked: bool


def a_run(number: int) -> Case:
    random = Random(number)
    signed_out_at = 1_000_000.0 + random.uniform(60, 120)
    trouble = Trouble(
        throttled=random.choice([0, 0, 0.2, 0.5]),
        unreachable=random.choice([0, 0, 0.2]),
        empty=random.choice([0, 0.3, 0.7]),
        late=random.choice([0, 0, 3, 5.9]),  # with a late stream still below the quiet time
        shuffled=random.random() < 0.4,
        token_life=random.choice([86_400, 86_400, 60, 30]),
        page=random.choice([1, 3, 50]),
        lag=random.choice([0, 0, 5]),
        signed_out=random.choice([(0.0, 0.0), (signed_out_at, signed_out_at + 300)]),
    )
    sep = random.choice(["", "", "", ":", "#"])
    count = random.choice([2, 5, 30]) if sep else 1
    marked = random.random() < 0.6
    jobs = [
        Job(f"j{sep}{index}" if sep else "j", tuple(_tries(random, trouble, index, marked)))
        for index in range(count)
    ]
    return Case(World(jobs, trouble, random, sep), trouble, jobs, sep, marked)


def _tries(random: Random, trouble: Trouble, index: int, marked: bool) -> list[Try]:
    tries, at = [], 1_000_000.0 + random.uniform(0, 30)
    count = random.choice([1, 1, 2, 3])
    for number in range(count):
        length = random.choice([0.5, 20, 90])
        # Few different texts at few different times: equal ones in one millisecond are the rule.
        lines = [
            (at + round(random.uniform(0, length), random.choice([0, 1, 3])), random.choice("abc "))
            for _ in range(random.choice([0, 1, 5, 40]))
        ]
        lines = [(min(when, at + length), text) for when, text in lines]
        code = random.choice([0, 1, None]) if number == count - 1 else 1
        tries.append(
            attempt(
                f"stream/{index}/{number}", at, lines, at + length, marked=marked, exit_code=code,
                trouble=trouble, random=random, created=random.choice([0, 0, 4]),
            )
        )  # fmt: skip
        at += length + random.uniform(0.1, 20)
    return tries


def check(case: Case) -> Counter[str]:
    """Follow the run and hold what came against what was printed."""
    seen = list(_told_in_time(case.world, follow(
        case.world.describe, case.world.open_log, "j", clock=case.world.clock, pace=PACE
    )))  # fmt: skip
    assert isinstance(seen[-1], RunEnded)
    assert not any(isinstance(each, RunEnded) for each in seen[:-1])
    proofs: Counter[str] = Counter()
    for index, job in enumerate(case.jobs):
        name = str(index) if case.sep else ""
        _in_order(seen, name)
        for number, each in enumerate(job.tries, start=1):
            child = f"{name}/{number}" if name and number > 1 else name
            proofs[_check_try(case, seen, each, child, alone=bool(name))] += 1
    return proofs


def _told_in_time(world: World, happenings: Iterator[RunEvent]) -> Iterator[RunEvent]:
    """Between a line and the next call, which may take long, it is said that a pause follows."""
    held_since: int | None = None
    for each in happenings:
        if isinstance(each, OutputLine) and held_since is None:
            held_since = len(world.calls)
        if held_since is not None:
            assert len(world.calls) == held_since, "a line was held back"
        if isinstance(each, PollingPaused):
            held_since = None
        yield each
    assert held_since is None


def _check_try(case: Case, seen: list[RunEvent], each: Try, child: str, *, alone: bool) -> str:
    shown = [text for number, text in _blocks(seen, child) if alone or number == each.stream]
    closed = [one for one in seen if isinstance(one, LogClosed) and one.stream == each.stream]
    assert not Counter(shown) - Counter(each.lines), "a line came twice"
    if not closed:
        assert shown == []
        assert not each.lines or case.trouble.shuffled
        return "none"
    (end,) = closed
    assert end.lines == len(shown)
    assert end.child == child
    if end.proof == MARKED:
        assert Counter(shown) == Counter(each.lines)
    if not case.trouble.shuffled:
        assert shown == list(each.lines), "a line was lost, or came out of its order"
    if case.marked:
        assert end.proof == MARKED, "what came late was not looked for"
    assert end.proof in (MARKED, QUIET, SHORT)
    return end.proof


def _blocks(seen: list[RunEvent], child: str) -> list[tuple[str, str]]:
    """(stream, line) of a child: its lines stand between its Opened and its Closed."""
    stream, found = "", []
    for each in seen:
        if isinstance(each, LogOpened) and each.child == child:
            stream = each.stream
        elif isinstance(each, OutputLine) and each.child == child:
            found.append((stream, each.text))
    return found


def _in_order(seen: list[RunEvent], name: str) -> None:
    """The attempts of a part come one after the other, none twice."""
    mine = [
        each
        for each in seen
        if isinstance(each, LogOpened | LogClosed) and each.child.partition("/")[0] == name
    ]
    assert [type(each) for each in mine] == [LogOpened, LogClosed] * (len(mine) // 2)
    numbers = [each.number for each in mine if isinstance(each, LogOpened)]
    assert numbers == sorted(set(numbers))


def test_no_line_is_lost_or_doubled_whatever_aws_does() -> None:
    proofs: Counter[str] = Counter()
    for number in range(RUNS):
        try:
            proofs += check(a_run(number))
        except AssertionError as error:
            raise AssertionError(f"run {number}: {error}") from error
    assert proofs[MARKED] > RUNS / 3
    assert proofs[QUIET] > RUNS / 6
