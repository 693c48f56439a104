"""`--detach`: submit a sweep's controller as a run of its own, and find its sweep in that run."""

import hashlib
import os
import re

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionRequests, dated_registration
from batchml.aws.naming import Platform
from batchml.context import Context, Notify, open_cache
from batchml.errors import ConfigError, NotFound
from batchml.jobs.images import pinned, read_recipe
from batchml.model.names import new_key, to_name
from batchml.model.record import Record
from batchml.runs.controllers import (
    IMAGE,
    ControllerRun,
    controller_platform,
    controller_requests,
    find_controller_folder,
    make_queue,
)
from batchml.runs.send import own_share
from batchml.runs.submit import submit
from batchml.sweeps.control.lease import refuse_second_controller
from batchml.sweeps.jobs import first_requests
from batchml.sweeps.started import SPEC, StartedSweep, read_started
from batchml.sweeps.stores import SweepStore, open_sweep_store, sweep_store_at

ATTEND = ("sweeps", "attend")  # and the sweep's key: local/executors/spec.py knows these
_MEMORY = "1 GiB"  # ten thousand trials take about 150 MiB
# The methods whose controller imports Optuna.
_BY_OPTUNA = ("gp", "cmaes", "nsga2")
_OPTUNA = re.compile(r"\s*optuna\b")


class ControllerArguments(Struct, frozen=True):
    """The arguments of `sweeps attend`. A controller in AWS may read no more of its environment."""

    key: str
    env: str
    store: str = ""  # the address of the sweep's store
    region: str = ""
    digest: str = ""  # of `spec.json` at the time when the controller was submitted

    @property
    def options(self) -> list[str]:
        """As words of the command line."""
        given = {"env": self.env, "board": self.store, "region": self.region, "digest": self.digest}
        return [self.key, *(word for name, value in given.items() for word in (f"--{name}", value))]


def open_sweep(context: Context, arguments: ControllerArguments) -> tuple[SweepStore, StartedSweep]:
    """The sweep of a controller. Raises NotFound, ConfigError if the sweep was changed since the
    controller was submitted, and StoreError."""
    store = (
        sweep_store_at(context, arguments.store)
        if arguments.store
        else open_sweep_store(context, arguments.key)
    )
    if arguments.digest:
        _check_digest(store, arguments.digest)
    sweep = read_started(store)
    if sweep is None or sweep.key != arguments.key:
        raise NotFound("Sweep", arguments.key, [], f"Its {SPEC} is gone. Start a new sweep.")
    return store, sweep


def digest_of(store: SweepStore) -> str:
    """The digest of `spec.json`, by which changes are noticed: programs in jobs can write to it."""
    return hashlib.sha256(store.get(SPEC) or b"").hexdigest()


def _check_digest(store: SweepStore, digest: str) -> None:
    if digest_of(store) != digest:
        raise ConfigError(
            SPEC,
            [
                "it has changed since this controller was submitted. If you changed it: "
                "batchml sweeps resume --detach."
            ],
        )


# --- Submitting it --------------------------------------------------------------------------------


def submit_controller(
    context: Context, sweep: StartedSweep, store: SweepStore, tell: Notify = lambda _: None
) -> str:
    """Submit a sweep's controller as a run; the run's id.

    Raises SweepHasController, ConfigError for an environment that has no role for controllers, and
    NotFound for an image that was not pushed.
    """
    refuse_second_controller(store, context.clock, store.key)
    key = new_key(os.urandom)
    is_local = context.settings.is_local
    run = _run_here(context, sweep) if is_local else _run_in_aws(context, sweep, store)
    requests = controller_requests(run, key)
    record = controller_record(sweep, key, requests)
    job_id = submit(
        context.batch,
        requests,
        context.history,
        replace(record, at=int(context.clock.now() * 1000)),
        clock=context.clock,
        share=own_share(),
        tell=tell,
    )
    tell(f"Its controller is the run {job_id} in the queue {requests.submit['jobQueue']}.")
    return job_id


def _run_here(context: Context, sweep: StartedSweep) -> ControllerRun:
    # The image is a name only: the embedded server runs its own Python there.
    return controller_run(
        sweep, (*ATTEND, sweep.key), f"batchml/{IMAGE}", make_queue(context), sweep.platform
    )


def _run_in_aws(context: Context, sweep: StartedSweep, store: SweepStore) -> ControllerRun:
    """The run of a controller. Also registers the trials' job definition: a controller may not."""
    folder = find_controller_folder(context)
    check_method(sweep, (folder / "requirements.txt").read_text("utf-8"))
    cache = open_cache(context)
    platform = controller_platform(sweep.platform, cache.outputs(), context.env)
    image = cache.image(read_recipe(folder).reference, lambda: pinned(context.connect(), folder))
    _register_trials(context, sweep)
    cache.save()
    queue = context.queue(context.settings.environment.controller_queue) or sweep.queue
    region = context.settings.environment.region
    arguments = ControllerArguments(sweep.key, context.env, sweep.store, region, digest_of(store))
    command = ("python", "-m", "batchml", *ATTEND, *arguments.options)
    return controller_run(sweep, command, image, queue, platform)


def controller_run(
    sweep: StartedSweep, command: tuple[str, ...], image: str, queue: str, platform: Platform
) -> ControllerRun:
    tags = {name: value for name, value in sweep.tags.items() if name != "batchml:job"}
    return ControllerRun(
        name=controller_name(sweep), command=command, image=image, queue=queue,
        platform=platform, memory=_MEMORY, tags=tags, store=sweep.runs,
    )  # fmt: skip


def controller_name(sweep: StartedSweep) -> str:
    """The name in `ls`: `lenet-controller`."""
    return to_name(f"{sweep.name}-controller")


def controller_record(sweep: StartedSweep, key: str, requests: SubmissionRequests) -> Record:
    """The record of a controller's run for the history."""
    request = requests.submit
    container = requests.register["containerProperties"]
    return Record(
        key=key,
        name=controller_name(sweep),
        job_name=request["jobName"],
        env=sweep.env,
        queue=request["jobQueue"],
        command=tuple(request["containerOverrides"]["command"]),
        tags=request["tags"],
        image=container["image"],
        vcpus=1,
        memory_mib=1024,
    )


def check_method(sweep: StartedSweep, requirements: str) -> None:
    """Raise ConfigError for a method whose package the image of controllers lacks."""
    lines = requirements.lower().splitlines()
    if sweep.spec.method in _BY_OPTUNA and not any(map(_OPTUNA.match, lines)):
        raise ConfigError(
            f"images/{IMAGE}/requirements.txt",
            [
                f"method {sweep.spec.method} needs Optuna, which the image of controllers does "
                f"not have. Copy images/{IMAGE} into your project, add the packages that "
                f"`pip install 'batchml[optuna]'` brings, and push it: batchml image push {IMAGE}. "
                f"Or keep the terminal open: leave out --detach."
            ],
        )


def _register_trials(context: Context, sweep: StartedSweep) -> None:
    request = first_requests(sweep, 1)["RegisterJobDefinition"]
    if not context.batch.has_definition(request["jobDefinitionName"]):
        context.batch.register(dated_registration(request, context.clock.now()))
