"""Build images, push them to ECR, and name what was pushed by its digest."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from msgspec import Struct

from batchml.aws.ecr import Ecr, Engine, Pushed, Repository, TagTaken, Tell, not_pushed
from batchml.aws.session import Session
from batchml.clock import Clock
from batchml.errors import ConfigError, ServiceUnreachable
from batchml.model.environment import LOCAL, Environment
from batchml.model.image import DOCKERFILE, Recipe, parse_reference
from batchml.ops.sources import ImageSource

Source = Path | ImageSource  # a path: a folder below images/

TRIES = 4  # of one push, when the connection ends or the registry is too busy
_PAUSE = 5.0  # seconds before the second try; doubled before each next


class Shown(Struct, frozen=True):
    """An image, as `--json` shows it. Sizes in bytes: as it is pulled, where it is in ECR.

    After a build or a push `built` and `pushed` say what was done now; in a list, where it is.
    """

    name: str
    flavor: str | None  # None: not what the folder says any more
    tag: str
    reference: str
    digest: str | None
    size: int | None
    built: bool
    pushed: bool


class Target(Struct, frozen=True):
    """Where images are pushed: an environment's account and region, and what marks them."""

    ecr: Ecr
    env: str
    tags: dict[str, str] = {}
    kms_key: str = ""  # ARN; that of ECR itself unless given


# --- recipes ------------------------------------------------------------------------------------


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
    """The recipes of images to be built, each once: some are the same in both flavors.

    Raises ConfigError, for one without a Dockerfile too.
    """
    found: dict[str, Recipe] = {}
    for source in map(_as_source, sources):
        for flavor in flavors:
            one = source.recipe(flavor, base=base, build_args=build_args)
            if not one.has_dockerfile:
                where = str(source.folder)
                raise ConfigError(where, [f"{DOCKERFILE}: missing. It is what is built."])
            found.setdefault(one.reference, one)
    return list(found.values())


def flavors_of(environment: Environment, name: str) -> tuple[str, ...]:
    """The flavors that an environment's jobs may run in: cuda as well, where it has GPUs."""
    has_gpus = any(compute.has_gpus for compute in environment.compute.values())
    return ("cpu", "cuda") if has_gpus and name != LOCAL else ("cpu",)


def _as_source(source: Source) -> ImageSource:
    return ImageSource(source) if isinstance(source, Path) else source


# --- build and push -----------------------------------------------------------------------------


def build(engine: Engine, wanted: Recipe, tell: Tell) -> Shown:
    """Build the image, unless the engine has it. Raises ImageError."""
    found = engine.find(wanted.reference)
    made = found or engine.build(wanted, tell)
    return _shown(wanted, wanted.reference, None, made.size, built=found is None)


def push(engine: Engine, target: Target, wanted: Recipe, tell: Tell, clock: Clock) -> Shown:
    """Put the image into ECR, unless it is there; built first, if the engine has it not.

    Raises ImageError, AccessError with what to allow, ServiceError, ServiceUnreachable.
    """
    repository, made = target.ecr.ensure(wanted.name, target.env, target.tags, target.kms_key)
    if made:
        tell(f"made the repository {repository.name}", True)
    there = target.ecr.find(wanted.name, wanted.tag)
    if there is not None:
        return _shown(wanted, pin(repository, there.digest), there.digest, there.size)
    built = build(engine, wanted, tell)
    digest = _push(engine, target.ecr, repository, wanted, tell, clock)
    there = target.ecr.find(wanted.name, wanted.tag)
    if there is not None:  # what others pull, should two have pushed at once
        digest = there.digest
    size = there.size if there is not None else built.size
    return _shown(wanted, pin(repository, digest), digest, size, built=built.built, pushed=True)


def _push(
    engine: Engine, ecr: Ecr, repository: Repository, wanted: Recipe, tell: Tell, clock: Clock
) -> str:
    login = ecr.login()
    pause = _PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return engine.push(wanted, repository.uri, repository.arn, login, tell)
        except TagTaken:
            there = ecr.find(wanted.name, wanted.tag)
            if there is None:
                raise
            return there.digest
        except ServiceUnreachable as error:
            if attempt == TRIES:
                raise
            tell(f"{error} Trying again in {pause:.0f} s.", True)
            clock.sleep(pause)
            pause *= 2
    raise AssertionError("unreachable: the last try returns or raises")


def pin(repository: Repository, digest: str) -> str:
    """`REGISTRY/batchml/NAME@sha256:...`, which names one image for ever."""
    return f"{repository.uri}@{digest}"


def pinned(
    session: Session,
    source: Source,
    flavor: str = "cpu",
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
) -> str:
    """`REGISTRY/batchml/NAME@sha256:...` of an image, as job definitions name it.

    Raises ConfigError, and what `pinned_recipe` does.
    """
    found = _as_source(source)
    wanted = found.recipe(flavor, base=base, build_args=build_args)
    options = f" --base {base}" if base else ""
    options += "".join(f" --build-arg {k}={v}" for k, v in sorted((build_args or {}).items()))
    return pinned_recipe(session, wanted, found.said(found.folder.parent), options)


def pinned_recipe(session: Session, wanted: Recipe, said: str, options: str = "") -> str:
    """`REGISTRY/batchml/NAME@sha256:...` of what a recipe makes. Two calls of ECR.

    `said` is how `batchml image push` is told of it. Raises NotFound, with that command,
    AccessError, ServiceError, ServiceUnreachable.
    """
    ecr = Ecr(session)
    there = ecr.find(wanted.name, wanted.tag)
    repository = ecr.repository(wanted.name) if there is not None else None
    if there is None or repository is None:
        flavor = f" --flavor {wanted.flavor}" if wanted.has_flavors else ""
        raise not_pushed(wanted.reference, f"batchml image push {quote(said)}{flavor}{options}")
    return pin(repository, there.digest)


# --- what there is ------------------------------------------------------------------------------


def listing(engine: Engine | None, ecr: Ecr | None, sources: Iterable[Source]) -> list[Shown]:
    """Every image: what the folders say, what the engine has, what ECR has. By name and tag.

    Without an engine, or on `local` without ECR, the other two.
    """
    known = {one.reference: one for one in _both_flavors(sources)}
    here = {one.reference: one for one in engine.ours()} if engine is not None else {}
    there: dict[str, tuple[Repository, Pushed]] = {}
    for repository in ecr.repositories() if ecr is not None else ():
        image = repository.name.partition("/")[2]
        for one in ecr.pushed(image) if ecr is not None else ():
            there[f"{repository.name}:{one.tag}"] = (repository, one)
    found = []
    for reference in sorted({*known, *here, *there}):
        parts = parse_reference(reference)
        if parts is not None:
            built, pushed = here.get(reference), there.get(reference)
            found.append(
                Shown(
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
    """Those of images that differ with the flavor are two; the others one, twice."""
    return [read_recipe(source, flavor) for source in sources for flavor in ("cuda", "cpu")]


def _shown(
    wanted: Recipe,
    reference: str,
    digest: str | None,
    size: int | None,
    *,
    built: bool = False,
    pushed: bool = False,
) -> Shown:
    return Shown(
        wanted.name, wanted.flavor, wanted.tag, reference, digest, size, built, pushed
    )  # fmt: skip
