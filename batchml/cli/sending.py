"""From what is prepared to a run that is followed, or left alone: `submit` and `rerun` end so."""

from typing import TYPE_CHECKING

from batchml.cli import following
from batchml.cli.interrupt import submitting
from batchml.cli.output import print_json, print_line, say
from batchml.client import submission

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.submission import Prepared


def send(
    place: "Place",
    prepared: "Prepared",
    *,
    dry_run: bool,
    wait: bool,
    json_: bool,
    cancel_on_interrupt: bool = False,
) -> None:
    """Say the notices, submit, and say how to go on; with `wait` follow the run to its end.

    With `dry_run` the requests are printed instead. Ctrl-C leaves the run alone, and says so.
    """
    for notice in prepared.notices:
        say(notice)
    if dry_run:
        print_json(submission.shown(prepared))
        return
    sent: list[str] = []
    with following.detaching(place, sent, cancel=cancel_on_interrupt):
        with submitting(sent):
            job_id = submission.send(place, prepared, say)
            sent.append(job_id)
            if not json_ or wait:
                (say if json_ else print_line)(submission.announcement(prepared, job_id))
        # Still in the block: no moment of a run that is known is without an answer to Ctrl-C.
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
