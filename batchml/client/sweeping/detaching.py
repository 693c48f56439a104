"""`--detach`: submit a controller that is a run of its own."""

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.client.submission import Tell, own_share
from batchml.client.sweeping.attending import Where, digest_of
from batchml.client.sweeping.controllers import (
    IMAGE,
    as_controller,
    check_method,
    controller_record,
    controller_requests,
    make_queue,
)
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.holding import refuse_second
from batchml.errors import NotFound
from batchml.model.names import new_key

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Submission
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board

ATTEND = ("sweeps", "attend")  # and the sweep's key: local/executors/spec.py knows these


def detach(place: "Place", frozen: Frozen, board: "Board", tell: Tell = lambda _: None) -> str:
    """Leave a sweep to a controller that is a run of its own; the run's id.

    Raises AnotherController where one attends to it already, ConfigError for an environment that
    has no role for controllers, NotFound for an image that was not pushed.
    """
    from batchml.ops.submit import submit

    refuse_second(place, board)
    key = new_key(os.urandom)
    if place.settings.is_local:
        requests = _here(place, frozen, key)
    else:
        requests = _in_aws(place, frozen, board, key)
    record = controller_record(frozen, key, requests)
    job_id = submit(
        place.batch,
        requests,
        place.history,
        replace(record, at=int(place.clock.now() * 1000)),
        clock=place.clock,
        share=own_share(),
        tell=tell,
    )
    tell(f"Its controller is the run {job_id} in the queue {requests.submit['jobQueue']}.")
    return job_id


def _here(place: "Place", frozen: Frozen, key: str) -> "Submission":
    queue = make_queue(place)
    command = (*ATTEND, frozen.key)
    image = f"batchml/{IMAGE}"  # a name: the server runs its own Python there
    return controller_requests(
        frozen, key, command, image=image, queue=queue, platform=frozen.platform
    )


def _in_aws(place: "Place", frozen: Frozen, board: "Board", key: str) -> "Submission":
    """A controller may not register definitions, so that of the trials is registered here."""
    from batchml.client.known import open_known
    from batchml.ops.images import pinned, read_recipe
    from batchml.ops.jobs import find_image

    folder = find_image(IMAGE, place.image_folders)
    if folder is None:
        raise NotFound("Image", IMAGE, [], "It comes with batchml: install that again.")
    check_method(frozen, (folder / "requirements.txt").read_text("utf-8"))
    known = open_known(place)
    platform = as_controller(frozen.platform, known.outputs(), place.env)
    image = known.image(read_recipe(folder).reference, lambda: pinned(place.connect(), folder))
    _register_trials(place, frozen)
    known.save()
    queue = place.queue(place.settings.environment.controller_queue) or frozen.queue
    region = place.settings.environment.region
    where = Where(frozen.key, place.env, frozen.board, region, digest_of(board))
    command = ("python", "-m", "batchml", *ATTEND, *where.words)
    return controller_requests(frozen, key, command, image=image, queue=queue, platform=platform)


def _register_trials(place: "Place", frozen: Frozen) -> None:
    from batchml.aws.batch.requests import registration
    from batchml.client.sweeping.waves import first_requests

    request = first_requests(frozen, 1)["RegisterJobDefinition"]
    if not place.batch.has_definition(request["jobDefinitionName"]):
        place.batch.register(registration(request, place.clock.now()))
