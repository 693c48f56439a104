"""submit."""

from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import (
    Attempts,
    DryRun,
    Env,
    Fallback,
    Gpus,
    Json,
    MaxCost,
    Memory,
    Name,
    Nodes,
    Param,
    Queue,
    SetEnv,
    Tag,
    Timeout,
    Vcpus,
    Wait,
    read_pairs,
)
from batchml.cli.hints import SubmitCommand


@app.command(cls=SubmitCommand, epilog="Example: batchml submit --wait lenet -p epochs=10")
def submit(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="A folder with a job.toml, its name, or a script."),
    ] = None,
    wait: Wait = False,
    param: Param = None,
    name: Name = None,
    queue: Queue = None,
    image: Annotated[str | None, typer.Option(help="Image, instead of the job's.")] = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    array: Annotated[
        int | None, typer.Option(metavar="N", help="So many runs at once, numbered from 0.")
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Start after this run succeeded.")
    ] = None,
    attempts: Attempts = None,
    retry_on: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Try again after this; host-lost unless given."),
    ] = None,
    timeout: Timeout = None,
    max_cost: MaxCost = None,
    set_env: SetEnv = None,
    tag: Tag = None,
    share: Annotated[
        str | None, typer.Option(help="Of a fair-share queue; your user name unless given.")
    ] = None,
    fallback: Fallback = None,
    dry_run: DryRun = False,
    strict_resources: Annotated[
        bool, typer.Option("--strict-resources", help="Refuse what does not fit, do not fit it.")
    ] = False,
    include_secrets: Annotated[
        bool, typer.Option("--include-secrets", help="Send files that look like secrets, too.")
    ] = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels instead of detaching.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Submit a run: a job, a script, or the command after --, here or in AWS.

    A script (- reads stdin) asks in lines "#BATCHML --gpus 1"; common lines "#SBATCH" are read.
    What follows -- are then its arguments.
    """
    from batchml.cli.sending import send
    from batchml.cli.wiring import open_place
    from batchml.client.client import Client
    from batchml.client.submission import prepare

    place = open_place(env)
    order = Client.order(
        job,
        command=context.obj,
        params=read_pairs(param, "-p"),
        name=name,
        queue=queue,
        image=image,
        vcpus=vcpus,
        memory=memory,
        gpus=gpus,
        nodes=nodes,
        array=array,
        after=after or (),
        attempts=attempts,
        retry_on=retry_on,
        timeout=timeout,
        max_cost=max_cost,
        set_env=read_pairs(set_env, "--set-env"),
        tags=read_pairs(tag, "--tag"),
        share=share,
        fallback=fallback,
        strict_resources=strict_resources,
        include_secrets=include_secrets,
    )
    prepared = prepare(place, order, dry_run=dry_run)
    send(
        place, prepared, dry_run=dry_run, wait=wait, json_=json_,
        cancel_on_interrupt=cancel_on_interrupt,
    )  # fmt: skip
