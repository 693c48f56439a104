"""`batchml.local.logs.files`: output as log streams. docs/behaviours.md B50-B56, B117."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.local.logs.files import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_SCAN,
    LogEvent,
    first_and_last,
    first_at,
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


@given(CONTENT, st.integers(-2, 52), st.integers(-2, 52), st.integers(1, 50))
def test_times_bound_any_pages_in_either_direction(
    lines: list[tuple[int, bytes]], low: int, high: int, limit: int
) -> None:
    since, until = 1_700_000_000_000 + low, 1_700_000_000_000 + high
    lines = sorted(lines, key=lambda line: line[0])
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "log", lines)
        expected = [
            text.decode("utf-8", "replace") for time, text in lines if since <= time < until
        ]
        ahead: list[LogEvent] = []
        offset = 0
        while (page := read_forward(path, offset, limit, since, until)).end != offset:
            ahead += page.events
            offset = page.end
        back: list[LogEvent] = []
        start: int | None = None
        while (page := read_backward(path, start, limit, since, until)).start != start:
            back = page.events + back
            start = page.start
        assert messages(ahead) == messages(back) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=60), st.integers(0, 11)
)
def test_a_time_is_found_in_a_file_of_any_size(lines: list[tuple[int, int]], since: int) -> None:
    """Long enough to be halved several times; lines longer and shorter than a step of it."""
    lines.sort(key=lambda line: line[0])
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "log", [(time, b"x" * size) for time, size in lines], b"9 torn")
        expected = next((e.start for e in forward(path, MAX_EVENTS) if e.timestamp >= since), None)
        with open(path, "rb") as file:
            found = first_at(file, since)
        assert found == (path.stat().st_size - len(b"9 torn") if expected is None else expected)


def test_a_late_time_is_found_without_reading_what_lies_before(make: Callable[..., Path]) -> None:
    """B117."""
    path = make([(n, b"x" * 90) for n in range(200_000)])
    before = _bytes_read()
    assert messages(read_forward(path, 0, 3, since=199_990).events) == ["x" * 90] * 3
    assert len(read_backward(path, None, 3, until=10).events) == 3
    assert _bytes_read() - before < path.stat().st_size / 10


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def test_one_page_looks_at_a_bounded_part_of_what_is_no_event(make: Callable[..., Path]) -> None:
    """B117: pages may be empty, and lead on."""
    junk = b"no time at all\n" * (3 * MAX_SCAN // 15)
    path = make([(1, b"first")], junk + b"2 last\n")
    for read, ends in ((forward_pages, "end"), (backward_pages, "start")):
        pages = read(path)
        assert 3 <= len(pages) <= 7, ends
        assert sorted(m for page in pages for m in messages(page)) == ["first", "last"]


def forward_pages(path: Path) -> list[list[LogEvent]]:
    found, offset = [], 0
    while (page := read_forward(path, offset)).end != offset:
        found.append(page.events)
        offset = page.end
    return found


def backward_pages(path: Path) -> list[list[LogEvent]]:
    found: list[list[LogEvent]] = []
    offset: int | None = None
    while (page := read_backward(path, offset)).start != offset:
        found.append(page.events)
        offset = page.start
    return found


@given(CONTENT, st.integers(1, 50), st.binary(max_size=10))
def test_any_pages_put_together_are_all_lines(
    lines: list[tuple[int, bytes]], limit: int, torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "log", lines, torn.replace(b"\n", b""))
        expected = [(stamp, line.decode("utf-8", "replace")) for stamp, line in lines]
        for read in (forward, backward):
            assert [(e.timestamp, e.message) for e in read(path, limit)] == expected
        assert forward(path, MAX_EVENTS) == forward(path, limit)
