"""The money guard of the runtime: time, store and stop are the test's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.run import Attempt, is_spent, max_seconds
from batchml.runtime.processes import process_age
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.variables import RuntimeEnv, is_main_node
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store, StoreError
from batchml.runtime.telemetry.budget import (
    BudgetGuard,
    read_account,
    stop_at,
)


class Going:
    """An attempt that goes on until it is asked to stop."""

    last_output, notice = 0.0, ""

    def __init__(self, environ: Mapping[str, str], store: Store | None) -> None:
        self.environ = environ
        self.env = RuntimeEnv.read(environ)
        self.store = store
        self.said: list[str] = []
        self.stops: list[tuple[str, int]] = []

    def pids(self) -> list[int]:
        return []

    def mark(self, text: str) -> None:
        raise AssertionError(text)

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop(self, reason: str, code: int, within: float = 0.0) -> None:
        self.stops.append((reason, code))


class Down(FolderStore):
    """A store that does not answer while it is down."""

    is_down = True

    def get(self, key: str) -> bytes | None:
        self._check()
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        self._check()
        super().put(key, data)

    def _check(self) -> None:
        if self.is_down:
            raise StoreError("no answer")


def going(store: Store | None, seconds: int = 3_600, **more: str) -> Going:
    return Going({"BATCHML_MAX_SECONDS": str(seconds), "AWS_BATCH_JOB_ID": "j", **more}, store)


def spend(attempt: Going, until: float, *, step: float = 1.0, finish: bool = True) -> float:
    """Ticks from 1,000 on until the run is asked to stop, or for so many seconds; how many."""
    now = 1_000.0
    guard = BudgetGuard(attempt, age=0.0, monotonic=lambda: now)
    while not attempt.stops and now - 1_000 < until:
        guard.tick(now)
        now += step
    if finish:
        guard.finish()
    return now - step - 1_000


def account(store: FolderStore, index: int = 0) -> Any:
    data = store.get(f"spent/{index}")
    return json.loads(data)["attempts"] if data else {}


def test_a_run_is_stopped_so_that_its_grace_is_within_the_budget(tmp_path: Path) -> None:
    attempt = going(FolderStore(str(tmp_path)), BATCHML_PRICE="1.006", BATCHML_GRACE="120")
    assert spend(attempt, 9_999) == 3_480
    assert attempt.stops == [
        (
            "the budget of --max-cost is spent: 3480 of 3600 seconds ($0.9725 at $1.006 an hour). "
            "The run saves and stops.",
            STOPPED,
        )
    ]


def test_without_a_budget_nothing_is_kept_or_stopped(tmp_path: Path) -> None:
    attempt = going(FolderStore(str(tmp_path)), seconds=0)
    spend(attempt, 100)
    assert attempt.stops == []
    assert list(tmp_path.iterdir()) == []


def test_attempts_share_one_budget(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    spend(going(store, AWS_BATCH_JOB_ATTEMPT="1"), 2_000)
    assert account(store) == {"1": 2_000.0}
    second = going(store, AWS_BATCH_JOB_ATTEMPT="2")
    assert spend(second, 9_999) == 3_570 - 2_000
    third = going(store, AWS_BATCH_JOB_ATTEMPT="3")
    assert spend(third, 9_999) == 0  # nothing is left: it is stopped at once


def test_what_a_lost_host_may_have_spent_counts_as_spent(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    spend(going(store), 1_000, finish=False)
    assert 1_000 <= account(store)["1"] <= 1_060


def test_this_process_has_an_age() -> None:
    assert 0 < process_age() < 86_400


def test_fetching_code_before_the_command_counts(tmp_path: Path) -> None:
    attempt = going(FolderStore(str(tmp_path)))
    guard = BudgetGuard(attempt, age=3_569.0)
    guard.tick(50.0)
    assert attempt.stops == []
    guard.tick(51.0)
    assert len(attempt.stops) == 1


def test_children_of_an_array_have_accounts_of_their_own(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    spend(going(store, AWS_BATCH_JOB_ARRAY_INDEX="7"), 10)
    assert account(store, 7) == {"1": 10.0}
    assert account(store) == {}


def test_only_the_main_node_counts(tmp_path: Path) -> None:
    nodes = {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", "AWS_BATCH_JOB_NODE_INDEX": "0"}
    other = going(FolderStore(str(tmp_path)), seconds=60, **nodes)
    spend(other, 200)
    assert other.stops == []
    assert is_main_node({**nodes, "AWS_BATCH_JOB_NODE_INDEX": "1"})
    assert is_main_node({})


def test_a_store_that_is_down_limits_this_attempt_and_is_said_once(tmp_path: Path) -> None:
    store = Down(str(tmp_path))
    attempt = going(store)
    assert spend(attempt, 9_999) == 3_570
    assert attempt.said == [
        "batchml: the spent budget cannot be saved, and earlier attempts are not counted: no answer"
    ]


def test_a_store_that_comes_back_tells_what_was_spent_before(tmp_path: Path) -> None:
    store = Down(str(tmp_path))
    store.is_down = False
    store.put("spent/0", b'{"attempts": {"1": 3000}}')
    attempt = going(store, AWS_BATCH_JOB_ATTEMPT="2")
    store.is_down = True
    guard = BudgetGuard(attempt, age=0.0)
    for now in range(600):
        store.is_down = now < 100
        guard.tick(float(now))
        if attempt.stops:
            break
    assert now == 570
    assert account(store).keys() == {"1", "2"}


def test_without_a_store_this_attempt_is_limited() -> None:
    attempt = going(None, AWS_BATCH_JOB_ATTEMPT="2")
    assert spend(attempt, 9_999) == 3_570


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 100_000), st.integers(0, 300), st.lists(st.floats(1, 5_000), max_size=4))
def test_all_attempts_together_never_pass_the_budget_by_more_than_a_tick(
    limit: int, grace: int, lives: list[float]
) -> None:
    """Whatever attempts there were and however they ended, lost hosts included."""
    store = Kept()
    spent = 0.0
    for number, life in enumerate([*lives, 1e9], 1):
        more = {"AWS_BATCH_JOB_ATTEMPT": str(number), "BATCHML_GRACE": str(grace)}
        attempt = going(store, limit, **more)
        step = max(1.0, limit / 50)
        spent += spend(attempt, life, step=step, finish=number % 2 == 0)
        # An account has tenths of seconds; what stops comes at the next tick.
        assert spent <= stop_at(limit, grace) + step + 0.1 * number
        if limit >= 4 * grace:
            assert stop_at(limit, grace) + grace == limit


class Kept(Down):
    """In memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.data.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.data[key] = data


@pytest.mark.parametrize(
    "data",
    [None, b"", b"[]", b"{}", b'{"attempts": 3}', b'{"attempts": {"1": "x"}}', b"\xff"],
)
def test_an_account_that_is_none_is_empty(data: bytes | None) -> None:
    assert read_account(data) == {}


# --- and what the client reads of it --------------------------------------------------------------


def test_a_run_that_its_budget_stopped_is_known_again() -> None:
    limited = {"BATCHML_MAX_SECONDS": "2000"}
    attempts = (Attempt(1_000, 1_001_000), Attempt(2_000_000, 3_000_000))
    assert is_spent(limited, STOPPED, attempts)
    assert not is_spent({}, STOPPED, attempts)
    assert not is_spent(limited, STOPPED, attempts[:1])  # long before: someone else stopped it
    assert not is_spent(limited, 1, attempts)
    assert max_seconds({"BATCHML_MAX_SECONDS": "x"}) == 0
