"""ls: list current and past runs."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, open_context, read_pairs, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import duration, run_json
from batchml.errors import did_you_mean
from batchml.model.names import short_id
from batchml.model.run import CANNOT_START, NOT_KNOWN, JobStatus
from batchml.runs.commands.next_commands import short_word
from batchml.runs.find import find
from batchml.runs.search import (
    FoundRun,
    RunFilter,
    read_commit,
    read_condition,
    read_states,
    run_as_submitted,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from batchml.context import Context


@app.command(epilog="Example: batchml ls --status RUNNING --tag team=vision")
def ls(
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE", help="List only runs of this state or class. May be repeated."
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="List only runs of this queue.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="List only runs of this name.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="List only runs with this tag.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="K=V", help="List only runs with this parameter."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION", help="List only runs with this metric: 'max(accuracy)>0.98'."
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="ID", help="List only runs of this git commit.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DURATION", help='List only runs of the last "2h", "7d".')
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also list the workers of group runs.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="List at most this many, the newest.")
    ] = 30,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List runs, newest first.

    Runs that were submitted from this machine are listed longer than AWS Batch keeps them. Runs of
    sweeps are listed only with --tag batchml:sweep=KEY or --job NAME.
    """
    context = open_context(env)
    now = int(context.clock.now() * 1000)
    seconds = read_seconds(since, "--since")
    wanted = RunFilter(
        states=read_states(status or (), "--status"),
        queue=context.queue(queue) if queue else "",
        name=job or "",
        since=now - seconds * 1000 if seconds is not None else 0,
        tags=read_pairs(tag, "--tag"),
        params=read_pairs(param, "--param"),
        metrics=tuple(read_condition(text, "--metric") for text in metric or ()),
        commit=read_commit(commit, "--commit") if commit else "",
        include_workers=all_,
    )
    found, more, sweeps = find(context, wanted, limit)
    if json_:
        print_json([found_json(context, each) for each in found])
        return
    if found:
        print_line(_table(found, wanted, now))
        if more:
            say(f"The newest {limit} are shown; --limit shows more.")
        elif sys.stdout.isatty():
            _say_next_commands(context, found)
    elif sweeps:
        pass  # the message about sweeps follows
    elif wanted not in (RunFilter(), RunFilter(include_workers=True)):
        say(f"No runs match.{_unknown_metrics(context, wanted)}")
    else:
        say("No runs. `batchml submit --wait lenet` starts one.")
    if sweeps:
        say(_about_sweeps(context, sweeps))
    _say_held_back(found)
    _say_unconfirmed(context)


def _about_sweeps(context: "Context", sweeps: "Collection[str]") -> str:
    """The message about sweeps whose runs were left out."""
    whose = "1 sweep" if len(sweeps) == 1 else f"{len(sweeps)} sweeps"
    key = next(iter(sweeps)) if len(sweeps) == 1 else "KEY"
    return (
        f"Runs of {whose} are left out: batchml sweeps ls{context.env_option} lists sweeps, and "
        f"batchml ls --tag batchml:sweep={key}{context.env_option} the runs of one."
    )


def _unknown_metrics(context: "Context", wanted: RunFilter) -> str:
    """A sentence for each metric of the filter that no run has: it is probably misspelt."""
    records = context.history.newest_first(context.env) if wanted.metrics else ()
    known = {name.rpartition(":")[0] or name for record in records for name in record.metrics}
    names = dict.fromkeys(condition.name for condition in wanted.metrics)
    return "".join(
        f" No run from here has a metric {name!r}.{did_you_mean(name, known)}"
        for name in names
        if name not in known and name.rpartition(":")[0] not in known
    )


def _say_next_commands(context: "Context", found: "Sequence[FoundRun]") -> None:
    """Print next commands for one run of the table, preferably a failed run."""
    failed = [each for each in found if each.run and each.run.status is JobStatus.FAILED]
    word = short_word(context, (failed or found)[0].job_id)
    say(f"  more of one:  batchml show {word}")
    say(
        f"  why:          batchml explain {word}"
        if failed
        else f"  its output:   batchml logs {word}"
    )


def found_json(context: "Context", found: FoundRun) -> dict[str, Any]:
    """A run for `--json`: AWS's names, and values of the history; `status` is null if forgotten."""
    record, run = found.record, found.run
    if run is not None:
        table = run_json(run)
    else:
        assert record is not None
        table = run_json(run_as_submitted(record)) | {"status": None}
    return table | {
        "env": context.env,
        "params": found.params,
        "tags": found.tags,
        "commit": found.commit or None,
        "metrics": found.metrics,
        "metricsFirst": found.first_metrics,
        "metricsBest": found.best_metrics,
        "cost": found.cost,
    }


def _table(found: "Sequence[FoundRun]", wanted: RunFilter, now_ms: int) -> str:
    """The table, with a column for each metric and parameter of the filter."""
    from batchml.cli.render import printable, run_rows, table

    head, *rest = run_rows([each.run for each in found if each.run], now_ms)
    known = iter(rest)
    names = list(dict.fromkeys(condition.name for condition in wanted.metrics))
    rows = [[*head, *names, *wanted.params]]
    for each in found:
        row = next(known) if each.run else _forgotten_row(head, each, now_ms)
        rows.append(
            [
                *row,
                *(f"{each.metrics[name]:g}" if name in each.metrics else "" for name in names),
                *(str(each.params.get(name, "")) for name in wanted.params),
            ]
        )
    return table([[printable(cell) for cell in row] for row in rows])


def _forgotten_row(head: "Sequence[str]", found: FoundRun, now_ms: int) -> list[str]:
    cells = {
        "ID": short_id(found.job_id),
        "NAME": found.name,
        "QUEUE": found.queue,
        "STATUS": NOT_KNOWN,
        "AGE": duration((now_ms - found.created_at) / 1000),
    }
    return [cells.get(name, "") for name in head]


def _say_held_back(found: "Sequence[FoundRun]") -> None:
    reasons = (each.run.status_reason for each in found if each.run)
    held_back = next((text for text in reasons if text.startswith(CANNOT_START)), "")
    if held_back:
        say(f"{held_back}. Waiting runs start by themselves once this is fixed.")


def _say_unconfirmed(context: "Context") -> None:
    """Print how many submissions have an unknown outcome, since they are not in the table."""
    count = len(context.history.unconfirmed(context.env))
    if count:
        what = "submission" if count == 1 else "submissions"
        say(f"{count} {what} without an answer: `batchml reconcile` finds out if there is a run.")
