"""A run that is a sweep's controller: `sweeps attend`, which `--detach` submits."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.cli.following import detaching
from batchml.cli.output import print_line, say, say_lost
from batchml.cli.render import printable

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.attending import Where


def attend_as_run(where: "Where") -> int:
    """Be the controller until the sweep is over, or another one has it: 0.

    What the sweep came to is no failure of its controller. Raises what stands in the way: AWS Batch
    tries again, except after ConfigError and AccessError.
    """
    from batchml.sweep.ledger import Fenced

    try:
        _attend(where)
    except Fenced as error:
        say(str(error))
    return 0


def _attend(where: "Where") -> None:
    from contextlib import closing

    from batchml.cli import sweep_running
    from batchml.client.sweeping.attending import sweep_of
    from batchml.client.sweeping.running import attend
    from batchml.sweep.lease import this_process

    place = _place(where)
    board, frozen = sweep_of(place, where)
    owner = this_process(frozen.user, os.environ.get("AWS_BATCH_JOB_ID", ""))
    attended = attend(place, frozen, board, say, owner, lost=say_lost)
    with detaching(place, []), closing(attended.pictures()) as pictures:
        sweep_running.show(sweep_running.brief_at_end(pictures), frozen, to_stderr=False)
    for line in sweep_running.end_lines(frozen, attended.summary):
        print_line(printable(line))


def _place(where: "Where") -> "Place":
    from batchml.client.sweeping.attending import ControllerPlace, place_in_aws
    from batchml.clock import SystemClock
    from batchml.model.environment import LOCAL
    from batchml.settings import load_settings

    clock = SystemClock()
    if where.board:
        return place_in_aws(where, Path.home() / ".batchml", clock)
    settings = load_settings(os.environ, Path.cwd(), LOCAL)
    return ControllerPlace(settings, clock, Path.cwd(), say)
