"""What `submit` does between its flags and its output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.aws.requests import Submission, Travel, definition, submission
from batchml.aws.site import (
    PLATFORM_STACKS,
    Platform,
    make_platform,
    owner_tags,
    stack_name,
)
from batchml.cli.following import select
from batchml.cli.output import say
from batchml.cli.wiring import Place
from batchml.errors import ConfigError, UsageError
from batchml.model.job import JobSpec, change_job, read_job, with_params
from batchml.model.names import to_name
from batchml.ops.code import CodeArchive, keep, pack
from batchml.ops.history import Remembered
from batchml.ops.jobs import find_image, find_job, load_job
from batchml.ops.submit import Capacity, fit, refuse_cuts, submit

DEFAULT_QUEUE = "default"
DEFAULT_IMAGE = "python"  # for `submit -- COMMAND` without a job


class Order(Struct, frozen=True):
    """What the user asked for."""

    job: str | None
    command: list[str] | None
    params: dict[str, str]
    changes: dict[str, Any]
    tags: dict[str, str]
    after: tuple[str, ...]
    strict: bool
    share: str = ""


class Prepared(Struct, frozen=True):
    spec: JobSpec
    requests: Submission
    archive: CodeArchive | None
    image_folder: Path | None


class Job(Struct, frozen=True):
    """A job and the reference of its image, which is all that its definition is made of."""

    spec: JobSpec
    image: str
    image_folder: Path | None

    def request(self, platform: Platform) -> dict[str, Any]:
        """The RegisterJobDefinition request."""
        return definition(self.spec, self.image, platform)


def prepare(place: Place, order: Order, *, dry_run: bool) -> Prepared:
    """Work out the requests; nothing is sent and nothing kept.

    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    spec, folder = _spec(place, order)
    if place.settings.is_local:
        spec = _fit(spec, order.strict)
    image_folder = find_image(spec.image, place.image_folders)
    # The state folder holds keys, and every archive before this one.
    archive = _archive(spec, folder, without=place.home.root)
    if spec.retry.attempts > 1:
        say(f"Up to {spec.retry.attempts} attempts, after: {', '.join(spec.retry.on)}.")
    travel = Travel(
        code=_code_place(place, archive) if archive else "",
        env=_place_variables(place),
        tags=order.tags if place.settings.is_local else {**order.tags, **owner_tags(place.env)},
        share=order.share,
        depends_on=order.after if dry_run else tuple(select(place, order.after)),
    )
    queue = spec.queue or DEFAULT_QUEUE
    requests = submission(
        spec,
        image=_image_reference(place, spec, image_folder),
        queue=place.queue(queue),
        travel=travel,
        platform=read_platform(place),
    )
    return Prepared(spec, requests, archive, image_folder)


def resolve(place: Place, names: Sequence[str]) -> list[Job]:
    """The jobs of these names or folders, with the references of their images.

    Raises ConfigError for a job.toml that is wrong, NotFound for a job, or for an image that was
    not pushed.
    """
    specs = [load_job(find_job(name, place.job_folders, place.here)) for name in names]
    folders = [find_image(spec.image, place.image_folders) for spec in specs]
    return [
        Job(spec, _image_reference(place, spec, folder), folder)
        for spec, folder in zip(specs, folders, strict=True)
    ]


def read_platform(place: Place) -> Platform:
    """What the stacks of an environment in AWS give to its job definitions; empty on `local`."""
    outputs: dict[str, str] = {}
    if not place.settings.is_local:
        from batchml.aws.stacks import Stacks

        stacks = Stacks(place.connect())
        for stack in PLATFORM_STACKS:
            outputs |= stacks.outputs(stack_name(place.env, stack))
    return make_platform(place.env, place.settings.environment, outputs)


def publish(place: Place, image_folder: Path | None) -> None:
    """Put an image where the embedded server finds it; one for AWS was pushed before."""
    if place.settings.is_local and image_folder is not None:
        from batchml.local import images

        images.publish(place.home.images, image_folder)


def send(place: Place, prepared: Prepared) -> str:
    """Put code and image where the run finds them, and submit it; the job's id."""
    place.connect()  # starting the embedded server makes the state folder, and checks it
    if not place.settings.is_local:
        place.home.prepare()  # the run is remembered there
    elif prepared.archive is not None:
        keep(prepared.archive, place.home.code)
    publish(place, prepared.image_folder)
    now = place.clock.now()
    job_id = submit(place.batch, prepared.requests, now, share=_own_share())
    request = prepared.requests.submit
    ms = int(place.clock.now() * 1000)
    place.history.add(Remembered(job_id, request["jobName"], place.env, request["jobQueue"], ms))
    return job_id


def _own_share() -> str:
    """Whose runs these are where a queue asks for it: the user's name, as AWS Batch takes one."""
    import getpass

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        name = ""
    return "".join(char for char in name if char.isascii() and char.isalnum()) or "default"


def announcement(prepared: Prepared, job_id: str) -> str:
    request = prepared.requests.submit
    name, queue = request["jobName"], request["jobQueue"]
    return f"Submitted job [{name} - {job_id}] to the job queue [{queue}]"


def as_json(place: Place, prepared: Prepared, job_id: str) -> dict[str, str]:
    request = prepared.requests.submit
    return {
        "jobId": job_id,
        "jobName": request["jobName"],
        "jobQueue": request["jobQueue"],
        "env": place.env,
    }


def shown(prepared: Prepared) -> dict[str, Any]:
    """What `--dry-run` prints."""
    return {
        "RegisterJobDefinition": prepared.requests.register,
        "SubmitJob": prepared.requests.submit,
    }


def _spec(place: Place, order: Order) -> tuple[JobSpec, Path]:
    if order.job is None and not order.command:
        raise UsageError("Name a job (`batchml submit lenet`) or give a command after --.")
    if order.job is None:
        assert order.command
        folder = place.here
        name = to_name(Path(order.command[0]).name)
        table = {"image": DEFAULT_IMAGE, "command": ["-"], "name": name, "params": order.params}
        spec = read_job(table, "The command line")
    else:
        folder = find_job(order.job, place.job_folders, place.here)
        spec = load_job(folder)
    if order.command:
        # After the check of the file: here braces may be the shell's or awk's as well, and only
        # those of a known parameter are filled in.
        if "" in order.command:
            raise UsageError("The command has an empty word, which AWS Batch refuses.")
        spec = msgspec.structs.replace(spec, command=tuple(order.command))
    spec = change_job(spec, order.changes, "The command line")
    return with_params(spec, order.params, spec.name), folder


def _fit(spec: JobSpec, strict: bool) -> JobSpec:
    from batchml.local.machine import read_machine

    machine = read_machine(with_gpus=spec.resources.gpus > 0)
    fitted = fit(spec, Capacity(machine.vcpus, machine.memory, len(machine.gpus)))
    if strict:
        refuse_cuts(fitted)
    if fitted.cuts:
        say(f"Fitted to this machine: {', '.join(fitted.cuts)}.")
    return fitted.spec


def _archive(spec: JobSpec, folder: Path, without: Path) -> CodeArchive | None:
    if spec.code is False:
        return None
    source = folder if spec.code is True else folder / spec.code
    if not source.is_dir():
        raise ConfigError(str(folder / "job.toml"), [f"code: {source} is not a folder."])
    archive = pack(source, without)
    if archive.left_out:
        names = ", ".join(archive.left_out[:5]) + (", ..." if len(archive.left_out) > 5 else "")
        say(f"Left behind, not being files of this folder: {names}.")
    return archive


def _code_place(place: Place, archive: CodeArchive) -> str:
    if not place.settings.is_local:
        raise ConfigError(
            place.env,
            ["code: sending a folder to AWS is not in this version yet. Put the code into the "
             "image and set code = false."],
        )  # fmt: skip
    return str(place.home.code / archive.name)


def _place_variables(place: Place) -> dict[str, str]:
    data = place.settings.data_dir
    return {"BATCHML_DATA_DIR": data.value} if data and place.settings.is_local else {}


def _image_reference(place: Place, spec: JobSpec, folder: Path | None) -> str:
    if folder is None:
        return spec.image
    if not place.settings.is_local:
        from batchml.model.image import flavor_for
        from batchml.ops.images import pinned

        return pinned(place.connect(), folder, flavor_for(spec.resources.gpus))
    from batchml.local import images

    return images.reference(folder)
