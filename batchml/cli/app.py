"""The root of the command line: `run(arguments)` -> exit code."""

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from batchml.cli.following import Detached
from batchml.cli.hints import WrongLine, about_command
from batchml.cli.interrupt import end_interrupted
from batchml.cli.output import print_error, say_error
from batchml.errors import BatchmlError

# As --help lists them: a day's work from its start to its end, then places and what is in them.
ORDER = (
    "init", "doctor",
    "submit", "alloc", "sweep", "sweeps",
    "ls", "show", "logs", "shell", "forward", "notebook", "tensorboard", "wait", "top", "explain",
    "cost", "get", "workspace", "diff",
    "cancel", "rerun", "reconcile",
    "setup", "teardown", "env", "compute", "queue", "jobdef", "image", "local", "completion",
)  # fmt: skip

# The modules that have a command, where they are not of its name.
_MODULES = {
    "init": ("doctor",), "ls": ("listing",), "wait": ("ending",), "cancel": ("ending",),
    "teardown": ("setup",), "env": ("envs",), "compute": ("compute", "hosts"),
    "queue": ("queues", "queue_show"), "image": ("images",),
    "sweeps": ("sweeps", "sweeps_steering"), "attend": ("attend",),
}  # fmt: skip
_SIGPIPE = 141  # as a shell has it of who died of that signal


class _Root(TyperGroup):
    """Commands in a fixed order, whatever the order in which their modules were imported."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = [name for name in ORDER if name in self.commands]
        return names + sorted(set(self.commands) - set(names))

    wrong = ""  # what typer says of a line that cannot be read

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
        """Whoever read the output has gone: typer would end with 1, as a program may."""
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
        help=words, epilog=f"Example: {example}", no_args_is_help=True, rich_markup_mode=None
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
    """Run one command line. Errors of ours become one message on stderr and their exit code."""
    before, command = _split_command(list(arguments))
    code, message = _run(before, command)
    if message and "--json" in before:
        try:
            print_error(message, code)
        except OSError:
            _drop_output()
    return code


def _run(before: list[str], command: list[str] | None) -> tuple[int, str]:
    """The exit code, and what went wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a job prints may be anything; a terminal of another encoding shows "?" for it.
            stream.reconfigure(errors="replace")
    _register(next((word for word in before if not word.startswith("-")), ""))
    try:
        try:
            app(args=before, prog_name="batchml", obj=command)
        finally:
            sys.stdout.flush()  # here, where a full disk can still be told
    except BatchmlError as error:
        say_error(error)
        return error.exit_code, str(error)
    except BrokenPipeError:
        _drop_output()
        return _SIGPIPE, ""
    except OSError as error:  # of the system: a disk that is full, a folder that is not ours
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
    """All of the command line, as Click has it."""
    _register("")
    return typer.main.get_command(app)


def _register(name: str) -> None:
    """Import what has the command of this name, or all of them: each registers its own.

    One is enough for a line that names it: typer builds every command that it knows of.
    """
    known = {**{each: (each,) for each in ORDER}, **_MODULES}
    for modules in [known[name]] if name in known else known.values():
        for module in modules:
            import_module(f"batchml.cli.{module}")


def _drop_output() -> None:
    """Nothing more can be written to stdout, nor at exit what it still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split_command(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """What follows the first `--` is the run's command, never ours to parse."""
    if "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]
