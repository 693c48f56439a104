"""The proof of a log: any change of the file is detected and located by its line."""

import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.local.batch.events import NO_LINES, LogEnd, LogProof
from batchml.local.executors.runner.files import MAX_CHECKPOINTS, LogDigest, count_marks
from batchml.local.logs.check import LargeChecks, check_small
from batchml.model.logcheck import LogCheck, LogState, parse_header

TEXTS = st.one_of(
    st.sampled_from(["a", "b", " ", "::batchml end code=0 lines=1", " ::batchml host x", "é\r"]),
    st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=5),
)
LOGS = st.lists(TEXTS, max_size=20) | st.builds(
    lambda count, every: ["::batchml m" if every and n % every == 0 else "x" for n in range(count)],
    st.integers(60, 700),
    st.integers(0, 9),
)


def written(texts: list[str]) -> list[bytes]:
    return [f"{number // 3} {text}\n".encode() for number, text in enumerate(texts)]


def proof_of(lines: list[bytes], batch: int = 7) -> LogProof:
    digest = LogDigest()
    for at in range(0, len(lines), batch):
        some = lines[at : at + batch]
        digest.add(b"".join(some), len(some))
    return msgspec.convert(digest.proof(), LogProof)


def check(proof: LogProof, data: bytes, doubt: str = "") -> LogCheck:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        found = check_small(file.name, LogEnd(proof, doubt))
    assert found is not None
    return found


def is_mark(line: bytes) -> bool:
    return line.partition(b" ")[2].startswith(b"::batchml ")


@given(LOGS, st.integers(1, 400))
def test_a_proof_is_of_the_bytes_however_they_were_written(texts: list[str], batch: int) -> None:
    lines = written(texts)
    proof = proof_of(lines, batch)
    data = b"".join(lines)
    assert proof == proof_of(lines, 1)
    assert proof.sha256 == sha256(data).hexdigest()
    assert (proof.lines, proof.size) == (len(lines), len(data))
    assert proof.shown == sum(not is_mark(line) for line in lines)
    assert len(proof.checkpoints) == len(lines) // proof.stride * 8 <= MAX_CHECKPOINTS * 8
    assert len(json.dumps(msgspec.to_builtins(proof))) < 1024
    assert check(proof, data) == LogCheck(LogState.COMPLETE, proof.shown)
    assert check(proof, data, "lost").state is LogState.UNPROVEN


def test_a_mark_is_counted_where_a_message_begins_and_nowhere_else() -> None:
    lines = [
        b"1 ::batchml a", b"2  ::batchml a", b"x ::batchml a", b" ::batchml a",
        b"1234567890123456 ::batchml a", b"3 a 4 ::batchml b", b"5 ::batchml a ::batchml",
    ]  # fmt: skip
    assert [count_marks(line) for line in lines] == [1, 0, 0, 0, 0, 0, 1]
    assert count_marks(b"\n".join(lines)) == 2


def damaged(draw: st.DrawFn, lines: list[bytes]) -> bytes:
    """The same log cut at any byte, with a flipped byte, or with a line more, less or elsewhere."""
    data = b"".join(lines)
    place = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(["cut", "flip", "delete", "insert", "swap", "lose", "add"])):
        case "cut":
            return data[: draw(st.integers(0, len(data) - 1))]
        case "flip":
            at = draw(st.integers(0, len(data) - 1))
            return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        case "delete":
            return b"".join(lines[:place] + lines[place + 1 :])
        case "insert":
            return b"".join([*lines[:place], b"0 new\n", *lines[place:]])
        case "swap":
            other = draw(st.integers(0, len(lines) - 1))
            changed = list(lines)
            changed[place], changed[other] = lines[other], lines[place]
            return b"".join(changed)
        case "lose":
            return b"".join(lines[: draw(st.integers(0, len(lines) - 1))])
        case _:
            return data + draw(st.sampled_from([b"0", b"0 new\n", lines[place]]))


@given(LOGS.filter(bool), st.data())
def test_whatever_is_done_to_a_log_is_found_and_its_first_line_is_named(
    texts: list[str], data: st.DataObject
) -> None:
    lines = written(texts)
    proof = proof_of(lines)
    changed = data.draw(st.composite(damaged)(lines))
    found = check(proof, changed)
    if changed == b"".join(lines):
        assert found.state is LogState.COMPLETE
        return
    after = split(changed)
    same = next(
        (at for at, line in enumerate(lines) if at >= len(after) or after[at] != line), len(lines)
    )
    assert found.is_damaged
    assert (found.state is LogState.ADDED) == (same == len(lines))
    if same < len(lines):
        first = sum(not is_mark(line) for line in lines[:same]) + 1
        assert found.first <= first <= max(found.first, found.last)
        if len(lines) <= MAX_CHECKPOINTS:
            assert found.first == first
    assert found.describe().endswith(found.file)
    assert parse_header(found.to_header()) == found


def split(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def test_a_large_log_is_checked_part_by_part_and_once(tmp_path: Path) -> None:
    """B260: no request waits for all of it."""
    lines = written([f"{'x' * 200} {number}" for number in range(20_000)])
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    end = LogEnd(proof_of(lines, 1000))
    assert check_small(str(path), end) is None
    checks = LargeChecks(at_a_time=1_500_000)
    states = [checks.check("t", str(path), end).state for _ in range(6)]
    assert states == [LogState.UNCHECKED] * 2 + [LogState.COMPLETE] * 4
    os.truncate(path, path.stat().st_size - 1)
    found = checks.check("t", str(path), end)
    while not found.is_final:
        found = checks.check("t", str(path), end)
    assert (found.state, found.lines, found.found) == (LogState.CUT, 20_000, 19_999)
    assert 19_000 < found.first < 20_000
    checks.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (LogCheck(LogState.CUT, 5, found=2, first=3, last=3), "line 3 of 5 is missing."),
        (LogCheck(LogState.CUT, 900, found=150, first=129, last=151),
         "line 151 of 900 is missing, and lines 129 to 150 may differ from what was written."),
        (LogCheck(LogState.CUT, 5, found=5, first=6, last=6), "5 lines are there, but not all"),
        (LogCheck(LogState.CHANGED, 5, first=4, last=4), "it differs at line 4 of 5."),
        (LogCheck(LogState.CHANGED, 900, first=65, last=128),
         "the first difference is among lines 65 to 128 of 900."),
        (LogCheck(LogState.CHANGED, 1, first=2, last=1), "it differs after 1 line."),
        (LogCheck(LogState.ADDED, 1), "something was added after 1 line."),
        (LogCheck(LogState.GONE, 5), "it is gone. This file with 5 lines was deleted"),
        (LogCheck(LogState.UNPROVEN, why="a host was lost"), "is complete: a host was lost"),
    ],
)  # fmt: skip
def test_a_log_that_is_not_complete_is_described(found: LogCheck, words: str) -> None:
    assert words in found.describe()
    assert "log of 3 " in found.describe("3")


def test_a_pipe_in_the_place_of_a_log_holds_up_nobody(tmp_path: Path) -> None:
    """Opened as a file it would wait for a writer, and all readers of logs with it."""
    os.mkfifo(tmp_path / "log")
    check = check_small(str(tmp_path / "log"), LogEnd(NO_LINES))
    assert check is not None
    assert check.state is LogState.UNPROVEN
    assert "it is not a regular file" in check.why
