"""The entry of the images that batchml builds: `python -m batchml.runtime.run COMMAND ...`.

It fetches the code, starts the command, passes its output on line by line, passes a stop signal on
to every process, and ends with a line that says how many lines there were, so that a client can
prove that it has them all. It exits with the command's own code.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import BinaryIO, Optional

from batchml.runtime.entry.attempt import Companions, Running
from batchml.runtime.entry.fetch import (
    BY_ORDER,
    BadArchive,
    BadOrder,
    bring,
    digest_in,
    read_order,
    unpack,
)
from batchml.runtime.entry.folders import (
    Temporary,
    WorkingFolder,
    arrange,
    is_kept,
    own_folder,
    variables,
    watch,
)
from batchml.runtime.entry.output import Output
from batchml.runtime.entry.outputs import Outputs, prefix_of
from batchml.runtime.entry.stopping import Signals, Stopped, held_back
from batchml.runtime.processes import become_reaper, kill_descendants
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import TORCHRUN, VARIABLE, Plan
from batchml.runtime.protocol.log_marks import LineSplitter, end_mark
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import BRIEF, Store, StoreError, open_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.nodes.torchrun.child import Led, Verdict
    from batchml.runtime.sweep.trial import Trial

PROGRESS_EVERY = 10.0  # seconds between two looks at a progress bar
_READ = 65_536
_TOO_LONG = "Linux takes 128 KiB of one argument or variable, and about 2 MiB of all"
_TOLD_OUTPUTS = 5  # names of outputs that could not be sent


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    stream: BinaryIO,
    progress_every: float = PROGRESS_EVERY,
) -> int:
    """Run one attempt and return its exit code."""
    signals, temporary = Signals(), Temporary()
    signals.listen()
    output = Output(stream, progress_every)
    attempt = _Attempt(list(command), environ, output, signals, temporary)
    try:
        code = attempt.run()
    finally:
        temporary.remove()
    signals.deafen()
    if RuntimeEnv.read(environ).is_run:
        stream.write(end_mark(code, output.lines, attempt.by_runtime).encode() + b"\n")
        stream.flush()
    return code


class _Ended(Exception):
    """The attempt ends before its command: with a line, and this code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Attempt:
    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        output: Output,
        signals: Signals,
        temporary: Temporary,
    ) -> None:
        self._command = command
        self._environ = dict(environ)
        self._output = output
        self._signals = signals
        self._temporary = temporary
        self._env = RuntimeEnv.read(environ)
        self._trial: Optional[Trial] = None
        self._plan: Optional[Plan] = None
        self._said = ""  # why the command did not begin
        self.by_runtime = False  # the exit code is not the program's own

    def run(self) -> int:
        code = self._run()
        if self._trial is None:
            return code
        return self._trial.end(code, bool(self._signals.stop_asked), self._said)

    def _run(self) -> int:
        try:
            self._take_order()
            self._claim()
            sends_outputs = self._env.is_run and not self._env.output_dir and self._env.store
            self._arrange()
            self._fetch_code()
            self._read_plan()
            self._look_at_host()
            self._fetch_checkpoints()
            self._signals.check()
        except _Ended as end:
            return self._not_begun(end.code, str(end))
        except Stopped as stop:
            return self._not_begun(STOPPED, f"stopped ({stop}) before the command began")
        except StoreError as error:
            code = TRY_ELSEWHERE if error.temporary else CONFIGURATION_ERROR
            return self._not_begun(code, str(error))
        except (BadArchive, BadOrder, OSError, ValueError) as error:
            return self._not_begun(CONFIGURATION_ERROR, str(error))
        try:
            return self._run_command(bool(sends_outputs))
        except FileNotFoundError:
            return self._cannot_run(127, self._missing())
        except OSError as error:
            why = _TOO_LONG if error.errno == errno.E2BIG else error.strerror
            return self._cannot_run(126, str(why))
        except ValueError as error:  # a NUL in a word, or `=` in the name of a variable
            return self._cannot_run(126, str(error))

    def _cannot_run(self, code: int, why: str) -> int:
        return self._not_begun(code, f"cannot run {self._command[0]!r}: {why}", by_runtime=False)

    def _not_begun(self, code: int, why: str, by_runtime: bool = True) -> int:
        self._said = why
        self.by_runtime = by_runtime
        self._output.say(f"batchml: {why}")
        if VARIABLE in self._environ:
            from batchml.runtime.nodes.torchrun.child import told_main

            told_main(self._environ, {"not_begun": [code, why]}, self._signals.stops_within)
        return code

    def _missing(self) -> str:
        """What is not there: Linux says it of a program and of what a script's first line names."""
        if shutil.which(self._command[0], path=self._environ.get("PATH")) is None:
            return "no such command in this image."
        return "what its first line (#!) names, or the loader that it needs, is not in this image."

    # --- before the command ---------------------------------------------------------------------

    def _take_order(self) -> None:
        """The command that was too long for AWS Batch, with its variables."""
        if self._env.order and self._command == [BY_ORDER]:
            order = read_order(*self._bring(self._env.order))
            self._command = order.command
            # Batch's own variables are facts.
            given = {k: v for k, v in order.env.items() if not k.startswith("AWS_BATCH_")}
            self._environ.update(given)
            self._env = RuntimeEnv.read(self._environ)
        if not self._command or self._command == [BY_ORDER]:
            raise _Ended(
                CONFIGURATION_ERROR, "no command was given. Name one in job.toml, or after --."
            )

    def _claim(self) -> None:
        """Of two jobs of one submission only the first runs."""
        if self._env.sweep:
            self._begin_trial()
        elif self._env.store and self._env.key:
            from batchml.runtime.entry.fetch import claim, refusal

            holder = claim(self._open(self._env.store), self._env)
            if holder is not None:
                raise _Ended(DUPLICATE, refusal(holder))

    def _begin_trial(self) -> None:
        """A trial has a claim of its own, and its command is the sweep's, filled in."""
        from batchml.runtime.sweep.assignment import Over
        from batchml.runtime.sweep.trial import Trial

        try:
            trial = Trial(self._env, self._environ, self._output.say, self._signals.check)
        except Over as over:
            raise _Ended(over.code, str(over)) from over
        self._trial, self._command, self._env = trial, trial.command(), trial.env

    def _arrange(self) -> None:
        self._env = arrange(self._env, self._temporary)
        self._environ.update(variables(self._env))
        if self._trial is not None:
            self._trial.bring_checkpoints(self._env.checkpoint_dir)
            self._environ.update(self._trial.variables())

    def _fetch_code(self) -> None:
        if self._env.code:
            path, digest = self._bring(self._env.code)
            unpack(path, own_folder(), digest)
            if path != self._env.code:
                os.unlink(path)

    def _read_plan(self) -> None:
        if VARIABLE in self._environ:
            from batchml.runtime.nodes.torchrun.child import plan_of

            self._plan = plan_of(self._environ)

    def _look_at_host(self) -> None:
        """An unfit host ends the attempt; among ranks the main node's supervisor does that."""
        if not self._env.is_run:
            return
        from batchml.runtime.health.gate import gate

        unfit = gate(self._env, self._environ, self._output.say)
        if unfit is None:
            return
        if self._plan is None or self._plan.kind != TORCHRUN:
            raise _Ended(TRY_ELSEWHERE, unfit)
        from batchml.runtime.nodes.torchrun.child import UNFIT

        self._environ[UNFIT] = unfit

    def _fetch_checkpoints(self) -> None:
        """From another run, and where no folder outlives the attempt, from the run's store."""
        if "BATCHML_RESUME" in self._environ and self._env.is_run and self._trial is None:
            from batchml.runtime.checkpoint.resume import resume

            resume(self._env, self._environ, self._output.say, self._signals.check)
        if is_kept(self._env) and self._trial is None:
            from batchml.runtime.checkpoint.remote import fetch

            fetch(self._env, self._environ, self._output.say)

    def _bring(self, url: str) -> tuple[str, str]:
        """The path of what travels with the run, and, when it came from elsewhere, its hash."""
        if "://" not in url:
            return url, ""
        folder = self._temporary.path()
        return bring(url, folder, self._environ, self._signals.check), digest_in(url)

    def _open(self, url: str) -> Store:
        return open_store(url, self._environ, self._signals.check)

    # --- while it runs, and after ---------------------------------------------------------------

    def _run_command(self, sends_outputs: bool) -> int:
        become_reaper()
        env, output = self._env, self._output
        store = open_store(env.store, self._environ, patience=BRIEF) if env.store else None
        running = Running(env, self._environ, output, self._signals, store, sends_outputs)
        companions = _companions(running)
        if self._trial is not None:
            trial = self._trial
            trial.start(running)
            output.listener = trial.hear
            companions.add("the sweep's watch", lambda: trial)
        working = self._watch_working_folder(sends_outputs)
        led = self._led()
        process = self._start(led)
        if led is not None:
            self._look_after(led, process.pid, running, companions)
        outputs = None
        if sends_outputs:
            patient = open_store(env.store, self._environ)
            outputs = Outputs(env.output_dir, patient, prefix_of(self._environ))
            outputs.start()
        code = _copy(process, self._signals.wake, output, running, companions, self._trial)
        companions.finish()
        left = working.told() if working else ""
        if left:
            output.say(f"batchml notice: {left}")  # "batchml: " is why a run could not begin
        if outputs is not None:
            _tell_outputs(outputs.finish(), output)
        verdict = led.verdict(code) if led is not None else None
        self.by_runtime = running.forced is not None or verdict is not None
        if verdict is not None:
            self._pass_on(verdict)
            code = verdict.code
        if running.forced is not None:
            return running.forced
        return 128 - code if code < 0 else code

    def _pass_on(self, verdict: Verdict) -> None:
        """What the supervisor of this node, which has ended, may not have told anyone."""
        if not verdict.is_said:
            self._output.say(f"batchml: {verdict.why}")
        if verdict.news and not self._signals.stop_asked:
            from batchml.runtime.nodes.torchrun.child import told_main

            told_main(self._environ, verdict.news, self._signals.stops_within)

    def _start(self, led: Optional[Led]) -> subprocess.Popen[bytes]:
        with held_back() if led else nullcontext():
            return subprocess.Popen(
                led.command if led else self._command,
                env=led.environ if led else self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _led(self) -> Optional[Led]:
        """The supervisor that is started instead of the command; None where that is simply run."""
        if self._plan is None:
            return None
        from batchml.runtime.nodes.torchrun.child import led

        return led(self._plan, self._command, self._environ, self._temporary.path())

    def _look_after(self, led: Led, pid: int, running: Running, companions: Companions) -> None:
        from batchml.runtime.nodes.torchrun.child import Frozen

        running.led_by(pid, led.asked, led.makes_stop_file)
        companions.add("the watch of the supervisor", lambda: Frozen(pid, running.say))

    def _watch_working_folder(self, is_container: bool) -> Optional[WorkingFolder]:
        data = self._environ.get("BATCHML_DATA_DIR", "")
        return watch(self._env, data, self._temporary.made, is_container)


def _companions(running: Running) -> Companions:
    companions = Companions(running.say)
    if running.env.is_run:
        from batchml.runtime.health.gate import has_gpus
        from batchml.runtime.telemetry.budget import Guard
        from batchml.runtime.telemetry.metrics import Relay
        from batchml.runtime.telemetry.spot import Notice
        from batchml.runtime.telemetry.usage import Usage

        companions.add("the money guard", lambda: Guard(running))
        companions.add("the relay of metrics", lambda: Relay(running))
        companions.add("the use of the machine", lambda: Usage(running))
        companions.add("the watch for notices", lambda: Notice(running))
        if is_kept(running.env):
            from batchml.runtime.checkpoint.remote import Keeper

            companions.add("the keeper of checkpoints", lambda: Keeper(running))
        if has_gpus(running.environ):
            from batchml.runtime.health.xid import Watch

            companions.add("the watch of the GPUs", lambda: Watch(running))
    return companions


def _tell_outputs(trouble: Sequence[str], output: Output) -> None:
    if trouble:
        output.say(f"batchml: {len(trouble)} outputs could not be kept:")
    for line in trouble[:_TOLD_OUTPUTS]:
        output.say(f"batchml:   {line}")


def _copy(
    process: subprocess.Popen[bytes],
    wake: int,
    output: Output,
    running: Running,
    companions: Companions,
    trial: Optional[Trial],
) -> int:
    """Copy until the command has ended, end what it leaves behind, and return its code."""
    import selectors

    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    splitter = LineSplitter(escape=True)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        if trial is not None and trial.changes >= 0:
            selector.register(trial.changes, selectors.EVENT_READ, trial.look)
        while not _has_ended(process):
            for key, _ in selector.select(_pause(output, running, companions)):
                if key.data is not None:
                    key.data()
                    continue
                data = _read(key.fd)
                if key.fd == pipe:
                    output.write(splitter.feed(data or b""))
                    if data == b"":
                        selector.unregister(pipe)
            running.hear()
            companions.tick(time.monotonic())
            running.kill_when_due()
            if output.until_progress() == 0:
                output.write(splitter.progress())
    kill_descendants()
    while True:  # not to the end of the stream: whom we may not kill could keep it open for ever
        data = _read(pipe)
        if not data:
            break
        output.write(splitter.feed(data))
    output.write(splitter.finish())
    process.stdout.close()
    return process.returncode


def _pause(output: Output, running: Running, companions: Companions) -> Optional[float]:
    """Seconds that may pass before something is due though nothing has come."""
    due = [running.until_kill()]
    if companions:
        due.append(companions.until_tick(time.monotonic()))
    if output.until_progress():  # once it was looked at, the next line counts
        due.append(output.until_progress())
    least = min(due)
    return None if least == float("inf") else least


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the command has; other children that have are orphans, and are collected here."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            found = None
        if found is None or found.si_pid == process.pid:
            return process.poll() is not None
        os.waitpid(found.si_pid, os.WNOHANG)


def _read(pipe: int) -> Optional[bytes]:
    """What can be read now; None when that is nothing yet, empty at the end."""
    try:
        return os.read(pipe, _READ)
    except BlockingIOError:
        return None


def main() -> None:
    """Never returns: Python's own way out would set the signals' handlers back."""
    code = 70  # if something here is wrong: a traceback, and no word from the command
    # `-m` looks for modules in the working directory first, where the job's own `queue.py` will be.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    try:
        code = run(sys.argv[1:], os.environ, sys.stdout.buffer)
    except BrokenPipeError:  # nobody reads: a log driver that has gone
        code = TRY_ELSEWHERE
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
