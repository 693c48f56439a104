"""sweeps: those that there are, how one stands, what came of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.client.sweeping.looking import Onlooker
    from batchml.sweep.state import SweepState

sweeps_app = command_group(
    "sweeps",
    "Sweeps: how they stand, what came of them, and going on.",
    "batchml sweeps show @last",
)

OneSweep = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Key, prefix of one, name or @last.")
]


@sweeps_app.command("ls", epilog="Example: batchml sweeps ls")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 20,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the environment's sweeps, newest first."""
    from batchml.cli.sweep_rows import listed_json, listed_table
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.boards import list_boards
    from batchml.client.sweeping.looking import glance

    place = open_place(env)
    boards = list_boards(place)
    found = [glance(place, each) for each in boards[:limit]]
    if json_:
        return print_json([listed_json(each) for each in found])
    if not found:
        return say("No sweeps. `batchml sweep sweep.toml` starts one.")
    print_line(listed_table(found, place.clock.now()))
    if len(boards) > limit:
        say(f"The newest {limit} are shown; --limit shows more.")


@sweeps_app.command("show", epilog="Example: batchml sweeps show --follow @last")
def show(
    sweep: OneSweep,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Live, until it has ended.")
    ] = False,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="One trial, and why it failed.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show how a sweep stands, once or live.

    Looking begins no trials: a sweep that waits for its controller goes on
    with `sweeps resume`.
    """
    from batchml.cli.sweep_table import draw, watching
    from batchml.cli.sweep_ways import ways_on
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.looking import Onlooker

    place = open_place(env)
    frozen, board = find(place, sweep)
    onlooker = Onlooker(place, frozen, board)
    if trial is not None:
        if follow:
            raise UsageError("--trial and --follow go one at a time: batchml logs -f follows one.")
        return _show_trial(place, frozen, onlooker.state, trial, json_=json_)
    if json_:
        from batchml.cli.sweep_rows import shown_json

        picture = onlooker.look()
        return print_json(
            shown_json(frozen, onlooker.state, picture, onlooker.summary, onlooker.holder())
        )
    if not follow:
        from batchml.cli.colour import screen

        picture = onlooker.look()
        print_line("\n".join([draw(picture, frozen, screen()), *_results(onlooker)]))
        return say(ways_on(place, frozen, onlooker.state, picture, onlooker.holder()))
    with watching(frozen, to_stderr=False) as view:
        try:
            for picture in onlooker.pictures():
                view.show(picture)
        except KeyboardInterrupt:
            return
    for line in _results(onlooker):
        print_line(line)
    say(ways_on(place, frozen, onlooker.state, onlooker.look(), ""))


def _results(onlooker: "Onlooker") -> list[str]:
    """What there is beside the best: trials that were run again, those that no other beats."""
    from batchml.cli.sweep_best import again_lines, front_lines

    summary = onlooker.summary
    return [*again_lines(summary.confirmed), *front_lines(summary.pareto)]


def _show_trial(
    place: "Place", frozen: "Frozen", state: "SweepState", number: int, *, json_: bool
) -> None:
    from batchml.cli import sweep_trial

    trial = sweep_trial.trial_of(frozen, state, number)
    if json_:
        return print_json(sweep_trial.told_json(frozen, trial, state))
    print_line(sweep_trial.told(place, frozen, trial, place.clock.now()))


@sweeps_app.command("best", epilog="Example: batchml sweeps best @last --command")
def best(
    sweep: OneSweep,
    count: Annotated[int, typer.Option("-n", min=1, metavar="K", help="How many.")] = 1,
    command: Annotated[
        bool, typer.Option("--command", help="Only the command that runs it, for a shell.")
    ] = False,
    get: Annotated[
        Path | None,
        typer.Option(
            "--get", metavar="DIR", help="A job there: its code, job.toml, outputs, checkpoint."
        ),
    ] = None,
    job: Annotated[
        bool, typer.Option("--job", help="Only the job.toml with its parameters.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show the best trials, or fetch the best one."""
    from batchml.cli import sweep_best
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.looking import Onlooker

    if sum((command, job, get is not None)) > 1:
        raise UsageError("--command, --job and --get go one at a time.")
    place = open_place(env)
    frozen, board = find(place, sweep)
    state = Onlooker(place, frozen, board).state
    trials = sweep_best.leaders(frozen, state)[:count]
    if not trials:
        raise sweep_best.nothing_yet(frozen, state)
    if json_ and get is None:
        return print_json(sweep_best.best_json(frozen, trials, state))
    if command:
        from batchml.sweep.report.subject import command_line

        return print_line("\n".join(command_line(frozen.job_spec, each) for each in trials))
    if job:
        return print_line(sweep_best.job_file(frozen, trials[0]))
    if get is not None:
        return sweep_best.fetch(place, frozen, board, trials[0], state, get, json_=json_)
    print_line(sweep_best.best_text(frozen, trials, state))


@sweeps_app.command("report", epilog="Example: batchml sweeps report @last -o lenet.html")
def report(
    sweep: OneSweep,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="NAME-KEY.html here unless given."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Write a sweep as an HTML page, and as CSV and JSON.

    The page needs no network and no server, and can be written at any time.
    """
    from batchml.cli.render import printable
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.looking import Onlooker
    from batchml.sweep.report.writing import beside, write_report

    place = open_place(env)
    frozen, board = find(place, sweep)
    path = output or Path(f"{frozen.name}-{frozen.key[:8]}.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {path}: the name must end in .html.")
    _check_folder(f"-o {path}", path)
    state = Onlooker(place, frozen, board).state
    write_report(frozen, state, path, place.clock)
    table, document = beside(path)
    if json_:
        files = {"html": path, "csv": table, "json": document}
        return print_json(
            {"sweepId": frozen.key, "trials": len(state.trials)}
            | {name: str(each.absolute()) for name, each in files.items()}
        )
    size = path.stat().st_size
    print_line(printable(str(path)))
    say(f"{len(state.trials):,} trials, {size // 1024:,} KiB; beside it {table.name} and "
        f"{document.name}.")  # fmt: skip


@sweeps_app.command("export", epilog="Example: batchml sweeps export @last --optuna lenet.log")
def export(
    sweep: OneSweep,
    optuna: Annotated[
        Path | None,
        typer.Option("--optuna", metavar="FILE", help="A journal for Optuna and its dashboard."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Write the trials for Optuna and its dashboard.

    `sweeps report` writes CSV and JSON.
    """
    from batchml.cli.render import printable
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.looking import Onlooker
    from batchml.sweep.export import write_journal

    if optuna is None:
        raise UsageError(
            "export needs to know for whom: --optuna FILE. For CSV and JSON: batchml sweeps report."
        )
    _check_folder(f"--optuna {optuna}", optuna)
    place = open_place(env)
    frozen, board = find(place, sweep)
    state = Onlooker(place, frozen, board).state
    count = write_journal(optuna, frozen.name, frozen.spec, state, place.clock.now())
    if json_:
        return print_json({"sweepId": frozen.key, "trials": count, "file": str(optuna.absolute())})
    print_line(printable(str(optuna)))
    say(f"{count:,} trials. To look at them: optuna-dashboard {printable(str(optuna))}")


def _check_folder(given: str, path: Path) -> None:
    """Raises UsageError for a file whose folder is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"{given}: there is no folder {path.parent}. Make it first.")


def find(place: "Place", word: str) -> "tuple[Frozen, Board]":
    """The sweep that a word means. Raises NotFound."""
    from batchml.client.sweeping.boards import find_sweep
    from batchml.client.sweeping.freezing import read_frozen
    from batchml.errors import NotFound

    board = find_sweep(place, word)
    frozen = read_frozen(board)
    if frozen is None:
        raise NotFound("Sweep", word, [], "`batchml sweeps ls` shows them.")
    return frozen, board
