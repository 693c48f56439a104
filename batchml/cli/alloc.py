"""alloc: hold resources and be in a shell there."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import (
    DryRun,
    Env,
    Gpus,
    Json,
    MaxCost,
    Memory,
    Nodes,
    Queue,
    SetEnv,
    Tag,
    Vcpus,
    read_pairs,
    read_seconds,
)

if TYPE_CHECKING:
    from batchml.client.order import Order

NEVER = "never"


@app.command(epilog="Example: batchml alloc --gpus 1 --time 2h")
def alloc(
    context: typer.Context,
    gpus: Gpus = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    nodes: Nodes = None,
    queue: Queue = None,
    image: Annotated[str | None, typer.Option(help="Image; python unless given.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="DURATION", help='End after so long at most: "2h".')
    ] = None,
    idle: Annotated[
        str, typer.Option(metavar="DURATION", help='Ends so long after the last shell, or "never".')
    ] = "10m",
    name: Annotated[str, typer.Option(help="Name of the run.")] = "alloc",
    code: Annotated[
        bool, typer.Option("--code/--no-code", help="Take the files of this folder along.")
    ] = True,
    shell: Annotated[
        bool, typer.Option("--shell/--no-shell", help="Begin a shell, or only hold.")
    ] = True,
    max_cost: MaxCost = None,
    set_env: SetEnv = None,
    tag: Tag = None,
    dry_run: DryRun = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Hold resources and begin a shell there, or the command after --.

    They are given back when the shell ends, and by themselves when nobody has been in for --idle.
    Ctrl-C while it waits for them cancels. The exit code is the shell's. --json only holds.
    """
    from batchml.cli.allocating import Wish, allocate, refuse
    from batchml.cli.wiring import open_place

    wish = Wish(
        command=tuple(context.obj) if context.obj else (),
        idle_s=None if idle == NEVER else read_seconds(idle, "--idle"),
        shell=shell and not json_,
        dry_run=dry_run,
        json_=json_,
    )
    refuse(wish, has_shell_flag=shell)
    place = open_place(env)
    order = _order(
        gpus=gpus, vcpus=vcpus, memory=memory, nodes=nodes, queue=queue, image=image,
        timeout=time, name=name, max_cost=max_cost, set_env=read_pairs(set_env, "--set-env"),
        tags=read_pairs(tag, "--tag"), code=code,
    )  # fmt: skip
    raise typer.Exit(allocate(place, order, wish))


def _order(*, code: bool, nodes: int | None, **wanted: object) -> "Order":
    """The order of a run that only holds what it is given."""
    from msgspec.structs import replace

    from batchml.client.client import Client
    from batchml.runtime.entry.script import SLURM

    command = ["python3", "-m", "batchml.runtime.sessions.alloc"]
    order = Client.order(command=command, nodes=nodes, **wanted)  # type: ignore[arg-type]
    changes = dict(order.changes)
    if not code:
        changes["code"] = False
    if (nodes or 1) > 1:  # srun is how the shell reaches the others
        changes["env"] = {SLURM: "1", **changes.get("env", {})}
    return replace(order, changes=changes)
