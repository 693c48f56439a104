"""Into runs of this machine: processes and containers."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.client import tunnel as tunnels
from batchml.client.doors import Asked, Seat, ending, task_of
from batchml.client.terminal import lent, quiet
from batchml.errors import NoDoor, NotRunning, ServiceUnreachable
from batchml.local import exec as inside
from batchml.local.store import identity
from batchml.model.run import JobStatus
from batchml.runtime.exec.main import ENDED, NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchml.client.place import Place
    from batchml.local.exec import Sitting

# With the folder of this installation before any other: the user's may hold anything.
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from batchml.runtime.exec.main import main; main()"
)
_ROOT = str(Path(__file__).parents[2])
_SETTLING = 5.0  # seconds until a run whose program has ended says so
_PAUSE = 0.05


class LocalDoors:
    """Doors of the environment `local`."""

    def __init__(self, place: "Place") -> None:
        self._place = place

    def run(self, seat: Seat, command: tuple[str, ...], tty: bool) -> int:
        sitting = self._sitting(seat)
        if sitting.container:
            from batchml.client.doors_container import run_in_container

            code, is_cut = run_in_container(sitting, command, tty)
        else:
            code, is_cut = _run_beside(sitting, command, tty)
        if is_cut and self._has_ended(sitting):
            quiet()
            raise self._ended(seat)
        return code

    def ask(self, seat: Seat, command: tuple[str, ...], limit: float | None) -> Asked:
        sitting = self._sitting(seat)
        if sitting.container:
            from batchml.client.doors_container import ask_container

            asked = ask_container(sitting, command, limit)
        else:
            asked = _ask_beside(sitting, command, limit)
        if asked.code in (ENDED, NOBODY) and self._has_ended(sitting):
            raise self._ended(seat)
        return asked

    def tunnel(self, seat: Seat, port: int, local_port: int | None) -> tunnels.Tunnel:
        from batchml.client.tunnel_local import connect_here, way_to

        sitting = self._sitting(seat)
        over = self._over(seat, sitting)
        connect = way_to(sitting, port)
        if connect is None and local_port in (None, port):
            return tunnels.Tunnel(port, port, over, is_direct=True)
        listener = tunnels.listen(port, local_port)
        return tunnels.Relay(port, listener, connect or connect_here(port), over)

    def _sitting(self, seat: Seat) -> "Sitting":
        """Raises NotRunning."""
        home = self._place.home
        if identity.of(home) is None:
            raise NotRunning(
                f"{home.root} is a copy or a restored backup, which is read-only: the programs of "
                f"its runs belong to another folder."
            )
        task = task_of(self._place, seat.run).rpartition("/")[2]
        found = inside.find(self._place.home, task)
        if found is None:
            raise self._ended(seat)
        return found

    def _has_ended(self, sitting: "Sitting") -> bool:
        """Whether the attempt is over; it is waited for a little, as its end is being written."""
        clock, end = self._place.clock, self._place.clock.monotonic() + _SETTLING
        while self._goes_on(sitting):
            if clock.monotonic() > end:
                return False
            clock.sleep(_PAUSE)
        return True

    def _goes_on(self, sitting: "Sitting") -> bool:
        """Whoever looked after it may be killed: a process goes with that, and a container gets
        another."""
        if sitting.container:
            return os.path.exists(sitting.record)
        return inside.find(self._place.home, sitting.task_id) is not None

    def _over(self, seat: Seat, sitting: "Sitting") -> "Callable[[], str]":
        def over() -> str:
            return "" if self._goes_on(sitting) else str(self._ended(seat))

        return over

    def _ended(self, seat: Seat) -> NotRunning:
        """How the run ended that somebody was in, once it says so."""
        clock, end = self._place.clock, self._place.clock.monotonic() + _SETTLING
        job_id = seat.run.job_id
        while True:
            run = self._place.describe([job_id]).get(job_id, seat.run)
            if run.status.is_terminal:
                return NotRunning(f"{run.name} has ended: {ending(run)}.")
            if run.status is not JobStatus.RUNNING or clock.monotonic() > end:
                return NotRunning(
                    f"This attempt of {run.name} has ended, and the run is {run.status.value}: it "
                    "is tried again."
                )
            clock.sleep(_PAUSE)


def _run_beside(sitting: "Sitting", command: tuple[str, ...], tty: bool) -> tuple[int, bool]:
    """The exit code, and whether the run may have ended beneath it.

    The command has this process's own terminal, or its own input and output: nothing is copied.
    """
    lifeline, ours = os.pipe()
    os.set_inheritable(lifeline, True)
    cut_by: list[int] = []  # signals to this process

    def cut(number: int) -> None:
        cut_by.append(number)
        if len(cut_by) == 1:
            os.close(ours)

    term = os.environ.get("TERM", "") if tty else ""
    try:
        with lent(cut):
            sys.stdout.flush()
            code = subprocess.Popen(
                _words(sitting, command, lifeline, term), pass_fds=[lifeline]
            ).wait()
    finally:
        os.close(lifeline)
        if not cut_by:
            os.close(ours)
    if cut_by:
        return 128 + cut_by[0], False
    if code == NOBODY:
        raise NoDoor("Nothing was run inside.")
    return (128 - code if code < 0 else code), code in (ENDED, -signal.SIGKILL)


def _ask_beside(sitting: "Sitting", command: tuple[str, ...], limit: float | None) -> Asked:
    lifeline, ours = os.pipe()
    os.set_inheritable(lifeline, True)
    try:
        done = subprocess.run(
            _words(sitting, command, lifeline, ""), pass_fds=[lifeline], timeout=limit, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ServiceUnreachable(
            f"{command[0]} did not end within {limit:.0f} s inside the run."
        ) from None
    finally:
        os.close(ours)
        os.close(lifeline)
    code = ENDED if done.returncode == -signal.SIGKILL else done.returncode
    return Asked(128 - code if code < 0 else code, done.stdout)


def _words(sitting: "Sitting", command: tuple[str, ...], lifeline: int, term: str) -> list[str]:
    order = sitting.order(command, lifeline=lifeline, term=term)
    return [sys.executable, "-c", _START, _ROOT, order.coded()]
