"""Forward a port into a run in AWS: session-manager-plugin listens, and is restarted when it ends.

A session ends after twenty minutes without traffic, or when the network fails. The user loses one
connection at most.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from batchml.errors import BatchmlError, ExecUnavailable
from batchml.sessions.forward.listener import EndReason, PortForward, open_listener

_READY = (b"Waiting for connections", b"opened for sessionId")  # output of a plugin that listens
_START_LIMIT = 30.0  # seconds until the plugin listens
_PAUSE = 2.0  # seconds between two starts
_MAX_OUTPUT = 2000  # bytes that are kept

# Opens a session; returns the words and the variables with which to start the plugin.
Start = Callable[[], tuple[list[str], dict[str, str]]]


class PluginForward(PortForward):
    """A port forward by the plugin. Raises ExecUnavailable if the plugin does not start."""

    def __init__(
        self, port: int, local_port: int, start: Start, end_reason: EndReason, pause: float = _PAUSE
    ) -> None:
        super().__init__(port, local_port, end_reason)
        self._pause = pause
        self._start = start
        self._plugin = _ListeningPlugin(*start())
        self._plugin.wait_until_ready()
        threading.Thread(target=self._keep_running, daemon=True).start()

    def close(self) -> None:
        super().close()
        self._plugin.end()

    def _keep_running(self) -> None:
        while not self._closed.is_set():
            self._plugin.wait()
            if self._closed.wait(self._pause):
                return
            with suppress(BatchmlError, OSError):  # the run has ended, or the network is down
                self._plugin = _ListeningPlugin(*self._start())
                if self._closed.is_set():
                    self._plugin.end()


class _ListeningPlugin:
    """A running plugin and its output."""

    def __init__(self, words: list[str], variables: dict[str, str]) -> None:
        self._output = b""
        self._reported = threading.Event()  # it listens, or has ended
        try:
            # A session of its own: Ctrl-C is handled by this process.
            self._process = subprocess.Popen(
                words, env={**os.environ, **variables}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise ExecUnavailable(f"{words[0]} cannot be run: {error}. Reinstall it.") from error
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), 4096):
                self._output = (self._output + data)[-_MAX_OUTPUT:]
                if any(word in self._output for word in _READY):
                    self._reported.set()
        self._reported.set()

    def wait_until_ready(self) -> None:
        """Wait until the plugin listens. Raises ExecUnavailable."""
        reported = self._reported.wait(_START_LIMIT)
        if reported and any(word in self._output for word in _READY):
            return
        self.end()
        output = self._output.decode("utf-8", "replace").strip() or "none"
        raise ExecUnavailable(f"session-manager-plugin did not open the port. Its output: {output}")

    def wait(self) -> None:
        self._process.wait()

    def end(self) -> None:
        """Send TERM, so that it ends the session; KILL if that has no effect."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port(port: int, local_port: int | None) -> int:
    """Choose a free port for the plugin, which listens itself. Raises UsageError."""
    with open_listener(port, local_port) as listener:
        return int(listener.getsockname()[1])
