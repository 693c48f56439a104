"""Run a command or a shell inside a run: `python -m batchml.runtime.exec.main [-- COMMAND]`.

The client starts this program in the container of the run: by `docker exec`, by ECS Exec, or as a
process of this machine. It finds the run's program, takes over its variables, folder, user and
limits, and runs the command. Meanwhile it holds a presence file (`presence.py`). The command ends
when the connection or the run ends.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import Dict, NoReturn

from batchml.runtime.exec.command import (
    NO_PROGRAM,
    PAUSE,
    RUN_ENDED,
    ExecFailed,
    ExecRequest,
    exit_code,
    handle_signals,
    kill_children,
    open_signal_pipe,
    resolve_command,
    start,
)
from batchml.runtime.exec.presence import hold_presence, prompt_variables
from batchml.runtime.exec.relay import refuse, serve
from batchml.runtime.exec.run_process import (
    RunProcess,
    become,
    enter_groups,
    enter_network,
    enter_processors,
    find_run_process,
)
from batchml.runtime.processes import become_reaper

_START_LIMIT = 5.0  # seconds to wait for a program that is starting
_CHECK_EVERY = 0.5  # seconds between two checks whether the run has ended


def wait_for_program(request: ExecRequest) -> RunProcess:
    """Find the run's program; wait a few seconds if it is starting. Raises ExecFailed."""
    end = time.monotonic() + _START_LIMIT
    while True:
        program = find_run_process(request.root, request.task)
        if program is not None:
            return program
        if time.monotonic() > end:
            break
        select.select([], [], [], PAUSE)
    if request.task or not os.environ.get("AWS_BATCH_JOB_ID"):
        raise ExecFailed(NO_PROGRAM, "the run's program has not started yet, or has ended.")
    # /proc hides the program's variables: use those of the container.
    return RunProcess(0, dict(os.environ), os.getcwd(), os.geteuid(), os.getegid(), os.getgroups())


def command_variables(request: ExecRequest, process: RunProcess) -> Dict[str, str]:
    """Return the program's variables, with TERM of the client, and with a prompt for a shell.

    Raises ExecFailed if the image has no shell.
    """
    if not request.term:
        return process.environ
    environ = {**process.environ, "TERM": request.term}
    if not request.command:
        environ.update(prompt_variables(environ, resolve_command(request, environ)[0]))
    return environ


class ExecChild:
    """The started command. It ends by itself, with the connection, or with the run."""

    def __init__(self, request: ExecRequest, process: subprocess.Popen[bytes], wake: int) -> None:
        self._request = request
        self._process = process
        self._wake = wake
        self.was_killed = False

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._request.lifeline >= 0:
            poll.register(self._request.lifeline, select.POLLIN)
        pause = _CHECK_EVERY * 1000 if self._request.record else None
        while self._process.poll() is None:
            for file, _ in poll.poll(pause):
                if file != self._wake or handle_signals(file, self._process):
                    return self._kill()
            if self._request.record and not os.path.exists(self._request.record):
                return self._kill()
        return exit_code(self._process)

    def _kill(self) -> int:
        self.was_killed = True
        kill_children()
        return RUN_ENDED


def run(request: ExecRequest) -> int:
    """Run the command; return its exit code. Raises ExecFailed."""
    program = wait_for_program(request)
    in_groups = enter_groups(list(request.groups))
    if program.pid:
        enter_network(program.pid)
        enter_processors(program.pid)
    become(program)
    environ = command_variables(request, program)
    become_reaper()
    if request.stream:
        return serve(request, environ, program.folder)
    wake = open_signal_pipe()
    with hold_presence(environ):
        command = resolve_command(request, environ)
        process = start(command, environ, program.folder)
        child = ExecChild(request, process, wake)
        code = child.wait()
        # Without a control group, which ends with the run, processes would outlive the run.
        if not in_groups and request.record and not child.was_killed:
            kill_children()
        return code


def main() -> NoReturn:
    code, request = 70, ExecRequest()  # 70: after a mistake of our own, with a traceback
    try:
        request = ExecRequest.parse(sys.argv[1:])
        code = run(request)
    except ExecFailed as error:
        code = error.code
        if request.stream:
            refuse(request, code, str(error))
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
    # `-m` puts the working folder first on the path, where the job may have a `queue.py`. Images
    # without batchml are sent this module, but not `package.py`, which has a function for that.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    # imported, not taken from __main__: otherwise each class would exist twice
    from batchml.runtime.exec.main import main as begin

    begin()
