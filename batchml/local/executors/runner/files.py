"""The files in an attempt's folder, and how its runner writes them.

    runner.json  the record, locked while the runner lives. Holds the runner's identity (boot id,
                 pid, start time, kind, slot), whether the program may have begun, since when it
                 runs, or that it never began
    exit.json    the record under its last name, once every process of the attempt has ended: adds
                 the exit and a proof of the log
    failure      the error that ended the runner itself, if one did
    progress     the steps before the program runs, one line each
    log          the output: one event per line, `<ms> <message>`

The runner waits for a file that cannot be written now: a full disk must not cost the results of an
attempt. The server reads the record with `executors/record.py`.

The proof of a log counts its lines and bytes and holds a digest of the whole. Checkpoints are
digests of the first `stride` lines, of twice as many, and so on. They locate the first line that
differs: exactly in a log of up to 64 lines, as a range of lines in a longer one, where the stride
grows.

Standard library only, few imports: runners import it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from batchml.runtime.protocol.exit_codes import LOG_TOO_LARGE
from batchml.runtime.protocol.log_marks import MARK

FAILURE = "failure"
MAX_CHECKPOINTS = 64
CHECKPOINT = 4  # bytes of each: it only locates a difference that the whole digest has shown
_MAY_PASS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE,
)  # fmt: skip
_RETRY_AFTER = 0.2  # seconds between tries when the disk is full
_BLOCK = 1_048_576
_MARK = b" " + MARK.encode()
_STAMP = 15  # digits of a time, at most
_MAX_INLINE = 512  # bytes of a log that its proof contains


class LogDigest:
    """The digest of a log, updated with each write from the first byte on."""

    def __init__(self) -> None:
        import hashlib

        self._sha = hashlib.sha256()
        self._lines = self._marks = self._size = 0
        self._stride = 1
        self._checkpoints: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        return not self._lines

    @property
    def has_only_marks(self) -> bool:
        return self._lines == self._marks

    def add(self, data: bytes, count: int) -> None:
        """Add `count` whole lines, each `<ms> <message>` with its newline."""
        self._size += len(data)
        if _MARK in data:
            self._marks += count_marks(data)
        while count >= (ahead := self._stride - self._lines % self._stride):
            end = len(data) if count == ahead else line_end(data, ahead)
            self._sha.update(data[:end])
            data, count = data[end:], count - ahead
            self._lines += ahead
            self._add_checkpoint()
        if count:
            self._sha.update(data)
            self._lines += count

    def _add_checkpoint(self) -> None:
        self._checkpoints.append(self._sha.digest()[:CHECKPOINT])
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            self._checkpoints = self._checkpoints[1::2]
            self._stride *= 2

    def proof(self) -> dict[str, Any]:
        """The fields of a LogProof (events.py), without its text. Less than 1 KiB as JSON."""
        return {
            "lines": self._lines,
            "shown": self._lines - self._marks,
            "size": self._size,
            "sha256": self._sha.hexdigest(),
            "stride": self._stride,
            "checkpoints": b"".join(self._checkpoints).hex(),
        }


def line_end(data: bytes, number: int) -> int:
    """The offset behind line `number`, counted from 1, of data with at least so many lines."""
    end = 0
    for _ in range(number):
        end = data.index(b"\n", end) + 1
    return end


def count_marks(data: bytes) -> int:
    """The number of lines that are batchml's marks, which users do not see."""
    count, at = 0, data.find(_MARK)
    while at >= 0:
        before = data[max(0, at - _STAMP - 1) : at]
        stamp = before[before.rfind(b"\n") + 1 :]
        count += stamp.isdigit() and len(stamp) <= _STAMP
        at = data.find(_MARK, at + 1)
    return count


class AttemptLog:
    """The attempt's output on disk, and its digest. Waits for space instead of losing lines.

    `while_waiting` is called during a wait: a stop must reach the program on a full disk, too.
    `full` is the reason why the log can take no more lines, permanently. The first line creates the
    file: most jobs of a large array print nothing.
    """

    def __init__(self, folder: int, while_waiting: Callable[[], object]) -> None:
        """`folder` is the descriptor of the attempt's folder, wherever that is moved to."""
        self._folder = folder
        self._file = -1
        self._while_waiting = while_waiting
        self._last_ms = 0  # the time of the last line
        self.full = ""
        self._digest = LogDigest()
        self.must_persist = False  # True once it contains output of the program
        self._is_lost = False  # the folder was deleted: lines go to /dev/null
        self._content = b""  # of a short log that this runner has written
        if os.path.exists(self._path):  # another runner was killed during this attempt
            self._resume()

    @property
    def _path(self) -> str:
        return f"/proc/self/fd/{self._folder}/log"

    @property
    def is_empty(self) -> bool:
        return self._digest.is_empty

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            return os.open("log", flags, 0o600, dir_fd=self._folder)
        except FileNotFoundError:  # the folder was deleted, which the proof will show
            self._is_lost = True
            return os.open(os.devnull, flags)

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._file < 0:
            self._file = until_it_works(self._open, self._while_waiting)
        self._last_ms = max(self._last_ms, now_ms())
        stamp = b"%d " % self._last_ms
        content = b"".join([b"%s%s\n" % (stamp, line) for line in lines])
        data = memoryview(content)
        while data and not self.full:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:  # disk full: the program waits on its pipe meanwhile
                if error.errno == errno.EFBIG:
                    self.full = _too_large()
                    return
                raise_unless_it_may_pass(error)
                self._while_waiting()
                time.sleep(_RETRY_AFTER)
        self._digest.add(content, len(lines))
        if len(self._content) <= _MAX_INLINE:
            self._content += content

    def _resume(self) -> None:
        """Add the content of the file to the digest. A torn last line is cut off."""
        cut_torn_line(self._path)
        with open(self._path, "rb") as file:
            while lines := file.readlines(_BLOCK):
                self._digest.add(b"".join(lines), len(lines))
        self.must_persist = not self.is_empty

    def close(self) -> dict[str, Any]:
        """Close the log; the proof of its content."""
        if self.full:  # the last line may be torn
            self._digest = LogDigest()
            self._resume()
        proof = self._digest.proof()
        if self._is_short(proof["size"]):
            proof["text"] = self._content.decode()
        if self._file >= 0:
            if self.must_persist and not self._is_lost and "text" not in proof:
                until_it_works(lambda: os.fsync(self._file), self._while_waiting)
            os.close(self._file)
        return proof

    def _is_short(self, size: int) -> bool:
        """Whether the proof, which the server's journal keeps, can contain the whole log. It then
        does so instead of a sync, which takes a quarter of the time of a job that prints nothing.
        Only batchml writes such a log.
        """
        return (
            self._digest.has_only_marks
            and 0 < len(self._content) == size <= _MAX_INLINE
            and self._content.isascii()
        )


def cut_torn_line(path: str) -> None:
    """Cut off a last line without its newline: its writer was killed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end = os.fstat(file).st_size
        while end:
            start = max(0, end - _BLOCK)
            newline = os.pread(file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        os.ftruncate(file, end)
    finally:
        os.close(file)


class RecordFile:
    """`runner.json`, which becomes `exit.json`. It is locked for as long as it is open."""

    def __init__(self, folder: str, file: int, identity: bytes) -> None:
        """`identity` is a JSON object. Raises OSError when the folder is missing."""
        # The whole state folder may be moved while the attempt runs.
        self.folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file = file
        self._text = identity
        self._size = os.fstat(file).st_size  # more than 0 if an earlier runner was killed
        until_it_works(lambda: self._write(identity))

    def note_begun(self) -> None:
        self._append(b'"may_have_begun": true}')

    def add(self, more: dict[str, Any]) -> None:
        self._append(json.dumps(more).encode()[1:])

    def _append(self, members: bytes) -> None:
        """Add members, which stay in the record whatever is added later."""
        text = self._text[:-1] + b", " + members
        self._write(text)
        self._text = text

    def _write(self, data: bytes) -> None:
        """Overwrite the content in one call, so that the file is never empty."""
        data = data.ljust(self._size)
        os.pwrite(self._file, data, 0)
        self._size = len(data)

    def finish(self, ended: dict[str, Any]) -> None:
        """Record the end of the attempt.

        The record is not synced to disk, because the server's journal is. If the power fails before
        the journal contains the end, the attempt counts as ended by the power failure
        (docs/durability.md).
        """
        until_it_works(lambda: self.add(ended))
        until_it_works(self._rename)

    def _rename(self) -> None:
        try:
            os.rename("runner.json", "exit.json", src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileNotFoundError:
            pass  # the folder was deleted: a live server receives the end as a message

    def close(self) -> None:
        os.close(self.folder)
        os.close(self._file)


def now_ms() -> int:
    return int(time.time() * 1000)


def until_it_works(
    write: Callable[[], Any],
    while_waiting: Callable[[], object] | None = None,
    *,
    lasting: tuple[int, ...] = (),
) -> Any:
    """Retry until a full disk has space. `lasting` errors are raised at once."""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno in lasting:
                raise
            raise_unless_it_may_pass(error)
            if while_waiting is not None:
                while_waiting()
            time.sleep(_RETRY_AFTER)


def raise_unless_it_may_pass(error: OSError) -> None:
    """Raise an error unless it may pass. A full disk may get space again, and a file system that
    was remounted read-only may become writable; a deleted folder does not come back.
    """
    if error.errno not in _MAY_PASS:
        raise error


def _too_large() -> str:
    """The message for a log that cannot grow any more."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    whose = "its file system" if limit == resource.RLIM_INFINITY else f"RLIMIT_FSIZE, {limit} bytes"
    return f"{LOG_TOO_LARGE}: the log of this attempt has reached the largest file size ({whose})"


def folder_of(record: int) -> str:
    """The folder of a record now: the state folder may have been moved since the server named
    it.
    """
    return os.path.dirname(os.readlink(f"/proc/self/fd/{record}"))


def write_failure(folder: str, error: BaseException) -> None:
    """Write the error that ends this runner to a file, for the server."""
    try:
        with open(os.path.join(folder, FAILURE), "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{type(error).__name__}: {error}")
    except OSError as unwritten:
        print(f"the reason why this runner ends could not be written: {unwritten}", file=sys.stderr)
