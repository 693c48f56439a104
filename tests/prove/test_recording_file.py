"""The file of a recording: whole, or refused in one line."""

from pathlib import Path

import msgspec
import pytest

from batchml.aws.recording import EMBEDDED
from batchml.errors import RecordingRefused
from batchml.prove.recording import (
    RecordedCall,
    Recording,
    calls_by_command,
    make_header,
    read_call_log,
    read_recording,
    write_recording,
)


def call(command: str = "batchml ls", operation: str = "ListJobs") -> RecordedCall:
    return RecordedCall(command, "batch", operation, "us-east-1", {"jobQueue": "q"}, 200, {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    calls = (call(), call("batchml submit", "SubmitJob"), call("batchml submit", "SubmitJob"))
    path = tmp_path / "recording.jsonl"
    write_recording(path, Recording(make_header(calls, EMBEDDED, "2026-11-28", "1.0"), calls))
    return path


def test_a_recording_is_read_as_it_was_written(path: Path) -> None:
    found = read_recording(path)
    assert found.header.made_by == EMBEDDED
    assert found.header.calls == len(found.calls) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_calls_of_each_command_are_listed_once(path: Path) -> None:
    assert calls_by_command(read_recording(path).calls) == {
        "batchml ls": ["batch:ListJobs"],
        "batchml submit": ["batch:SubmitJob"],
    }


def test_any_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordingRefused) as caught:
            read_recording(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00\xff\xfe", "is not a recording"),
        (b"[]\n", "is not a recording"),
        (b'{"format": "other"}\n', "is not a recording"),
        (b'{"format": "batchml recording", "version": 7, "batchml": "9"}\n', "version 7"),
        (b'{"format": "batchml recording", "version": 1}\n', "line 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordingRefused, match=message):
        read_recording(path)


def test_further_calls_a_wrong_line_and_the_log_of_a_process_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(call()) + b"\n")
    with pytest.raises(RecordingRefused, match="was changed"):
        read_recording(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b'{"command": 7}\n' + lines[3])
    with pytest.raises(RecordingRefused, match="line 3"):
        read_recording(path)
    path.write_bytes(lines[1])
    with pytest.raises(RecordingRefused, match="the log of BATCHML_RECORDING"):
        read_recording(path)
    for other in (path.parent, path.parent / "missing"):
        with pytest.raises(RecordingRefused, match="cannot be read"):
            read_recording(other)


def test_the_log_of_a_killed_process_is_read_without_its_damaged_line(path: Path) -> None:
    line = msgspec.json.encode(call()) + b"\n"
    path.write_bytes(line + line[:20] + b"\n" + line)
    calls, damaged = read_call_log(path)
    assert (len(calls), damaged) == (2, 1)
    path.write_bytes(b"nothing\n")
    with pytest.raises(RecordingRefused, match="no calls"):
        read_call_log(path)
