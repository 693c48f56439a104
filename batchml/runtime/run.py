"""The entry point of batchml's images: `python -m batchml.runtime.run COMMAND ...`.

It fetches the code, starts the command, copies the command's output line by line, and forwards stop
signals to every process. The last line that it prints has the number of lines, so that a client can
prove that it has read all of them. It exits with the command's exit code.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Optional

from batchml.runtime.entry.attempt import AttemptPlugins, Output, RunningAttempt
from batchml.runtime.entry.command import Program, copy_output
from batchml.runtime.entry.fetch import (
    IN_FILE,
    BadArchive,
    BadCommandFile,
    NotStarted,
    claim,
    describe_duplicate,
    digest_in_name,
    download,
    read_command_file,
    unpack,
)
from batchml.runtime.entry.folders import (
    TemporaryFolder,
    enter_code_folder,
    folder_variables,
    is_kept_in_store,
    make_folders,
)
from batchml.runtime.entry.outputs import OutputSender, output_prefix
from batchml.runtime.entry.stopping import Signals, StopRequested, signals_blocked
from batchml.runtime.entry.working_folder import (
    WorkingFolder,
    WorkingFolderKeeper,
    open_keeper,
    watch_working_folder,
)
from batchml.runtime.package import drop_working_folder
from batchml.runtime.processes import become_reaper, keep_files, shell_code
from batchml.runtime.processors import count_processors, with_processors
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import VARIABLE, LaunchPlan
from batchml.runtime.protocol.log_marks import end_mark
from batchml.runtime.protocol.variables import (
    DATA,
    DATA_CACHE,
    FILL,
    STAGED,
    RuntimeEnv,
    data_variable,
    fill_folders,
    fill_params,
    folder_placeholders,
    folder_values,
    folder_variable,
    parameter_variables,
    params_placeholders,
    read_data,
    read_params,
)
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.nodes.launcher import SupervisedCommand, SupervisorVerdict
    from batchml.runtime.sweep.trial import TrialAttempt

PROGRESS_EVERY = 10.0  # seconds after which a progress bar is printed as a line
FIRST_TICK = 0.05  # seconds from the start of the plug-ins: a short command needs no tick
_HINTS = {  # after the error of a program that cannot be started
    errno.E2BIG: ": Linux takes 128 KiB of one argument or variable, and about 2 MiB of all",
    errno.ENOEXEC: ": a script needs a first line with its interpreter, such as #!/bin/sh",
    errno.EACCES: ": chmod +x makes a file executable",
}
_NAMED_OUTPUTS = 5  # the most outputs that are named after they could not be sent


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    stream: BinaryIO,
    progress_every: float = PROGRESS_EVERY,
) -> int:
    """Run one attempt and return its exit code."""
    signals, temporary = Signals(), TemporaryFolder()
    signals.listen()
    output = Output(stream, progress_every)
    attempt = _Attempt(list(command), environ, output, signals, temporary)
    try:
        code = attempt.run()
    finally:
        temporary.remove()
    signals.ignore()
    if RuntimeEnv.read(environ).is_run:
        stream.write(end_mark(code, output.lines, attempt.by_runtime).encode() + b"\n")
        stream.flush()
    return code


class _Attempt:
    """One attempt, from its claim to its exit code."""

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        output: Output,
        signals: Signals,
        temporary: TemporaryFolder,
    ) -> None:
        self._command = command
        self._environ = dict(environ)
        self._output = output
        self._signals = signals
        self._temporary = temporary
        self._env = RuntimeEnv.read(environ)
        self._trial: Optional[TrialAttempt] = None
        self._plan: Optional[LaunchPlan] = None
        self._working: Optional[WorkingFolder] = None
        self._keeper: Optional[WorkingFolderKeeper] = None
        self._is_unfit = False
        self._why_not_started = ""
        self.by_runtime = False  # whether the runtime, not the program, chose the exit code

    def run(self) -> int:
        """Run the command, end the trial if this is one of a sweep, and return the exit code."""
        code = self._run()
        if self._trial is None:
            return code
        return self._trial.end(code, bool(self._signals.stop_signal), self._why_not_started)

    def _run(self) -> int:
        try:
            self._read_command_file()
            self._claim()
            sends_outputs = bool(self._env.is_run and not self._env.output_dir and self._env.store)
            self._make_folders()
            self._fetch_code()
            self._read_plan()
            self._check_host()
            self._stage_data()
            self._fill_folders()
            self._fetch_checkpoints()
            self._watch_working_folder(sends_outputs)
            self._signals.check()
        except NotStarted as end:
            return self._not_started(end.code, str(end))
        except StopRequested as stop:
            return self._not_started(STOPPED, f"stopped ({stop}) before the command began")
        except StoreError as error:
            code = TRY_ELSEWHERE if error.temporary else CONFIGURATION_ERROR
            return self._not_started(code, str(error))
        except (BadArchive, BadCommandFile, OSError, ValueError) as error:
            return self._not_started(CONFIGURATION_ERROR, str(error))
        try:
            return self._run_command(sends_outputs)
        except FileNotFoundError:
            return self._cannot_run(127, self._describe_missing())
        except OSError as error:
            return self._cannot_run(126, f"{error.strerror}{_HINTS.get(error.errno or 0, '')}")
        except ValueError as error:  # a NUL in an argument, or `=` in the name of a variable
            return self._cannot_run(126, str(error))

    def _cannot_run(self, code: int, why: str) -> int:
        return self._not_started(code, f"cannot run {self._command[0]!r}: {why}", by_runtime=False)

    def _not_started(self, code: int, why: str, by_runtime: bool = True) -> int:
        self._why_not_started = why
        self.by_runtime = by_runtime
        self._output.say(f"batchml: {why}")
        if VARIABLE in self._environ:
            from batchml.runtime.nodes.launcher import tell_main_node

            tell_main_node(self._environ, {"not_begun": [code, why]}, self._signals.wait_for_stop)
        return code

    def _describe_missing(self) -> str:
        """Linux's FileNotFoundError may mean the program, or the interpreter that it names."""
        name = self._command[0]
        if shutil.which(name, path=self._environ.get("PATH")) is None:
            line = f" Did you mean: sh -c {shlex.quote(name)}" if " " in name.strip() else ""
            return f"no such command in this image.{line}"
        return "the program of its first line (#!), or its loader, is not in this image."

    # --- Before the command -----------------------------------------------------------------------

    def _read_command_file(self) -> None:
        """Read the command and the variables that were too long for AWS Batch."""
        if self._env.command_file and self._command == [IN_FILE]:
            found = read_command_file(*self._fetch(self._env.command_file))
            self._command = found.command
            for name, value in found.env.items():
                if not name.startswith("AWS_BATCH_"):  # AWS Batch's own variables stay
                    self._environ[name] = value
            self._env = RuntimeEnv.read(self._environ)
        if not self._command or self._command == [IN_FILE]:
            raise NotStarted(
                CONFIGURATION_ERROR, "no command was given. Name one in job.toml, or after --."
            )

    def _claim(self) -> None:
        """Let only the first of two jobs of one submission run."""
        if self._env.sweep:
            self._begin_trial()
        elif self._env.store and self._env.key:
            store = open_store(self._env.store, self._environ, self._signals.check)
            holder = claim(store, self._env)
            if holder is not None:
                raise NotStarted(DUPLICATE, describe_duplicate(holder))

    def _begin_trial(self) -> None:
        """Claim a trial of a sweep, and fill its parameters into the sweep's command."""
        from batchml.runtime.sweep.trial import TrialAttempt

        trial = TrialAttempt(self._env, self._environ, self._output.say, self._signals.check)
        self._trial, self._command, self._env = trial, trial.command(), trial.env

    def _make_folders(self) -> None:
        self._env = make_folders(self._env, self._temporary)
        self._environ.update(folder_variables(self._env))
        if self._trial is not None:
            self._trial.fetch_checkpoints(self._env.checkpoint_dir)
            self._environ.update(self._trial.variables())

    def _fill_folders(self) -> None:
        """Fill folders, the child's number and the trial's seed into command and parameters."""
        if FILL not in self._environ:
            return
        values = folder_values(self._environ)
        params = read_params(self._environ)
        for name in (*folder_placeholders(self._command), *params_placeholders(params)):
            if not values.get(name):
                variable = folder_variable(name)
                why = f"the command has {{{name}}}, but {variable} is not set here."
                raise NotStarted(CONFIGURATION_ERROR, why)
        self._command = fill_folders(self._command, values)
        if params:
            filled = parameter_variables(fill_params(params, values))
            self._environ.update({n: text for n, text in filled.items() if n in self._environ})

    def _fetch_code(self) -> None:
        if self._env.code:
            path, digest = self._fetch(self._env.code)
            unpack(path, enter_code_folder(), digest)
            if path != self._env.code:
                os.unlink(path)

    def _read_plan(self) -> None:
        if VARIABLE in self._environ:
            from batchml.runtime.nodes.launcher import read_plan

            self._plan = read_plan(self._environ)

    def _check_host(self) -> None:
        """End the attempt on an unfit host. In a run of ranks, the main node's supervisor does."""
        if not self._env.is_run:
            return
        from batchml.runtime.health.gate import check_host

        unfit = check_host(self._env, self._environ, self._output.say)
        if unfit is None:
            return
        if self._plan is None or not self._plan.is_supervised:
            raise NotStarted(TRY_ELSEWHERE, unfit)
        from batchml.runtime.nodes.launcher import UNFIT

        self._environ[UNFIT] = unfit
        self._is_unfit = True

    def _stage_data(self) -> None:
        """Copy the data sets of `[data]` to this host, unless they are there. Raises NotStarted."""
        if not self._environ.get(DATA):
            return
        from batchml.runtime.data.sources import DataError
        from batchml.runtime.data.stage import StagingContext, choose_cache, stage_data

        def wait(seconds: float) -> None:
            self._signals.wait_for_stop(seconds)
            self._signals.check()

        def own_folder() -> str:
            return os.path.join(self._temporary.path(), "data")

        root = choose_cache(self._environ.get(DATA_CACHE, ""), own_folder, self._output.say)
        context = StagingContext(self._environ, self._output.say, self._signals.check, wait)
        sources = read_data(self._environ)
        if self._is_unfit:  # the command does not start here
            self._environ.update({data_variable(name): root for name in sources})
            return
        try:
            staged = stage_data(sources, root, context)
        except DataError as error:
            code = TRY_ELSEWHERE if error.temporary else CONFIGURATION_ERROR
            raise NotStarted(code, str(error)) from error
        self._environ.update(staged.variables())
        self._environ[STAGED] = f"{staged.seconds:.2f}"

    def _fetch_checkpoints(self) -> None:
        """Copy checkpoints from another run, or from the run's store if no folder keeps them."""
        if "BATCHML_RESUME" in self._environ and self._env.is_run and self._trial is None:
            from batchml.runtime.checkpoint.resume import resume

            resume(self._env, self._environ, self._output.say, self._signals.check)
        if is_kept_in_store(self._env) and self._trial is None:
            from batchml.runtime.checkpoint.remote import fetch

            fetch(self._env, self._environ, self._output.say)

    def _watch_working_folder(self, sends_outputs: bool) -> None:
        """Remember the content of the working folder, and fetch files of an earlier attempt."""
        temporary = self._temporary.existing_path
        self._working = watch_working_folder(self._env, self._environ, temporary, sends_outputs)
        if self._working is None:
            return
        others: list[tuple[str, str]] = []
        if "BATCHML_RESUME" in self._environ and self._trial is None:
            from batchml.runtime.checkpoint.resume import kept_places

            others = kept_places(self._env, self._environ)
        self._keeper = open_keeper(
            self._working, self._env, self._environ, self._output.say, temporary, sends_outputs,
            others,
        )  # fmt: skip

    def _fetch(self, url: str) -> tuple[str, str]:
        """Return the path of a file of the submission, and its SHA-256 if it was downloaded."""
        if "://" not in url:
            return url, ""
        folder = self._temporary.path()
        return download(url, folder, self._environ, self._signals.check), digest_in_name(url)

    # --- While the command runs, and after --------------------------------------------------------

    def _run_command(self, sends_outputs: bool) -> int:
        become_reaper()
        env, output = self._env, self._output
        if "GPU-" in self._environ.get("NVIDIA_VISIBLE_DEVICES", ""):
            from batchml.runtime.telemetry.gpus import with_own_gpus

            self._environ = with_own_gpus(self._environ, os.listdir("/dev"))
        store = open_store(env.store, self._environ, limits=BRIEF) if env.store else None
        running = RunningAttempt(env, self._environ, output, self._signals, store, sends_outputs)
        plugins = _make_plugins(running)
        if self._trial is not None:
            trial = self._trial
            trial.start(running)
            output.listener = trial.read_output
            plugins.add("the trial's watch", lambda: trial)
        if self._keeper is not None:
            keeper = self._keeper
            plugins.add("the keeper of the working folder", lambda: keeper)
        supervised = self._supervise()
        program = self._start(supervised)
        if supervised is not None:
            self._watch_supervisor(supervised, program.pid, running, plugins)
        outputs = None
        if sends_outputs:
            output_store = open_store(env.store, self._environ)
            outputs = OutputSender(env.output_dir, output_store, output_prefix(self._environ))
            outputs.start()
        code = copy_output(program, self._signals.wake, output, running, plugins, self._trial)
        running.code = shell_code(code)
        plugins.finish()
        left = self._working.describe_leftovers() if self._working and not self._keeper else ""
        if left:
            # Not "batchml: ", which begins the reason why a run did not start.
            output.say(f"batchml notice: {left}")
        if outputs is not None:
            _report_outputs(outputs.finish(), output)
        if self._keeper is not None:
            self._keeper.end(was_killed=shell_code(code) == 128 + signal.SIGKILL)
        verdict = supervised.verdict(code) if supervised is not None else None
        self.by_runtime = running.forced is not None or verdict is not None
        if verdict is not None:
            self._report_verdict(verdict)
            code = verdict.code
        if running.forced is not None:
            return running.forced
        return shell_code(code)

    def _report_verdict(self, verdict: SupervisorVerdict) -> None:
        """Print why this node's supervisor has ended, if it could not print that itself."""
        if not verdict.is_said:
            self._output.say(f"batchml: {verdict.why}")
        if verdict.news and not self._signals.stop_signal:
            from batchml.runtime.nodes.launcher import tell_main_node

            tell_main_node(self._environ, verdict.news, self._signals.wait_for_stop)

    def _start(self, supervised: Optional[SupervisedCommand]) -> Program:
        if supervised is not None:  # it divides the processors among the processes that it starts
            with signals_blocked():
                return Program(supervised.command, supervised.environ)
        processors = count_processors(self._environ)
        return Program(self._command, with_processors(self._environ, processors))

    def _supervise(self) -> Optional[SupervisedCommand]:
        """The supervisor that is started instead of the command; None for a plain command."""
        if self._plan is None:
            return None
        from batchml.runtime.nodes.launcher import supervise

        return supervise(self._plan, self._command, self._environ, self._temporary.path())

    def _watch_supervisor(
        self,
        supervised: SupervisedCommand,
        pid: int,
        running: RunningAttempt,
        plugins: AttemptPlugins,
    ) -> None:
        from batchml.runtime.nodes.launcher import SupervisorWatch

        running.delegate_to(pid, supervised.stop_request, supervised.makes_stop_file)
        plugins.add("the watch of the supervisor", lambda: SupervisorWatch(pid, running.say))


def _make_plugins(running: RunningAttempt) -> AttemptPlugins:
    plugins = AttemptPlugins(running.say, time.monotonic() + FIRST_TICK)
    if running.env.is_run:
        from batchml.runtime.health.neurons import asked_neurons
        from batchml.runtime.telemetry.budget import BudgetGuard
        from batchml.runtime.telemetry.gpus import has_gpus
        from batchml.runtime.telemetry.metrics import MetricsRelay
        from batchml.runtime.telemetry.spot import SpotWatcher
        from batchml.runtime.telemetry.usage import UsageReporter

        plugins.add("the budget guard", lambda: BudgetGuard(running))
        plugins.add("the relay of metrics", lambda: MetricsRelay(running))
        plugins.add("the usage reporter", lambda: UsageReporter(running))
        plugins.add("the watch for spot notices", lambda: SpotWatcher(running))
        if is_kept_in_store(running.env):
            from batchml.runtime.checkpoint.remote import CheckpointKeeper

            plugins.add("the keeper of checkpoints", lambda: CheckpointKeeper(running))
        if has_gpus(running.environ):
            from batchml.runtime.health.xid import GpuWatcher

            plugins.add("the watch of the GPUs", lambda: GpuWatcher(running))
        if asked_neurons(running.environ):
            from batchml.runtime.health.neuron_watch import NeuronWatcher

            plugins.add("the watch of the Neuron chips", lambda: NeuronWatcher(running))
    return plugins


def _report_outputs(problems: Sequence[str], output: Output) -> None:
    if problems:
        output.say(f"batchml: {len(problems)} outputs could not be kept:")
    for line in problems[:_NAMED_OUTPUTS]:
        output.say(f"batchml:   {line}")


def run_once(environ: Mapping[str, str] = os.environ) -> int:
    """Run the command line, and return the exit code. `environ`: a copy of its variables."""
    drop_working_folder()
    try:
        return run(sys.argv[1:], environ, sys.stdout.buffer)
    except BrokenPipeError:  # the log driver has gone
        return TRY_ELSEWHERE
    except BaseException:  # a mistake of our own
        import traceback

        traceback.print_exc()
        return 70


def main() -> None:
    """Run the command line. It never returns, because Python's exit would reset signal handlers."""
    code = 70
    try:
        keep_files()
        code = run_once()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
