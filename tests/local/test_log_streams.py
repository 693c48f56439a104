"""Decode the engine's frames to lines, and find the lines that a log lacks."""

import itertools
import random
from pathlib import Path

import pytest

from batchml.local.executors.runner.files import cut_torn_line
from batchml.local.executors.runner.link import (
    FrameDecoder,
    RecordedFrameDecoder,
    UnloggedLines,
    logged_lines,
)
from batchml.runtime.protocol.log_marks import MAX_LINE


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def test_frames_become_lines_wherever_the_stream_is_cut() -> None:
    data = frame(1, b"a\nhal") + frame(2, b"error\n") + frame(1, b"") + frame(1, b"f\n\nlast")
    for size in (1, 2, 3, 7, 8, 9, 1000):
        decoder = FrameDecoder(escape=False)
        lines: list[bytes] = []
        for at in range(0, len(data), size):
            lines += decoder.feed(data[at : at + size])
        assert lines + decoder.finish() == [b"a", b"error", b"half", b" ", b"last"], size


def test_a_record_is_read_with_its_times_and_escapes_alike() -> None:
    mark = b"::batchml end code=0 lines=0"
    for escape in (True, False):
        lines = FrameDecoder(escape).recorded().feed(frame(1, b"T1 " + mark + b"\n"))
        assert lines == [b" " + mark if escape else mark]


def test_a_long_line_whose_end_the_engine_lost_is_cut_where_another_time_begins() -> None:
    long = b"x" * 16384
    for ends in (b"", b"\n"):
        data = frame(1, b"T1 " + long) + frame(2, b"T2 error\n") + frame(1, b"T1 and" + ends)
        data += frame(1, b"T3 after\n") + frame(1, b"T4 no end")
        decoder = RecordedFrameDecoder(escape=False)
        lines = decoder.feed(data) + decoder.finish()
        assert lines == [b"error", long + b"and", b"after", b"no end"]


@pytest.mark.parametrize("held", range(6))
def test_what_is_held_is_let_through_no_more(held: int) -> None:
    whole = [b"a", b"b", b"b", b"a", b"c"]
    unseen = UnloggedLines(iter(whole[:held]))
    assert unseen.feed(whole) + unseen.finish() == whole[held:]


def test_streams_woven_otherwise_lose_and_double_nothing() -> None:
    """Whatever was held of either stream, what follows is exactly the rest of each."""
    draw = random.Random(4)
    for _ in range(2000):
        out = [b"o%d" % draw.randrange(3) for _ in range(draw.randrange(9))]
        err = [b"e%d" % draw.randrange(3) for _ in range(draw.randrange(9))]
        whole = woven(draw, out, err)
        some_out, some_err = draw.randrange(len(out) + 1), draw.randrange(len(err) + 1)
        held = woven(draw, out[:some_out], err[:some_err])
        unseen = UnloggedLines(iter(held))
        new: list[bytes] = []
        for line in whole:
            new += unseen.feed([line])
        new += unseen.finish()
        assert [line for line in new if line.startswith(b"o")] == out[some_out:]
        assert [line for line in new if line.startswith(b"e")] == err[some_err:]


def woven(draw: random.Random, one: list[bytes], other: list[bytes]) -> list[bytes]:
    left, right = list(one), list(other)
    made = []
    while left or right:
        made.append((left if not right or (left and draw.random() < 0.5) else right).pop(0))
    return made


def test_what_is_remembered_does_not_grow_with_the_log() -> None:
    numbers = (b"%d" % number for number in itertools.count())
    unseen = UnloggedLines(itertools.islice(numbers, 100_000))
    for number in range(100_000):
        assert unseen.feed([b"%d" % number]) == []
    assert not unseen._only_logged and not unseen._only_output


def test_the_messages_of_a_log_without_our_first_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert list(logged_lines(str(log))) == []
    log.write_bytes(b"1 ::batchml host executor=docker image=i\n2 a b\n3  \n4 torn")
    assert list(logged_lines(str(log))) == [b"a b", b" "]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (b"1 a\n", b"1 a\n"),
        (b"1 a\n2 to", b"1 a\n"),
        (b"1 t", b""),
        (b"1 a\n2 " + b"x" * MAX_LINE, b"1 a\n"),
    ],
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, content: bytes, left: bytes) -> None:
    log = tmp_path / "log"
    cut_torn_line(str(log))
    assert not log.exists()
    log.write_bytes(content)
    cut_torn_line(str(log))
    assert log.read_bytes() == left
