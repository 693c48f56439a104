"""`batchml.local.logstore`: output as log streams. docs/behaviours.md B50-B56."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.local.logstore import (
    MAX_BYTES,
    LogEvent,
    first_and_last,
    iterate,
    read_backward,
    read_forward,
)


def write(path: Path, lines: list[tuple[int, bytes]], torn: bytes = b"") -> Path:
    path.write_bytes(b"".join(b"%d %s\n" % line for line in lines) + torn)
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def made(lines: list[tuple[int, bytes]], torn: bytes = b"") -> Path:
        return write(tmp_path / "log", lines, torn)

    return made


def forward(path: Path, limit: int) -> list[LogEvent]:
    """Every event, page by page until the position stays where it is."""
    found: list[LogEvent] = []
    offset = 0
    while (page := read_forward(path, offset, limit)).end != offset:
        assert len(page.events) <= limit
        found += page.events
        offset = page.end
    return found


def backward(path: Path, limit: int) -> list[LogEvent]:
    found: list[LogEvent] = []
    offset: int | None = None
    while (page := read_backward(path, offset, limit)).start != offset:
        assert len(page.events) <= limit
        found = page.events + found
        offset = page.start
    return found


def messages(events: list[LogEvent]) -> list[str]:
    return [event.message for event in events]


LINES = [(1_000 + n // 3, b"line %d" % n) for n in range(100)]
TEXTS = [f"line {n}" for n in range(100)]


@pytest.mark.parametrize("limit", [1, 2, 7, 99, 100, 101, 10_000])
def test_pages_in_either_direction_make_up_the_whole(make: Callable[..., Path], limit: int) -> None:
    """Three events share each millisecond: no page boundary loses or repeats one (B51)."""
    path = make(LINES)
    assert messages(forward(path, limit)) == TEXTS
    assert messages(backward(path, limit)) == TEXTS


def test_the_first_page_backward_is_the_newest_events_oldest_first(
    make: Callable[..., Path],
) -> None:
    assert messages(read_backward(make(LINES), None, 3).events) == TEXTS[-3:]


def test_a_page_s_ends_lead_to_its_neighbours(make: Callable[..., Path]) -> None:
    path = make(LINES)
    middle = read_forward(path, read_forward(path, 0, 40).end, 20)
    assert messages(middle.events) == TEXTS[40:60]
    assert messages(read_backward(path, middle.start, 10).events) == TEXTS[30:40]
    assert messages(read_forward(path, middle.end, 10).events) == TEXTS[60:70]


def test_a_line_still_being_written_is_not_an_event_yet(make: Callable[..., Path]) -> None:
    """B53."""
    path = make([(1, b"whole")], torn=b"2 half")
    assert messages(forward(path, 10)) == messages(backward(path, 10)) == ["whole"]
    end = read_forward(path, 0).end
    with open(path, "ab") as file:
        file.write(b" and the rest\n")
    assert messages(read_forward(path, end).events) == ["half and the rest"]
    assert messages(read_backward(path, None, 1).events) == ["half and the rest"]


def test_at_the_end_the_position_stays_and_new_events_come_from_there(
    make: Callable[..., Path],
) -> None:
    path = make(LINES)
    end = read_forward(path, 0).end
    assert read_forward(path, end) == ([], end, end)
    with open(path, "ab") as file:
        file.write(b"2000 more\n")
    assert messages(read_forward(path, end).events) == ["more"]


def test_start_is_inclusive_and_end_exclusive(make: Callable[..., Path]) -> None:
    path = make([(n, b"%d" % n) for n in range(10)])
    assert messages(read_forward(path, 0, since=3, until=6).events) == ["3", "4", "5"]
    assert messages(read_forward(path, 0, limit=2, since=3).events) == ["3", "4"]


def test_a_page_keeps_to_a_mebibyte(make: Callable[..., Path]) -> None:
    """B52."""
    big = b"x" * 300_000
    path = make([(n, b"%d" % n + big) for n in range(10)])
    for page in (read_forward(path, 0), read_backward(path, None)):
        assert len(page.events) == 3
    assert len(forward(path, 10_000)) == len(backward(path, 10_000)) == 10


@pytest.mark.parametrize("size", [MAX_BYTES - 1, MAX_BYTES, MAX_BYTES + 1, 5 * MAX_BYTES])
def test_an_event_larger_than_a_page_comes_alone_and_is_not_lost(
    make: Callable[..., Path], size: int
) -> None:
    path = make([(1, b"before"), (2, b"y" * size), (3, b"after")])
    expected = [6, size, 5]
    assert [len(event.message) for event in forward(path, 10)] == expected
    assert [len(event.message) for event in backward(path, 10)] == expected


def test_bytes_that_are_no_text_are_shown_as_replacements(make: Callable[..., Path]) -> None:
    path = make([(1, b"a\xffb"), (2, "ü€😀".encode()), (3, b"\0\r\x1b[31m"), (4, b"")])
    assert messages(forward(path, 10)) == ["a�b", "ü€😀", "\0\r\x1b[31m", ""]


def test_a_line_without_a_time_is_passed_over(make: Callable[..., Path]) -> None:
    path = make([(1, b"a")], torn=b"no time\n\n99999999999999999999 x\n2 b\n")
    assert messages(forward(path, 1)) == messages(backward(path, 1)) == ["a", "b"]


@pytest.mark.parametrize("offset", [0, 1, 5, 10**9])
def test_a_stream_without_a_file_is_empty(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "none"
    assert read_forward(path, offset).events == []
    assert read_backward(path, offset).events == []
    assert first_and_last(path) is None


def test_any_position_that_a_client_makes_up_is_survived(make: Callable[..., Path]) -> None:
    path = make([(1, b"9" * 50), (2, b"b")])
    for offset in range(80):
        for page in (read_forward(path, offset), read_backward(path, offset)):
            assert all(event.timestamp < 10**15 for event in page.events)


def test_the_first_and_the_last_time_are_found(make: Callable[..., Path]) -> None:
    assert first_and_last(make([(5, b"a"), (6, b"b"), (9, b"c")], torn=b"10 d")) == (5, 9)


CONTENT = st.lists(
    st.tuples(
        st.integers(0, 50).map(lambda n: 1_700_000_000_000 + n),
        st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")),
    ),
    max_size=40,
)


@given(CONTENT, st.integers(1, 50), st.binary(max_size=10))
def test_any_pages_put_together_are_all_lines(
    lines: list[tuple[int, bytes]], limit: int, torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "log", lines, torn.replace(b"\n", b""))
        expected = [(stamp, line.decode("utf-8", "replace")) for stamp, line in lines]
        for read in (forward, backward):
            assert [(e.timestamp, e.message) for e in read(path, limit)] == expected
        assert list(iterate(path, 0)) == forward(path, limit)
