"""submit, ls, show, logs, wait, cancel."""

import sys
from typing import Annotated, Any

import typer

from batchml.cli import following
from batchml.cli.app import app
from batchml.cli.flags import Env, Json, read_pairs, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Job id, prefix, name or @last.")]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="Job id, prefix, name or @last.")]


@app.command(epilog="Example: batchml submit --wait lenet -p epochs=10")
def submit(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="A folder with a job.toml, or its name.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--detach", help="Stream the log and exit with the job's code.")
    ] = False,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", metavar="K=V", help="Set a parameter.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    queue: Annotated[str | None, typer.Option(help="Job queue.")] = None,
    image: Annotated[str | None, typer.Option(help="Image, instead of the job's.")] = None,
    vcpus: Annotated[int | None, typer.Option(help="vCPUs.")] = None,
    memory: Annotated[str | None, typer.Option(help='Memory, such as "8 GiB".')] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs.")] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Start after this run succeeded.")
    ] = None,
    attempts: Annotated[int | None, typer.Option(help="Tries in all.")] = None,
    retry_on: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Try again after this; host-lost unless given."),
    ] = None,
    timeout: Annotated[str | None, typer.Option(help='Of one attempt, such as "4h".')] = None,
    set_env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Set a variable of the run.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Tag the run.")] = None,
    share: Annotated[
        str | None, typer.Option(help="Of a fair-share queue; your user name unless given.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the AWS requests and send nothing.")
    ] = False,
    strict_resources: Annotated[
        bool, typer.Option("--strict-resources", help="Refuse what does not fit, do not fit it.")
    ] = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels instead of detaching.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Submit a run: a job, or the command after --, here or in AWS."""
    from batchml.cli import submission
    from batchml.cli.wiring import open_place

    changes = {
        "name": name,
        "queue": queue,
        "image": image,
        "timeout": timeout,
        "resources": {"vcpus": vcpus, "memory": memory, "gpus": gpus},
        "retry": {"attempts": attempts, "on": retry_on},
        "env": read_pairs(set_env, "--set-env"),
    }
    order = submission.Order(
        job=job,
        command=context.obj,
        params=read_pairs(param, "-p"),
        changes=changes,
        tags=read_pairs(tag, "--tag"),
        after=tuple(after or ()),
        share=share or "",
        strict=strict_resources,
    )
    place = open_place(env)
    prepared = submission.prepare(place, order, dry_run=dry_run)
    if dry_run:
        print_json(submission.shown(prepared))
        return
    sent: list[str] = []
    with (
        following.detaching(place, sent, cancel=cancel_on_interrupt),
        following.finishing_first("the submission"),
    ):
        job_id = submission.send(place, prepared)
        sent.append(job_id)
        if not json_ or wait:
            (say if json_ else print_line)(submission.announcement(prepared, job_id))
    if wait:
        following.follow(
            place,
            job_id,
            json_=json_,
            from_start=True,
            cancel_on_interrupt=cancel_on_interrupt,
            patterns=prepared.spec.metrics,
        )
    elif json_:
        print_json(submission.as_json(place, prepared, job_id))
    else:
        following.say_how_to_go_on(place, job_id)


@app.command(epilog="Example: batchml ls --status RUNNING")
def ls(
    status: Annotated[str | None, typer.Option(help="Only runs in this state.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only runs of this queue.")] = None,
    job: Annotated[str | None, typer.Option(help="Only runs of this name.")] = None,
    since: Annotated[str | None, typer.Option(help='Only runs of the last "2h", "7d".')] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 30,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List runs, newest first."""
    from itertools import islice

    from batchml.cli.render import run_json, run_rows, table
    from batchml.cli.wiring import open_place

    place = open_place(env)
    now = int(place.clock.now() * 1000)
    seconds = read_seconds(since, "--since")
    wanted = _status(status)
    start = now - seconds * 1000 if seconds is not None else 0
    found = [
        run
        for each in ([place.queue(queue)] if queue else place.batch.queues())
        for run in islice(
            (
                run
                for run in place.batch.list_recent(each, start, job or "")
                if wanted is None or run.status is wanted
            ),
            limit + 1,
        )
    ]
    found.sort(key=lambda run: run.created_at or 0, reverse=True)
    more = len(found) > limit
    # ListJobs does not tell who was cancelled, nor how often a run was tried.
    whole = place.describe([run.job_id for run in found[:limit]])
    found = [whole.get(run.job_id, run) for run in found[:limit]]
    if json_:
        print_json([run_json(run) for run in found])
    elif found:
        print_line(table(run_rows(found, now)))
        if more:
            say(f"The newest {limit} are shown; --limit shows more.")
    elif status or queue or job or since:
        say("No runs match.")
    else:
        say("No runs. `batchml submit --wait lenet` starts one.")


@app.command(epilog="Example: batchml show @last")
def show(run: OneRun, env: Env = None, json_: Json = False) -> None:
    """Show everything about a run."""
    from batchml.cli.render import run_json, show_text
    from batchml.cli.wiring import open_place

    place = open_place(env)
    (job_id,) = following.select(place, [run])
    found = following.described(place, [job_id])[job_id]
    outputs = str(place.outputs(job_id) or "")
    if json_:
        print_json(
            {
                **run_json(found),
                "image": found.image,
                "command": list(found.command),
                "outputs": outputs or None,
                "logStreams": [a.log_stream for a in found.attempts if a.log_stream],
            }
        )
    else:
        print_line(show_text(found, int(place.clock.now() * 1000), outputs))


@app.command(epilog="Example: batchml logs -f @last")
def logs(
    run: OneRun,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the run ends; exit with its code.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Print a run's output, every attempt of it."""
    from batchml.cli.render import timestamp
    from batchml.cli.wiring import open_place
    from batchml.runtime.lines import parse_mark

    place = open_place(env)
    (job_id,) = following.select(place, [run])
    found = following.described(place, [job_id])[job_id]
    if follow:
        following.follow(place, job_id, json_=json_, from_start=False)
    lines = [
        (attempt.log_stream, line)
        for attempt in found.attempts
        if attempt.log_stream
        for line in place.open_log(found, attempt.log_stream).read()
        if parse_mark(line.message) is None
    ]
    if json_:
        print_json(
            [
                {"logStreamName": stream, "timestamp": line.timestamp, "message": line.message}
                for stream, line in lines
            ]
        )
        return
    for _, line in lines:
        print_line(f"[{timestamp(line.timestamp)}] {_shown(line.message)}")
    if found.children:
        say(f"An array has no output of its own. Its children's: batchml logs {found.job_id}:0")


@app.command(epilog="Example: batchml wait @last")
def wait(runs: Runs, env: Env = None, json_: Json = False) -> None:
    """Wait for runs to end; exit as the first that failed.

    The exit code is the first that is not 0, in the order in which the runs are given.
    """
    from batchml.cli.render import job_title, run_json, verdict
    from batchml.cli.wiring import open_place
    from batchml.model.run import classify
    from batchml.ops.watch import wait as wait_for

    place = open_place(env)
    asked = following.select(place, runs)
    following.described(place, asked)
    ended = {}
    with following.detaching(place, asked):
        for run in wait_for(place.describe, asked, clock=place.clock, pace=place.pace):
            ended[run.job_id] = run
            if not json_:
                print_line(f"{job_title(run)} {run.status}")
                say(verdict(run))
    if json_:
        print_json([run_json(ended[job_id]) for job_id in asked])
    raise typer.Exit(next((c for j in asked if (c := classify(ended[j]).exit_code)), 0))


@app.command(epilog="Example: batchml cancel @last")
def cancel(
    runs: Runs,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "Cancelled by the user",
    env: Env = None,
    json_: Json = False,
) -> None:
    """Stop runs, whatever state they are in."""
    from batchml.cli.render import job_title, run_json
    from batchml.cli.wiring import open_place

    place = open_place(env)
    asked = following.select(place, runs)
    before = following.described(place, asked)
    for job_id, run in before.items():
        if not run.status.is_terminal:
            place.batch.terminate(job_id, reason)
    after = place.describe(list(before))
    if json_:
        print_json([run_json(after.get(job_id, before[job_id])) for job_id in asked])
        return
    for job_id in asked:
        run = after.get(job_id, before[job_id])
        if before[job_id].status.is_terminal:
            print_line(f"{job_title(run)} had ended already: {run.status}.")
        elif run.status.is_terminal:
            print_line(f"{job_title(run)} is cancelled.")
        elif not run.status.holds_resources:
            print_line(f"{job_title(run)} will not run; it ends with what it waits for.")
        else:
            print_line(f"{job_title(run)} is being stopped: it has its grace to save and end.")


def _status(text: str | None) -> Any:
    from batchml.errors import did_you_mean
    from batchml.model.status import JobStatus

    if text is None:
        return None
    try:
        return JobStatus(text.upper())
    except ValueError:
        names = [each.value for each in JobStatus]
        raise UsageError(
            f"--status {text}: no such state.{did_you_mean(text, names)} "
            f"States: {', '.join(names)}."
        ) from None


def _shown(message: str) -> str:
    from batchml.cli.render import printable

    return printable(message) if sys.stdout.isatty() else message
