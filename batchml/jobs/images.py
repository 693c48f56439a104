"""Build images, push them to ECR, and list them."""

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from msgspec import Struct

from batchml.aws.ecr import (
    Ecr,
    ImageEngine,
    NotifyBuild,
    PushedImage,
    RegistryLogin,
    Repository,
    image_not_pushed,
)
from batchml.aws.session import Session
from batchml.clock import Clock
from batchml.errors import (
    ConfigError,
    ImageError,
    InputNotFound,
    NoImageEngine,
    ServiceUnreachable,
    TagTaken,
)
from batchml.jobs.find import ImageSource
from batchml.model.environment import LOCAL, Environment
from batchml.model.image import DOCKERFILE, Recipe, parse_reference

TRIES = 4  # of a push, if the connection fails or the registry is too busy
_PAUSE = 5.0  # seconds before the second try; each pause is twice the one before


class ImageRow(Struct, frozen=True):
    """An image in the output of a command (`--json`)."""

    name: str
    flavor: str | None  # None: an image of earlier files, whose flavor is not known
    tag: str
    reference: str
    digest: str | None
    size: int | None  # bytes: compressed if it is in ECR
    built: bool  # by this command; in a list: the Docker engine has it
    pushed: bool  # by this command; in a list: ECR has it


class PushTarget(Struct, frozen=True):
    """The registry of an environment, and the tags of new repositories."""

    ecr: Ecr
    env: str
    tags: dict[str, str] = {}
    kms_key: str = ""  # ARN; "": AWS's own key for ECR


class ImageVariant(Struct, frozen=True):
    """A flavor of an image for a processor."""

    flavor: str
    processor: str = ""  # "": that of the engine


# --- Recipes --------------------------------------------------------------------------------------


def read_recipes(
    sources: Iterable[ImageSource],
    variants: Sequence[ImageVariant],
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> list[Recipe]:
    """Read the recipes of images to build, each once: some images are the same in both flavors.

    Raises ConfigError, also for an image without a Dockerfile.
    """
    recipes: dict[str, Recipe] = {}
    for source in sources:
        for variant in variants:
            recipe = source.recipe(variant.flavor, base=base, build_args=build_args)
            recipe = recipe.built_for(variant.processor)
            if not recipe.has_dockerfile:
                where = str(source.folder)
                raise ConfigError(where, [f"{DOCKERFILE}: missing. The image is built from it."])
            recipes.setdefault(recipe.reference, recipe)
    return list(recipes.values())


def variants_of(environment: Environment, name: str, flavor: str = "") -> list[ImageVariant]:
    """Choose the variants of an image that the hosts of an environment need.

    That is the flavor cpu for each processor, and cuda for the processors of hosts with GPUs; or
    only the given flavor. On `local` the engine's processor counts, so none is named.
    """
    if name == LOCAL:
        return [ImageVariant(flavor or "cpu")]
    with_gpus = {each.processor for each in environment.compute.values() if each.has_gpus}
    chosen = {"cpu": environment.processors, "cuda": tuple(sorted(with_gpus))}
    if flavor:
        return [ImageVariant(flavor, each) for each in chosen.get(flavor) or environment.processors]
    return [ImageVariant(each, processor) for each in chosen for processor in chosen[each]]


# --- Build and push -------------------------------------------------------------------------------


def build(engine: ImageEngine, recipe: Recipe, notify: NotifyBuild) -> ImageRow:
    """Build the image, unless the engine has it. Raises ImageError.

    A recipe without a processor is built for that of the engine.
    """
    if not recipe.processor:
        recipe = recipe.built_for(engine.processor())
    existing = engine.find(recipe.reference)
    if existing is not None and existing.processor != recipe.processor:
        existing = None  # someone else gave this name to another image
    image = existing or engine.build(recipe, notify)
    return _row(recipe, recipe.reference, None, image.size, built=existing is None)


def push(
    engine: ImageEngine, target: PushTarget, recipe: Recipe, notify: NotifyBuild, clock: Clock
) -> ImageRow:
    """Push the image to ECR, unless it is there; build it first, if the engine does not have it.

    Before an image counts as being there, the engine reads its processor from its manifest. Without
    an engine its tag, which names the processor, is believed. Raises ImageError, AccessError with
    the policy statement to add, ServiceError, ServiceUnreachable.
    """
    repository, is_new = target.ecr.ensure(recipe.name, target.env, target.tags, target.kms_key)
    if is_new:
        notify(f"made the repository {repository.name}", True)
    pushed = target.ecr.find(recipe.name, recipe.tag)
    login = target.ecr.login()
    if pushed is not None:
        try:
            _check_processor(engine, repository, recipe, pushed, login)
        except NoImageEngine:
            notify(f"the processor of {recipe.reference} was not checked: no Docker engine", True)
        return _row(recipe, pin(repository, pushed.digest), pushed.digest, pushed.size)
    built = build(engine, recipe, notify)
    digest = _push(engine, target.ecr, repository, recipe, login, notify, clock)
    pushed = target.ecr.find(recipe.name, recipe.tag)
    if pushed is not None:  # if another client pushed the tag meanwhile, its digest
        digest = pushed.digest
    size = pushed.size if pushed is not None else built.size
    return _row(recipe, pin(repository, digest), digest, size, built=built.built, pushed=True)


def _push(
    engine: ImageEngine, ecr: Ecr, repository: Repository, recipe: Recipe, login: RegistryLogin,
    notify: NotifyBuild, clock: Clock,
) -> str:  # fmt: skip
    pause = _PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return engine.push(recipe, repository.uri, repository.arn, login, notify)
        except TagTaken:
            pushed = ecr.find(recipe.name, recipe.tag)
            if pushed is None:
                raise
            _check_processor(engine, repository, recipe, pushed, login)
            return pushed.digest
        except ServiceUnreachable as error:
            if attempt == TRIES:
                raise
            notify(f"{error} Trying again in {pause:.0f} s.", True)
            clock.sleep(pause)
            pause *= 2
    raise AssertionError("unreachable: the last try returns or raises")


def _check_processor(
    engine: ImageEngine,
    repository: Repository,
    recipe: Recipe,
    pushed: PushedImage,
    login: RegistryLogin,
) -> None:
    """Raise ImageError if the image that ECR has under the recipe's tag is for another processor.

    The tag is immutable, and hosts would fetch that image.
    """
    found = engine.processors_in_registry(pin(repository, pushed.digest), login)
    if recipe.processor not in found:
        what = " and ".join(sorted(found)) or "an unknown processor"
        raise ImageError(
            f"{repository.name}:{recipe.tag} in ECR is an image for {what}, not for "
            f"{recipe.processor}, and tags are immutable. Delete it, then push again: "
            f"aws ecr batch-delete-image --repository-name {repository.name} --image-ids "
            f"imageTag={recipe.tag} --region {repository.arn.split(':')[3]}"
        )


def pin(repository: Repository, digest: str) -> str:
    """`REGISTRY/batchml/NAME@sha256:...`, which always names the same image."""
    return f"{repository.uri}@{digest}"


def pinned_recipe(
    session: Session, recipe: Recipe, push_argument: str, env_option: str = ""
) -> str:
    """Return `REGISTRY/batchml/NAME@sha256:...` of a recipe's image, in two calls of ECR.

    `env_option` is that of the command in messages. Raises NotFound, with the command that pushes
    the image, AccessError, ServiceError, ServiceUnreachable.
    """
    ecr = Ecr(session)
    pushed = ecr.find(recipe.name, recipe.tag)
    repository = ecr.repository(recipe.name) if pushed is not None else None
    if pushed is None or repository is None:
        raise recipe_not_pushed(recipe, push_argument, env_option)
    return pin(repository, pushed.digest)


def push_command(recipe: Recipe, push_argument: str, env_option: str = "") -> str:
    """The command that pushes a recipe's image. `env_option`: such as ` --env dev`."""
    flavor = f" --flavor {recipe.flavor}" if recipe.has_flavors else ""
    return f"batchml image push{env_option} {quote(push_argument)}{flavor}"


def recipe_not_pushed(recipe: Recipe, push_argument: str, env_option: str = "") -> InputNotFound:
    """The error for an image that is not in ECR, with the command that pushes it."""
    return image_not_pushed(recipe.reference, push_command(recipe, push_argument, env_option))


# --- List -----------------------------------------------------------------------------------------


def list_images(
    engine: ImageEngine | None,
    ecr: Ecr | None,
    sources: Iterable[ImageSource],
    processors: Sequence[str] = (),
) -> list[ImageRow]:
    """List the images of the sources, of the engine and of ECR (if given), by name and tag.

    The images of the sources are listed for `processors`, or without any for that of the engine.
    """
    processors = processors or ((engine.processor(),) if engine else ("",))
    recipes = [
        source.recipe(flavor).built_for(processor)
        for source in sources
        for flavor in ("cuda", "cpu")
        for processor in processors
    ]
    flavors = {recipe.reference: recipe.flavor for recipe in recipes}
    in_engine = {each.reference: each for each in engine.list_images()} if engine else {}
    in_ecr: dict[str, tuple[Repository, PushedImage]] = {}
    if ecr is not None:
        for repository in ecr.list_repositories():
            for image in ecr.list_images(repository.name.partition("/")[2]):
                in_ecr[f"{repository.name}:{image.tag}"] = (repository, image)
    rows = []
    for reference in sorted({*flavors, *in_engine, *in_ecr}):
        parts = parse_reference(reference)
        if parts is not None:
            built, pushed = in_engine.get(reference), in_ecr.get(reference)
            rows.append(
                ImageRow(
                    name=parts.name,
                    flavor=flavors.get(reference),
                    tag=parts.tag,
                    reference=pin(pushed[0], pushed[1].digest) if pushed else reference,
                    digest=pushed[1].digest if pushed else None,
                    size=pushed[1].size if pushed else built.size if built else None,
                    built=built is not None,
                    pushed=pushed is not None,
                )
            )
    return rows


def _row(
    recipe: Recipe,
    reference: str,
    digest: str | None,
    size: int | None,
    *,
    built: bool = False,
    pushed: bool = False,
) -> ImageRow:
    return ImageRow(
        recipe.name, recipe.flavor, recipe.tag, reference, digest, size, built, pushed
    )  # fmt: skip
