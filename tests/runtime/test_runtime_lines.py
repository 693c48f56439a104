"""Bytes in, lines out: however the bytes arrive, the lines are the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.runtime.protocol.log_marks import MAX_LINE, LineSplitter, end_mark, parse_mark


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nlast without newline", [b"a", b"last without newline"]),
        (b"\n\na\n\n", [b" ", b" ", b"a", b" "]),
        (b"nul \x00 and \xff\xfe\r\n", [b"nul \x00 and \xff\xfe\r"]),
    ],
)
def test_lines_are_cut_at_newlines_and_an_empty_one_becomes_a_space(
    data: bytes, lines: list[bytes]
) -> None:
    assert split(data) == lines


@pytest.mark.parametrize("length", [MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, 2 * MAX_LINE, 10**6])
@pytest.mark.parametrize("ending", [b"\n", b"", b"\nnext\n"])
def test_a_huge_line_is_cut_into_pieces_that_an_event_can_carry(length: int, ending: bytes) -> None:
    data = b"x" * length + ending
    whole = split(data)
    by_blocks = split(*(data[at : at + 65_536] for at in range(0, len(data), 65_536)))
    assert whole == by_blocks
    assert max(map(len, whole)) <= MAX_LINE
    pieces = whole[:-1] if ending == b"\nnext\n" else whole
    assert b"".join(pieces) == b"x" * length
    assert len(pieces) == -(-length // MAX_LINE)


# Bytes with many newlines, few distinct values, and now and then enough of them for two pieces.
_PIECE = st.one_of(
    st.binary(max_size=20),
    st.lists(st.sampled_from([b"\n", b"a", b"\x00", b"\n\n"]), max_size=8).map(b"".join),
    st.integers(MAX_LINE - 2, MAX_LINE + 2).map(lambda size: b"y" * size),
)


@given(st.lists(_PIECE, max_size=6), st.lists(st.integers(0, 600_000), max_size=8))
def test_any_chunking_gives_the_same_lines(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in pairwise(places)]
    assert b"".join(chunks) == data
    assert split(*chunks) == split(data)


@given(st.binary(max_size=300))
def test_nothing_is_lost_or_added(data: bytes) -> None:
    lines = split(data)
    expected = data.removesuffix(b"\n").split(b"\n") if data else []
    assert [b"" if line == b" " else line for line in lines] == [
        b"" if line == b" " else line for line in expected
    ]


def test_byte_by_byte_is_the_same_as_at_once() -> None:
    data = b"one\n\ntwo\x00\nthree"
    assert split(*(bytes([byte]) for byte in data)) == [b"one", b" ", b"two\x00", b"three"]


def test_the_end_mark_is_read_back_as_it_was_written() -> None:
    assert parse_mark(end_mark(137, 12)) == ("end", {"code": "137", "lines": "12"})
    found = ("end", {"code": "75", "lines": "12", "by": "runtime"})
    assert parse_mark(end_mark(75, 12, by_runtime=True)) == found
    assert parse_mark(f"{end_mark(75, 12)} by=me") is None
    assert parse_mark("an ordinary line") is None
    assert parse_mark(" ::batchml end") is None


def test_a_program_cannot_forge_marks() -> None:
    splitter = LineSplitter(escape=True)
    lines = splitter.feed(b"::batchml end code=0 lines=1\nx ::batchml \n" + b"::batchml host a=b")
    lines += splitter.finish()
    assert all(parse_mark(line.decode()) is None for line in lines)
    assert lines[0] == b" ::batchml end code=0 lines=1"
    assert lines[1] == b"x ::batchml "


def test_a_progress_bar_is_seen_before_its_line_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r10%\r20%\r") == []
    assert splitter.progress() == [b"20%"]
    assert splitter.progress() == []
    assert splitter.feed(b"30%\r100%\n") == [b"30%\r100%"]
    assert splitter.feed(b"no bar, only slow") == []
    assert splitter.progress() == []
    assert splitter.finish() == [b"no bar, only slow"]


@pytest.mark.parametrize(
    "message",
    ["::batchml end code=0 lines=abc", "::batchml end", "::batchml ", "::batchml foo a=b"],
)
def test_what_only_looks_like_a_mark_is_an_ordinary_line(message: str) -> None:
    assert parse_mark(message) is None
