"""attend: look after a run that may move to another queue, as a run of its own."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env
from batchml.cli.output import say

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.ops.fallback import Plan


@app.command(hidden=True, epilog="Example: batchml attend KEY")
def attend(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Of the run that may move.")],
    env: Env = None,
    region: Annotated[str, typer.Option(help="Where no batchml.toml says it.")] = "",
    job: Annotated[str, typer.Option(help="The run's job id.")] = "",
    plan: Annotated[str, typer.Option(help="Where the plan of its move is kept.")] = "",
    digest: Annotated[str, typer.Option(help="Of that plan.")] = "",
) -> None:
    """Look after a run that may move, as `submit --fallback` has it done."""
    from batchml.client.fallback import attend as look_after

    place, found, job_id = _in_aws(env, region, plan, digest) if plan else _here(key)
    if found is None or not (job or job_id):
        return say("Nothing to look after: it has moved, or it was never submitted.")
    now = look_after(place, found, job or job_id, say)
    say(f"The run is the job {now}.")


def _here(key: str) -> "tuple[Place, Plan | None, str]":
    from batchml.client.fallback import plans_of
    from batchml.client.sweeping.attending import ControllerPlace
    from batchml.client.watcher import job_of
    from batchml.clock import SystemClock
    from batchml.model.environment import LOCAL
    from batchml.settings import load_settings

    settings = load_settings(os.environ, Path.cwd(), LOCAL)
    place = ControllerPlace(settings, SystemClock(), Path.cwd(), say)
    return place, plans_of(place).find(key), job_of(place, key)


def _in_aws(
    env: str | None, region: str, address: str, digest: str
) -> "tuple[Place, Plan | None, str]":
    from batchml.client.sweeping.attending import Where, place_in_aws
    from batchml.client.watcher import fetch_plan
    from batchml.clock import SystemClock

    where = Where("", env or "", region=region)
    place = place_in_aws(where, Path.home() / ".batchml", SystemClock())
    place.home.prepare()
    return place, fetch_plan(place, address, digest), ""
