"""Control a sweep in this process, or detach it, so that a run in AWS Batch controls it."""

import hashlib
import re
from contextlib import closing

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionRequests, dated_registration
from batchml.aws.naming import Platform
from batchml.context import Context, EnvironmentCache, Notify, open_cache
from batchml.errors import BatchmlError, ConfigError, NotFound, SweepHasController
from batchml.jobs.find import ImageSource
from batchml.model.names import new_key, to_name
from batchml.model.run import Record
from batchml.runs.controllers import (
    IMAGE,
    ControllerRun,
    controller_platform,
    controller_requests,
    ensure_queue,
    find_controller_folder,
)
from batchml.runs.job_images import pinned_image
from batchml.runs.send import make_submitter, user_name
from batchml.runs.submit import submit
from batchml.sweeps.control.controller import Controller
from batchml.sweeps.control.lease import (
    AWS_INTERVALS,
    LOCAL_INTERVALS,
    LeaseOwner,
    expect_controller,
    newest_lease,
    refuse_second_controller,
    this_process,
)
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import SubmitMode, count_trials
from batchml.sweeps.jobs import BatchJobs, first_requests
from batchml.sweeps.samplers.optuna import PACKAGES_BY_METHOD
from batchml.sweeps.started import SPEC, StartedSweep, load_started
from batchml.sweeps.stores import SweepStore, open_sweep_store, sweep_store_at


def control_sweep(
    context: Context,
    sweep: StartedSweep,
    store: SweepStore,
    tell: Notify = lambda _: None,
    owner: LeaseOwner | None = None,
    lost: Notify | None = None,
) -> Controller:
    """The controller of a sweep. Its work begins when its first snapshot is requested.

    `owner` describes the controller to other processes; by default it is this process. `tell` is
    called with progress of long operations, and with the controller's notices. Callers that show
    snapshots give `lost`, because snapshots have all notices: then `lost` is called with errors of
    services that cannot be reached, and `tell` gets no notices.
    """
    intervals = LOCAL_INTERVALS if context.settings.is_local else AWS_INTERVALS
    jobs = BatchJobs(context, sweep, store, tell)
    owner = owner or this_process(user_name())
    tell_notice = tell if lost is None else lambda _: None
    return Controller(
        sweep.spec, store, jobs, context.clock, intervals, owner, tell_notice, lost=lost or tell
    )


def needs_controller(sweep: StartedSweep) -> bool:
    """Whether a sweep without a controller begins no trials, or ignores early stopping or limits.

    An array needs no controller: AWS Batch runs it, its trials keep the limit of hours, and their
    messages wait in the store. But cut-offs, a target and confirming runs need a controller, and so
    does a cost limit that the rungs of `halving` can exceed.
    """
    spec = sweep.spec
    if sweep.mode is SubmitMode.BATCHES:
        return True
    return (
        spec.early_stop.method in ("asha", "median")
        or spec.limits.target is not None
        or spec.confirm is not None
        or (spec.limits.cost is not None and sweep.mode is SubmitMode.RUNGS)
    )


def gains_from_controller(sweep: StartedSweep) -> bool:
    """Whether a controller could stop the sweep early if its first trials all fail."""
    count = count_trials(sweep.spec)
    return count is None or count > sweep.spec.limits.parallel


def detach_sweep(
    context: Context, sweep: StartedSweep, store: SweepStore, tell: Notify = lambda _: None
) -> None:
    """Let a sweep run without this process: without a controller, or with one that is a run.

    Trials that need no controller are submitted first, and run even if the controller cannot be
    submitted. Raises SweepHasController, and what `submit_controller` raises for a sweep that needs
    a controller.
    """
    refuse_second_controller(store, context.clock, store.key)
    is_needed = needs_controller(sweep)
    if sweep.mode is not SubmitMode.BATCHES:
        with closing(control_sweep(context, sweep, store, tell).snapshots()) as snapshots:
            is_over = next(p.ended for p in snapshots if p.ended or _is_submitted(store))
        if is_over or not (is_needed or gains_from_controller(sweep)):
            return
    try:
        submit_controller(context, sweep, store, tell)
    except SweepHasController:
        raise
    except BatchmlError as error:
        if is_needed:
            raise
        tell(f"Without a controller, failing trials do not stop the sweep. {error}")


def _is_submitted(store: SweepStore) -> bool:
    """Whether all batches are submitted: after the first round, unless an error delayed them."""
    state = SweepLedger(store).load()
    return bool(state.batches) and not state.open_batches


# --- The controller as a run ----------------------------------------------------------------------


# The command of the run; the sweep's key follows. local/executors/spec.py recognizes it.
ATTEND = ("sweeps", "attend")
_MEMORY = "1 GiB"  # ten thousand trials take about 150 MiB
_BY_OPTUNA = tuple(PACKAGES_BY_METHOD)  # the methods whose controller imports Optuna or cmaes
_OPTUNA = re.compile(r"\s*optuna\b")


class ControllerArguments(Struct, frozen=True):
    """The arguments of `sweeps attend`: all that a controller in AWS knows of its environment."""

    key: str
    env: str
    store: str = ""  # the address of the sweep's store
    region: str = ""
    digest: str = ""  # of `spec.json` at the time when the controller was submitted

    @property
    def options(self) -> list[str]:
        """The arguments as words of the command line."""
        flags = {"env": self.env, "store": self.store, "region": self.region, "digest": self.digest}
        return [self.key, *(word for name, value in flags.items() for word in (f"--{name}", value))]


def open_sweep(context: Context, arguments: ControllerArguments) -> tuple[SweepStore, StartedSweep]:
    """The sweep of a controller. Raises NotFound, ConfigError if the sweep was changed since the
    controller was submitted, and StoreError."""
    store = (
        sweep_store_at(context, arguments.store)
        if arguments.store
        else open_sweep_store(context, arguments.key)
    )
    if arguments.digest and digest_of(store) != arguments.digest:
        hint = "If you changed it: batchml sweeps resume --detach."
        raise ConfigError(SPEC, [f"it has changed since this controller was submitted. {hint}"])
    hint = f"Its {SPEC} is gone. Start a new sweep."
    sweep = load_started(store, arguments.key, hint)
    if sweep.key != arguments.key:
        raise NotFound("Sweep", arguments.key, [], hint)
    return store, sweep


def digest_of(store: SweepStore) -> str:
    """The digest of `spec.json`: by it a controller notices that a program in a job changed it."""
    return hashlib.sha256(store.get(SPEC) or b"").hexdigest()


def submit_controller(
    context: Context, sweep: StartedSweep, store: SweepStore, tell: Notify = lambda _: None
) -> str:
    """Submit a sweep's controller as a run; the run's id.

    Raises SweepHasController, ConfigError for an environment that has no role for controllers, and
    NotFound for an image that was not pushed.
    """
    refuse_second_controller(store, context.clock, store.key)
    key = new_key()
    is_local = context.settings.is_local
    run = _local_run(context, sweep) if is_local else _run_in_aws(context, sweep, store)
    requests = controller_requests(run, key)
    record = controller_record(sweep, key, requests)
    record = replace(record, at=int(context.clock.now() * 1000))
    lease, intervals = newest_lease(store), LOCAL_INTERVALS if is_local else AWS_INTERVALS
    job_id = submit(make_submitter(context, tell), requests, record)
    expect_controller(store, job_id, context.clock.now() + intervals.patience, lease)
    tell(f"Its controller is the run {job_id} in the queue {requests.submit['jobQueue']}.")
    return job_id


def _local_run(context: Context, sweep: StartedSweep) -> ControllerRun:
    # The image is a name only: the embedded server runs controllers with its own Python.
    return controller_run(
        sweep, (*ATTEND, sweep.key), f"batchml/{IMAGE}", ensure_queue(context), sweep.platform
    )


def _run_in_aws(context: Context, sweep: StartedSweep, store: SweepStore) -> ControllerRun:
    """The run of a controller. Also registers the trials' job definition: a controller may not."""
    cache = open_cache(context)
    image, queue, platform = _find_parts(context, sweep, cache)
    cache.save()
    _register_trials(context, sweep)
    region = context.settings.environment.region
    arguments = ControllerArguments(sweep.key, context.env, sweep.store, region, digest_of(store))
    command = ("python", "-m", "batchml", *ATTEND, *arguments.options)
    return controller_run(sweep, command, image, queue, platform)


def check_controller(context: Context, sweep: StartedSweep, cache: EnvironmentCache | None) -> None:
    """Raise what `submit_controller` would, for a sweep that needs a controller; write nothing.

    `cache`: of the environment in AWS; None for `local`, where a controller needs no image.
    """
    if cache is not None and needs_controller(sweep):
        _find_parts(context, sweep, cache)


def _find_parts(
    context: Context, sweep: StartedSweep, cache: EnvironmentCache
) -> tuple[str, str, Platform]:
    """The image, the queue and the platform of a controller in AWS."""
    folder = find_controller_folder(context)
    check_method(sweep, (folder / "requirements.txt").read_text("utf-8"))
    platform = controller_platform(sweep.platform, cache.outputs(), context.env)
    queue = context.queue(context.settings.environment.controller_queue) or sweep.queue
    image = pinned_image(context, ImageSource(folder), queue, cache)
    return image, queue, platform


def controller_run(
    sweep: StartedSweep, command: tuple[str, ...], image: str, queue: str, platform: Platform
) -> ControllerRun:
    return ControllerRun(
        name=controller_name(sweep), command=command, image=image, queue=queue,
        platform=platform, memory=_MEMORY, tags=sweep.resource_tags, store=sweep.runs,
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
        project=sweep.project,
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
