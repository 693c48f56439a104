"""What a runner keeps in the folder of its attempt, and how it writes there.

    runner.json  the record. Locked: its runner lives. Holds the runner's identity (boot id, pid,
                 start time, kind, slot), whether the program may have begun and since when it
                 runs, or that it never began
    exit.json    the record under its last name, once every process of the attempt is gone: how it
                 ended and a proof of its log (proof.py), beside the identity
    failure      the error that ended the runner itself, if one did
    progress     what it does before the program runs, a line each
    log          the output: one event a line, `<ms> <message>`

A file that cannot be written now is waited for: a full disk must not cost what an attempt has done.
The server reads the record with `record.py`.

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

from batchml.local.executors.runner.proof import LogDigest
from batchml.runtime.protocol.exit_codes import LOG_TOO_LARGE

FAILURE = "failure"
_MAY_PASS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE,
)  # fmt: skip
_RETRY_AFTER = 0.2  # seconds between tries when the disk is full
_BLOCK = 1_048_576


class Log:
    """The attempt's output on disk, and its digest. Waits for space rather than lose a line.

    `meanwhile` is called while it waits: a stop must reach the program on a full disk as well.
    `full` says why the log can take no more lines, permanently. The file is created with the first
    line: most jobs of a large array print nothing.
    """

    def __init__(self, folder: int, meanwhile: Callable[[], object]) -> None:
        """`folder` is the descriptor of the attempt's folder, wherever that is moved to."""
        self._folder = folder
        self._file = -1
        self._meanwhile = meanwhile
        self._last = 0
        self.full = ""
        self._digest = LogDigest()
        self.must_last = False  # it has output of the program
        self._is_lost = False  # the folder was deleted: lines go to /dev/null
        if os.path.exists(self._path):  # another runner was killed on this attempt
            self._go_on()

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
        except FileNotFoundError:  # somebody has deleted the folder, which the proof will show
            self._is_lost = True
            return os.open(os.devnull, flags)

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._file < 0:
            self._file = until_it_works(self._open, self._meanwhile)
        self._last = max(self._last, now_ms())
        stamp = b"%d " % self._last
        whole = b"".join([b"%s%s\n" % (stamp, line) for line in lines])
        data = memoryview(whole)
        while data and not self.full:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:  # disk full: the program waits on its pipe meanwhile
                if error.errno == errno.EFBIG:
                    self.full = _too_large()
                    return
                raise_unless_it_may_pass(error)
                self._meanwhile()
                time.sleep(_RETRY_AFTER)
        self._digest.add(whole, len(lines))

    def _go_on(self) -> None:
        """Take in what the file holds. A last line that is torn is cut off."""
        from batchml.local.executors.runner.streams import cut_torn_line

        cut_torn_line(self._path)
        with open(self._path, "rb") as file:
            while lines := file.readlines(_BLOCK):
                self._digest.add(b"".join(lines), len(lines))

    def close(self) -> dict[str, Any]:
        """The proof of what it holds."""
        if self.full:  # its last line may be torn
            self._digest = LogDigest()
            self._go_on()
        if self._file >= 0:
            if self.must_last and not self._is_lost:
                until_it_works(lambda: os.fsync(self._file), self._meanwhile)
            os.close(self._file)
        return self._digest.proof()


class Record:
    """`runner.json`, which becomes `exit.json`. Holds the lock for as long as it is open."""

    def __init__(self, folder: str, file: int, identity: bytes) -> None:
        """`identity` is a JSON object. Raises OSError where the folder is gone."""
        # The folder may be moved, with all of the state folder, while the attempt runs.
        self.folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file = file
        self._text = identity
        self._size = os.fstat(file).st_size  # 0, unless another runner was killed on this one
        until_it_works(lambda: self._write(identity))

    def note_begun(self) -> None:
        self._append(b'"may_have_begun": true}')

    def add(self, more: dict[str, Any]) -> None:
        self._append(json.dumps(more).encode()[1:])

    def _append(self, members: bytes) -> None:
        """What is added stays, whatever is added later."""
        text = self._text[:-1] + b", " + members
        self._write(text)
        self._text = text

    def _write(self, data: bytes) -> None:
        """Over what was there, in one go, so that there is no moment at which it is empty."""
        data = data.ljust(self._size)
        os.pwrite(self._file, data, 0)
        self._size = len(data)

    def finish(self, ended: dict[str, Any]) -> None:
        """The attempt has ended, and this is how.

        Not synced: the server's journal is, and until it has the end, a power cut is what took
        the attempt (docs/durability.md).
        """
        until_it_works(lambda: self.add(ended))
        until_it_works(self._rename)

    def _rename(self) -> None:
        try:
            os.rename("runner.json", "exit.json", src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileNotFoundError:
            pass  # somebody has deleted the folder: a server that lives hears of the end from us

    def close(self) -> None:
        os.close(self.folder)
        os.close(self._file)


def now_ms() -> int:
    return int(time.time() * 1000)


def until_it_works(
    write: Callable[[], Any],
    meanwhile: Callable[[], object] | None = None,
    *,
    lasting: tuple[int, ...] = (),
) -> Any:
    """A full disk must not cost the record of an attempt. `lasting` errors are raised at once."""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno in lasting:
                raise
            raise_unless_it_may_pass(error)
            if meanwhile is not None:
                meanwhile()
            time.sleep(_RETRY_AFTER)


def raise_unless_it_may_pass(error: OSError) -> None:
    """A full disk has space again some day, and a file system that was mounted read-only after a
    fault can be written to; a folder that was deleted does not come back."""
    if error.errno not in _MAY_PASS:
        raise error


def _too_large() -> str:
    """What to say of a log that can grow no more."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    whose = "its file system" if limit == resource.RLIM_INFINITY else f"RLIMIT_FSIZE, {limit} bytes"
    return f"{LOG_TOO_LARGE}: the log of this attempt has reached the largest file size ({whose})"


def folder_of(record: int) -> str:
    """Where a record lies now: the state folder may have been moved since the server named it."""
    return os.path.dirname(os.readlink(f"/proc/self/fd/{record}"))


def leave_reason(folder: str, error: BaseException) -> None:
    """Say, for the server, what ends this runner."""
    try:
        with open(os.path.join(folder, FAILURE), "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{type(error).__name__}: {error}")
    except OSError as unwritten:
        print(f"no reason could be left: {unwritten}", file=sys.stderr)
