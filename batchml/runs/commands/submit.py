"""submit: send a job, a script or a command to a job queue."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.aws.batch.requests import container_properties
from batchml.cli.app import app
from batchml.cli.options import (
    DryRun,
    Env,
    Json,
    Offline,
    Project,
    Wait,
    choose_offline,
    open_context,
)
from batchml.cli.output import print_json, print_line, say
from batchml.errors import BatchmlError, UsageError
from batchml.jobs.gpus import describe_container
from batchml.model.data import S3
from batchml.model.image import flavor_for
from batchml.model.job import JobSpec
from batchml.runs.commands.hints import SubmitCommand
from batchml.runs.commands.interrupt import detaching, finish_submission, say_next_commands
from batchml.runs.commands.options import takes_options
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.prepare import PreparedRun, prepare, to_requests
from batchml.runs.submit import announcement, submit_run, submitted_json
from batchml.runtime.entry.folders import size_text

if TYPE_CHECKING:
    from batchml.context import Context

_MOST_LISTED = 1000  # objects: one call


@app.command(cls=SubmitCommand, epilog="Example: batchml submit --wait lenet -p epochs=10")
@takes_options()
def submit(
    *,
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]", help="A folder with a job.toml, its name, a script, or a .py file."
        ),
    ] = None,
    wait: Wait = False,
    options: SubmitOptions,
    dry_run: DryRun = False,
    offline: Offline = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Cancel the run at Ctrl-C, do not detach.")
    ] = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Submit a run: a job, a script, a Python program, or the command after --.

    A script (- reads stdin) sets options in lines "#BATCHML --gpus 1"; common lines "#SBATCH" are
    read, too. The words after -- are the arguments of a script or program.
    """
    context = choose_offline(open_context(env, project), offline, dry_run, "--dry-run")
    # A program or script takes no arguments; a job would run its own command, which is not meant.
    if ctx.obj == [] and (job is None or not (context.folder / job).is_file()):
        raise UsageError(
            "Nothing follows the --: give a command, or leave the -- out for the job's own."
        )
    prepared = prepare(context, to_request(job, {**options, "command": ctx.obj}), dry_run=dry_run)
    send(
        context, prepared, dry_run=dry_run, wait=wait, json_=json_,
        cancel_on_interrupt=cancel_on_interrupt,
    )  # fmt: skip


def send(
    context: "Context",
    prepared: PreparedRun,
    *,
    dry_run: bool,
    wait: bool,
    json_: bool,
    cancel_on_interrupt: bool = False,
) -> None:
    """Print the notices, submit, and print the next commands; with `wait` follow the run.

    With `dry_run` the requests are printed instead. After Ctrl-C the run goes on, and a line says
    so.
    """
    for notice in prepared.notices:
        say(notice)
    if dry_run:
        for line in _preview_lines(context, prepared):
            say(line)
        print_json(to_requests(prepared))
        return
    sent: list[str] = []
    with detaching(context, sent, cancel=cancel_on_interrupt):
        with finish_submission(sent):
            job_id = submit_run(context, prepared, say)
            sent.append(job_id)
            if not json_ or wait:
                (say if json_ else print_line)(announcement(context, prepared, job_id))
        # Still in the block: Ctrl-C is answered at every moment after the submission.
        if wait:
            from batchml.runs.commands.follow import follow

            follow(
                context,
                job_id,
                json_=json_,
                from_start=True,
                cancel_on_interrupt=cancel_on_interrupt,
                patterns=prepared.spec.patterns,
                directions=prepared.spec.directions,
            )
        elif json_:
            print_json(submitted_json(context, prepared, job_id))
        else:
            say_next_commands(context, job_id)


def _preview_lines(context: "Context", prepared: PreparedRun) -> Iterator[str]:
    """The queue of each job with its hosts, and the price of an hour; none on `local`.

    AWS is not asked, not even for prices: they are those that ship with batchml.
    """
    if context.settings.is_local:
        return
    from batchml.cost.render import quote_lines
    from batchml.cost.service import quote_of_job

    yield from describe_data(context, prepared.spec)
    if context.is_offline:
        yield f"{context.why_offline}: \u00abnames\u00bb stand for values that setup makes."
    sent = [prepared.requests.submit, *(each.requests.submit for each in prepared.workers)]
    queues = dict.fromkeys(context.bare(str(request["jobQueue"])) for request in sent)
    for queue in queues:
        yield _describe_queue(context, queue)
    yield from _describe_containers(prepared)
    if queues.keys() <= context.settings.environment.queues.keys():
        alone = context.without_aws(context.why_offline or "a dry run")
        children = prepared.record.array_size
        yield from quote_lines(quote_of_job(alone, prepared.spec, children=children))


def describe_data(context: "Context", spec: JobSpec) -> Iterator[str]:
    """`Data train: 1,203 files, 12 GiB in s3://bucket/prefix.` for each data set in S3.

    One call for each, and one more for a prefix without objects. A longer list is not read to its
    end.
    """
    from batchml.aws.s3 import BucketStore

    for name, address in spec.data.items():
        found = ""
        if address.startswith(S3) and not context.is_offline:
            bucket, _, prefix = address.removeprefix(S3).rstrip("/").partition("/")
            try:
                store = BucketStore(context.connect(), bucket)
                objects = store.list_objects(f"{prefix}/" if prefix else "", _MOST_LISTED)
                if not objects and prefix:  # it may be the address of one object
                    objects = [each for each in store.list_objects(prefix, 1) if each.key == prefix]
            except BatchmlError as error:
                found = f", of unknown size: {str(error).partition('. ')[0]}"
            else:
                more = "at least " if len(objects) == _MOST_LISTED else ""
                files = "1 file" if len(objects) == 1 else f"{len(objects):,} files"
                size = size_text(sum(each.size for each in objects))
                found = f": {more}{files}, {size}" if objects else ": no files below it"
        yield f"Data {name}, copied to the host first: {address}{found}."


def _describe_containers(prepared: PreparedRun) -> Iterator[str]:
    """`Container: 1 GPU, unprivileged, by NVIDIA's container toolkit; CUDA image.` for each job."""
    source = prepared.image_source
    jobs = [(prepared.record, prepared.requests)]
    jobs += [(each.record, each.requests) for each in prepared.workers]
    for record, requests in jobs:
        recipe = None if source is None else source.recipe(flavor_for(record.gpus))
        words = describe_container(record.gpus, container_properties(requests.register), recipe)
        name = f" of {record.name}" if prepared.workers else ""
        if words:
            yield f"Container{name}: {words}."


def _describe_queue(context: "Context", queue: str) -> str:
    """`Queue gpu: gpu-spot (spot: g6.xlarge, g5.xlarge), gpu (g6.xlarge, g5.xlarge).`"""
    environment = context.settings.environment
    if queue not in environment.queues:
        return f"Queue {queue}: batchml.toml does not describe it, so its price is unknown."
    described = environment.queues[queue]
    hosts = []
    for name in described.compute:
        compute = environment.compute[name]
        types = ", ".join(compute.instance_types)
        hosts.append(f"{name} ({'spot: ' if compute.spot else ''}{types})")
    return f"Queue {queue}: {', '.join(hosts)}."
