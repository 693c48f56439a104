"""Image: a folder below `images/`, and the name that its content gives it. No I/O.

The name is `batchml/NAME:TAG`, here, in the Docker engine and in ECR. The tag is a hash of all that
decides the image, so an image that has its tag need never be built again.
"""

import hashlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec import Struct

from batchml.errors import ConfigError, did_you_mean
from batchml.model.tables import read_struct

FLAVORS = ("cpu", "cuda")

DOCKERFILE = "Dockerfile"
REQUIREMENTS = "requirements.txt"
CUDA_REQUIREMENTS = "requirements-cuda.txt"
SETTINGS = "image.toml"

# What of an image's folder is looked at. The rest does not travel, and decides nothing.
FILES = (REQUIREMENTS, CUDA_REQUIREMENTS, ".python-version", DOCKERFILE, SETTINGS)

_TAG_LENGTH = 12
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")  # ECR's, and the Docker engine's
_REFERENCE = re.compile(rf"batchml/([a-z0-9][a-z0-9._-]*):([0-9a-f]{{{_TAG_LENGTH}}})")
_PINNED = re.compile(r".+@sha256:[0-9a-f]{64}|[^@]*[^/:@]:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class Reference(NamedTuple):
    name: str
    tag: str


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """What one flavor is built with, beside its requirements: `[cuda]` of an image.toml."""

    base: str = ""
    build_args: dict[str, str] = {}


class ImageSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """An image.toml. The flavor cpu has no variant: it is what the Dockerfile says."""

    cuda: Variant | None = None
    whole: bool = False  # all of batchml goes into it, not its runtime alone


class Recipe(Struct, frozen=True):
    """All that decides an image: the files of its build context, and the build arguments."""

    name: str
    flavor: str
    files: tuple[tuple[str, bytes], ...]
    args: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()  # files that may be executed
    has_flavors: bool = False  # the other flavor is another image

    @property
    def tag(self) -> str:
        # Of each file its hash: a job's own image may copy hundreds of megabytes.
        files = tuple((name, hashlib.sha256(data).hexdigest()) for name, data in self.files)
        content = (files, self.args)
        return digest((*content, self.programs) if self.programs else content)

    @property
    def reference(self) -> str:
        return f"batchml/{self.name}:{self.tag}"

    @property
    def has_dockerfile(self) -> bool:
        return any(name == DOCKERFILE for name, _ in self.files)


def recipe(
    name: str,
    folder: Mapping[str, bytes],
    runtime: Mapping[str, bytes],
    flavor: str = "cpu",
    *,
    base: str = "",
    build_args: Mapping[str, str] | None = None,
    more: Mapping[str, bytes] = {},
    programs: Collection[str] = (),
) -> Recipe:
    """The recipe of an image from its folder's FILES and the runtime's sources.

    An image without anything for CUDA is the same in both flavors. `base` and `build_args` go
    before those of the image.toml. `more` are files that the Dockerfile sees beside these;
    `programs` may be executed. Raises ConfigError with every mistake.
    """
    settings, mistakes = _settings(folder)
    variant = Variant()
    if flavor == "cuda" and has_cuda(folder):
        variant = settings.cuda or variant
    else:
        flavor = "cpu" if flavor == "cuda" else flavor
    given = dict(build_args or {})
    mistakes += _mistakes(name, flavor, base, given)
    if variant.base and not is_pinned(variant.base):
        mistakes.append(f"{SETTINGS}: cuda.base: {_unpinned(variant.base)}")
    if mistakes:
        raise ConfigError(f"images/{name}", mistakes)
    chosen = base or variant.base
    args = {**variant.build_args, **({"BASE": chosen} if chosen else {}), **given}
    files = {**more, **_context(folder, flavor), **runtime}
    kept = tuple(sorted(each for each in programs if each in files))
    return Recipe(
        name, flavor, tuple(sorted(files.items())), tuple(sorted(args.items())), kept,
        has_flavors=has_cuda(folder),
    )  # fmt: skip


def has_cuda(folder: Mapping[str, bytes]) -> bool:
    """True when the flavor cuda of an image differs from cpu."""
    return CUDA_REQUIREMENTS in folder or bool(_settings(folder)[0].cuda)


def is_whole(folder: Mapping[str, bytes]) -> bool:
    """True when all of batchml goes into an image, and not its runtime alone."""
    return _settings(folder)[0].whole


def flavor_for(gpus: int) -> str:
    """The flavor of the image that a job with so many GPUs runs in."""
    return "cuda" if gpus else "cpu"


def parse_reference(text: str) -> Reference | None:
    """The parts of `batchml/NAME:TAG`; None for the reference of any other image."""
    match = _REFERENCE.fullmatch(text)
    return Reference(match[1], match[2]) if match else None


def is_pinned(reference: str) -> bool:
    """True for a reference with a digest, or a tag that is not `latest`."""
    return bool(_PINNED.fullmatch(reference)) and not reference.endswith(":latest")


def digest(content: object) -> str:
    """A short name for content made of strings, bytes and tuples."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:_TAG_LENGTH]


def _context(folder: Mapping[str, bytes], flavor: str) -> dict[str, bytes]:
    """The files beside the runtime that the Dockerfile sees: one requirements.txt, its flavor's."""
    kept = {
        name: folder[name]
        for name in (DOCKERFILE, REQUIREMENTS, ".python-version")
        if name in folder
    }
    if flavor == "cuda" and CUDA_REQUIREMENTS in folder:
        kept[REQUIREMENTS] = folder[CUDA_REQUIREMENTS]
    return kept


def _settings(folder: Mapping[str, bytes]) -> tuple[ImageSettings, list[str]]:
    if SETTINGS not in folder:
        return ImageSettings(), []
    try:
        table = tomllib.loads(folder[SETTINGS].decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return ImageSettings(), [f"{SETTINGS}: not TOML: {error}."]
    settings, mistakes = read_struct(table, ImageSettings)
    return settings, [f"{SETTINGS}: {mistake}" for mistake in mistakes]


def _mistakes(name: str, flavor: str, base: str, args: Mapping[str, str]) -> list[str]:
    found = []
    if not _NAME.fullmatch(name):
        found.append(
            f"the folder's name {name!r} is not a name for a repository: lower-case letters and "
            "digits, with single . _ or - between them."
        )
    if flavor not in FLAVORS:
        meant = did_you_mean(flavor, FLAVORS)
        found.append(f"--flavor: found {flavor!r}. Expected one of {', '.join(FLAVORS)}.{meant}")
    if base and not is_pinned(base):
        found.append(f"--base: {_unpinned(base)}")
    if base and "BASE" in args:
        found.append("--build-arg BASE and --base say the same: give one of them.")
    if "BASE" in args and not is_pinned(args["BASE"]):
        found.append(f"--build-arg BASE: {_unpinned(args['BASE'])}")
    return found


def _unpinned(base: str) -> str:
    return (
        f"found {base!r}, which names another image tomorrow. Give it a tag that stays, such as "
        "debian:bookworm-slim, or a digest."
    )
