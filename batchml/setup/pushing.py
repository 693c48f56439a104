"""The images that the jobs of the user's folder need in ECR, and their push by `setup`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from shlex import quote

from msgspec import Struct

from batchml.aws.ecr import Ecr, ImageEngine, NotifyBuild
from batchml.context import Context
from batchml.errors import BatchmlError, ConfigError, ImageError
from batchml.jobs import images
from batchml.jobs.find import find_job, find_source, load_job
from batchml.jobs.gpus import queue_processor, variants
from batchml.model.image import Recipe, flavor_for


class NeededImage(Struct, frozen=True):
    """An image that jobs need. `argument` names it for `batchml image push`."""

    recipe: Recipe
    argument: str

    def push_command(self, env_option: str) -> str:
        return images.push_command(self.recipe, self.argument, env_option)


def own_jobs(context: Context) -> list[str]:
    """The jobs of the user's folder, as commands take them; `hello`, of `init`, is the first."""
    names = [path.parent.name for path in sorted(context.job_folders[0].glob("*/job.toml"))]
    names.sort(key=lambda name: name != "hello")
    return [*names, *(["."] if (context.folder / "job.toml").is_file() else [])]


def needed_images(context: Context, jobs: Sequence[str]) -> list[NeededImage]:
    """The images that batchml builds for these jobs, each once.

    Raises ConfigError for mistakes in a job or its image.
    """
    found: dict[str, NeededImage] = {}
    for name in jobs:
        folder = find_job(name, context.job_folders, context.folder)
        job = load_job(folder, context.image_folders)
        source = find_source(job.image, context.image_folders, folder)
        if source is None:
            continue
        for spec in variants(context, job, source):
            gpus = spec.resources.gpu_count
            queue = context.choose_queue(spec.queue, gpus)
            processor = queue_processor(context, queue, None)
            recipe = source.recipe(flavor_for(gpus)).built_for(processor)
            needed = NeededImage(recipe, source.push_argument(context.folder))
            found.setdefault(recipe.reference, needed)
    return list(found.values())


def missing_images(context: Context, needed: Sequence[NeededImage]) -> list[NeededImage]:
    """The images that ECR lacks: one call for each."""
    ecr = Ecr(context.connect())
    return [each for each in needed if ecr.find(each.recipe.name, each.recipe.tag) is None]


def check_engine(missing: Sequence[NeededImage]) -> None:
    """Raise ImageError if images are missing and no Docker engine can build and push them."""
    if not missing:
        return
    names = ", ".join(each.recipe.name for each in missing)
    for each in missing:
        if not each.recipe.has_dockerfile:
            where = each.argument
            raise ConfigError(where, ["Dockerfile: missing. The image is built from it."])
    try:
        ImageEngine().find(missing[0].recipe.reference)
    except ImageError as error:
        raise ImageError(
            f"Nothing was made, because --push cannot build {names}: {error}\n"
            "  Without --push, setup needs no Docker engine: run `batchml image push` later."
        ) from error


def push_images(
    context: Context, missing: Sequence[NeededImage], notify: NotifyBuild
) -> Iterator[str]:
    """Build and push images; yield the reference of each. It raises what `images.push` does."""
    tags = dict(context.settings.environment.tags)
    target = images.PushTarget(Ecr(context.connect()), context.env, tags)
    engine = ImageEngine()
    for each in missing:
        yield images.push(engine, target, each.recipe, notify, context.clock).reference


def next_steps(context: Context) -> list[str]:
    """The commands after `setup` in AWS: push the image of a first job if ECR lacks it; submit."""
    job = next(iter(own_jobs(context)), "lenet")
    needed: list[NeededImage] = []
    with suppress(BatchmlError):  # a mistake in the job, or no answer of ECR
        needed = needed_images(context, [job])
        needed = missing_images(context, needed)
    pushes = [each.push_command(context.env_option) for each in needed]
    return [*pushes, f"batchml submit{context.env_option} --wait {quote(job)}"]
