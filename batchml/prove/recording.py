"""The file of a recording: AWS calls with all names replaced (`sanitize`).

JSON lines. The first line is the header, with the number of calls; each further line is one call
(`RecordedCall`). An incomplete file is refused: it has fewer calls than its header says.

`read_call_log` reads the file of BATCHML_RECORDING (aws/recording.py), which has all names.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.aws.recording import AWS, EMBEDDED
from batchml.errors import RecordingRefused
from batchml.runtime.storage.files import open_regular, write_atomically

FORMAT, VERSION = "batchml recording", 1
MADE_BY = (AWS, EMBEDDED, "moto")


class CallError(Struct, frozen=True):
    code: str | None = None
    message: str | None = None


class RecordedCall(Struct, frozen=True):
    """One attempt of a call. The members are those of `aws.recording.CallRecorder`."""

    command: str
    service: str
    operation: str
    region: str
    params: dict[str, Any]
    status: int  # of HTTP; 0 without an answer
    answer: Any = None
    error: CallError | None = None
    failure: str = ""
    attempt: int = 1
    time: float = 0.0  # seconds since the epoch; in a recording, since its first call
    seconds: float = 0.0
    process: int = 0  # its id; in a recording, counted from 1
    server: str = AWS


class RecordingHeader(Struct, frozen=True):
    """The first line. `made_by` is one of MADE_BY: the server that answered."""

    format: str
    version: int
    batchml: str
    date: str  # YYYY-MM-DD
    region: str
    made_by: str
    calls: int


class Recording(Struct, frozen=True):
    header: RecordingHeader
    calls: tuple[RecordedCall, ...]


def write_recording(path: Path, recording: Recording) -> None:
    """Write the file, whole or not at all."""
    lines = (recording.header, *recording.calls)
    write_atomically(str(path), b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises RecordingRefused, with the reason, for any other file."""
    lines = _read_lines(path)
    header = _read_header(path, lines)
    if not lines[-1].endswith(b"\n") or len(lines) - 1 < header.calls:
        raise RecordingRefused(
            f"{path} is cut off: it has {len(lines) - 1} of {header.calls} calls. Copy it again."
        )
    if len(lines) - 1 > header.calls:
        raise RecordingRefused(
            f"{path} has {len(lines) - 1} calls, but its first line says {header.calls}: it was "
            f"changed. Take the file that `batchml prove` wrote."
        )
    return Recording(header, tuple(_read_calls(path, lines[1:], first=2)))


def _read_lines(path: Path) -> list[bytes]:
    try:
        with open_regular(str(path)) as file:
            data = file.read()
    except OSError as error:
        raise RecordingRefused(f"{path} cannot be read: {error.strerror}.") from error
    if not data:
        raise RecordingRefused(f"{path} is empty. `batchml prove` makes recordings.")
    return data.splitlines(keepends=True)


def _read_header(path: Path, lines: Sequence[bytes]) -> RecordingHeader:
    try:
        found = msgspec.json.decode(lines[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        is_log = isinstance(found, dict) and {"operation", "params"} <= {*found}
        what = "the log of BATCHML_RECORDING, not a recording" if is_log else "not a recording"
        raise RecordingRefused(f"{path} is {what}. `batchml prove` makes recordings.")
    if found.get("version") != VERSION:
        raise RecordingRefused(
            f"{path} is of version {found.get('version')!r} of the format; this batchml reads "
            f"version {VERSION}. Replay it with batchml {found.get('batchml')}, which made it."
        )
    try:
        return msgspec.convert(found, RecordingHeader)
    except msgspec.ValidationError as error:
        raise RecordingRefused(f"{path}, line 1: {error}.") from error


def _read_calls(path: Path, lines: Iterable[bytes], first: int) -> Iterable[RecordedCall]:
    decoder = msgspec.json.Decoder(RecordedCall)
    for number, line in enumerate(lines, first):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordingRefused(f"{path}, line {number}: {error}.") from error


def read_call_log(path: Path) -> tuple[list[RecordedCall], int]:
    """The calls that BATCHML_RECORDING wrote, and the number of damaged lines: of killed processes.

    Raises RecordingRefused if the file cannot be read or has no call.
    """
    calls: list[RecordedCall] = []
    damaged = 0
    for line in _read_lines(path):
        try:
            calls += _read_calls(path, [line], 1)
        except RecordingRefused:
            damaged += 1
    if not calls:
        raise RecordingRefused(f"{path} has no calls of BATCHML_RECORDING.")
    return calls, damaged


def number_calls(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls with times since the first, and processes that are counted from 1."""
    start = min((call.time for call in calls), default=0.0)
    processes: dict[int, int] = {}
    return [
        msgspec.structs.replace(
            call,
            time=round(call.time - start, 3),
            process=processes.setdefault(call.process, len(processes) + 1),
        )
        for call in calls
    ]


def calls_by_command(calls: Iterable[RecordedCall]) -> dict[str, list[str]]:
    """The calls of each command: "batchml submit" -> "batch:SubmitJob" and others, sorted."""
    found: dict[str, set[str]] = {}
    for call in calls:
        found.setdefault(call.command, set()).add(f"{call.service}:{call.operation}")
    return {command: sorted(names) for command, names in sorted(found.items())}


def describe(recording: Recording) -> str:
    """One line about a recording, for people."""
    header = recording.header
    return (
        f"{header.calls} calls of {header.date} in {header.region}, answered by {header.made_by}, "
        f"with batchml {header.batchml}"
    )


def make_header(
    calls: Sequence[RecordedCall], made_by: str, date: str, version: str
) -> RecordingHeader:
    region = next((call.region for call in calls if call.region), "")
    return RecordingHeader(FORMAT, VERSION, version, date, region, made_by, len(calls))
