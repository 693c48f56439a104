"""The ledger in its store: nothing is lost and one controller writes, whichever is killed when."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.errors import ControllerReplaced, LedgerDamaged
from batchml.model.sweep import SweepLimits
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import MessageSender, message_key
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError
from batchml.sweeps.control import inbox
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    LimitsChanged,
    MessageReceived,
    NoticeGiven,
    PlannedTrial,
    SweepEnded,
    SweepReopened,
    SweepStopping,
    TrialBatch,
    TrialObserved,
)
from batchml.sweeps.control.ledger import PACK_AFTER, SweepLedger
from batchml.sweeps.control.state import SweepState
from tests.support.sweep_stores import Killed, KillingStore, LossyStore, MemoryStore


def message(trial: int, seq: int, kind: str = "report", step: int = 1) -> dict[str, object]:
    sender = MessageSender(1, trial, 1, trial, f"job1:{trial}", 10.0)
    found = messages.make_message(
        sender, seq, kind, 10.0 + seq, [[step, [0.5 + trial], 10.0 + seq]]
    )
    return messages.add_end(found, "DONE", 0) if kind == "end" else found


WAVE = TrialBatch(
    1, 1.0, "key1", tuple(PlannedTrial(n, {"lr": 0.1, "opt": "sgd"}, n, "tpe") for n in range(3))
)
ALL: list[Event] = [
    WAVE,
    BatchSubmitted(1, "job1", 2.0),
    MessageReceived(message(0, 0, "start")),
    MessageReceived(message(0, 1)),
    MessageReceived(message(0, 2, "end", 2)),
    TrialObserved(1, 1, "LOST", 3.0, "job1:1", 1, "Host EC2 terminated", 2.0, 3.0),
    NoticeGiven("ünïcode", "line\nline", 4.0),
    LimitsChanged(SweepLimits(trials=9, cost=1.5), 5.0),
    SweepStopping("user", "stop", 6.0),
    SweepEnded("stopped", 7.0),
    SweepReopened("top-up", 8.0),
]


def fold(events: Sequence[Event]) -> SweepState:
    state = SweepState()
    for event in events:
        state.apply(event)
    return state


def test_what_is_appended_is_loaded(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "store"))
    ledger = SweepLedger(store)
    assert ledger.load() == SweepState()
    ledger.append(ALL[:4])
    ledger.append(ALL[4:])
    state = SweepLedger(store).load()
    assert state == fold(ALL)
    assert state.segment == 2
    assert store.keys("log/") == ["log/000000001.jsonl", "log/000000002.jsonl"]


def test_a_follower_reads_what_is_new() -> None:
    store = MemoryStore()
    writer, reader = SweepLedger(store), SweepLedger(store)
    state = reader.load()
    assert not reader.follow(state)
    for event in ALL:
        writer.append([event])
        assert reader.follow(state)
        assert not reader.follow(state)
    assert state == fold(ALL)


def test_who_finds_its_number_taken_ends() -> None:
    store = MemoryStore()
    first, second = SweepLedger(store, "process 1 on a"), SweepLedger(store, "process 2 on b")
    first.append([WAVE])
    second.load()
    second.append([BatchSubmitted(1, "job1", 2.0)])
    with pytest.raises(ControllerReplaced, match="process 2 on b"):
        first.append([BatchSubmitted(1, "other", 2.0)])
    assert SweepLedger(store).load().jobs == {1: "job1"}


def test_who_takes_over_fences_before_it_has_anything_to_say() -> None:
    store = MemoryStore()
    first = SweepLedger(store)
    first.append([WAVE])
    state = SweepLedger(store).take_over()
    assert state == fold([WAVE])
    with pytest.raises(ControllerReplaced):
        first.append([BatchSubmitted(1, "job1", 2.0)])


def test_one_that_slept_while_its_number_was_packed_and_deleted_is_fenced() -> None:
    store = MemoryStore()
    slept, reader = SweepLedger(store), SweepLedger(store)
    slept.append([WAVE])
    state = reader.load()
    other = SweepLedger(store)
    other.take_over()
    for number in range(PACK_AFTER + 5):
        other.append([NoticeGiven(f"notice {number}", "", 1.0)])
    assert "log/000000002.jsonl" not in store.values
    with pytest.raises(ControllerReplaced):
        slept.append([BatchSubmitted(1, "wrong", 2.0)])
    assert "log/000000002.jsonl" in store.values  # it came too late, and counts for nobody
    reader.follow(state)
    for found in (state, SweepLedger(store).load()):
        assert found.jobs == {}
        assert len(found.notices) == PACK_AFTER + 5
    for number in range(PACK_AFTER):
        other.append([NoticeGiven(f"later {number}", "", 1.0)])
    assert "log/000000002.jsonl" not in store.values


def test_packs_hold_all_and_leave_few_objects() -> None:
    store = MemoryStore()
    ledger, reader = SweepLedger(store), SweepLedger(store)
    slow = reader.load()
    events: list[Event] = [WAVE]
    ledger.append(events)
    for number in range(PACK_AFTER * 3):
        events.append(NoticeGiven(f"notice {number}", "words " * 50, 1.0))
        ledger.append(events[-1:])
        if number % 40 == 0:
            assert reader.follow(slow)
    assert SweepLedger(store).load() == fold(events)
    reader.follow(slow)
    assert slow == fold(events)
    assert len(store.keys("packs/")) == 1
    assert len(store.keys("log/")) < PACK_AFTER


def test_a_large_pack_is_not_written_anew_for_every_few_segments() -> None:
    class Counting(MemoryStore):
        packed = 0

        def put(self, key: str, data: bytes) -> None:
            self.packed += len(data)
            super().put(key, data)

    store = Counting()
    ledger = SweepLedger(store)
    for number in range(PACK_AFTER * 40):
        ledger.append([NoticeGiven(f"notice {number}", "", 1.0)])
    size = sum(map(len, store.values.values()))
    assert store.packed < 10 * size  # with one pack for each 50, 20 times


def torn(data: bytes, cut: int) -> int:
    """How many events of a segment are whole when it ends there."""
    return max(0, data[:cut].count(b"\n") - 1)


def test_a_torn_tail_is_cut_at_every_byte() -> None:
    store = MemoryStore()
    SweepLedger(store).append(ALL[:5])
    SweepLedger(store).append(ALL[5:])
    last = store.values["log/000000002.jsonl"]
    for cut in range(len(last)):
        torn_store = MemoryStore()
        for key, data in {**store.values, "log/000000002.jsonl": last[:cut]}.items():
            torn_store.put(key, data)
        expected = fold(ALL[: 5 + torn(last, cut)])
        ledger = SweepLedger(torn_store)
        assert ledger.load() == expected, cut
        if cut % 97 == 0:  # it goes on from there, and the next readers agree
            ledger.append([NoticeGiven("on", "", 9.0)])
            ledger.pack()
            expected.apply(NoticeGiven("on", "", 9.0))
            assert SweepLedger(torn_store).load() == expected


@pytest.mark.parametrize(
    "damage", [b'{"by":""}\n{"type":"wave"\n', b'\n{"type":"new"}\n', b"\n\xff\n"]
)
def test_a_line_that_is_none_is_damage_that_is_named(damage: bytes) -> None:
    store = MemoryStore()
    SweepLedger(store).append([WAVE])
    store.values["log/000000002.jsonl"] = damage
    with pytest.raises(LedgerDamaged, match=r"log/000000002\.jsonl"):
        SweepLedger(store).load()


@pytest.mark.parametrize("garbage", [b"", b"garbage", b'{"by":""}\n{"type":"wa', b"x\n" * 3])
@pytest.mark.parametrize("reads", ["load", "follow", "pack"])
def test_a_segment_that_is_garbled_and_has_a_successor_is_damage_that_is_named(
    garbage: bytes, reads: str
) -> None:
    """What stood in it would be lost in silence: it was not torn when the next was written."""
    store = MemoryStore()
    writer, reader = SweepLedger(store), SweepLedger(store)
    state = reader.load()
    for event in ALL:
        writer.append([event])
    store.values["log/000000003.jsonl"] = garbage
    with pytest.raises(LedgerDamaged, match=r"ledger is damaged: log/000000003\.jsonl"):
        if reads == "load":
            reader.load()
        elif reads == "follow":
            reader.follow(state)
        else:
            writer.pack()
    assert len(store.keys("log/")) == len(ALL)


def test_a_pack_that_breaks_off_is_damage_that_is_named() -> None:
    store = MemoryStore()
    ledger = SweepLedger(store)
    ledger.append(ALL)
    ledger.pack()
    store.values["packs/000000001.jsonl"] = store.values["packs/000000001.jsonl"][:-5]
    with pytest.raises(LedgerDamaged, match=r"packs/000000001\.jsonl breaks off"):
        SweepLedger(store).load()
    with pytest.raises(LedgerDamaged):
        SweepLedger(store).take_over()


@pytest.mark.parametrize("goes_on", ["load", "take_over", "append"])
def test_who_goes_on_after_a_torn_tail_says_so_once(goes_on: str) -> None:
    store = MemoryStore()
    SweepLedger(store).append(ALL[:2])
    store.values["log/000000001.jsonl"] = store.values["log/000000001.jsonl"][:-3]
    ledger = SweepLedger(store)
    if goes_on != "append":
        getattr(ledger, goes_on)()
    ledger.append(ALL[2:4])
    ledger.append(ALL[4:])
    assert SweepLedger(store).load() == fold([ALL[0], *ALL[2:]])
    store.values["log/000000002.jsonl"] = store.values["log/000000002.jsonl"][:-3]
    with pytest.raises(LedgerDamaged, match=r"log/00000000[12]\.jsonl breaks off"):
        SweepLedger(store).load()


def test_a_segment_that_is_missing_is_damage_that_is_named() -> None:
    store = MemoryStore()
    ledger = SweepLedger(store)
    for event in ALL:
        ledger.append([event])
    del store.values["log/000000004.jsonl"]
    with pytest.raises(LedgerDamaged, match=r"log/000000004\.jsonl is missing"):
        SweepLedger(store).load()


def test_a_reader_that_meets_a_pack_reads_again() -> None:
    class Busy(MemoryStore):
        """Before one of the reader's calls, the writer packs."""

        def __init__(self, nth: int) -> None:
            super().__init__()
            self.nth, self.calls = nth, 0
            self.act: Callable[[], None] = lambda: None

        def _called(self) -> None:
            self.calls += 1
            if self.calls == self.nth:
                self.act()

        def get(self, key: str) -> bytes | None:
            self._called()
            return super().get(key)

        def keys(self, prefix: str, limit: int | None = None) -> list[str]:
            self._called()
            return super().keys(prefix, limit)

    for nth in range(1, 20):
        store = Busy(-1)
        writer = SweepLedger(store)
        for event in ALL[:6]:
            writer.append([event])
        follower = SweepLedger(store)
        state = follower.load()
        for event in ALL[6:]:
            writer.append([event])
        store.calls, store.nth, store.act = 0, nth, writer.pack
        assert SweepLedger(store).load() == fold(ALL)
        store.calls = -1000
        store.calls, store.nth = 0, nth
        assert follower.follow(state)
        assert state == fold(ALL)


# --- killed anywhere, answers lost anywhere -----------------------------------------------------

SENT = [
    message(n, seq, kind, 1 + seq) for n in range(3) for seq, kind in enumerate(["start", "end"])
]


def control(store: Any, rounds: int = 12) -> SweepState:
    """A controller in little: what it intends, then what trials say, a few packs in between."""
    ledger = SweepLedger(store)
    state = ledger.take_over()

    def happen(*events: Event) -> None:
        ledger.append(events)
        for event in events:
            state.apply(event)

    if not state.batches:
        happen(WAVE)
    if state.open_batches:
        happen(BatchSubmitted(1, "job1", 2.0))
    for _ in range(rounds):
        found = inbox.read_inbox(store, limit=2)
        if found.keys:
            happen(*(MessageReceived(each) for each in found.messages))
            store.delete(*found.keys)
            ledger.pack()
    if state.ended is None:
        happen(SweepEnded("all done", 9.0))
    return state


def put_messages(store: MemoryStore) -> None:
    for each in SENT:
        key = message_key(1, each["trial"], 1, each["seq"])  # type: ignore[arg-type]
        store.values[key] = messages.encode_message(each)
    store.values["inbox/nonsense.json"] = b"{"


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_and_started_again_it_comes_to_the_same(after: bool) -> None:
    whole = MemoryStore()
    put_messages(whole)
    expected = control(whole)
    assert whole.keys("inbox/") == []
    assert {each.state for each in expected.trials.values()} == {"DONE"}
    for nth in range(1, whole.writes + 1):
        store = MemoryStore()
        put_messages(store)
        with pytest.raises(Killed):
            control(KillingStore(store, nth, before=not after))
        assert control(store) == expected, nth
        assert SweepLedger(store).load() == expected
        assert store.keys("inbox/") == []


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_lost_answers_neither_lose_nor_fence(dice: random.Random) -> None:
    store = LossyStore(lambda: dice.choice(["", "", "", "before", "after"]))
    ledger = SweepLedger(store)
    wanted: list[Event] = []
    for event in ALL * 6:
        wanted.append(event)
        try:
            ledger.append(wanted)
        except StoreError:
            continue
        wanted = []
    store._fails = lambda: ""
    ledger.append(wanted)
    assert SweepLedger(store).load() == fold(ALL * 6)
    with pytest.raises(ControllerReplaced):
        second = SweepLedger(store)
        second.take_over()
        ledger.append([])
    assert SweepLedger(store).load() == fold(ALL * 6)


def test_two_that_take_turns_never_both_write() -> None:
    for seed in range(30):
        dice, store = random.Random(seed), MemoryStore()
        ledgers = [SweepLedger(store, str(number)) for number in range(3)]
        for ledger in ledgers:
            ledger.load()
        written: list[Event] = []
        live: set[int] = set()
        for count in range(80):
            who = dice.randrange(3)
            if dice.random() < 0.2:
                ledgers[who].follow(ledgers[who].load())  # looking on makes nobody a writer again
            elif dice.random() < 0.1:
                assert ledgers[who].take_over() == fold(written)
                live = {who}
                continue
            event = NoticeGiven(f"{who} {count}", "", 1.0)
            try:
                ledgers[who].append([event])
            except ControllerReplaced:
                assert who not in live
                continue
            assert not live or who in live
            written.append(event)
            live = live or {who}
        assert SweepLedger(store).load() == fold(written)


def test_of_many_who_write_at_once_in_one_folder_one_does(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    SweepLedger(store).append([WAVE])
    ledgers = [SweepLedger(store, str(number)) for number in range(8)]
    for ledger in ledgers:
        ledger.load()
    won: list[int] = []

    def write(number: int) -> None:
        with suppress(ControllerReplaced):
            ledgers[number].append([BatchSubmitted(1, str(number), 2.0)])
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number) for number in won] == [SweepLedger(store).load().jobs[1]]


# --- the inbox ----------------------------------------------------------------------------------


def test_the_inbox_gives_a_few_at_a_time_and_drops_what_is_no_message() -> None:
    store = MemoryStore()
    put_messages(store)
    seen = []
    while (found := inbox.read_inbox(store, limit=3)).keys:
        assert len(found.keys) <= 3
        seen += found.messages
        store.delete(*found.keys)
    assert sorted(map(str, seen)) == sorted(map(str, SENT))


def test_a_message_that_utf8_cannot_say_is_told_as_far_as_it_can_be() -> None:
    store = MemoryStore()
    found = messages.add_end(message(0, 0), "FAILED", 1, "\udcff!", ["a\ud800"])
    found |= {"metrics": {"l\udcff": 1.0}, "more": [1]}
    store.values[message_key(1, 0, 1, 0)] = messages.encode_message(found)
    (taken,) = inbox.read_inbox(store).messages
    assert (taken["why"], taken["tail"], taken["metrics"]) == ("?!", ["a?"], {"l?": 1.0})
    assert "more" not in taken
    ledger = SweepLedger(store)
    ledger.append([WAVE, MessageReceived(taken)])
    assert ledger.load().trials[0].why == "?!"
