"""The root of the command line: `run(arguments)` -> exit code."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from batchml.cli.exit import Detached, end_interrupted
from batchml.cli.output import print_error, say_error
from batchml.errors import BatchmlError

# The error for a wrong command line. Where typer keeps its name depends on the version.
WrongLine: type[Exception] = typer.BadParameter.__mro__[1]

# Words of other programs for our commands.
SYNONYMS = {
    "status": "ls", "ps": "ls", "list": "ls", "jobs": "ls", "runs": "ls", "history": "ls",
    "run": "submit", "start": "submit", "exec": "submit", "stop": "cancel", "kill": "cancel",
    "terminate": "cancel", "delete": "cancel", "rm": "cancel", "log": "logs", "tail": "logs",
    "follow": "logs -f", "attach": "logs -f", "describe": "show", "info": "show", "why": "explain",
    "download": "get", "fetch": "get", "retry": "rerun", "resubmit": "rerun", "price": "cost",
    "help": "--help", "version": "--version",
    # Slurm and ParallelCluster: docs/slurm.md.
    "sbatch": "submit", "srun": "submit --wait --", "salloc": "alloc", "squeue": "ls",
    "scancel": "cancel", "sinfo": "compute list", "sacct": "ls", "seff": "show",
    "awsbsub": "submit", "awsbstat": "ls", "awsbout": "logs", "awsbkill": "cancel",
    "awsbqueues": "queue list", "awsbhosts": "compute hosts",
}  # fmt: skip

# The commands as --help lists them, each group in the order of use.
GROUPS = {
    "Run": ("submit", "wait", "get", "rerun", "cancel", "reconcile"),
    "Look": ("ls", "show", "logs", "top", "explain", "diff"),
    "Search": ("sweep", "sweeps"),
    "Work inside": ("shell", "notebook", "tensorboard", "forward", "alloc", "workspace"),
    "Money": ("cost",),
    "Environments": ("init", "doctor", "setup", "env", "teardown"),
    "AWS Batch things": ("compute", "queue", "jobdef", "image"),
    "This machine": ("local", "completion"),
}
ORDER = tuple(name for names in GROUPS.values() for name in names)

# The modules that register each command, in the order of their subcommands.
_MODULES = {
    "init": ("setup.commands.doctor",), "doctor": ("setup.commands.doctor",),
    "submit": ("runs.commands.submit",), "alloc": ("sessions.commands.alloc",),
    "sweep": ("sweeps.commands.sweeps",),
    "sweeps": ("sweeps.commands.sweeps", "sweeps.commands.manage"),
    "ls": ("runs.commands.list",), "show": ("runs.commands.show",), "logs": ("runs.commands.logs",),
    "shell": ("sessions.commands.shell",), "forward": ("sessions.commands.shell",),
    "notebook": ("sessions.commands.notebook",), "tensorboard": ("sessions.commands.tensorboard",),
    "wait": ("runs.commands.wait",), "top": ("cluster.commands",), "explain": ("explain.commands",),
    "cost": ("runs.commands.cost",), "get": ("runs.commands.get",),
    "workspace": ("workspace.commands",),
    "diff": ("runs.commands.diff",), "cancel": ("runs.commands.wait",),
    "rerun": ("runs.commands.rerun",), "reconcile": ("runs.commands.reconcile",),
    "setup": ("setup.commands.setup",), "teardown": ("setup.commands.setup",),
    "env": ("setup.commands.env",), "compute": ("setup.commands.compute",),
    "queue": ("setup.commands.queues",), "jobdef": ("setup.commands.definitions",),
    "image": ("jobs.commands",), "local": ("setup.commands.local",),
    "completion": ("cli.commands",), "attend": ("runs.commands.reconcile",),
}  # fmt: skip
_SIGPIPE = 141  # as shells report a process that SIGPIPE killed


class CommandGroup(TyperGroup):
    """A group whose --help shows the first sentence of each command's help, whole."""

    sections: Mapping[str, Sequence[str]] = {}  # title -> commands; none: one section

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {
            name: (name, command.get_short_help_str(limit=200))
            for name, command in shown.items()
            if command is not None and not command.hidden
        }
        widest = max(map(len, rows), default=0)
        for title, names in (self.sections or {"Commands": list(rows)}).items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(widest), text) for name, text in (rows[each] for each in names)]
                )


class _Root(CommandGroup):
    """Commands in a fixed order, whatever the order in which their modules were imported."""

    sections = GROUPS

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = [name for name in ORDER if name in self.commands]
        return names + sorted(set(self.commands) - set(names))

    wrong = ""  # typer's message for a wrong command line

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except WrongLine as error:
            _Root.wrong = error.format_message()  # type: ignore[attr-defined]
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except WrongLine as error:
            hint = about_command(args[0])
            if hint:
                error.message = f"No such command {args[0]!r}. {hint}"  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Exit with 141 when the reader of stdout has gone; typer would exit with 1."""
        try:
            return super().invoke(ctx)
        except WrongLine as error:
            _Root.wrong = error.format_message()  # type: ignore[attr-defined]
            raise
        except Detached:
            end_interrupted()
            raise
        except KeyboardInterrupt:
            raise typer.Exit(end_interrupted()) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(_SIGPIPE) from None


app = typer.Typer(
    name="batchml",
    cls=_Root,
    help="Run training containers on AWS Batch, or on this machine by the same commands.",
    epilog="Example: batchml submit --wait lenet",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 80},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def command_group(name: str, words: str, example: str) -> typer.Typer:
    """A group of commands below the root, such as `local`."""
    group = typer.Typer(
        cls=CommandGroup,
        help=words,
        epilog=f"Example: {example}",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.add_typer(group, name=name)
    return group


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from batchml import __version__

        print(f"batchml {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """Run one command line. A BatchmlError becomes one message on stderr and its exit code."""
    before, command = _split_command(list(arguments))
    code, message = _run(before, command)
    if message and "--json" in before:
        try:
            print_error(message, code)
        except OSError:
            _drop_output()
    return code


def _run(before: list[str], command: list[str] | None) -> tuple[int, str]:
    """The exit code, and the error message."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A job may print any characters; a terminal of another encoding shows "?".
            stream.reconfigure(errors="replace")
    _register(next((word for word in before if not word.startswith("-")), ""))
    try:
        try:
            app(args=before, prog_name="batchml", obj=command)
        finally:
            sys.stdout.flush()  # here a full disk can still be reported
    except BatchmlError as error:
        say_error(error)
        return error.exit_code, str(error)
    except BrokenPipeError:
        _drop_output()
        return _SIGPIPE, ""
    except OSError as error:  # of the system: a full disk, a folder without permission
        where = f" ({error.filename})" if error.filename else ""
        message = f"{error.strerror or error}{where}"
        print(f"batchml: {message}", file=sys.stderr)
        _drop_output()
        return 1, message
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        return code, _Root.wrong if code else ""
    return 0, ""


def whole() -> Any:
    """The whole command line as a Click group."""
    _register("")
    return typer.main.get_command(app)


def _register(name: str) -> None:
    """Import the modules of this command, or of all commands: each module registers its own.

    One is enough for a command line that names it: typer builds every registered command.
    """
    for modules in [_MODULES[name]] if name in _MODULES else _MODULES.values():
        for module in modules:
            import_module(f"batchml.{module}")


def why_it_waits(context: Any, job_id: str) -> str:
    """Why a run waits, in the words of `explain`: a higher room, so it is called by name."""
    return str(import_module("batchml.explain.ask").waiting_reason(context, job_id))


def about_command(word: str) -> str:
    """A suggestion for a word that other programs use for one of our commands."""
    return f"Did you mean 'batchml {SYNONYMS[word]}'?" if word in SYNONYMS else ""


def _drop_output() -> None:
    """Discard further output on stdout, and what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split_command(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The words after the first `--` are the run's command and are not parsed."""
    if "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]
