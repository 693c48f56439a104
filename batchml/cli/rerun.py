"""rerun: the same again, or onward from where it ended."""

from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import (
    Attempts,
    DryRun,
    Env,
    Gpus,
    Json,
    MaxCost,
    Memory,
    Name,
    OneRun,
    Param,
    Queue,
    Tag,
    Timeout,
    Vcpus,
    Wait,
    read_pairs,
)
from batchml.cli.output import print_json, say


@app.command(epilog="Example: batchml rerun @last -p lr=0.01 --wait")
def rerun(
    run: OneRun,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only what failed: of an array, those children.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from its checkpoint, or each child's.")
    ] = False,
    param: Param = None,
    name: Name = None,
    queue: Queue = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    gpus: Gpus = None,
    attempts: Attempts = None,
    retry_on: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help="Try again after this.")
    ] = None,
    timeout: Timeout = None,
    max_cost: MaxCost = None,
    tag: Tag = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Submit a run again: the same code, image and command.

    The code is what was sent then, whatever the job's folder holds now; what an option names is
    changed, the rest stays. RUN:3 is one child of an array.

    With --resume the new run goes on from what the one that ended has saved in its checkpoint
    folder: a copy is there before the command starts.
    """
    from batchml.cli.sending import send
    from batchml.cli.wiring import open_place
    from batchml.client.client import Client
    from batchml.client.finding import recall
    from batchml.client.reruns import prepare_again
    from batchml.client.runs import select

    place = open_place(env)
    params = read_pairs(param, "-p")
    more = Client.order(
        name=name, queue=queue, vcpus=vcpus, memory=memory, gpus=gpus, attempts=attempts,
        retry_on=retry_on, timeout=timeout, max_cost=max_cost, tags=read_pairs(tag, "--tag"),
    )  # fmt: skip
    (found,) = recall(place, select(place, [run]))
    prepared = prepare_again(
        place, found, failed=failed, resume=resume, params=params, more=more, dry_run=dry_run
    )
    if prepared is None:
        say(f"Nothing of {found.name} {found.job_id} has failed: nothing was submitted.")
        if json_:
            print_json(None)
        return
    send(place, prepared, dry_run=dry_run, wait=wait, json_=json_)
