"""The root command: parse a command line, import the module of its command, and run it."""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from batchml.cli.output import print_error, say_error
from batchml.cli.terminal import end_interrupted
from batchml.errors import BatchmlError, EmptyOption, UsageError, did_you_mean

# Click's UsageError. Where typer keeps it depends on the version of typer.
ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]

# Command names of other programs, and our commands to suggest for them.
SYNONYMS = {
    "status": "ls", "ps": "ls", "list": "ls", "jobs": "ls", "runs": "ls", "history": "ls",
    "run": "submit", "start": "submit", "exec": "submit", "stop": "cancel", "kill": "cancel",
    "terminate": "cancel", "delete": "cancel", "rm": "cancel", "log": "logs", "tail": "logs",
    "follow": "logs -f", "attach": "logs -f", "describe": "show", "info": "show",
    "metrics": "show", "why": "explain", "download": "get", "fetch": "get", "retry": "rerun",
    "resubmit": "rerun", "price": "cost",
    "help": "--help", "version": "--version",
    # Slurm and ParallelCluster: docs/slurm.md.
    "sbatch": "submit", "srun": "submit --wait --", "salloc": "alloc", "squeue": "ls",
    "scancel": "cancel", "sinfo": "compute list", "sacct": "ls", "seff": "show",
    "awsbsub": "submit", "awsbstat": "ls", "awsbout": "logs", "awsbkill": "cancel",
    "awsbqueues": "queue list", "awsbhosts": "compute hosts",
}  # fmt: skip

# The sections of --help, and their commands in the order of use.
SECTIONS = {
    "Run": ("submit", "adopt", "wait", "get", "rerun", "cancel", "reconcile"),
    "Look": ("ls", "show", "logs", "top", "explain", "compare", "diff", "dashboard"),
    "Search": ("sweep", "sweeps"),
    "Work inside": ("shell", "notebook", "tensorboard", "forward", "alloc", "workspace"),
    "Money": ("cost",),
    "Environments": ("init", "doctor", "setup", "env", "prove", "teardown"),
    "AWS Batch things": ("compute", "queue", "jobdef", "image"),
    "This machine": ("local", "completion"),
}
ORDER = tuple(name for names in SECTIONS.values() for name in names)

# The modules that register each command. They register subcommands in the order of --help.
_MODULES = {
    "init": ("setup.commands.doctor",), "doctor": ("setup.commands.doctor",),
    "adopt": ("adopt.commands",),
    "submit": ("runs.commands.submit",), "alloc": ("sessions.commands.alloc",),
    "sweep": ("sweeps.commands.sweeps",),
    "sweeps": ("sweeps.commands.sweeps", "sweeps.commands.manage"),
    "ls": ("runs.commands.list",), "show": ("runs.commands.show",), "logs": ("runs.commands.logs",),
    "shell": ("sessions.commands.shell",), "forward": ("sessions.commands.shell",),
    "notebook": ("sessions.commands.notebook",), "tensorboard": ("sessions.commands.tensorboard",),
    "wait": ("runs.commands.wait",), "top": ("cluster.commands",), "explain": ("explain.commands",),
    "cost": ("runs.commands.cost",), "get": ("runs.commands.get",),
    "workspace": ("workspace.commands",),
    "diff": ("runs.commands.diff",), "compare": ("runs.commands.compare",),
    "cancel": ("runs.commands.wait",),
    "rerun": ("runs.commands.rerun",), "reconcile": ("runs.commands.reconcile",),
    "setup": ("setup.commands.setup",), "teardown": ("setup.commands.setup",),
    "env": ("setup.commands.env",), "compute": ("setup.commands.compute",),
    "prove": ("prove.commands",), "dashboard": ("dashboard.commands",),
    "queue": ("setup.commands.queues",), "jobdef": ("setup.commands.definitions",),
    "image": ("jobs.commands",), "local": ("setup.commands.local",),
    "completion": (), "attend": ("runs.commands.reconcile",),
}  # fmt: skip
_SIGPIPE = 141  # the exit code that shells report for a process that SIGPIPE killed


class Detached(typer.Exit):
    """Ends a command that has handled Ctrl-C, in the way that Ctrl-C ends other commands."""


class CheckedCommand(TyperCommand):
    """A command that refuses an empty value of an option, such as `--queue ""`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # As typed: a path would be read as the current folder.
        typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for option in self.params:
            value = typed.get(option.name or "")
            values = value if isinstance(value, list) else [value]
            is_empty = any(isinstance(each, str) and not each.strip() for each in values)
            if is_empty and option.param_type_name == "option":
                raise EmptyOption(option.opts[0])
        return super().parse_args(ctx, args)


class CommandTree(typer.Typer):
    """A typer application whose commands are checked."""

    def command(
        self, *args: Any, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(*args, **{"cls": CheckedCommand, **options})


class CommandGroup(TyperGroup):
    """A group whose --help shows the first sentence of each command's help, not shortened."""

    sections: Mapping[str, Sequence[str]] = {}  # title -> commands; empty: one section for all

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {
            name: command.get_short_help_str(limit=200)
            for name, command in commands.items()
            if command is not None and not command.hidden
        }
        widest = max(map(len, rows), default=0)
        for title, names in (self.sections or {"Commands": list(rows)}).items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), rows[name]) for name in names])


class RootGroup(CommandGroup):
    """The root command. The order of its commands does not depend on the order of imports."""

    sections = SECTIONS

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = [name for name in ORDER if name in self.commands]
        return names + sorted(set(self.commands) - set(names))

    usage_error = ""  # the message for the last wrong command line, for --json

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*args, **extra)
        except ClickUsageError as error:
            RootGroup.usage_error = error.format_message()  # type: ignore[attr-defined]
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except ClickUsageError as error:
            self._suggest(error, args[0])
            raise

    @staticmethod
    def _suggest(error: Any, word: str) -> None:
        """Name our command for a name of another program; typer suggests only similar names."""
        # 0.75: one of four letters is wrong, or two have changed places.
        names = [word] if word in SYNONYMS else get_close_matches(word, SYNONYMS, 1, 0.75)
        if word in SYNONYMS or (names and "Did you mean" not in error.message):
            hint = f"Did you mean 'batchml {SYNONYMS[names[0]]}'?"
            error.message = f"No such command {word!r}. {hint}"

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Exit with 141 when the reader of stdout has gone; typer would exit with 1."""
        try:
            return super().invoke(ctx)
        except ClickUsageError as error:
            RootGroup.usage_error = error.format_message()  # type: ignore[attr-defined]
            raise
        except Detached:
            end_interrupted()
            raise
        except KeyboardInterrupt:
            raise typer.Exit(end_interrupted()) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(_SIGPIPE) from None


app = CommandTree(
    name="batchml",
    cls=RootGroup,
    help="Run training containers on AWS Batch, or on this machine with the same commands.",
    epilog="Example: batchml submit --wait lenet",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 80},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def command_group(name: str, help_text: str, example: str) -> typer.Typer:
    """Register a group of commands, such as `local`, and return it."""
    group = CommandTree(
        cls=CommandGroup,
        help=help_text,
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


@app.command(epilog='Example: eval "$(batchml completion bash)"')
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands, options and names in a shell."""
    from batchml.cli.completion import SCRIPTS

    if shell not in SCRIPTS:
        raise UsageError(
            f"completion {shell}: no such shell.{did_you_mean(shell, SCRIPTS)} "
            f"Shells: {', '.join(SCRIPTS)}."
        )
    sys.stdout.write(SCRIPTS[shell])


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code. A BatchmlError is printed on stderr."""
    words, command = _split_command(list(arguments))
    code, message = _run(words, command)
    if message and "--json" in words:
        try:
            print_error(message, code)
        except OSError:
            _drop_output()
    return code


def _run(words: list[str], command: list[str] | None) -> tuple[int, str]:
    """Run `words`; the run's `command` is in `ctx.obj`. Return the exit code and the error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A job may print any characters; a terminal of another encoding shows "?".
            stream.reconfigure(errors="replace")
    _register(next((word for word in words if not word.startswith("-")), ""))
    try:
        try:
            app(args=words, prog_name="batchml", obj=command)
        finally:
            sys.stdout.flush()  # a full disk is reported as an error, not when Python ends
    except BatchmlError as error:
        say_error(error)
        return error.exit_code, str(error)
    except BrokenPipeError:
        _drop_output()
        return _SIGPIPE, ""
    except OSError as error:  # such as a full disk, a folder without permission
        where = f" ({error.filename})" if error.filename else ""
        message = f"{error.strerror or error}{where}"
        print(f"batchml: {message}", file=sys.stderr)
        _drop_output()
        return 1, message
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        return code, RootGroup.usage_error if code else ""
    return 0, ""


def full_command() -> Any:
    """Return the root command, with all commands, as a Click group."""
    _register("")
    return typer.main.get_command(app)


def _register(name: str) -> None:
    """Import the modules that register a command; without a known name, those of all commands.

    Typer builds every registered command, so a command line registers only the one that it names.
    """
    for modules in [_MODULES[name]] if name in _MODULES else _MODULES.values():
        for module in modules:
            import_module(f"batchml.{module}")


def why_it_waits(context: Any, job_id: str) -> str:
    """Say why a run waits, as `explain` does. Imported by name: that module is a layer above."""
    return str(import_module("batchml.explain.ask").waiting_reason(context, job_id))


def find_cause(context: Any, record: Any, run: Any, lines: Sequence[str]) -> str:
    """The cause of a failure that the last lines of a log show, as `explain` names it; "" without.

    Imported by name, as in `why_it_waits`.
    """
    return str(import_module("batchml.explain.ask").cause_in_log(context, record, run, lines))


def _drop_output() -> None:
    """Discard what stdout has buffered, and all further output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split_command(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split at the first `--`: the words after it are the run's command, and are not parsed."""
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
