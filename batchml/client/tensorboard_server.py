"""TensorBoard itself: a process of this machine, in an environment of its own."""

import http.client
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.errors import BatchmlError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.submission import Tell

IMAGE = "tensorboard"
PORT = 6006  # TensorBoard's own
STARTING = 90.0  # seconds until it answers

_SAID = 10  # lines of its own that an error shows
_PAUSE = 0.1


def environment(place: "Place", tell: "Tell") -> Path:
    """The Python of images/tensorboard's environment, which is made where it is missing.

    Raises BatchmlError with what pip said.
    """
    from batchml.local import environments, images
    from batchml.ops.jobs import find_image

    home = place.home
    home.prepare()
    folder = find_image(IMAGE, place.image_folders)
    assert folder is not None  # it is shipped
    image = images.find(home.images, images.publish(home.images, folder))
    assert image is not None
    target = home.envs / image.label
    if not environments.is_whole(str(target)):
        tell(f"Making TensorBoard's environment {image.label}, once.")
        _make(image.requirements, target, image.python() or sys.executable, tell)
    return target / "bin" / "python"


def _make(requirements: Path, target: Path, python: str, tell: "Tell") -> None:
    from batchml.local import environments

    words = [python, "-I", environments.__file__, str(requirements), str(target), python]
    last = ""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            last = line.strip()
            tell(f"  {last}")
    if process.returncode != 0:
        raise BatchmlError(
            f"TensorBoard's environment cannot be made: {last}. Curves without TensorBoard: "
            "batchml show RUN --plot curves.html"
        )


class TensorBoard:
    """A server that runs. `url` is where it answers whoever has the token, which lies in a file."""

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
        """Raises BatchmlError once it has ended, with what it said last."""
        if self._process.poll() is not None:
            lines = self._log.read_text("utf-8", "replace").splitlines()[-_SAID:]
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
def running(
    place: "Place", python: Path, folder: Path, port: int | None, reload_s: int
) -> Iterator[TensorBoard]:
    """TensorBoard over a folder, once it answers, until the end of the block.

    Raises UsageError for a port that is taken, BatchmlError where it does not start.
    """
    from batchml.client import tensorboard_program
    from batchml.client.tunnel import listen
    from batchml.runtime.storage.files import write_atomically

    with listen(PORT, port) as listener:  # which names who has it, or finds a free one
        number = int(listener.getsockname()[1])
    log, token_file = (folder.with_name(folder.name + end) for end in (".log", ".token"))
    write_atomically(str(token_file), secrets.token_urlsafe(32).encode())
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [
                str(python), "-I", tensorboard_program.__file__, str(token_file),
                *_arguments(folder, number, reload_s),
            ],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to answer
        )  # fmt: skip
    try:
        server = TensorBoard(process, number, log, token_file)
        until = place.clock.monotonic() + STARTING
        while not server.answers():
            server.check()
            if place.clock.monotonic() > until:
                raise BatchmlError(f"TensorBoard does not answer on port {number}.")
            place.clock.sleep(_PAUSE)
        yield server
    finally:
        _end(process)


def _arguments(folder: Path, port: int, reload_s: int) -> list[str]:
    return [
        "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--reload_interval", str(reload_s), "--reload_multifile", "true",
        "--samples_per_plugin", "scalars=5000",
        "--load_fast", "false",  # or a server of its own shows all of it to each local user
    ]  # fmt: skip


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        process.kill()
        process.wait()
