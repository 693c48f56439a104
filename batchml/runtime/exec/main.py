"""Into a run that is RUNNING: `python -m batchml.runtime.exec.main [-- COMMAND]`.

It is started beside the run's program, by `docker exec`, by ECS Exec, or on this machine by the
client. It finds the program, takes its variables, its folder, its user and its limits, and runs the
command, or the best shell there is. While that goes on it holds a seat (`seats.py`). Whatever it
started ends with the connection, and with the run.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple, NoReturn, Optional, Sequence

from batchml.runtime.exec.program import Program, become, enter_groups, enter_network, find_program
from batchml.runtime.exec.prompt import prompted, taken
from batchml.runtime.processes import become_reaper, descendants, kill_descendants, send

NOBODY = 69  # there is no program to sit beside
ENDED = 75  # the run has ended beneath the command

_SHELLS = ("bash", "sh")
_PATIENCE = 5.0  # seconds for a program that is just being started
_PAUSE = 0.05
_LOOK = 0.5  # seconds between two looks whether the run goes on
_HANG_UP = 0.3  # seconds between HUP and KILL
_HEARD = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)


class Order(NamedTuple):
    """What is asked for. As one word on the command line it needs no quotes, whoever splits it."""

    command: Sequence[str] = ()  # none: a shell
    root: int = 1  # the process that the program runs below
    task: str = ""  # the attempt, where others may run below it
    groups: Sequence[str] = ()  # control groups to go into
    record: str = ""  # a file that goes away with the attempt
    lifeline: int = -1  # a descriptor that ends with whoever is connected
    term: str = ""  # the kind of terminal
    stream: str = ""  # "": as it is; "relay": frames; "port": frames to and from a port
    size: Sequence[int] = ()  # of the terminal, lines and columns; none: there is none
    port: int = 0
    text: bool = False  # frames as lines: there is a terminal on the way

    def coded(self) -> str:
        given = {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}
        return base64.urlsafe_b64encode(json.dumps(given).encode()).decode("ascii")

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Order:
        """Raises ValueError for words that are no order."""
        if arguments[:1] == ["--"] or not arguments:
            return cls(command=list(arguments[1:]))
        if len(arguments) > 1:
            raise ValueError("usage: python -m batchml.runtime.exec.main [-- COMMAND...]")
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(arguments[0])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not an order: {error}") from None


class NoWay(Exception):
    """Why there is no way in, with the exit code that says so."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def program_of(order: Order) -> Program:
    """The run's program; while it is just being started it is waited for a little."""
    end = time.monotonic() + _PATIENCE
    while True:
        found = find_program(order.root, order.task)
        if found is not None:
            return found
        if time.monotonic() > end:
            break
        select.select([], [], [], _PAUSE)
    if order.task or not os.environ.get("AWS_BATCH_JOB_ID"):
        raise NoWay(NOBODY, "the run's program is not there: it is only starting, or has ended.")
    # Its variables cannot be seen; those of the container are there.
    return Program(0, dict(os.environ), os.getcwd(), os.geteuid(), os.getegid(), os.getgroups())


def command_of(order: Order, environ: Dict[str, str]) -> List[str]:
    """What to run. Raises NoWay."""
    if order.command:
        return list(order.command)
    own = environ.get("SHELL", "")
    for shell in (own, *_SHELLS):
        found = shutil.which(shell, path=environ.get("PATH") or os.defpath) if shell else None
        if found:
            return [found]
    raise NoWay(127, "this image has no shell: name a program that it has, after --.")


def variables(order: Order, program: Program) -> Dict[str, str]:
    """The program's, with the kind of the terminal that looks on, and for a shell its prompt.

    Raises NoWay where there is no shell.
    """
    if not order.term:
        return program.environ
    found = {**program.environ, "TERM": order.term}
    if not order.command:
        found.update(prompted(found, command_of(order, found)[0]))
    return found


class Child:
    """The command, and the end of it: by itself, with the connection, or with the run."""

    def __init__(self, order: Order, process: subprocess.Popen[bytes], wake: int) -> None:
        self._order = order
        self._process = process
        self._wake = wake
        self.is_cut = False  # it did not end by itself

    def wait(self) -> int:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._order.lifeline >= 0:
            poll.register(self._order.lifeline, select.POLLIN)
        pause = _LOOK * 1000 if self._order.record else None
        while self._process.poll() is None:
            for file, _ in poll.poll(pause):
                if file != self._wake or self._heed(os.read(file, 64)):
                    return self.cut(ENDED)
            if self._order.record and not os.path.exists(self._order.record):
                return self.cut(ENDED)
        return code_of(self._process)

    def _heed(self, numbers: bytes) -> bool:
        """TERM is for the command; what a terminal sends reaches it by itself. True where that
        terminal has gone."""
        if signal.SIGTERM in numbers:
            send([self._process.pid], signal.SIGTERM)
        return signal.SIGHUP in numbers

    def cut(self, code: int) -> int:
        """End what was started, and all that it started: first asked, then killed."""
        self.is_cut = True
        end_all()
        return code


def end_all() -> None:
    below = descendants(os.getpid())
    send(below, signal.SIGHUP)
    send(below, signal.SIGCONT)
    end = time.monotonic() + _HANG_UP
    while time.monotonic() < end and descendants(os.getpid()):
        select.select([], [], [], _PAUSE)
    kill_descendants(limit=5.0)


def code_of(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code


def wake_file() -> int:
    """A descriptor that can be read when a signal has come.

    Handlers that do nothing, instead of ignoring: a program that is started heeds them again.
    """
    wake, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in _HEARD:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    return wake


def start(command: List[str], **more: object) -> subprocess.Popen[bytes]:
    """Raises NoWay with a shell's codes for what cannot be started."""
    try:
        return subprocess.Popen(command, **more)  # type: ignore[call-overload,no-any-return]
    except FileNotFoundError:
        raise NoWay(127, f"{command[0]!r}: there is no such command in this run.") from None
    except (OSError, ValueError) as error:
        raise NoWay(126, f"{command[0]!r} cannot be run: {error}") from None


def run(order: Order) -> int:
    """The exit code of the command. Raises NoWay."""
    program = program_of(order)
    in_groups = enter_groups(list(order.groups))
    if program.pid:
        enter_network(program.pid)
    become(program)
    environ = variables(order, program)
    become_reaper()
    if order.stream:
        from batchml.runtime.exec.relay import serve

        return serve(order, environ, program.folder)
    wake = wake_file()
    with taken(environ):
        command = command_of(order, environ)
        process = start(command, env=environ, cwd=_folder(program.folder))
        child = Child(order, process, wake)
        code = child.wait()
        # Where no control group ends with the run, nothing may stay behind.
        if not in_groups and order.record and not child.is_cut:
            end_all()
        return code


def _folder(path: str) -> Optional[str]:
    return path if os.path.isdir(path) else None


def main() -> NoReturn:
    code, order = 70, Order()
    try:
        order = Order.read(sys.argv[1:])
        code = run(order)
    except NoWay as error:
        code = error.code
        if order.stream:
            from batchml.runtime.exec.relay import refuse

            refuse(order, code, str(error))
        else:
            print(f"batchml: {error}", file=sys.stderr, flush=True)
    except ValueError as error:
        code = 2
        print(f"batchml: {error}", file=sys.stderr, flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    # `-m` looks in the working folder first, where the job's own `queue.py` may be.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    from batchml.runtime.exec.main import main as begin  # by its name: there is one of each class

    begin()
