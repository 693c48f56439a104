"""The image of a job and the platform of its environment: what a job definition is made from."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.batch.requests import definition_request
from batchml.aws.naming import Platform, make_platform
from batchml.context import Context, EnvironmentCache, read_stack_outputs
from batchml.errors import ConfigError
from batchml.jobs.find import (
    ImageSource,
    find_job,
    find_source,
    load_job,
    own_image_files,
    unused_files_notice,
)
from batchml.jobs.images import pinned_recipe
from batchml.model.image import flavor_for
from batchml.model.job import JobSpec
from batchml.runs.options import DEFAULT_IMAGE, ResolvedJob


class JobWithImage(Struct, frozen=True):
    """A job and the reference of its image, which is all that its definition is made of."""

    spec: JobSpec
    image: str
    image_source: ImageSource | None

    def request(self, platform: Platform) -> dict[str, Any]:
        """The RegisterJobDefinition request."""
        return definition_request(self.spec, self.image, platform)


def resolve_jobs(context: Context, names: Sequence[str]) -> list[JobWithImage]:
    """The jobs of these names or folders, with the references of their images.

    Raises ConfigError for a job.toml that is wrong, NotFound for a job, or for an image that was
    not pushed.
    """
    jobs = [find_job(name, context.job_folders, context.folder) for name in names]
    specs = [load_job(folder, context.image_folders) for folder in jobs]
    sources = [
        find_source(spec.image, context.image_folders, folder)
        for spec, folder in zip(specs, jobs, strict=True)
    ]
    return [
        JobWithImage(spec, image_reference(context, spec, source), source)
        for spec, source in zip(specs, sources, strict=True)
    ]


def image_reference(
    context: Context,
    spec: JobSpec,
    source: ImageSource | None,
    known: EnvironmentCache | None = None,
) -> str:
    """The reference of a job's image. Raises ConfigError for what it is made from, and NotFound,
    with the command that pushes it, for one that is not in the registry."""
    if source is None:
        return spec.image
    if context.settings.is_local:
        return source.recipe().reference

    wanted = source.recipe(flavor_for(spec.resources.gpus))
    said = source.push_argument(context.folder)
    if known is None:
        return pinned_recipe(context.connect(), wanted, said)
    return known.image(wanted.reference, lambda: pinned_recipe(context.connect(), wanted, said))


def read_platform(context: Context) -> Platform:
    """What the stacks of an environment in AWS give to its job definitions; empty on `local`."""
    outputs: dict[str, str] = {}
    if not context.settings.is_local:
        outputs = read_stack_outputs(context)
    return make_platform(context.env, context.settings.environment, outputs)


def publish_image(context: Context, source: ImageSource | None, reference: str = "") -> None:
    """Put an image where the embedded server finds it; one for AWS was pushed before.

    A `reference` that was worked out already saves doing so again.
    """
    if context.settings.is_local and source is not None:
        from batchml.local import images

        if images.find(context.home.images, reference) is None:
            made = images.publish_recipe(context.home.images, source.recipe())
            if reference and made != reference:
                raise ConfigError(
                    str(source.folder), ["changed while it was submitted. Submit it again."]
                )


def own_image_notices(ordered: ResolvedJob) -> list[str]:
    """What is said where a folder's requirements may be thought to be in the image."""
    if ordered.job:
        told = unused_files_notice(ordered.spec.image, ordered.folder)
        return [told] if told else []
    found = own_image_files(ordered.folder)
    if ordered.spec.image != DEFAULT_IMAGE or not found:
        return []
    return [f"{' and '.join(found)} here: not used; --image . makes the image of it."]
