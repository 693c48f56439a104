"""notebook: JupyterLab in a run, in the browser here."""

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
    Queue,
    Tag,
    Vcpus,
    read_pairs,
    read_seconds,
)
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.model.run import Run

NEVER = "never"
NAME = "notebook"


@app.command(epilog="Example: batchml notebook --gpus 1 --idle 30m")
def notebook(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="One that runs, to come back to.")
    ] = None,
    gpus: Gpus = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    queue: Queue = None,
    image: Annotated[
        str | None, typer.Option(help="Image with JupyterLab in it; notebook unless given.")
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help='Ends when left idle so long; 1h, or "never".'),
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="DURATION", help='End after so long at most: "12h".')
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "--local-port", metavar="N", help="Port of this machine."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
    end: Annotated[
        bool, typer.Option("--end", help="End RUN, or the one that runs; with --new: at Ctrl-C.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Begin another, although one runs.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start it, and do not wait for it.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the run.")] = NAME,
    set_env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Set a variable of the run.")
    ] = None,
    tag: Tag = None,
    max_cost: MaxCost = None,
    dry_run: DryRun = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Work in JupyterLab, in a run: it starts, and the URL for the browser here is printed.

    JupyterLab shows the workspace. Ctrl-C leaves it running, for `batchml notebook` to come back
    to. Left idle for --idle, it ends itself and says what it cost.
    """
    from batchml.cli.noting import Wish, begin, come_back
    from batchml.cli.wiring import open_place
    from batchml.client.notebook import Asked, as_asked, only_one, pick, standing

    wish = Wish(port=port, open_=open_, end=end, detach=detach, dry_run=dry_run, json_=json_)
    about = {
        "--gpus": gpus, "--vcpus": vcpus, "--memory": memory, "--queue": queue, "--image": image,
        "--idle": idle, "--time": time, "--set-env": set_env, "--tag": tag, "--max-cost": max_cost,
        "--dry-run": dry_run or None, "--detach": detach or None, "--new": new or None,
    }  # fmt: skip
    given = [flag for flag, value in about.items() if value is not None]
    _refuse(run, given, end=end and not new)
    if end and detach:
        raise UsageError("--end and --detach: with --end this command has to stay. Leave one out.")
    place = open_place(env)
    if run is not None:
        raise typer.Exit(come_back(place, pick(place, run), wish))
    if end and not new:
        raise typer.Exit(come_back(place, only_one(place), wish))
    if not new and not dry_run:
        asked = Asked(
            gpus=gpus, vcpus=vcpus, memory=memory, queue=queue, image=image,
            name=None if name == NAME else name, others=bool(set_env or tag),
        )  # fmt: skip
        ours = as_asked(standing(place), asked, place.history.recent(place.env))
        if ours is not None:
            _say_back(ours, [flag for flag in ("--idle", "--time", "--max-cost") if flag in given])
            raise typer.Exit(come_back(place, ours, wish))
    order = _order(
        place, gpus=gpus, vcpus=vcpus, memory=memory, image=image, name=name, queue=queue,
        timeout=time, max_cost=max_cost, set_env=read_pairs(set_env, "--set-env"),
        tags=read_pairs(tag, "--tag"),
    )  # fmt: skip
    raise typer.Exit(begin(place, order, _idle(idle), wish))


def _say_back(run: "Run", given: list[str]) -> None:
    from batchml.cli.output import say

    kept = f" It is as it was begun, without this {', '.join(given)}." if given else ""
    say(
        f"Your notebook {run.job_id} is {run.status.value}: back to it.{kept} "
        "For another: batchml notebook --new"
    )


def _refuse(run: str | None, given: list[str], *, end: bool = False) -> None:
    if run is None and end and given:
        raise UsageError(
            f"{', '.join(given)}: --end ends the one that runs. Leave these out, or give --new as "
            "well, for another that ends together with this command."
        )
    if run is not None and given:
        raise UsageError(
            f"{', '.join(given)}: {run} runs already, and is as it was begun. Leave these out, or "
            "leave the run out to begin another."
        )


def _idle(text: str | None) -> float | None:
    """Seconds; None for never. Raises UsageError."""
    from batchml.client.notebook import IDLE

    if text == NEVER:
        return None
    seconds = read_seconds(text, "--idle")
    if seconds == 0:
        raise UsageError('--idle 0s: it would end at once. Give "30m", "2h", or "never".')
    return IDLE if seconds is None else float(seconds)


def _order(
    place: "Place", *, gpus: int | None, vcpus: int | None, memory: str | None, image: str | None,
    **more: object,
) -> "Order":  # fmt: skip
    from batchml.client.notebook import check_image, most_of, order_of, resources, spec_of

    spec = spec_of(image, resources(gpus, vcpus, memory, most_of(place)))
    check_image(place, spec.image)
    return order_of(spec, **more)
