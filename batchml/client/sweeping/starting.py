"""What `sweep` does before its first trial: works out what is to be run, and puts it in place."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.naming import make_platform, owner_tags
from batchml.client.luggage import Depot, code_folder, find_depot, pack_code, put
from batchml.client.order import Order, fit_here
from batchml.client.submission import (
    DEFAULT_QUEUE,
    Tell,
    ask_commit,
    image_reference,
    own_image_notices,
    place_variables,
    publish,
    user_name,
)
from batchml.client.sweeping.freezing import Frozen, write_frozen
from batchml.client.sweeping.reading import Read, Wish, read_wish
from batchml.errors import BatchmlError, ConfigError
from batchml.model.job import JobSpec
from batchml.model.names import new_key
from batchml.model.sweep import SweepSpec
from batchml.ops.code import CodeArchive
from batchml.ops.search import SWEEP_TAG
from batchml.ops.sources import ImageSource, find_source

if TYPE_CHECKING:
    from batchml.client.known import Known
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board


class Ready(Struct, frozen=True):
    """A sweep that can be started, and what the user should know before it is."""

    frozen: Frozen
    archive: CodeArchive | None
    depot: Depot
    image_source: ImageSource | None
    notices: tuple[str, ...] = ()
    known: "Known | None" = None  # of an environment in AWS


def make_ready(place: "Place", wish: Wish) -> Ready:
    """Work out a sweep; nothing is sent and nothing kept.

    Raises ConfigError with all the mistakes of the file and of its job, NotFound, UsageError.
    """
    read = read_wish(place, wish)
    question = ask_commit(read.ordered.folder)
    notices: list[str] = []
    spec, sweep, known = read.ordered.spec, read.spec, None
    if place.settings.is_local:
        spec = fit_here(place, spec, wish.strict, notices)
        sweep = _fit_width(sweep, spec, notices)
    else:
        from batchml.client.known import open_known

        known = open_known(place)
    source = find_source(spec.image, place.image_folders, read.ordered.folder)
    notices += own_image_notices(read.ordered)
    depot = find_depot(place, known, spec.image, source)
    mistakes = list(_unfit_place(place, spec, depot))
    if mistakes:
        raise ConfigError(read.where, mistakes)
    order = Order(include_secrets=wish.include_secrets)
    archive = pack_code(place, order, read.ordered, depot, notices)
    image = image_reference(place, spec, source, known)
    commit = question.read().id if question else ""
    frozen = _freeze(place, read, sweep, spec, depot, image, commit, notices)
    if archive is not None:
        frozen = replace(frozen, code=depot.address(archive))
    if known is not None:
        platform = make_platform(place.env, place.settings.environment, known.outputs())
        frozen = replace(frozen, platform=platform)
    return Ready(frozen, archive, depot, source, tuple(notices), known)


def start(
    place: "Place",
    ready: Ready,
    tell: Tell = lambda _: None,
    writing: Callable[[], None] = lambda: None,
) -> "Board":
    """Put code, image and what a trial must know in place; the sweep's board. No trial runs yet.

    Killed before its end it leaves no sweep, or a whole one: `spec.json` is written last, and
    `writing` is called before that.
    """
    from batchml.client.sweeping.boards import open_board
    from batchml.client.sweeping.courses import course_of
    from batchml.runtime.protocol.sweep_store import COURSE

    frozen = ready.frozen
    place.connect()
    if not place.settings.is_local:
        place.home.prepare()
    publish(place, ready.image_source, frozen.image)
    try:
        put(place, ready.depot, ready.archive, None, tell)
        board = open_board(place, frozen.key)
        board.put(COURSE, course_of(frozen, is_local=place.settings.is_local).to_json())
        writing()
        write_frozen(board, frozen)
    except BatchmlError:
        if ready.known is not None:  # what we know of the environment may be old
            from batchml.client.known import forget

            forget(place)
        raise
    if ready.known is not None:
        ready.known.save()
    return board


def _freeze(
    place: "Place",
    read: Read,
    sweep: SweepSpec,
    spec: JobSpec,
    depot: Depot,
    image: str,
    commit: str,
    notices: list[str],
) -> Frozen:
    key = new_key(os.urandom)
    ordered = read.ordered
    tags = {SWEEP_TAG: key, "batchml:job": ordered.job, "batchml:commit": commit}
    if not place.settings.is_local:
        tags |= owner_tags(place.env)
    return Frozen(
        key=key,
        name=sweep.name,
        env=place.env,
        spec=sweep,
        job=msgspec.json.decode(msgspec.json.encode(spec)),  # as it is read back
        queue=place.queue(spec.queue or DEFAULT_QUEUE),
        image=image,
        created_at=place.clock.now(),
        user=user_name(),
        commit=commit,
        text=read.text,
        hourly=_hourly(place, sweep, spec, notices),
        tags={name: value for name, value in tags.items() if value},
        board=depot.store(key) or str(place.home.root / "sweeps" / key),
        runs=depot.store(key).removesuffix(f"/{key}"),
        documents=depot.documents,
        environ=place_variables(place),
        folder=str(code_folder(ordered) or ""),
    )


def _unfit_place(place: "Place", spec: JobSpec, depot: Depot) -> list[str]:
    """Why no trial could run there: it needs our runtime, and a place that outlives it."""
    if place.settings.is_local:
        return []
    if not depot.is_read:
        return [
            f"job: {spec.image} is not an image that batchml built, and what runs a trial comes "
            f"with those. Name a folder below images/ whose Dockerfile builds on it."
        ]
    if not depot.codes:
        return [
            f"env: {place.env} has no bucket, where a sweep keeps its state. Make one with "
            f"`batchml setup --env {place.env}`."
        ]
    return []


def _fit_width(sweep: SweepSpec, spec: JobSpec, notices: list[str]) -> SweepSpec:
    """No more trials at once than this machine has room for: a method that learns would guess for
    those that only wait."""
    from batchml.local import ecs as machine

    room = [
        machine.count_vcpus() // spec.resources.vcpus,
        machine.memory_mib() // max(1, spec.resources.memory_mib),
    ]
    if spec.resources.gpus:
        room.append(len(machine.find_gpus()) // spec.resources.gpus)
    width = max(1, min(sweep.limits.parallel, *room))
    if width == sweep.limits.parallel:
        return sweep
    trials = "1 trial" if width == 1 else f"{width} trials"
    notices.append(f"Fitted to this machine: {trials} at once instead of {sweep.limits.parallel}.")
    return replace(sweep, limits=replace(sweep.limits, parallel=width))


def _hourly(place: "Place", sweep: SweepSpec, spec: JobSpec, notices: list[str]) -> float | None:
    """What an hour of one trial costs at most, in USD; None where it is free or not known.

    Raises ConfigError where it is not known and `limits.cost` needs it.
    """
    from batchml.client.costs import quote_of
    from batchml.ops.cost import need_of_job

    why = ""
    try:
        quote = quote_of(place, need_of_job(spec), spec.queue or DEFAULT_QUEUE)
        if quote.is_free:
            return None
        if quote.hour is not None:
            return float(quote.hour.high)
        why = "; ".join(f"{what}: {reason}" for what, reason in quote.unknown.items())
    except BatchmlError as error:
        why = str(error)
    if sweep.limits.cost is not None:
        raise ConfigError(
            "limits.cost",
            [f"what a trial costs in queue {spec.queue or DEFAULT_QUEUE} is not known: {why}"],
        )
    notices.append(f"What it costs is not known: {why}")
    return None
