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

Source = Path | ImageSource  # a path: a folder below images/

TRIES = 4  # of a push, if the connection ends or the registry is too busy
_PAUSE = 5.0  # seconds before the second try; each pause is twice the one before


class ImageRow(Struct, frozen=True):
    """An image in the output of a command (`--json`)."""

    name: str
    flavor: str | None  # None: an earlier content of the folder
    tag: str
    reference: str
    digest: str | None
    size: int | None  # bytes: compressed if it is in ECR
    built: bool  # now; in a list: the Docker engine has it
    pushed: bool  # now; in a list: ECR has it


class PushTarget(Struct, frozen=True):
    """The registry of an environment, and the tags of new repositories."""

    ecr: Ecr
    env: str
    tags: dict[str, str] = {}
    kms_key: str = ""  # ARN; AWS's own key for ECR unless given


# --- Recipes --------------------------------------------------------------------------------------


def read_recipe(
    source: Source,
    flavor: str = "cpu",
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of an image. Raises ConfigError with every mistake."""
    return _as_source(source).recipe(flavor, base=base, build_args=build_args)


def read_recipes(
    sources: Iterable[Source],
    flavors: Sequence[str],
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> list[Recipe]:
    """The recipes of images to build, each once: some are the same in both flavors.

    Raises ConfigError, also for an image without a Dockerfile.
    """
    found: dict[str, Recipe] = {}
    for source in map(_as_source, sources):
        for flavor in flavors:
            one = source.recipe(flavor, base=base, build_args=build_args)
            if not one.has_dockerfile:
                where = str(source.folder)
                raise ConfigError(where, [f"{DOCKERFILE}: missing. The image is built from it."])
            found.setdefault(one.reference, one)
    return list(found.values())


def flavors_of(environment: Environment, name: str) -> tuple[str, ...]:
    """The flavors for an environment's jobs: also cuda, if it has GPUs."""
    has_gpus = any(compute.has_gpus for compute in environment.compute.values())
    return ("cpu", "cuda") if has_gpus and name != LOCAL else ("cpu",)


def _as_source(source: Source) -> ImageSource:
    return ImageSource(source) if isinstance(source, Path) else source


# --- Build and push -------------------------------------------------------------------------------


def build(engine: ImageEngine, wanted: Recipe, notify: NotifyBuild) -> ImageRow:
    """Build the image, unless the engine has it. Raises ImageError."""
    found = engine.find(wanted.reference)
    made = found or engine.build(wanted, notify)
    return _row(wanted, wanted.reference, None, made.size, built=found is None)


def push(
    engine: ImageEngine, target: PushTarget, wanted: Recipe, notify: NotifyBuild, clock: Clock
) -> ImageRow:
    """Push the image to ECR, unless it is there; build it first, if the engine does not have it.

    Raises ImageError, AccessError with the policy statement to add, ServiceError,
    ServiceUnreachable.
    """
    repository, made = target.ecr.ensure(wanted.name, target.env, target.tags, target.kms_key)
    if made:
        notify(f"made the repository {repository.name}", True)
    pushed = target.ecr.find(wanted.name, wanted.tag)
    if pushed is not None:
        return _row(wanted, pin(repository, pushed.digest), pushed.digest, pushed.size)
    built = build(engine, wanted, notify)
    digest = _push(engine, target.ecr, repository, wanted, notify, clock)
    pushed = target.ecr.find(wanted.name, wanted.tag)
    if pushed is not None:  # another client may have pushed the tag at the same time
        digest = pushed.digest
    size = pushed.size if pushed is not None else built.size
    return _row(wanted, pin(repository, digest), digest, size, built=built.built, pushed=True)


def _push(
    engine: ImageEngine, ecr: Ecr, repository: Repository, wanted: Recipe, notify: NotifyBuild,
    clock: Clock,
) -> str:  # fmt: skip
    login = ecr.login()
    pause = _PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return engine.push(wanted, repository.uri, repository.arn, login, notify)
        except TagTaken:
            pushed = ecr.find(wanted.name, wanted.tag)
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


def pinned(
    session: Session,
    source: Source,
    flavor: str = "cpu",
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> str:
    """The reference of an image for job definitions. Raises ConfigError; see `pinned_recipe`."""
    found = _as_source(source)
    wanted = found.recipe(flavor, base=base, build_args=build_args)
    options = f" --base {base}" if base else ""
    options += "".join(f" --build-arg {k}={v}" for k, v in sorted((build_args or {}).items()))
    return pinned_recipe(session, wanted, found.push_argument(found.folder.parent), options)


def pinned_recipe(session: Session, wanted: Recipe, push_argument: str, options: str = "") -> str:
    """`REGISTRY/batchml/NAME@sha256:...` of a recipe's image, in two calls of ECR.

    Raises NotFound, with the command `batchml image push` for this image, AccessError,
    ServiceError, ServiceUnreachable.
    """
    ecr = Ecr(session)
    pushed = ecr.find(wanted.name, wanted.tag)
    repository = ecr.repository(wanted.name) if pushed is not None else None
    if pushed is None or repository is None:
        flavor = f" --flavor {wanted.flavor}" if wanted.has_flavors else ""
        command = f"batchml image push {quote(push_argument)}{flavor}{options}"
        raise image_not_pushed(wanted.reference, command)
    return pin(repository, pushed.digest)


# --- List -----------------------------------------------------------------------------------------


def list_images(
    engine: ImageEngine | None, ecr: Ecr | None, sources: Iterable[Source]
) -> list[ImageRow]:
    """The images of the sources, of the engine and of ECR (both if given), by name and tag."""
    known = {one.reference: one for one in _both_flavors(sources)}
    here = {one.reference: one for one in engine.list_images()} if engine is not None else {}
    there: dict[str, tuple[Repository, PushedImage]] = {}
    for repository in ecr.list_repositories() if ecr is not None else ():
        image = repository.name.partition("/")[2]
        for one in ecr.list_images(image) if ecr is not None else ():
            there[f"{repository.name}:{one.tag}"] = (repository, one)
    found = []
    for reference in sorted({*known, *here, *there}):
        parts = parse_reference(reference)
        if parts is not None:
            built, pushed = here.get(reference), there.get(reference)
            found.append(
                ImageRow(
                    name=parts.name,
                    flavor=known[reference].flavor if reference in known else None,
                    tag=parts.tag,
                    reference=pin(pushed[0], pushed[1].digest) if pushed else reference,
                    digest=pushed[1].digest if pushed else None,
                    size=pushed[1].size if pushed else built.size if built else None,
                    built=built is not None,
                    pushed=pushed is not None,
                )
            )
    return found


def _both_flavors(sources: Iterable[Source]) -> list[Recipe]:
    """The recipes of both flavors, which are equal for some images."""
    return [read_recipe(source, flavor) for source in sources for flavor in ("cuda", "cpu")]


def _row(
    wanted: Recipe,
    reference: str,
    digest: str | None,
    size: int | None,
    *,
    built: bool = False,
    pushed: bool = False,
) -> ImageRow:
    return ImageRow(
        wanted.name, wanted.flavor, wanted.tag, reference, digest, size, built, pushed
    )  # fmt: skip
