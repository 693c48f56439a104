"""The run that looks after one that may move, while nobody waits for it."""

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.requests import Submission, Travel, registration, submission
from batchml.aws.naming import Platform, qualified
from batchml.errors import ConfigError, NotFound, ServiceError
from batchml.model.fallback import WATCHES_TAG
from batchml.model.job import JobSpec, Resources
from batchml.model.names import new_key, to_name
from batchml.ops.fallback import Plan, digest_of, encode, read

if TYPE_CHECKING:
    from batchml.client.place import Place

ATTEND = "attend"  # and the run's key: local/executors/spec.py knows this
PLAN = "fallback.json"  # in the run's store

# It is followed by the next however it ends; but what a policy or a file says does not change.
_RETRY = {
    "attempts": 10,
    "evaluateOnExit": [
        {"onExitCode": "77", "action": "EXIT"},
        {"onExitCode": "78", "action": "EXIT"},
        {"onReason": "*", "action": "RETRY"},
    ],
}


def start_watcher(place: "Place", plan: Plan, job_id: str) -> str:
    """Submit it; its id. It is no run of the history, and a second one does no harm.

    Raises ConfigError where the environment has no queue or no role for it, and what the calls do.
    """
    requests = _here(place, plan) if place.settings.is_local else _in_aws(place, plan, job_id)
    api, request = place.batch, requests.submit
    try:
        return api.submit(request)
    except ServiceError as error:
        if error.code != "ClientException":
            raise
        if api.has_definition(requests.register["jobDefinitionName"]):
            raise
        api.register(registration(requests.register, place.clock.now()))
        return api.submit(request)


def watcher_requests(
    plan: Plan, key: str, command: tuple[str, ...], image: str, queue: str, platform: Platform
) -> Submission:
    """Its requests. Pure."""
    spec = JobSpec(
        name=to_name(f"{plan.record.name}-fallback"),
        image=image,
        command=command,
        code=False,
        resources=Resources(vcpus=1, memory="512 MiB"),
    )
    tags = {WATCHES_TAG: plan.key, "batchml:key": key}
    owner = plan.record.tags.get("batchml:env")
    travel = Travel(key=key, tags={**tags, "batchml:env": owner} if owner else tags)
    made = submission(spec, image=image, queue=queue, travel=travel, platform=platform)
    return replace(made, submit={**made.submit, "retryStrategy": _RETRY})


def _here(place: "Place", plan: Plan) -> Submission:
    from batchml.client.sweeping.controllers import IMAGE, make_queue

    # The image is a name: the server runs its own Python there.
    return watcher_requests(
        plan, new_key(os.urandom), (ATTEND, plan.key), f"batchml/{IMAGE}", make_queue(place),
        Platform(),
    )  # fmt: skip


def _in_aws(place: "Place", plan: Plan, job_id: str) -> Submission:
    from batchml.aws.s3 import Bucket
    from batchml.client.known import open_known
    from batchml.client.submission import read_platform
    from batchml.client.sweeping.controllers import IMAGE, as_controller
    from batchml.ops.images import pinned, read_recipe
    from batchml.ops.jobs import find_image

    environment, known = place.settings.environment, open_known(place)
    if not environment.controller_queue:
        raise ConfigError(
            place.env,
            [
                "controller_queue: missing. A queue of cheap hosts, such as controller_queue = "
                '"cpu", in which a small run looks after those that may move.'
            ],
        )
    if not plan.queue.startswith(qualified(place.env, "")):
        raise ConfigError(
            place.env,
            [
                f"fallback.queue: {plan.queue} is no queue of this environment, and the role of "
                "who looks after runs submits to no other."
            ],
        )
    bucket = known.outputs().get("BucketName", "")
    folder = find_image(IMAGE, place.image_folders)
    if folder is None:
        raise NotFound("Image", IMAGE, [], "It comes with batchml: install that again.")
    platform = as_controller(read_platform(place), known.outputs(), place.env)
    image = known.image(read_recipe(folder).reference, lambda: pinned(place.connect(), folder))
    data = encode(plan)
    Bucket(place.connect(), bucket).put(f"runs/{plan.key}/{PLAN}", data)
    told = {
        "env": place.env, "region": environment.region, "job": job_id,
        "plan": f"s3://{bucket}/runs/{plan.key}/{PLAN}", "digest": digest_of(data),
    }  # fmt: skip
    words = [word for name, value in told.items() for word in (f"--{name}", value)]
    command = ("python", "-m", "batchml", ATTEND, plan.key, *words)
    queue = place.queue(environment.controller_queue)
    return watcher_requests(plan, new_key(os.urandom), command, image, queue, platform)


def fetch_plan(place: "Place", address: str, digest: str) -> Plan:
    """The plan that a watcher in AWS was submitted for. Raises ConfigError for another."""
    from batchml.aws.s3 import Bucket

    bucket, _, key = address.removeprefix("s3://").partition("/")
    data = Bucket(place.connect(), bucket).get(key)
    if data is None or digest_of(data) != digest:
        raise ConfigError(address, ["it is gone, or not what it was when the run was submitted."])
    return read(data)


def job_of(place: "Place", key: str) -> str:
    """The job that a run of this machine is now; "" where it was never submitted."""
    names = place.history.names(place.env)
    return next((name.job_id for name in names if name.key == key), "")
