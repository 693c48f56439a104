"""A tunnel of Session Manager: its plugin listens, and is started again while the run goes on.

A session ends after twenty minutes without a byte, or when the network was away; who had the
address open should not notice more than one lost connection.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from batchml.client.tunnel import Over, Tunnel, listen
from batchml.errors import BatchmlError, NoDoor

_READY = (b"Waiting for connections", b"opened for sessionId")
_START = 30.0  # seconds until the plugin listens
_PAUSE = 2.0  # between two starts
_SAID = 2000  # characters

Start = Callable[[], tuple[list[str], dict[str, str]]]


class PluginTunnel(Tunnel):
    """`start` opens a session and says how the plugin is called. Raises NoDoor."""

    def __init__(
        self, port: int, local_port: int, start: Start, over: Over, pause: float = _PAUSE
    ) -> None:
        super().__init__(port, local_port, over)
        self._pause = pause
        self._start = start
        self._plugin = _Listening(*start())
        self._plugin.wait_until_ready()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def close(self) -> None:
        super().close()
        self._plugin.end()

    def _keep(self) -> None:
        while not self._closed.is_set():
            self._plugin.wait()
            if self._closed.wait(self._pause):
                return
            with suppress(BatchmlError, OSError):  # the run ends, or the network is away
                self._plugin = _Listening(*self._start())
                if self._closed.is_set():
                    self._plugin.end()


class _Listening:
    """The plugin, and what it says."""

    def __init__(self, words: list[str], variables: dict[str, str]) -> None:
        self._said = b""
        self._told = threading.Event()
        try:
            # A session of its own: Ctrl-C is answered by us.
            self._process = subprocess.Popen(
                words, env={**os.environ, **variables}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise NoDoor(f"{words[0]} cannot be run: {error}. Install it anew.") from error
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), 4096):
                self._said = (self._said + data)[-_SAID:]
                if any(word in self._said for word in _READY):
                    self._told.set()
        self._told.set()

    def wait_until_ready(self) -> None:
        """Raises NoDoor."""
        told = self._told.wait(_START)
        if told and any(word in self._said for word in _READY):
            return
        self.end()
        said = self._said.decode("utf-8", "replace").strip()
        raise NoDoor(f"session-manager-plugin did not open the port. It said: {said or 'nothing'}")

    def wait(self) -> None:
        self._process.wait()

    def end(self) -> None:
        """TERM, on which it ends the session; KILL if it does not heed that."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port(port: int, wanted: int | None) -> int:
    """One that is free now, for the plugin, which listens itself. Raises UsageError."""
    with listen(port, wanted) as listener:
        return int(listener.getsockname()[1])
