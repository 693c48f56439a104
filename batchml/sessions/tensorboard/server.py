"""Run TensorBoard as a process of this machine, in a Python environment of its own."""

import http.client
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.errors import BatchmlError
from batchml.jobs.find import find_image
from batchml.local import environments, images
from batchml.runtime.storage.files import write_atomically
from batchml.sessions.forward.listener import open_listener
from batchml.sessions.tensorboard import token_server

if TYPE_CHECKING:
    from batchml.context import Context, Notify

IMAGE = "tensorboard"
PORT = 6006  # TensorBoard's default
STARTUP_LIMIT = 90.0  # seconds

_LOG_LINES = 10  # the last lines of TensorBoard's log that an error shows
_PAUSE = 0.1  # seconds between two requests during the start


def prepare_environment(context: "Context", notify: "Notify") -> Path:
    """Return the Python of the environment of images/tensorboard, which is made if it is missing.

    Raises BatchmlError with pip's message.
    """
    home = context.home
    home.prepare()
    folder = find_image(IMAGE, context.image_folders)
    assert folder is not None  # it ships with batchml
    image = images.find(home.images, images.publish(home.images, folder))
    assert image is not None
    target = home.envs / image.label
    if not environments.is_complete(str(target)):
        notify(f"Making TensorBoard's environment {image.label}, once.")
        _make_environment(image.requirements, target, image.python() or sys.executable, notify)
    return target / "bin" / "python"


def _make_environment(requirements: Path, target: Path, python: str, notify: "Notify") -> None:
    words = [*environments.maker_command(python), str(requirements), str(target), python]
    last = ""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            last = line.strip()
            notify(f"  {last}")
    if process.returncode != 0:
        raise BatchmlError(
            f"TensorBoard's environment cannot be made: {last}. Curves without TensorBoard: "
            "batchml show RUN --plot curves.html"
        )


class TensorBoard:
    """A running server. It answers requests with the token, which is also in a file."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", port: int, log: Path, token_file: Path
    ) -> None:
        self._process = process
        self._port = port
        self._log = log
        self.token_file = token_file
        self.token = token_file.read_text("ascii")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def check(self) -> None:
        """Raise BatchmlError, with the last lines of the log, if the server has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
            raise BatchmlError("\n  ".join(["TensorBoard ended by itself:", *lines]))

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            headers = {"Authorization": f"Bearer {self.token}"}
            connection.request("GET", "/data/environment", headers=headers)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def run_tensorboard(
    context: "Context", python: Path, folder: Path, port: int | None, reload_s: int
) -> Iterator[TensorBoard]:
    """Run TensorBoard on a folder during the block, which begins when TensorBoard answers.

    Raises UsageError for a port that is taken, BatchmlError if it does not start.
    """
    with open_listener(PORT, port) as listener:  # finds a free port, or names the holder
        number = int(listener.getsockname()[1])
    log, token_file = (folder.with_name(folder.name + end) for end in (".log", ".token"))
    write_atomically(str(token_file), secrets.token_urlsafe(32).encode())
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [
                str(python), "-I", token_server.__file__, str(token_file),
                *_arguments(folder, number, reload_s),
            ],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is handled by this process
        )  # fmt: skip
    try:
        server = TensorBoard(process, number, log, token_file)
        until = context.clock.monotonic() + STARTUP_LIMIT
        while not server.answers():
            server.check()
            if context.clock.monotonic() > until:
                raise BatchmlError(f"TensorBoard does not answer on port {number}.")
            context.clock.sleep(_PAUSE)
        yield server
    finally:
        _end(process)


def _arguments(folder: Path, port: int, reload_s: int) -> list[str]:
    return [
        "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--reload_interval", str(reload_s), "--reload_multifile", "true",
        "--samples_per_plugin", "scalars=5000",
        "--load_fast", "false",  # its data server would answer every local user
    ]  # fmt: skip


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        process.kill()
        process.wait()
