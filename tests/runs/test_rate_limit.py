"""The rate that all processes share: in order, within the limit, and slower when AWS says so."""

import multiprocessing
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.clock import SystemClock
from batchml.runs.rate_limit import (
    BURST,
    RATE,
    RECOVERY,
    SLOWEST,
    BucketState,
    RateBucket,
    current_rate,
    take,
    throttled,
)
from tests.support.fakes import FakeClock


def test_after_a_quiet_time_a_burst_goes_at_once_and_then_one_after_the_other() -> None:
    turns, waits = BucketState(), []
    for _ in range(int(BURST) + 80):
        turns, wait = take(turns, 1000.0)
        waits.append(wait)
    assert waits[: int(BURST)] == [0.0] * int(BURST)
    assert waits[-1] == pytest.approx(80 / RATE)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=200), st.floats(0, 1e9))
def test_no_second_has_more_turns_than_a_burst_and_the_rate(gaps: list[float], now: float) -> None:
    turns, starts = BucketState(), []
    for gap in gaps:
        now += gap / 100
        turns, wait = take(turns, now)
        starts.append(now + wait)
    for start in starts:
        within = sum(start <= each < start + 1 for each in starts)
        assert within <= BURST + RATE + 1


def test_throttling_halves_the_rate_for_all_once_a_second_and_time_gives_it_back() -> None:
    turns = throttled(BucketState(), 1000.0)
    assert current_rate(turns, 1000.0) == RATE / 2
    assert throttled(turns, 1000.5) == turns, "said of calls that were sent together"
    turns = throttled(turns, 1001.5)
    assert current_rate(turns, 1001.5) == (RATE / 2 + 1.5 * RECOVERY) / 2
    assert take(turns, 1001.5)[1] > 0, "no burst now"
    assert current_rate(turns, 1030.0) == RATE
    for number in range(100):
        turns = throttled(turns, 1002.0 + 1.1 * number)
    assert current_rate(turns, turns.since) >= SLOWEST


def test_many_clients_of_a_slow_account_get_through_with_few_refusals() -> None:
    """An account that takes 10 a second, and 64 clients that each want to submit 10 times."""
    now, turns, chance = 1000.0, BucketState(), random.Random(5)
    room, at = 10.0, now
    waiting: list[tuple[float, int]] = []
    for client in range(64):
        turns, wait = take(turns, now)
        waiting.append((now + wait, client))
    left = dict.fromkeys(range(64), 10)
    refused = 0
    while waiting:
        waiting.sort()
        now, client = waiting.pop(0)
        room, at = min(10.0, room + (now - at) * 10), now
        if room >= 1:
            room -= 1
            left[client] -= 1
            if not left[client]:
                continue
        else:
            refused += 1
            turns = throttled(turns, now)
            now += chance.uniform(0.5, 1.0)
        turns, wait = take(turns, now)
        waiting.append((now + wait, client))
    assert not any(left.values())
    assert refused < 640 * 0.7
    assert at - 1000 < 640 / 10 * 2, "at least half of what the account would take"


def test_a_reboot_and_a_damaged_file_are_a_fresh_start(tmp_path: Path) -> None:
    clock = FakeClock(now=5.0)  # seconds since this boot
    path = tmp_path / "submits"
    old = FakeClock(now=1e6)
    for _ in range(100):
        RateBucket(path).throttled(old)
        RateBucket(path).take(old)
    RateBucket(path).take(clock)
    assert clock.naps == []
    for damage in (b"", b"short", b"\xff" * 60, bytes(24), bytes(60), bytes(100)):
        path.write_bytes(damage)
        RateBucket(path).take(clock)
    assert clock.naps == []


def test_turns_booked_before_a_reboot_hold_nobody_up(tmp_path: Path) -> None:
    """Both boots are young, so that their clocks say nearly the same."""
    path, before, after = tmp_path / "submits", FakeClock(now=300.0), FakeClock(now=100.0)
    for _ in range(60):
        RateBucket(path, "first").throttled(before)
        RateBucket(path, "first").take(before)
    assert before.naps
    RateBucket(path, "second").take(after)
    assert after.naps == []
    RateBucket(path, "").take(after)  # where the system does not tell
    assert after.naps == []


def test_who_waits_for_long_is_told(tmp_path: Path) -> None:
    path, clock, said = tmp_path / "submits", FakeClock(), list[str]()

    def stand_still(seconds: float) -> None:
        naps.append(seconds)

    naps: list[float] = []
    clock.sleep = stand_still  # type: ignore[method-assign]
    for _ in range(int(BURST + 3 * RATE)):
        RateBucket(path).take(clock, said.append)
    assert max(naps) == pytest.approx(3.0)
    assert len(said) == sum(nap > 2 for nap in naps) and said[-1].startswith("Waiting 3 s")


def test_a_file_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    clock = FakeClock()
    bucket = RateBucket(tmp_path / "nowhere" / "submits")
    bucket.take(clock)
    bucket.throttled(clock)
    assert clock.naps == []


def _many(path: str, turns: int) -> list[float]:
    clock, taken = SystemClock(), []
    for _ in range(turns):
        RateBucket(Path(path)).take(clock)
        taken.append(clock.monotonic())
    return taken


def test_processes_share_one_rate(tmp_path: Path) -> None:
    path = str(tmp_path / "submits")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        each = pool.starmap(_many, [(path, 18)] * 4, chunksize=1)
    taken = sorted(time for times in each for time in times)
    assert taken[-1] - taken[0] >= (4 * 18 - BURST) / RATE * 0.9
