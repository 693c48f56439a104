"""A notebook: a run with JupyterLab, found from here by what it tells inside, and nowhere else.

Its token is made in the run (`batchml/runtime/sessions/notebook.py`) and fetched by a door into it:
no request, log, history or argument has it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchml.client.holding import Unheld, last_words
from batchml.errors import BatchmlError, NoDoor, NotRunning, UsageError
from batchml.model.group import SEAT_TAG
from batchml.model.job import JobSpec, Resources
from batchml.model.tables import parse_size

if TYPE_CHECKING:
    from batchml.client.doors import Seat
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.client.submission import Tell
    from batchml.client.tunnel import Tunnel
    from batchml.model.record import Record
    from batchml.model.run import Run

KIND = "notebook"
IMAGE = "notebook"
IDLE = 3600.0  # seconds without use after which a notebook ends itself, unless it is told
PROGRAM = ("python", "-m", "batchml.runtime.sessions.notebook")

_ASKS = 45  # seconds that one question inside waits for JupyterLab; its door has 60
_TRIES = 8  # such questions
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before a tunnel that was cut is opened again
_TOLD = 3  # earlier notebooks that are looked at
_STANDING = 100  # that are looked at when one is looked for; one call
_SAID = "batchml: "


class Door(Struct, frozen=True):
    """How JupyterLab is reached: a port inside the run, and what it wants to be shown."""

    port: int
    token: str
    root: str = ""

    def __repr__(self) -> str:  # it may come to stand in a traceback
        return f"Door(port={self.port}, root={self.root!r})"


# --- to begin -------------------------------------------------------------------------------------


class Most(Struct, frozen=True):
    """What a notebook takes at most, unless it is told how much."""

    vcpus: int
    memory_mib: int


def most_of(place: "Place") -> Most | None:
    """On `local` half of this machine, so that other runs do not wait for a notebook to end."""
    if not place.settings.is_local:
        return None
    from batchml.local.ecs import believed_vcpus, memory_mib

    return Most(max(1, believed_vcpus(place.home) // 2), memory_mib() // 2)


def resources(
    gpus: int | None = None,
    vcpus: int | None = None,
    memory: str | None = None,
    most: Most | None = None,
) -> Resources:
    """What a notebook gets unless told: 2 vCPUs and 7 GiB; with GPUs 4 vCPUs and 14 GiB for each,
    which leaves what ECS needs of a host with 8 and of one with 16 GiB a GPU."""
    each = gpus or 0
    own_vcpus, own_mib = 4 * each or 2, (14 * each or 7) * 1024
    if most is not None:
        own_vcpus, own_mib = min(own_vcpus, most.vcpus), min(own_mib, most.memory_mib)
    own_memory = f"{own_mib} MiB" if own_mib % 1024 else f"{own_mib // 1024} GiB"
    return Resources(
        vcpus=own_vcpus if vcpus is None else vcpus,
        memory=own_memory if memory is None else memory,
        gpus=each,
    )


def spec_of(image: str | None, wanted: Resources) -> JobSpec:
    """The job. The folder that one stands in does not travel: JupyterLab shows the workspace."""
    return JobSpec(image=image or IMAGE, command=PROGRAM, name=KIND, code=False, resources=wanted)


def check_image(place: "Place", image: str) -> None:
    """Raises UsageError for an image of others in AWS: JupyterLab is started by our runtime."""
    from batchml.ops.jobs import find_image

    if place.settings.is_local or find_image(image, place.image_folders) is not None:
        return
    raise UsageError(
        f"--image {image} was not built by batchml, whose runtime starts JupyterLab and looks "
        "after it. Make a folder below images/ with this image as its base: docs/images.md"
    )


def check_way(place: "Place", register: Mapping[str, Any]) -> None:
    """Raises NoDoor where nobody could get to the notebook, before it is begun and paid for.

    `register` is the request of its definition.
    """
    if place.settings.is_local:
        return
    from batchml.client.plugin import find_plugin

    find_plugin(os.environ)
    if not register.get("containerProperties", {}).get("enableExecuteCommand"):
        raise NoDoor(
            f"Jobs of {place.env} have no role of their own, by which ECS Exec could lead to "
            f"JupyterLab: nothing was begun. Bring the environment up to date: "
            f"batchml setup --env {place.env}"
        )


def order_of(spec: JobSpec, **more: object) -> "Order":
    from batchml.client.client import Client

    return Client.order(spec, **more)  # type: ignore[arg-type]


# --- to come back ---------------------------------------------------------------------------------


def check_is_notebook(place: "Place", run: "Run", word: str) -> None:
    """Raises UsageError for a run that was not begun by `notebook`."""
    if run.tags.get(SEAT_TAG) != KIND:
        ours = "".join(
            f"\nYour notebook that is {each.status.value}: "
            f"batchml notebook {each.job_id}{place.option}"
            for each in standing(place)
        )
        raise UsageError(
            f"{word} is no notebook: it was not begun by `batchml notebook`. To go into any other "
            f"run: batchml shell {word}{place.option}, batchml forward {word} PORT{place.option}"
            f"{ours}"
        )


def pick(place: "Place", word: str) -> "Run":
    """The notebook that a word means: of several of one name one that runs, before any that has
    ended. Raises UsageError, NotFound."""
    from batchml.client.runs import described, select

    named = [run for run in standing(place) if word == run.name] if word else []
    if named:
        return named[0]
    (job_id,) = select(place, [word])
    run = described(place, [job_id])[job_id]
    check_is_notebook(place, run, word)
    return run


def only_one(place: "Place") -> "Run":
    """The one that runs, or waits to. Raises UsageError where there is none, or are several."""
    runs = standing(place)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise UsageError(
            "--end: no notebook of yours runs here. `batchml notebook --new --end` begins one "
            "that ends together with its command."
        )
    lines = [f"  batchml notebook {run.job_id}{place.option} --end" for run in runs]
    raise UsageError("\n".join(["--end: several notebooks of yours run. Name one:", *lines]))


def find_door(place: "Place", seat: "Seat") -> Door:
    """Port and token, once JupyterLab answers.

    Raises Unheld, with what the run said last, when it ends instead; NotRunning, NoDoor; and
    BatchmlError when JupyterLab does not answer for six minutes.
    """
    from batchml.client.doors import ask_inside

    for _ in range(_TRIES):
        try:
            asked = ask_inside(place, seat, (*PROGRAM, "where", str(_ASKS)))
        except NotRunning as error:
            check_ended(place, seat.run.job_id, error)
            raise
        if asked.code == 0:
            return read_door(asked.out)
    raise BatchmlError(
        f"JupyterLab of {seat.run.name} does not answer. What it printed: "
        f"batchml logs {seat.run.job_id}{place.option}"
    )


def read_door(text: bytes) -> Door:
    """What `where` printed; a terminal may have put something around it. Raises BatchmlError."""
    for line in reversed(text.decode(errors="replace").splitlines()):
        try:
            return msgspec.json.decode(line.strip().encode(), type=Door)
        except msgspec.DecodeError:
            continue
    raise BatchmlError("JupyterLab's port could not be read from what the run answered.")


def check_ended(place: "Place", job_id: str, error: NotRunning) -> None:
    """Raises Unheld for a run that ended before JupyterLab answered."""
    run = place.describe([job_id]).get(job_id)
    if run is not None and run.status.is_terminal:
        raise ended(place, run) from error


def ended(place: "Place", run: "Run", otherwise: str = "") -> Unheld:
    """Of a notebook that is over: how it ended, in its own words, or `otherwise` where it had none;
    the exit code is the run's."""
    from batchml.client.doors import ending
    from batchml.model.run import classify

    said = said_last(place, run)
    words = f"{run.name} has ended: {ending(run)}."
    if said:
        words = f"{words} It said: {said}"
    elif otherwise:
        return Unheld(otherwise, classify(run).exit_code or 1)
    return Unheld(
        f"{words}\n  batchml logs {run.job_id}{place.option}", classify(run).exit_code or 1
    )


def said_last(place: "Place", run: "Run") -> str:
    """What the notebook's program said in the log, the last time; "" where it said nothing."""
    try:
        reader = place.open_log(run, run.attempts[-1].log_stream)
        said = (line.message for line in reader.backwards() if line.message.startswith(_SAID))
        return next(said, "").removeprefix(_SAID)
    except (BatchmlError, IndexError):
        return ""


def seat_words(place: "Place", run: "Run") -> str:
    """Of a notebook: how to come back to it, or why it ended and what it cost; "" of another run.

    One call for one that has ended.
    """
    if run.tags.get(SEAT_TAG) != KIND:
        return ""
    if run.status.is_terminal:
        return said_last(place, run)
    return f"batchml notebook {run.job_id}{place.option}"


def keep_open(place: "Place", seat: "Seat", door: Door, first: "Tunnel", tell: "Tell") -> str:
    """Until the run ends, keep a tunnel open on the port that `first` has; why it ended.

    A tunnel that is cut (a laptop that slept, a session that AWS ended) is opened again.
    """
    tunnel: Tunnel | None = first
    while tunnel is not None:
        with tunnel:
            why = tunnel.wait()
        cut = f"The tunnel was cut: it is opened again while the notebook runs. ({why})"
        tunnel = _again(place, seat, door, first.local_port, partial(tell, cut))
    return why


def _again(
    place: "Place", seat: "Seat", door: Door, local_port: int, tell: Callable[[], None]
) -> "Tunnel | None":
    """The tunnel, however long there is no contact; None once the run has ended."""
    from batchml.client.doors import open_tunnel
    from batchml.errors import ServiceUnreachable

    pauses, job_id, is_told = iter(_PAUSES), seat.run.job_id, False
    while True:
        try:
            run = place.describe([job_id]).get(job_id)
            if run is None or run.status.value != "RUNNING":
                return None
            if not is_told:
                is_told = True
                tell()
            return open_tunnel(place, seat, door.port, local_port)
        except (ServiceUnreachable, NotRunning):
            place.renew()
            place.clock.sleep(next(pauses, _PAUSES[-1]))


# --- notebooks that run ---------------------------------------------------------------------------


def standing(place: "Place") -> list["Run"]:
    """Those that this machine began here and that have not ended: what runs, and then what waits,
    the newest first. One call, and none where the history has none."""
    left = [each for each in newest(place.history.recent(place.env)) if not each.has_ended]
    ids = [each.job_id for each in left][:_STANDING]
    told = place.describe(ids) if ids else {}
    runs = [told[job_id] for job_id in ids if job_id in told]
    alive = [run for run in runs if not run.status.is_terminal]
    return sorted(alive, key=lambda run: run.status.value != "RUNNING")


class Asked(Struct, frozen=True, kw_only=True):
    """What was asked for by flags of a notebook; None: not said."""

    gpus: int | None = None
    vcpus: int | None = None
    memory: str | None = None
    queue: str | None = None
    image: str | None = None
    name: str | None = None
    others: bool = False  # what cannot be compared, such as variables


def as_asked(runs: "Iterable[Run]", asked: Asked, records: "Iterable[Record]") -> "Run | None":
    """The first of these that has what was asked for, as it was sent. Pure."""
    known = {each.job_id: each for each in records}
    found = (run for run in runs if _is_as_asked(known.get(run.job_id), asked))
    return None if asked.others else next(found, None)


def _is_as_asked(record: "Record | None", asked: Asked) -> bool:
    if record is None:
        return False
    memory = None if asked.memory is None else (parse_size(asked.memory) or 0) // 1024**2
    pairs = (
        (asked.gpus, record.gpus), (asked.vcpus, record.vcpus), (memory, record.memory_mib),
        (asked.queue, record.queue), (asked.image, record.spec.get("image", IMAGE)),
        (asked.name, record.name),
    )  # fmt: skip
    return all(wanted is None or wanted == has for wanted, has in pairs)


# --- notebooks that were forgotten ----------------------------------------------------------------


def earlier(place: "Place") -> list[str]:
    """What to know before another notebook is begun: one that still runs, and one that ended
    while nobody looked, with what it cost. No call where there is none."""
    records = newest(place.history.recent(place.env))
    unseen = [each for each in records if not each.has_ended][:_TOLD]
    if not unseen:
        return []
    try:
        told = place.describe([each.job_id for each in unseen])
        return [words for each in unseen for words in _words(place, each, told.get(each.job_id))]
    except BatchmlError:  # it is an extra
        return []


def newest(records: "Iterable[Record]") -> list["Record"]:
    """The notebooks among what the history has, the newest first. Pure."""
    found = [each for each in records if each.job_id and each.tags.get(SEAT_TAG) == KIND]
    return sorted(found, key=lambda each: each.at, reverse=True)


def _words(place: "Place", record: "Record", run: "Run | None") -> list[str]:
    if run is None:
        return []
    spent = last_words(place, run.job_id)
    if run.status.is_terminal:
        place.history.all_ended([run])
        if run.started_at is None and (run.is_cancelled or run.is_terminated):
            return []  # whoever gave it up knows
        return [f"Your notebook {record.job_id} has ended since you left it. {spent}"]
    return [
        f"Your notebook {record.job_id} is {run.status.value}. {spent} "
        f"To go there instead: batchml notebook {record.job_id}{place.option}"
    ]
