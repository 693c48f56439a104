"""ls: list current and past runs."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from batchml.cli.app import app
from batchml.cli.options import (
    AllProjects,
    Env,
    Json,
    Project,
    open_context,
    read_pairs,
    read_seconds,
)
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable, run_json, table
from batchml.config.project import (
    folder_above,
    folder_project,
    project_name,
    short_project,
)
from batchml.errors import UsageError, did_you_mean
from batchml.model.run import CANNOT_START, JobStatus
from batchml.runs.commands.next_commands import short_word
from batchml.runs.compare.columns import (
    DEFAULT,
    FACTS,
    Column,
    known_names,
    metric_column,
    param_column,
    read_column,
    to_rows,
)
from batchml.runs.compare.facts import describe_unused, unused_params
from batchml.runs.compare.first import find_first
from batchml.runs.compare.newest import find, find_all, measure_runs
from batchml.runs.groups.members import record_bills
from batchml.runs.metrics.conditions import NO_METRICS, MetricValue, read_condition
from batchml.runs.search import (
    MAX_OTHERS,
    FoundRun,
    RunFilter,
    SkippedRuns,
    read_commit,
    read_states,
    run_as_submitted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchml.context import Context
    from batchml.model.run import Record
    from batchml.runs.compare.columns import KnownNames


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
    workers: Annotated[
        bool, typer.Option("--workers", help="Also list the workers of group runs.")
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Show these columns: facts, parameters, metrics, max(METRIC)."
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Sort by this column; -COLUMN for the greatest first."),
    ] = None,
    all_: AllProjects = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List at most this many.")] = 30,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """List the project's runs, newest first.

    Runs that were submitted from this machine are listed longer than AWS Batch keeps them. Runs of
    sweeps are listed only with --tag batchml:sweep=KEY or --job NAME.
    """
    if columns is not None and json_:
        raise UsageError("--columns cannot be combined with --json, which has all values.")
    context = open_context(env, project, all_projects=all_)
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
        include_workers=workers,
        project="" if all_ else context.project,
    )
    if sort is None:
        key = None
        found, more, left_out = find(context, wanted, limit)
    else:
        key = _sort_column(context, wanted, sort.removeprefix("-"))
        by = key
        found, more, left_out = find_first(
            context.history, context.env, lambda *words: find_all(context, *words),
            lambda runs: _complete(context, runs, [by]), wanted, limit, by, now,
            descending=sort.startswith("-"),
        )  # fmt: skip
    chosen = _read_columns(context, found, wanted, columns, key)
    found = _complete(context, found, [each for each in chosen if each is not key])
    if context.settings.is_local:  # in AWS a call for it would make `ls` slower: `top` shows it
        found = _with_idleness(context, found, now)
    if json_:
        print_json([found_json(context, each) for each in found])
        return
    if found:
        chosen = [_with_labels(context, each, found) for each in chosen]
        rows = [[printable(cell) for cell in row] for row in to_rows(chosen, found, now)]
        print_line(table(rows, keep=columns is not None))
        if FACTS["cost"] in chosen:
            from batchml.cost.render import FREE
            from batchml.cost.service import is_free

            if is_free(context):
                say(FREE)
        notes = _unused_params(chosen, found)
        if notes:
            say(printable(notes))
        say_without_direction([each.metric for each in chosen if each.metric], found)
        if any(each.metric for each in chosen) and not any(each.metrics for each in found):
            say(NO_METRICS)
        if more:
            say(f"The {'first' if sort else 'newest'} {limit} are shown; --limit shows more.")
        elif sys.stdout.isatty():
            _say_next_commands(context, found)
    elif not left_out.sweeps:  # else the message about sweeps follows
        say(_nothing_found(context, wanted, left_out))
        say_without_direction(wanted.values, context.history.records(context.env))
    if left_out.sweeps:
        say(_about_sweeps(context, all_=all_))
    if left_out.is_cut and not context.settings.is_local:
        say(
            f"Over {MAX_OTHERS:,} newer runs are of other projects: older runs that were submitted "
            "elsewhere are not listed. --job NAME searches further."
        )
    _say_held_back(found)
    _say_unconfirmed(context, wanted.project)


def _read_columns(
    context: "Context",
    found: "Sequence[FoundRun]",
    wanted: RunFilter,
    columns: str | None,
    key: Column | None,
) -> list[Column]:
    """The columns of the table. Raises UsageError.

    Without `columns` the table has the usual ones, those of the filter, and `key`, by which it is
    sorted.
    """
    if columns is not None:
        known = _known_names(context, found, wanted)
        return [read_column(name, "--columns", known) for name in columns.split(",")]
    chosen = [FACTS[name] for name in DEFAULT]
    chosen += [FACTS["project"]] if not wanted.project else []
    chosen += [metric_column(each) for each in dict.fromkeys(wanted.values)]
    chosen += [param_column(name) for name in wanted.params]
    is_new = key is not None and key.heading not in {column.heading for column in chosen}
    return [*chosen, key] if key is not None and is_new else chosen


def _sort_column(context: "Context", wanted: RunFilter, word: str) -> Column:
    """The column to sort by. Raises UsageError."""
    try:
        return read_column(word, "--sort", _known_names(context, (), wanted))
    except UsageError:  # perhaps a name that only runs of sweeps have, or runs from elsewhere
        found = find_all(context, wanted)
        return read_column(word, "--sort", _known_names(context, found, wanted))


def _known_names(
    context: "Context", found: "Iterable[FoundRun]", wanted: RunFilter
) -> "KnownNames":
    kept = context.history.column_names(context.env, wanted.project)
    return known_names(found, kept["param"], kept["metric"])


def _with_labels(context: "Context", column: Column, found: "Sequence[FoundRun]") -> Column:
    """The column with short names of queues, and full ones of projects that share a name."""
    if column.heading == FACTS["queue"].heading:
        return column._replace(text=lambda each, _: context.resource_label(each.queue))
    if column.heading == FACTS["project"].heading:
        known = [each.project for each in found]
        return column._replace(text=lambda each, _: short_project(each.project, known))
    return column


def _complete(
    context: "Context", found: "list[FoundRun]", columns: "Sequence[Column]"
) -> "list[FoundRun]":
    """The runs with what these columns show beyond the answers of AWS Batch."""
    found = measure_runs(context, found, [each.metric for each in columns if each.metric])
    return record_bills(context, found) if FACTS["cost"] in columns else found


def _with_idleness(context: "Context", found: "Sequence[FoundRun]", now: int) -> "list[FoundRun]":
    """The runs with the time for which they have been idle."""
    running = [each.run for each in found if each.run and each.run.status is JobStatus.RUNNING]
    if not running:
        return list(found)
    from batchml.runs.metrics.usage import read_idle_seconds

    idle = read_idle_seconds(context, running, now)
    return [
        replace(each, idle=idle[each.job_id]) if each.job_id in idle else each for each in found
    ]


def say_without_direction(
    values: "Sequence[MetricValue]", runs: "Iterable[FoundRun | Record]"
) -> None:
    """Say which best values are unknown because no run says what the best is."""
    names = dict.fromkeys(each.name for each in values if each.function == "best")
    if not names:
        return
    records = (each.record if isinstance(each, FoundRun) else each for each in runs)
    known = {name for record in records if record for name in record.directions}
    for name in names:
        if name not in known:
            say(
                f"best({name}) is unknown: no run says which value is the best. In job.toml: "
                f'[metrics] {name} = {{ best = "max" }}, or "min".'
            )


def _unused_params(columns: "Sequence[Column]", found: "Iterable[FoundRun]") -> str:
    """The note about parameters in these columns that the commands of runs do not use."""
    headings = {column.heading for column in columns}
    unused = [name for each in found for name in unused_params(each)]
    return describe_unused(
        name for name in unused if name in headings or FACTS["params"].heading in headings
    )


def _nothing_found(context: "Context", wanted: RunFilter, left_out: SkippedRuns) -> str:
    """Why the table is empty."""
    is_filtered = replace(wanted, project="", include_workers=False) != RunFilter()
    known = context.history.projects() if wanted.project else []
    name = short_project(wanted.project, known)
    if is_filtered:
        where = f" in the project {name}; --all searches all projects" if left_out.passed else ""
        return f"No runs match{where}.{_unknown_metrics(context, wanted)}"
    above = folder_above(str(context.folder), left_out.of_projects)
    if above and wanted.project == context.settings.own_project:
        found = folder_project(above)
        word = short_project(found, known)
        return (
            f"No runs in the project {name}; {left_out.of_projects[found]} in the project {word}, "
            f"the folder above: --project {word}."
        )
    if left_out.others:
        meant = "" if wanted.project in known else did_you_mean(name, map(project_name, known))
        more = " or more" if left_out.is_cut else ""
        return f"No runs in the project {name}; {left_out.others}{more} in others: --all.{meant}"
    return "No runs. `batchml submit --wait lenet` starts one."


def _about_sweeps(context: "Context", *, all_: bool) -> str:
    """The message that runs of sweeps were left out; not how many, as the search is limited."""
    options = context.env_option + (" --all" if all_ else context.project_option)
    return (
        f"Runs of sweeps are left out: batchml sweeps ls{options} lists sweeps, and "
        f"batchml ls --tag batchml:sweep=KEY{options} the runs of one."
    )


def _unknown_metrics(context: "Context", wanted: RunFilter) -> str:
    """A sentence for each metric of the filter that no run has: it is probably misspelt."""
    known = context.history.metric_names(context.env) if wanted.metrics else set[str]()
    names = dict.fromkeys(condition.name for condition in wanted.metrics)
    return "".join(
        f" No run from here has a metric {name!r}.{did_you_mean(name, known)}"
        for name in names
        if name not in known and name.rpartition(":")[0] not in known
    )


def _say_next_commands(context: "Context", found: "Sequence[FoundRun]") -> None:
    """Print next commands for one run of the table, preferably a failed run."""
    failed = [each for each in found if each.run and each.run.status is JobStatus.FAILED]
    word = short_word(context, (failed or found)[0].shown_id)
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
    times = found.times(int(context.clock.now() * 1000))
    return table | {
        "ran": times.ran,
        "waited": times.waited,
        "env": context.env,
        "project": found.project or None,
        "params": found.params,
        "tags": found.tags,
        "commit": found.commit or None,
        "metrics": found.metrics,
        "metricsFirst": found.first_metrics,
        "metricsBest": found.best_metrics,
        "cost": found.cost,
        **({"idle": found.idle} if found.idle else {}),
    }


def _say_held_back(found: "Sequence[FoundRun]") -> None:
    reasons = (each.run.status_reason for each in found if each.run)
    held_back = next((text for text in reasons if text.startswith(CANNOT_START)), "")
    if held_back:
        say(f"{held_back}. Waiting runs start by themselves once this is fixed.")


def _say_unconfirmed(context: "Context", project: str) -> None:
    """Print how many submissions have an unknown outcome, since they are not in the table."""
    unconfirmed = context.history.unconfirmed(context.env)
    count = sum(project in ("", each.project) for each in unconfirmed)
    if count:
        what = "submission" if count == 1 else "submissions"
        say(f"{count} {what} without an answer: `batchml reconcile` finds out if there is a run.")
