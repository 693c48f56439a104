"""Sees to what a killed client leaves in a container whose image has no Python.

The engine does not end what it was asked to start when its client is gone. So a process of our own
waits beside the client, and ends it then.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchml.local import exec as engine
from batchml.local.exec import Refusal, Started

_START = "import sys; sys.path[0] = sys.argv.pop(1); from batchml.client.plain_guard import main; "
_ROOT = str(Path(__file__).parents[2])


@contextmanager
def guarded(container: str, started: Started) -> Iterator[Callable[[], None]]:
    """End what was started after the block, also if this process does not come to the end of it,
    unless what is yielded is called: it has ended by itself."""
    words = [sys.executable, "-c", f"{_START}main()", _ROOT, container, started.exec_id]
    null = subprocess.DEVNULL
    guard = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
    )
    assert guard.stdin is not None
    with guard, guard.stdin as line:

        def release() -> None:
            with suppress(OSError):
                line.write(b"done")

        yield release


def main() -> None:
    """`CONTAINER EXEC`: wait for the end of the client, by our standard input."""
    if os.read(0, 1):
        return
    container, exec_id = sys.argv[1:]
    with suppress(Refusal, OSError, ValueError):
        inside = _number_inside(engine.pid_of(exec_id))
        # Its session hangs up with it: so do the programs that it has in the foreground.
        script = f"kill -HUP -{inside}; kill -KILL -{inside} {inside}"
        engine.start_plain(container, ["/bin/sh", "-c", script], tty=False).close()


def _number_inside(pid: int) -> int:
    """A process of this machine as the container numbers it. Raises OSError, ValueError."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ValueError(pid)
