"""Compare a log's file with the proof that was committed when its attempt ended.

`examine` works in steps, so that a large file does not delay other requests: see LargeChecks.
"""

import hashlib
import os
from collections.abc import Generator
from typing import BinaryIO, NamedTuple

from msgspec.structs import replace

from batchml.local.batch.events import LogEnd, LogProof
from batchml.local.executors.runner.files import CHECKPOINT, count_marks, line_end
from batchml.model.logcheck import LogCheck, LogState
from batchml.runtime.storage.files import open_regular

_BLOCK = 1_048_576
_SMALL = _BLOCK  # bytes: checking such a file takes a millisecond
_AT_A_TIME = 256 * _BLOCK  # bytes that one request checks: in about 0.2 seconds
_MAX_CACHED = 4096  # large files whose results are cached
_MAX_BEGUN = 64  # large files whose checks are not finished

Steps = Generator[int, None, LogCheck]  # yields how many bytes a step has read


class _Walk:
    """A file's bytes from its start, with their digest and the number of lines so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha = hashlib.sha256()
        self.lines = self.offset = 0

    def advance(self, most: int) -> int:
        """Read one block, but not past line `most`. Returns the number of bytes."""
        data = os.pread(self._file.fileno(), _BLOCK, self.offset)
        count = data.count(b"\n")
        if self.lines + count >= most:
            count = most - self.lines
            data = data[: line_end(data, count)]
        self.sha.update(data)
        self.lines += count
        self.offset += len(data)
        return len(data)


def examine(proof: LogProof, file: BinaryIO) -> Steps:
    """Find the first line of `file` that differs from the proof."""
    if os.fstat(file.fileno()).st_size == proof.size:
        sha = hashlib.sha256()  # of the whole file: counting lines as well takes twice the time
        for offset in range(0, proof.size, _BLOCK):
            data = os.pread(file.fileno(), _BLOCK, offset)
            sha.update(data)
            yield len(data)
        if sha.hexdigest() == proof.sha256:
            return LogCheck(LogState.COMPLETE, proof.shown)
    walk = _Walk(file)
    lines = offset = 0  # up to here the file agrees with the proof
    for number, wanted in _checkpoints(proof):
        while walk.lines < number:
            read = walk.advance(number)
            if not read:
                found = walk.lines - (yield from _marks(file, walk.offset))
                first = lines - (yield from _marks(file, offset)) + 1
                return LogCheck(LogState.CUT, proof.shown, found=found, first=first, last=found + 1)
            yield read
        if not walk.sha.digest().startswith(wanted):
            first = lines - (yield from _marks(file, offset)) + 1
            last = min(first + number - lines - 1, proof.shown)
            return LogCheck(LogState.CHANGED, proof.shown, first=first, last=last)
        lines, offset = number, walk.offset
    is_more = bool(os.pread(file.fileno(), 1, walk.offset))
    return LogCheck(LogState.ADDED if is_more else LogState.COMPLETE, proof.shown)


def _checkpoints(proof: LogProof) -> list[tuple[int, bytes]]:
    """(Number of lines, first bytes of their digest) for each checkpoint, and for the whole log."""
    digests = bytes.fromhex(proof.checkpoints)
    parts = [digests[at : at + CHECKPOINT] for at in range(0, len(digests), CHECKPOINT)]
    numbered = [(number * proof.stride, digest) for number, digest in enumerate(parts, start=1)]
    return [*numbered, (proof.lines, bytes.fromhex(proof.sha256))]


def _marks(file: BinaryIO, end: int) -> Generator[int, None, int]:
    """The number of whole lines before `end` that are batchml's marks, which users do not see."""
    count, at, rest = 0, 0, b""
    while at < end:
        data = os.pread(file.fileno(), min(_BLOCK, end - at), at)
        if not data:
            break
        at += len(data)
        whole = (rest + data).rpartition(b"\n")
        count, rest = count + count_marks(whole[0]), whole[2][:_BLOCK]
        yield len(data)
    return count


class _Key(NamedTuple):
    """A file with an equal key has not changed."""

    inode: int
    size: int
    changed: int  # ns


class _Begun(NamedTuple):
    """The check of a large file that is not finished."""

    key: _Key
    file: BinaryIO
    steps: Steps


def restore_short(path: str, proof: LogProof | None) -> None:
    """Write the lines again that a power cut has taken, if the proof contains them. A power cut
    leaves a shorter file: file systems record a size after the bytes. Others are not read, as this
    is done for each log of a long history.
    """
    if proof is None or not proof.text:
        return
    folder = os.path.dirname(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if os.lstat(path).st_size >= proof.size:
            return
    except OSError:
        pass
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
        file = os.open(path, flags, 0o600)
        try:
            os.pwrite(file, proof.text.encode(), 0)
        finally:
            os.close(file)
    except OSError:  # the check reports what is missing
        pass


def check_small(path: str, end: LogEnd) -> LogCheck | None:
    """Check the log of an ended attempt; None when its file is large."""
    if end.proof is None:
        return LogCheck(LogState.UNPROVEN, why=end.doubt)
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _SMALL:
                return None
            found = _finish(examine(end.proof, file))
    except (FileNotFoundError, NotADirectoryError):
        found = LogCheck(LogState.GONE if end.proof.lines else LogState.COMPLETE, end.proof.shown)
    except OSError as error:
        return LogCheck(LogState.UNPROVEN, why=f"its file {path} cannot be read: {error.strerror}.")
    return _with_end(found, path, end)


class LargeChecks:
    """Checks of large files. Each call checks one part of a file, and no part twice. For one
    thread.
    """

    def __init__(self, at_a_time: int = _AT_A_TIME) -> None:
        self._at_a_time = at_a_time
        self._results: dict[str, tuple[_Key, LogCheck]] = {}  # by task id
        self._begun: dict[str, _Begun] = {}

    def close(self) -> None:
        for task_id in list(self._begun):
            self._drop(task_id)

    def check(self, task_id: str, path: str, end: LogEnd) -> LogCheck:
        """The result, or UNCHECKED while the check is not finished: call it again."""
        key = _key(path)
        cached = self._results.get(task_id)
        if cached is not None and cached[0] == key:
            return cached[1]
        found = None if key is None else self._go_on(task_id, key, path, end)
        if found is None:  # the file was deleted or replaced just now
            return LogCheck(LogState.UNCHECKED)
        if found.is_final and key is not None:
            if len(self._results) >= _MAX_CACHED:
                self._results.clear()
            self._results[task_id] = (key, found)
        return found

    def _go_on(self, task_id: str, key: _Key, path: str, end: LogEnd) -> LogCheck | None:
        begun = self._begun.get(task_id)
        if begun is None or begun.key != key:
            self._drop(task_id)
            begun = self._begin(task_id, key, path, end)
        if begun is None:
            return None
        read = 0
        try:
            while read < self._at_a_time:
                read += next(begun.steps)
        except StopIteration as stop:
            self._drop(task_id)
            return _with_end(stop.value, path, end)
        return LogCheck(LogState.UNCHECKED)

    def _begin(self, task_id: str, key: _Key, path: str, end: LogEnd) -> _Begun | None:
        if end.proof is None:
            return None
        try:
            file = open_regular(path)  # _drop closes it
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(self._begun) >= _MAX_BEGUN:
            self._drop(next(iter(self._begun)))
        begun = self._begun[task_id] = _Begun(key, file, examine(end.proof, file))
        return begun

    def _drop(self, task_id: str) -> None:
        begun = self._begun.pop(task_id, None)
        if begun is not None:
            begun.file.close()


def _key(path: str) -> _Key | None:
    try:
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Key(about.st_ino, about.st_size, about.st_ctime_ns)


def _with_end(found: LogCheck, path: str, end: LogEnd) -> LogCheck:
    """The result for an ended attempt: an intact log may lack output that was lost with a host."""
    if found.state is LogState.COMPLETE and end.doubt:
        return replace(found, state=LogState.UNPROVEN, why=end.doubt)
    return replace(found, file=path) if found.is_damaged else found


def _finish(steps: Steps) -> LogCheck:
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        found: LogCheck = stop.value
        return found
