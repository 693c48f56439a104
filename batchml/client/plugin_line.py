"""A line to our program in a container in AWS: through session-manager-plugin, on a terminal that
is made for it, because it wants one."""

import os
import pty
import select
import signal
import subprocess
import threading
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import suppress

from batchml.runtime.exec.relay import Frame, Lines

_BLOCK = 65_536
_KEPT = 4000  # characters of what is not ours, for words about a failure
_ENDING = 5.0  # seconds for the plugin to say good-bye


class PluginLine:
    """The plugin, started with the words and variables that `aws/exec.plugin_call` gives."""

    def __init__(self, words: list[str], variables: Mapping[str, str]) -> None:
        """Raises OSError."""
        self._file, theirs = pty.openpty()
        tty.setraw(theirs)  # else our own lines come back as an echo
        self._lines = Lines()
        self._lock = threading.Lock()
        self._noise = b""
        try:
            # A session of its own: Ctrl-C of our terminal is for inside, not for it.
            self._process = subprocess.Popen(
                words, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **variables},
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._file)
            raise
        finally:
            os.close(theirs)

    @property
    def noise(self) -> str:
        """What was said that is no frame: the plugin's own words, and errors inside."""
        return self._noise.decode("utf-8", "replace").replace("\r", "").strip()

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        while data := self._read(until):
            self._noise = (self._noise + data)[-_KEPT:] if len(self._noise) < _KEPT else self._noise
            yield list(self._lines.feed(data))

    def raw(self) -> Iterator[bytes]:
        """What comes, as it is."""
        while data := self._read(None):
            yield data

    def send(self, kind: bytes, content: bytes = b"") -> None:
        data = memoryview(self._lines.pack(kind, content))
        with self._lock:
            while data:
                data = data[os.write(self._file, data) :]

    def cut(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the plugin, which may be ending by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING if self._process.poll() is None else 0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            os.close(self._file)

    def _read(self, until: float | None) -> bytes:
        """Empty at the end. Raises TimeoutError."""
        if until is not None:
            ready, _, _ = select.select([self._file], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
        try:
            return os.read(self._file, _BLOCK)
        except OSError:  # Linux says so when nobody has the other end any more
            return b""
