"""What trials and their sweep tell each other: manifest, course, messages."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.runtime.protocol import sweep as manifest
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import (
    BadManifest,
    BadTrialContract,
    Cutoffs,
    MessageSender,
    TrialContract,
    TrialEntry,
    batch_key,
    claim_key,
    encode,
)
from batchml.runtime.storage.folder import FolderStore

scalars = st.one_of(
    st.text(max_size=20), st.booleans(), st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
entries = st.builds(
    TrialEntry, st.integers(0, 10**6), st.dictionaries(st.text(max_size=10), scalars, max_size=4),
    st.integers(0, 2**62), st.integers(0, 10**9), st.booleans(), st.booleans(),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(entries, min_size=1, max_size=6))
def test_every_child_reads_its_own_line(planned: list[TrialEntry]) -> None:
    data, width = encode("k", 3, planned)
    assert len(data) == width * len(planned)
    for index, entry in enumerate(planned):
        line = data[index * width :][:width]
        assert manifest.decode(line, "k", 3, index, width) == entry


def test_a_child_reads_its_line_and_no_more(tmp_path: Path) -> None:
    class Watched(FolderStore):
        asked: tuple[int, int] = (0, 0)

        def read(self, key: str, start: int, length: int) -> bytes | None:
            self.asked = (start, length)
            return super().read(key, start, length)

    store = Watched(str(tmp_path))
    data, width = encode("k", 1, [TrialEntry(n, {"lr": n / 7}, n) for n in range(10_000)])
    store.put(batch_key(1), data)
    assert manifest.read(store, "k", 1, 7_123, width).trial == 7_123
    assert store.asked == (7_123 * width, width)


DATA, WIDTH = encode("k", 1, [TrialEntry(0, {"lr": 0.5}, 1), TrialEntry(1, {"lr": 0.25}, 2)])


@pytest.mark.parametrize(
    ("key", "wave", "index", "width", "words"),
    [
        ("other", 1, 0, WIDTH, "checksum"),
        ("k", 2, 0, WIDTH, "missing"),
        ("k", 1, 2, WIDTH, "ends before"),
        ("k", 1, 0, WIDTH - 1, "ends before"),
        ("k", 1, 1, 0, "BATCHML_WAVE_WIDTH"),
    ],
)
def test_what_is_not_ours_is_refused(
    tmp_path: Path, key: str, wave: int, index: int, width: int, words: str
) -> None:
    store = FolderStore(str(tmp_path))
    store.put(batch_key(1), DATA)
    with pytest.raises(BadManifest, match=words):
        manifest.read(store, key, wave, index, width)


def test_a_line_of_another_place_is_refused() -> None:
    with pytest.raises(BadManifest, match="checksum"):
        manifest.decode(DATA[:WIDTH], "k", 1, 1, WIDTH)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, WIDTH - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen(place: int, change: int) -> None:
    line = bytearray(DATA[:WIDTH])
    line[place] ^= change
    with pytest.raises(BadManifest):
        manifest.decode(bytes(line), "k", 1, 0, WIDTH)


@pytest.mark.parametrize("length", range(WIDTH))
def test_a_line_that_was_cut_is_refused(length: int) -> None:
    with pytest.raises(BadManifest):
        manifest.decode(DATA[:length], "k", 1, 0, WIDTH)


def test_a_course_comes_back() -> None:
    course = TrialContract(
        "k", (("acc", "max"), ("ms", "min")), ("python", "train.py"), {"lr": 0.1, "on": True},
        {"acc": "acc=(.*)"}, "epoch", "asha", (1, 3), 9, 3, True, "waves", 12.5, 2.0, 1.0,
    )  # fmt: skip
    assert TrialContract.from_json(course.to_json()) == course
    later = json.dumps({**json.loads(course.to_json()), "later": 1}).encode()
    assert TrialContract.from_json(later) == course
    assert course.loss(2.0) == -2.0
    assert [course.target_of(rung) for rung in range(3)] == [1, 3, 9]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b'{"key": "k", "goals": [], "command": []}',
        b'{"key": "k", "goals": [["a", "up"]], "command": []}',
        b'{"key": "k", "goals": [["a", "max"]], "command": [], "max": "9"}',
        b'{"key": "k", "goals": [["a", "max"]], "command": 7}',
    ],
)  # fmt: skip
def test_a_course_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadTrialContract, match=r"course\.json"):
        TrialContract.from_json(data)


SENDER = MessageSender(wave=2, trial=17, attempt=1, child=4, job="job:4", began=1000.0)


def message(**changes: Any) -> dict[str, Any]:
    made = messages.make_message(
        SENDER, 3, "report", 1001.5, [(1, (0.5,), 1001.0)], [(1, 0.5, None, 7, True)],
        {"loss": 0.1, "lost": float("nan")},
    )  # fmt: skip
    return {**made, **changes}


def test_a_message_comes_back() -> None:
    assert messages.decode_message(messages.encode_message(message())) == {
        "wave": 2, "trial": 17, "attempt": 1, "seq": 3, "index": 4, "job": "job:4",
        "began": 1000.0, "at": 1001.5, "kind": "report", "points": [[1, [0.5], 1001.0]],
        "decisions": [[1, 0.5, None, 7, True]], "metrics": {"loss": 0.1},
    }  # fmt: skip


def test_an_end_says_how_and_shows_the_last_lines() -> None:
    lines = [f"line {number} " + "x" * 1000 for number in range(100)]
    end = messages.add_end(message(), "FAILED", 3, "w" * 1000, lines)
    found = messages.decode_message(messages.encode_message(end))
    assert found is not None
    assert (found["kind"], found["state"], found["code"]) == ("end", "FAILED", 3)
    assert len(found["why"]) == 500
    assert len(found["tail"]) == 20
    assert found["tail"][-1].startswith("line 99")
    assert len(messages.encode_message(end)) < 16_384


@pytest.mark.parametrize(
    "change",
    [
        {"wave": "2"}, {"trial": True}, {"seq": 1.5}, {"at": None}, {"kind": "other"}, {"job": 1},
        {"points": {}}, {"points": [[1, 0.5, 3]]}, {"points": [[1, ["x"], 3]]},
        {"decisions": [[1, 0.5, None, 7]]}, {"metrics": {"loss": "x"}}, {"metrics": []},
        {"kind": "end"}, {"kind": "end", "state": "LOST", "code": 0}, {"tail": [1]}, {"why": 1},
        {"at": 10**400},
    ],
)  # fmt: skip
def test_nonsense_is_no_message(change: dict[str, Any]) -> None:
    assert messages.decode_message(json.dumps(message(**change)).encode()) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"7", b"\xff", b'{"at": NaN}', b"[" * 10_000])
def test_junk_is_no_message(data: bytes) -> None:
    assert messages.decode_message(data) is None


def test_keys_are_told_apart_and_in_order() -> None:
    keys = [(1, 0, 1, 0), (1, 0, 1, 1), (1, 0, 2, 0), (1, 9_999, 1, 0), (12, -1, 1, 0)]
    written = [messages.message_key(*each) for each in keys]
    assert len(set(written)) == len(keys)
    assert written[:4] == sorted(written[:4])
    assert all(each.startswith(messages.INBOX) for each in written)
    assert messages.unknown_trial(0) == -1
    assert claim_key(1, 2) != claim_key(12, 2)


def test_cutoffs_come_back_and_nonsense_stops_nobody() -> None:
    cutoffs = Cutoffs(7, {0: (3, 0.5)}, {4: (5, 0.25)})
    assert Cutoffs.from_json(cutoffs.to_json()) == cutoffs
    for data in (None, b"", b"[]", b'{"rungs": 1}', b'{"rungs": {"x": [1, 2]}}', b"\xff"):
        assert Cutoffs.from_json(data) == Cutoffs(0, {}, {})
    assert Cutoffs.from_json(b'{"version": 2, "rungs": {"0": [3, NaN]}}').rungs == {}
