"""The image of a job and the platform of its environment, from which a job definition is made."""

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from msgspec import Struct

from batchml.aws.batch.requests import definition_request
from batchml.aws.naming import Platform, make_platform
from batchml.context import Context, EnvironmentCache, open_cache, read_stack_outputs
from batchml.errors import BatchmlError, ConfigError, NotFound
from batchml.jobs.find import (
    ImageSource,
    find_job,
    find_source,
    load_job,
    own_image_files,
    unused_files_notice,
)
from batchml.jobs.gpus import queue_processor, variants
from batchml.jobs.images import pinned_recipe, recipe_not_pushed
from batchml.model.image import flavor_for, is_reference
from batchml.model.job import JobSpec
from batchml.model.run import Record
from batchml.runs.options import (
    COMMAND_LINE,
    DEFAULT_IMAGE,
    ResolvedJob,
    RunRequest,
)

_PINNED = r"/batchml/[^/@]+@sha256:"  # images that batchml pushed


class JobWithImage(Struct, frozen=True):
    """A job, its queue in AWS, and the reference of its image, for its job definition.

    `name` is the job's name or folder, as it was asked for.
    """

    name: str
    spec: JobSpec
    image: str
    image_source: ImageSource | None
    queue: str

    def request(self, platform: Platform) -> dict[str, Any]:
        """The RegisterJobDefinition request."""
        return definition_request(self.spec, self.image, platform, self.queue)


def resolve_jobs(
    context: Context, names: Sequence[str]
) -> tuple[list[JobWithImage], list[tuple[str, NotFound]]]:
    """The jobs of these names or folders, with the references of their images.

    A job with `gpus = "auto"` that names no queue is there twice if the environment has hosts with
    and without GPUs. Also returns, by the names of jobs, the images that were not pushed. Raises
    ConfigError for a job.toml that is wrong, NotFound for a job.
    """
    found, missing = list[JobWithImage](), list[tuple[str, NotFound]]()
    for name in names:
        folder = find_job(name, context.job_folders, context.folder)
        job = load_job(folder, context.image_folders)
        source = find_source(job.image, context.image_folders, folder)
        for spec in variants(context, job, source):
            try:
                image = image_reference(context, spec, source)
            except NotFound as error:
                missing.append((name, error))
            else:
                queue = run_queue(context, spec)
                found.append(JobWithImage(name, spec, image, source, queue))
    return found, missing


def run_queue(context: Context, spec: JobSpec) -> str:
    """The name of a run's queue in AWS. On `local` it decides nothing, so nobody is asked."""
    queue = context.choose_queue(spec.queue, spec.resources.gpu_count)
    return queue if context.settings.is_local else context.queue(queue)


def image_reference(
    context: Context,
    spec: JobSpec,
    source: ImageSource | None,
    cache: EnvironmentCache | None = None,
) -> str:
    """The reference of a job's image, for the processor of its queue's hosts.

    Raises ConfigError for mistakes in the image's folder, and NotFound, with the command that
    pushes the image, if it is not in the registry.
    """
    if source is None:
        return spec.image
    if context.settings.is_local:
        return source.recipe().reference
    gpus = spec.resources.gpu_count
    queue = context.choose_queue(spec.queue, gpus)
    return pinned_image(context, source, queue, cache, flavor_for(gpus))


def pinned_image(
    context: Context,
    source: ImageSource,
    queue: str,
    cache: EnvironmentCache | None,
    flavor: str = "cpu",
) -> str:
    """The reference, with its digest, of an image in ECR for the hosts of a queue.

    Raises ConfigError for mistakes in the image's folder, and NotFound if it is not in ECR.
    """
    recipe = source.recipe(flavor).built_for(queue_processor(context, queue, cache))

    def pin() -> str:
        argument = source.push_argument(context.folder)
        if context.is_offline:
            raise recipe_not_pushed(recipe, argument, context.env_option)
        return pinned_recipe(context.connect(), recipe, argument, context.env_option)

    return pin() if cache is None else cache.image(recipe.reference, pin)


def check_kept_image(context: Context, image: str, before: str, queue: str) -> None:
    """Raise ConfigError if an image made for the hosts of the queue `before` goes to a queue of
    another processor, as batchml.toml describes the queues.

    An image that batchml did not build may be for several processors.
    """
    environment = context.settings.environment
    names = [context.bare(context.queue(each)) for each in (before, queue)]
    old, new = map(environment.processor_of_queue, names)
    if old and new and old != new and re.search(_PINNED, image) and not context.settings.is_local:
        raise ConfigError(
            COMMAND_LINE,
            [
                f"queue {context.bare(queue)} has {new} hosts, but the image of this run is for "
                f"the {old} hosts of queue {context.bare(before)}. Submit the job again: it then "
                f"gets an image for {new}."
            ],
        )


def read_platform(context: Context) -> Platform:
    """The platform of an environment, from the outputs of its stacks; on `local` without roles."""
    outputs: dict[str, str] = {}
    if not context.settings.is_local:
        outputs = read_stack_outputs(context)
    return make_platform(context.env, context.settings.environment, outputs)


def check_image_runs(context: Context, request: RunRequest) -> None:
    """Raise ConfigError for a flag `--image` with a registry's image, where jobs run as processes.

    They would run with this machine's programs. The image of a job.toml may be meant for AWS, so
    only a notice in the log says that (docs/decisions/003-images-without-docker.md).
    """
    image = str(request.changes.get("image") or "")
    if not (context.settings.is_local and is_reference(image)):
        return
    from batchml.local import images
    from batchml.local.executors.choice import DOCKER, read_choice

    is_stored = images.find(context.home.images, image) is not None
    if is_stored or read_choice(context.home).executor == DOCKER:
        return
    raise ConfigError(
        COMMAND_LINE,
        [
            f"--image {image}: local jobs run as processes here, without a registry's images. With "
            "Docker: batchml local stop, then batchml local start --executor docker. Without: "
            f"--image {DEFAULT_IMAGE}, or the name of a folder below images/."
        ],
    )


def publish_image(context: Context, source: ImageSource | None, reference: str = "") -> None:
    """On `local`, store an image where the embedded server finds it; nothing in AWS.

    With its `reference`, an image that is stored already is not read again. Raises ConfigError if
    the image's folder has changed since `reference` was made.
    """
    if context.settings.is_local and source is not None:
        from batchml.local import images

        if images.find(context.home.images, reference) is None:
            published = images.publish_recipe(context.home.images, source.recipe())
            if reference and published != reference:
                raise ConfigError(
                    str(source.folder), ["changed while it was submitted. Submit it again."]
                )


def own_image_notices(job: ResolvedJob) -> list[str]:
    """A notice for a folder with image files, such as requirements.txt, that the image ignores."""
    if job.job:
        notice = unused_files_notice(job.spec.image, job.folder)
        return [notice] if notice else []
    files = own_image_files(job.folder)
    if job.spec.image != DEFAULT_IMAGE or not files:
        return []
    return [f"The image does not use {' and '.join(files)}; --image . builds an image with it."]


# --- The image of an earlier run ------------------------------------------------------------------


def present_source(context: Context, record: Record) -> ImageSource | None:
    """The files from which the image of an earlier run's job would be made now.

    None for an image of a registry, and if the files are not known or have mistakes.
    """
    if not (record.job or record.folder):
        return None
    folder = Path(record.job or record.folder)
    try:
        word = load_job(folder).image if record.job else record.spec.get("image", "")
        return find_source(word, context.image_folders, folder) if word else None
    except (BatchmlError, OSError):
        return None


def changed_image_notice(context: Context, record: Record | None, spec: JobSpec) -> str:
    """A notice if the files of a rerun's image have changed since it was made; else "".

    `record`: the earlier run. `spec` has its image, which the rerun keeps.
    """
    source = present_source(context, record) if record is not None else None
    if record is None or source is None:
        return ""
    repository = re.split(r"[:@](?=[^/]*$)", spec.image)[0]
    if f"/{repository}".endswith(f"/batchml/{source.name}"):
        try:
            now = image_reference(context, spec, source, _cache(context))
        except NotFound:  # the new image was not pushed
            now = ""
        except (BatchmlError, OSError):
            return ""
        if now != spec.image:
            files = source.folder / source.file
            params = " -p ..." if record.params else ""
            again = f"batchml submit {quote(record.job)}{params}" if record.job else "submit anew"
            return (
                f"The image stays as it was, although {files} gives another image now; to use "
                f"that: {again}"
            )
    return ""


def kept_flavor_notice(context: Context, record: Record | None, gpus: int) -> str:
    """A notice if a rerun keeps the image for CPUs and gets GPUs, or vice versa; else ""."""
    if record is None or context.settings.is_local or bool(record.gpus) == bool(gpus):
        return ""
    source = present_source(context, record)
    if source is None or not source.recipe().has_flavors:
        return ""
    before, now = ("CPUs", "GPUs") if gpus else ("GPUs", "CPUs")
    return f"The image stays that for {before}. With the one for {now}, submit the job again."


def _cache(context: Context) -> EnvironmentCache | None:
    return None if context.settings.is_local else open_cache(context)
