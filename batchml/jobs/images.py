"""Build images, push them to ECR, and list them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from msgspec import Struct

from batchml.aws.ecr import Ecr, ImageEngine, NotifyBuild, PushedImage, Repository, image_not_pushed
from batchml.aws.session import Session
from batchml.clock import Clock
from batchml.errors import ConfigError, ServiceUnreachable, TagTaken
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


# --- Recipes --------------------------------------------------------------------------------------


def read_recipe(folder: Path, flavor: str = "cpu", *, base: str = "") -> Recipe:
    """Read the recipe of a folder below images/. Raises ConfigError with every mistake."""
    return ImageSource(folder).recipe(flavor, base=base)


def read_recipes(
    sources: Iterable[ImageSource],
    flavors: Sequence[str],
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> list[Recipe]:
    """Read the recipes of images to build, each once: some images are the same in both flavors.

    Raises ConfigError, also for an image without a Dockerfile.
    """
    recipes: dict[str, Recipe] = {}
    for source in sources:
        for flavor in flavors:
            recipe = source.recipe(flavor, base=base, build_args=build_args)
            if not recipe.has_dockerfile:
                where = str(source.folder)
                raise ConfigError(where, [f"{DOCKERFILE}: missing. The image is built from it."])
            recipes.setdefault(recipe.reference, recipe)
    return list(recipes.values())


def flavors_of(environment: Environment, name: str) -> tuple[str, ...]:
    """Choose the flavors for an environment's jobs: cpu, and cuda if it has GPUs."""
    has_gpus = any(compute.has_gpus for compute in environment.compute.values())
    return ("cpu", "cuda") if has_gpus and name != LOCAL else ("cpu",)


# --- Build and push -------------------------------------------------------------------------------


def build(engine: ImageEngine, recipe: Recipe, notify: NotifyBuild) -> ImageRow:
    """Build the image, unless the engine has it. Raises ImageError."""
    existing = engine.find(recipe.reference)
    image = existing or engine.build(recipe, notify)
    return _row(recipe, recipe.reference, None, image.size, built=existing is None)


def push(
    engine: ImageEngine, target: PushTarget, recipe: Recipe, notify: NotifyBuild, clock: Clock
) -> ImageRow:
    """Push the image to ECR, unless it is there; build it first, if the engine does not have it.

    Raises ImageError, AccessError with the policy statement to add, ServiceError,
    ServiceUnreachable.
    """
    repository, is_new = target.ecr.ensure(recipe.name, target.env, target.tags, target.kms_key)
    if is_new:
        notify(f"made the repository {repository.name}", True)
    pushed = target.ecr.find(recipe.name, recipe.tag)
    if pushed is not None:
        return _row(recipe, pin(repository, pushed.digest), pushed.digest, pushed.size)
    built = build(engine, recipe, notify)
    digest = _push(engine, target.ecr, repository, recipe, notify, clock)
    pushed = target.ecr.find(recipe.name, recipe.tag)
    if pushed is not None:  # if another client pushed the tag meanwhile, its digest
        digest = pushed.digest
    size = pushed.size if pushed is not None else built.size
    return _row(recipe, pin(repository, digest), digest, size, built=built.built, pushed=True)


def _push(
    engine: ImageEngine, ecr: Ecr, repository: Repository, recipe: Recipe, notify: NotifyBuild,
    clock: Clock,
) -> str:  # fmt: skip
    login = ecr.login()
    pause = _PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return engine.push(recipe, repository.uri, repository.arn, login, notify)
        except TagTaken:
            pushed = ecr.find(recipe.name, recipe.tag)
            if pushed is None:
                raise
            return pushed.digest
        except ServiceUnreachable as error:
            if attempt == TRIES:
                raise
            notify(f"{error} Trying again in {pause:.0f} s.", True)
            clock.sleep(pause)
            pause *= 2
    raise AssertionError("unreachable: the last try returns or raises")


def pin(repository: Repository, digest: str) -> str:
    """`REGISTRY/batchml/NAME@sha256:...`, which always names the same image."""
    return f"{repository.uri}@{digest}"


def pinned(session: Session, folder: Path) -> str:
    """Return `pinned_recipe` of a folder below images/. Raises ConfigError, too."""
    return pinned_recipe(session, read_recipe(folder), folder.name)


def pinned_recipe(session: Session, recipe: Recipe, push_argument: str) -> str:
    """Return `REGISTRY/batchml/NAME@sha256:...` of a recipe's image, in two calls of ECR.

    Raises NotFound, with the command that pushes the image, AccessError, ServiceError,
    ServiceUnreachable.
    """
    ecr = Ecr(session)
    pushed = ecr.find(recipe.name, recipe.tag)
    repository = ecr.repository(recipe.name) if pushed is not None else None
    if pushed is None or repository is None:
        flavor = f" --flavor {recipe.flavor}" if recipe.has_flavors else ""
        command = f"batchml image push {quote(push_argument)}{flavor}"
        raise image_not_pushed(recipe.reference, command)
    return pin(repository, pushed.digest)


# --- List -----------------------------------------------------------------------------------------


def list_images(
    engine: ImageEngine | None, ecr: Ecr | None, sources: Iterable[ImageSource]
) -> list[ImageRow]:
    """List the images of the sources, of the engine and of ECR (if given), by name and tag."""
    recipes = [source.recipe(flavor) for source in sources for flavor in ("cuda", "cpu")]
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
