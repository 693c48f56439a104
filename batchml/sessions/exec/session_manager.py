"""AWS's session-manager-plugin, the local program that connects to a session in a container.

The plugin needs a terminal, so it gets a pseudo-terminal. At the other end is batchml's own
program, or a plain shell in images that lack that program.
"""

import os
import platform
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from batchml.aws.exec import PLUGIN
from batchml.errors import ExecUnavailable
from batchml.runtime.exec.relay import Frame, LineCodec
from batchml.sessions.terminal import lend_terminal, write_out

# The plugin's installers use this folder, which is in PATH only after a new login.
_INSTALL_FOLDER = "/usr/local/sessionmanagerplugin/bin"
_DOWNLOADS = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"
_VERSION_LIMIT = 20.0  # seconds


class SessionManagerPlugin(Struct, frozen=True):
    """An installed plugin and its version."""

    path: str
    version: str


def find_plugin(environ: Mapping[str, str]) -> SessionManagerPlugin:
    """Find the plugin. Raises ExecUnavailable with the command that installs it."""
    search = os.pathsep.join((environ.get("PATH", os.defpath), _INSTALL_FOLDER))
    path = shutil.which(PLUGIN, path=search)
    if path is None:
        raise ExecUnavailable(
            f"AWS's {PLUGIN} is not installed on this machine; nothing was started. Install it:\n"
            f"  {install_command(platform.system(), platform.machine(), _family())}"
        )
    try:
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT,
            check=False, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ExecUnavailable(f"{path} cannot be run: {error}. Reinstall it.") from error
    return SessionManagerPlugin(path, version.strip())


def install_command(system: str, machine: str, family: str = "") -> str:
    """Return the command that installs the plugin. `family` of a Linux is "rpm" or "deb".

    Source: AWS Systems Manager User Guide, "Install the Session Manager plugin".
    """
    is_arm = machine.lower() in ("arm64", "aarch64")
    if system == "Darwin":
        return "brew install --cask session-manager-plugin"
    if system != "Linux":
        return f"see {_DOWNLOADS.rpartition('/plugin')[0]} and AWS's guide for {system}"
    if family == "rpm":
        folder = "linux_arm64" if is_arm else "linux_64bit"
        return f"sudo dnf install -y {_DOWNLOADS}/{folder}/session-manager-plugin.rpm"
    folder = "ubuntu_arm64" if is_arm else "ubuntu_64bit"
    return (
        f"curl -fsSLO {_DOWNLOADS}/{folder}/session-manager-plugin.deb && "
        "sudo dpkg -i session-manager-plugin.deb"
    )


def _family() -> str:
    return "rpm" if shutil.which("rpm") and not shutil.which("dpkg") else "deb"


# --- The stream to batchml's program --------------------------------------------------------------


_BLOCK = 65_536
_MAX_NOISE = 4000  # characters of other output that are kept for error messages
_END_LIMIT = 5.0  # seconds for the plugin to end


class PluginStream:
    """A running plugin, as an `ExecStream`; started as `aws.exec.plugin_arguments` says."""

    def __init__(self, words: list[str], variables: Mapping[str, str]) -> None:
        """Raises OSError."""
        self._file, theirs = pty.openpty()
        tty.setraw(theirs)  # no echo
        self._lines = LineCodec()
        self._lock = threading.Lock()
        self._noise = b""
        try:
            # A session of its own: Ctrl-C on our terminal is for the command, not for the plugin.
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
        """Output that is not frames: messages of the plugin, and errors in the container."""
        return self._noise.decode("utf-8", "replace").replace("\r", "").strip()

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        while data := self._read(until):
            if len(self._noise) < _MAX_NOISE:
                self._noise = (self._noise + data)[-_MAX_NOISE:]
            yield list(self._lines.feed(data))

    def raw(self) -> Iterator[bytes]:
        """Yield the output unchanged."""
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
        """Wait for the plugin to end, or end it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT if self._process.poll() is None else 0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            os.close(self._file)

    def _read(self, until: float | None) -> bytes:
        """Read some bytes, b"" at the end. Raises TimeoutError."""
        if until is not None:
            ready, _, _ = select.select([self._file], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
        try:
            return os.read(self._file, _BLOCK)
        except OSError:  # the other end is closed
            return b""


# --- Plain shells ---------------------------------------------------------------------------------
# In an image without batchml's program: a shell on our terminal, or a command between two marks.


def run_shell(words: list[str], variables: Mapping[str, str]) -> int:
    """Give the terminal to the plugin. Its exit code is not the shell's."""
    process = subprocess.Popen(words, env={**os.environ, **variables})
    with lend_terminal(lambda _: process.terminate()):
        return process.wait()


def run_command(stream: PluginStream, mark: str) -> int | None:
    """Print the output between the marks; return the exit code that follows, or None."""
    marks = MarkedOutput(mark)
    for data in stream.raw():
        write_out(1, marks.feed(data))
        if marks.code is not None:
            return marks.code
    return None


class MarkedOutput:
    """Extracts the output between two marks; `code` is the exit code in the second."""

    def __init__(self, mark: str) -> None:
        self._begin = f"{mark} begin\n".encode()
        self._end = re.compile(rf"\n?{mark} end (\d+)".encode() + rb"\n")
        self._margin = len(mark) + 16  # bytes that may be the beginning of the end mark
        self._rest = b""
        self._began = False
        self.code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Take output of the session; return what belongs to the command."""
        if self.code is not None:
            return b""
        self._rest = (self._rest + data).replace(b"\r\n", b"\n")
        if not self._began:
            _, begin, after = self._rest.partition(self._begin)
            if not begin:
                return b""
            self._began, self._rest = True, after
        end = self._end.search(self._rest)
        if end is not None:
            self.code = int(end[1])
            out, self._rest = self._rest[: end.start()], b""
            return out
        keep = max(0, len(self._rest) - self._margin)
        out, self._rest = self._rest[:keep], self._rest[keep:]
        return out


def mark_command(command: Sequence[str], mark: str) -> str:
    """Return a shell command that prints a mark before the command, and one with its exit code."""
    script = f"echo {mark} begin; {shlex.join(command)}; c=$?; echo; echo {mark} end $c"
    return shlex.join(["/bin/sh", "-c", script])
