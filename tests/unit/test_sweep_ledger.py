"""The ledger on its board: nothing is lost and one writes at a time, whoever is killed when."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import Limits
from batchml.runtime.protocol import messages
from batchml.runtime.protocol.messages import Sender, message_key
from batchml.runtime.storage.store import FolderStore, Store, StoreError
from batchml.sweep import inbox
from batchml.sweep.events import (
    Ended,
    Event,
    Limited,
    Noticed,
    Planned,
    Reopened,
    Seen,
    Stopping,
    Submitted,
    Told,
    Wave,
)
from batchml.sweep.ledger import PACK_AFTER, DamagedLedger, Fenced, Ledger
from batchml.sweep.state import SweepState
from tests.boards import Killed, LossyBoard, MemoryBoard, MortalBoard


def message(trial: int, seq: int, kind: str = "report", step: int = 1) -> dict[str, object]:
    sender = Sender(1, trial, 1, trial, f"job1:{trial}", 10.0)
    found = messages.make(sender, seq, kind, 10.0 + seq, [[step, [0.5 + trial], 10.0 + seq]])
    return messages.with_end(found, "DONE", 0) if kind == "end" else found


WAVE = Wave(
    1, 1.0, "key1", tuple(Planned(n, {"lr": 0.1, "opt": "sgd"}, n, "tpe") for n in range(3))
)
ALL: list[Event] = [
    WAVE,
    Submitted(1, "job1", 2.0),
    Told(message(0, 0, "start")),
    Told(message(0, 1)),
    Told(message(0, 2, "end", 2)),
    Seen(1, 1, "LOST", 3.0, "job1:1", 1, "Host EC2 terminated", 2.0, 3.0),
    Noticed("ünïcode", "line\nline", 4.0),
    Limited(Limits(trials=9, cost=1.5), 5.0),
    Stopping("user", "stop", 6.0),
    Ended("stopped", 7.0),
    Reopened("top-up", 8.0),
]


def fold(events: Sequence[Event]) -> SweepState:
    state = SweepState()
    for event in events:
        state.fold(event)
    return state


def test_what_is_appended_is_loaded(tmp_path: Path) -> None:
    board = FolderStore(str(tmp_path / "board"))
    ledger = Ledger(board)
    assert ledger.load() == SweepState()
    ledger.append(ALL[:4])
    ledger.append(ALL[4:])
    state = Ledger(board).load()
    assert state == fold(ALL)
    assert state.segment == 2
    assert board.keys("log/") == ["log/000000001.jsonl", "log/000000002.jsonl"]


def test_a_follower_reads_what_is_new() -> None:
    board = MemoryBoard()
    writer, reader = Ledger(board), Ledger(board)
    state = reader.load()
    assert not reader.follow(state)
    for event in ALL:
        writer.append([event])
        assert reader.follow(state)
        assert not reader.follow(state)
    assert state == fold(ALL)


def test_who_finds_its_number_taken_ends() -> None:
    board = MemoryBoard()
    first, second = Ledger(board, "process 1 on a"), Ledger(board, "process 2 on b")
    first.append([WAVE])
    second.load()
    second.append([Submitted(1, "job1", 2.0)])
    with pytest.raises(Fenced, match="process 2 on b"):
        first.append([Submitted(1, "other", 2.0)])
    assert Ledger(board).load().jobs == {1: "job1"}


def test_who_takes_over_fences_before_it_has_anything_to_say() -> None:
    board = MemoryBoard()
    first = Ledger(board)
    first.append([WAVE])
    state = Ledger(board).take_over()
    assert state == fold([WAVE])
    with pytest.raises(Fenced):
        first.append([Submitted(1, "job1", 2.0)])


def test_one_that_slept_while_its_number_was_packed_and_deleted_is_fenced() -> None:
    board = MemoryBoard()
    slept, reader = Ledger(board), Ledger(board)
    slept.append([WAVE])
    state = reader.load()
    other = Ledger(board)
    other.take_over()
    for number in range(PACK_AFTER + 5):
        other.append([Noticed(f"notice {number}", "", 1.0)])
    assert "log/000000002.jsonl" not in board.values
    with pytest.raises(Fenced):
        slept.append([Submitted(1, "wrong", 2.0)])
    assert "log/000000002.jsonl" in board.values  # it came too late, and counts for nobody
    reader.follow(state)
    for found in (state, Ledger(board).load()):
        assert found.jobs == {}
        assert len(found.notices) == PACK_AFTER + 5
    for number in range(PACK_AFTER):
        other.append([Noticed(f"later {number}", "", 1.0)])
    assert "log/000000002.jsonl" not in board.values


def test_packs_hold_all_and_leave_few_objects() -> None:
    board = MemoryBoard()
    ledger, reader = Ledger(board), Ledger(board)
    slow = reader.load()
    events: list[Event] = [WAVE]
    ledger.append(events)
    for number in range(PACK_AFTER * 3):
        events.append(Noticed(f"notice {number}", "words " * 50, 1.0))
        ledger.append(events[-1:])
        if number % 40 == 0:
            assert reader.follow(slow)
    assert Ledger(board).load() == fold(events)
    reader.follow(slow)
    assert slow == fold(events)
    assert len(board.keys("packs/")) == 1
    assert len(board.keys("log/")) < PACK_AFTER


def test_a_large_pack_is_not_written_anew_for_every_few_segments() -> None:
    class Counting(MemoryBoard):
        packed = 0

        def put(self, key: str, data: bytes) -> None:
            self.packed += len(data)
            super().put(key, data)

    board = Counting()
    ledger = Ledger(board)
    for number in range(PACK_AFTER * 40):
        ledger.append([Noticed(f"notice {number}", "", 1.0)])
    size = sum(map(len, board.values.values()))
    assert board.packed < 10 * size  # with one pack for each 50, 20 times


def torn(data: bytes, cut: int) -> int:
    """How many events of a segment are whole when it ends there."""
    return max(0, data[:cut].count(b"\n") - 1)


def test_a_torn_tail_is_cut_at_every_byte() -> None:
    board = MemoryBoard()
    Ledger(board).append(ALL[:5])
    Ledger(board).append(ALL[5:])
    last = board.values["log/000000002.jsonl"]
    for cut in range(len(last)):
        torn_board = MemoryBoard()
        torn_board.values = {**board.values, "log/000000002.jsonl": last[:cut]}
        expected = fold(ALL[: 5 + torn(last, cut)])
        ledger = Ledger(torn_board)
        assert ledger.load() == expected, cut
        if cut % 97 == 0:  # it goes on from there, and the next readers agree
            ledger.append([Noticed("on", "", 9.0)])
            ledger.pack()
            expected.fold(Noticed("on", "", 9.0))
            assert Ledger(torn_board).load() == expected


@pytest.mark.parametrize(
    "damage", [b'{"by":""}\n{"type":"wave"\n', b'\n{"type":"new"}\n', b"\n\xff\n"]
)
def test_a_line_that_is_none_is_damage_that_is_named(damage: bytes) -> None:
    board = MemoryBoard()
    Ledger(board).append([WAVE])
    board.values["log/000000002.jsonl"] = damage
    with pytest.raises(DamagedLedger, match=r"log/000000002\.jsonl"):
        Ledger(board).load()


@pytest.mark.parametrize("garbage", [b"", b"garbage", b'{"by":""}\n{"type":"wa', b"x\n" * 3])
@pytest.mark.parametrize("reads", ["load", "follow", "pack"])
def test_a_segment_that_is_garbled_and_has_a_successor_is_damage_that_is_named(
    garbage: bytes, reads: str
) -> None:
    """What stood in it would be lost in silence: it was not torn when the next was written."""
    board = MemoryBoard()
    writer, reader = Ledger(board), Ledger(board)
    state = reader.load()
    for event in ALL:
        writer.append([event])
    board.values["log/000000003.jsonl"] = garbage
    with pytest.raises(DamagedLedger, match=r"ledger is damaged: log/000000003\.jsonl"):
        if reads == "load":
            reader.load()
        elif reads == "follow":
            reader.follow(state)
        else:
            writer.pack()
    assert len(board.keys("log/")) == len(ALL)


def test_a_pack_that_breaks_off_is_damage_that_is_named() -> None:
    board = MemoryBoard()
    ledger = Ledger(board)
    ledger.append(ALL)
    ledger.pack()
    board.values["packs/000000001.jsonl"] = board.values["packs/000000001.jsonl"][:-5]
    with pytest.raises(DamagedLedger, match=r"packs/000000001\.jsonl breaks off"):
        Ledger(board).load()
    with pytest.raises(DamagedLedger):
        Ledger(board).take_over()


@pytest.mark.parametrize("goes_on", ["load", "take_over", "append"])
def test_who_goes_on_after_a_torn_tail_says_so_once(goes_on: str) -> None:
    board = MemoryBoard()
    Ledger(board).append(ALL[:2])
    board.values["log/000000001.jsonl"] = board.values["log/000000001.jsonl"][:-3]
    ledger = Ledger(board)
    if goes_on != "append":
        getattr(ledger, goes_on)()
    ledger.append(ALL[2:4])
    ledger.append(ALL[4:])
    assert Ledger(board).load() == fold([ALL[0], *ALL[2:]])
    board.values["log/000000002.jsonl"] = board.values["log/000000002.jsonl"][:-3]
    with pytest.raises(DamagedLedger, match=r"log/00000000[12]\.jsonl breaks off"):
        Ledger(board).load()


def test_a_segment_that_is_missing_is_damage_that_is_named() -> None:
    board = MemoryBoard()
    ledger = Ledger(board)
    for event in ALL:
        ledger.append([event])
    del board.values["log/000000004.jsonl"]
    with pytest.raises(DamagedLedger, match=r"log/000000004\.jsonl is missing"):
        Ledger(board).load()


def test_a_reader_that_meets_a_pack_reads_again() -> None:
    class Busy(MemoryBoard):
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

        def keys(self, prefix: str) -> list[str]:
            self._called()
            return super().keys(prefix)

    for nth in range(1, 20):
        board = Busy(-1)
        writer = Ledger(board)
        for event in ALL[:6]:
            writer.append([event])
        follower = Ledger(board)
        state = follower.load()
        for event in ALL[6:]:
            writer.append([event])
        board.calls, board.nth, board.act = 0, nth, writer.pack
        assert Ledger(board).load() == fold(ALL)
        board.calls = -1000
        board.calls, board.nth = 0, nth
        assert follower.follow(state)
        assert state == fold(ALL)


# --- killed anywhere, answers lost anywhere -----------------------------------------------------

SENT = [
    message(n, seq, kind, 1 + seq) for n in range(3) for seq, kind in enumerate(["start", "end"])
]


def control(board: Store, rounds: int = 12) -> SweepState:
    """A controller in little: what it intends, then what trials say, a few packs in between."""
    ledger = Ledger(board)
    state = ledger.take_over()

    def happen(*events: Event) -> None:
        ledger.append(events)
        for event in events:
            state.fold(event)

    if not state.waves:
        happen(WAVE)
    if state.open_waves:
        happen(Submitted(1, "job1", 2.0))
    for _ in range(rounds):
        found = inbox.take(board, most=2)
        if found.keys:
            happen(*(Told(each) for each in found.messages))
            inbox.discard(board, found.keys)
            ledger.pack()
    if state.ended is None:
        happen(Ended("all done", 9.0))
    return state


def put_messages(board: MemoryBoard) -> None:
    for each in SENT:
        key = message_key(1, each["trial"], 1, each["seq"])  # type: ignore[arg-type]
        board.values[key] = messages.write(each)
    board.values["inbox/nonsense.json"] = b"{"


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_and_started_again_it_comes_to_the_same(after: bool) -> None:
    whole = MemoryBoard()
    put_messages(whole)
    expected = control(whole)
    assert whole.keys("inbox/") == []
    assert {each.state for each in expected.trials.values()} == {"DONE"}
    for nth in range(1, whole.writes + 1):
        values: dict[str, bytes] = {}
        board = MortalBoard(values, nth, after=after)
        put_messages(board)
        with pytest.raises(Killed):
            control(board)
        again = MemoryBoard()
        again.values = values
        assert control(again) == expected, nth
        assert Ledger(again).load() == expected
        assert again.keys("inbox/") == []


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_lost_answers_neither_lose_nor_fence(dice: random.Random) -> None:
    board = LossyBoard(lambda: dice.choice(["", "", "", "before", "after"]))
    ledger = Ledger(board)
    wanted: list[Event] = []
    for event in ALL * 6:
        wanted.append(event)
        try:
            ledger.append(wanted)
        except StoreError:
            continue
        wanted = []
    board._fails = lambda: ""
    ledger.append(wanted)
    assert Ledger(board).load() == fold(ALL * 6)
    with pytest.raises(Fenced):
        second = Ledger(board)
        second.take_over()
        ledger.append([])
    assert Ledger(board).load() == fold(ALL * 6)


def test_two_that_take_turns_never_both_write() -> None:
    for seed in range(30):
        dice, board = random.Random(seed), MemoryBoard()
        ledgers = [Ledger(board, str(number)) for number in range(3)]
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
            event = Noticed(f"{who} {count}", "", 1.0)
            try:
                ledgers[who].append([event])
            except Fenced:
                assert who not in live
                continue
            assert not live or who in live
            written.append(event)
            live = live or {who}
        assert Ledger(board).load() == fold(written)


def test_of_many_who_write_at_once_in_one_folder_one_does(tmp_path: Path) -> None:
    board = FolderStore(str(tmp_path))
    Ledger(board).append([WAVE])
    ledgers = [Ledger(board, str(number)) for number in range(8)]
    for ledger in ledgers:
        ledger.load()
    won: list[int] = []

    def write(number: int) -> None:
        with suppress(Fenced):
            ledgers[number].append([Submitted(1, str(number), 2.0)])
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number) for number in won] == [Ledger(board).load().jobs[1]]


# --- the inbox ----------------------------------------------------------------------------------


def test_the_inbox_gives_a_few_at_a_time_and_drops_what_is_no_message() -> None:
    board = MemoryBoard()
    put_messages(board)
    seen = []
    while (found := inbox.take(board, most=3)).keys:
        assert len(found.keys) <= 3
        seen += found.messages
        inbox.discard(board, found.keys)
    assert sorted(map(str, seen)) == sorted(map(str, SENT))


def test_a_message_that_utf8_cannot_say_is_told_as_far_as_it_can_be() -> None:
    board = MemoryBoard()
    found = messages.with_end(message(0, 0), "FAILED", 1, "\udcff!", ["a\ud800"])
    found |= {"metrics": {"l\udcff": 1.0}, "more": [1]}
    board.values[message_key(1, 0, 1, 0)] = messages.write(found)
    (taken,) = inbox.take(board).messages
    assert (taken["why"], taken["tail"], taken["metrics"]) == ("?!", ["a?"], {"l?": 1.0})
    assert "more" not in taken
    ledger = Ledger(board)
    ledger.append([WAVE, Told(taken)])
    assert ledger.load().trials[0].why == "?!"
