"""The recipe of an image: its files and build arguments, whose hash is in the image's tag.

The name of an image is `batchml/NAME:HASH-PROCESSOR` in the Docker engine and in ECR. An image
whose tag exists is never built again. On `local` a job names its image without the processor: the
embedded server adds that of its engine.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from batchml.errors import ConfigError, did_you_mean
from batchml.model.tables import read_struct

FLAVORS = ("cpu", "cuda")
PROCESSORS = ("amd64", "arm64")  # of hosts, in the words of Docker and of image manifests

DOCKERFILE = "Dockerfile"
REQUIREMENTS = "requirements.txt"
CUDA_REQUIREMENTS = "requirements-cuda.txt"
SETTINGS = "image.toml"
CONDA = "environment.yml"

# The files of an image's folder that are sent to the builder, or change the image.
FILES = (REQUIREMENTS, CUDA_REQUIREMENTS, ".python-version", DOCKERFILE, SETTINGS)

_TAG_LENGTH = 12
_SMALL = 128 * 1024  # bytes of a file whose hash is remembered
_CAPABILITY = r"([1-9][0-9]?)\.([0-9])"
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"  # valid for ECR and Docker
_REFERENCE = (
    rf"batchml/([a-z0-9][a-z0-9._-]*):([0-9a-f]{{{_TAG_LENGTH}}})(?:-({'|'.join(PROCESSORS)}))?"
)
_PINNED = r".+@sha256:[0-9a-f]{64}|[^@]*[^/:@]:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"


class ImageTag(NamedTuple):
    """The parts of `batchml/NAME:HASH-PROCESSOR`. Without a processor it is ""."""

    name: str
    content: str
    processor: str

    @property
    def tag(self) -> str:
        return make_tag(self.content, self.processor)


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """The base image and build arguments of a flavor: `[cuda]` of an image.toml."""

    base: str = ""
    build_args: dict[str, str] = {}


class GpuLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs for which the CUDA libraries of an image have code: `[gpu]` of an image.toml.

    The limits are NVIDIA's compute capabilities, such as "8.6"; "" for none. `driver` is the first
    branch of NVIDIA's driver that can load the libraries; 0 if any can.
    """

    min_capability: str = ""
    max_capability: str = ""
    driver: Annotated[int, Meta(ge=0, le=9999)] = 0

    def allows(self, capability: tuple[int, int]) -> bool:
        """Whether the image has code for a GPU of this compute capability."""
        least, most = _capability(self.min_capability), _capability(self.max_capability)
        return (least is None or capability >= least) and (most is None or capability <= most)

    def describe(self) -> str:
        """`compute capability 7.5 or more`, `compute capability up to 8.9`, `... 7.5 to 8.9`."""
        if self.min_capability and self.max_capability:
            return f"compute capability {self.min_capability} to {self.max_capability}"
        if self.max_capability:
            return f"compute capability up to {self.max_capability}"
        return f"compute capability {self.min_capability} or more"


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(_CAPABILITY, text)
    return (int(match[1]), int(match[2])) if match else None


class ImageSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """An image.toml. The flavor cpu has no settings: its defaults are in the Dockerfile."""

    cuda: Variant | None = None
    gpu: GpuLimits = GpuLimits()
    whole: bool = False  # whether the image has all of batchml, not only its runtime


class Recipe(Struct, frozen=True, dict=True):
    """The files of an image's build context, and its build arguments."""

    name: str
    flavor: str
    files: tuple[tuple[str, bytes], ...]
    args: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()  # executable files
    has_flavors: bool = False  # whether the flavors are different images
    processor: str = ""  # one of PROCESSORS; "": that of the engine that builds the image
    gpu: GpuLimits = GpuLimits()

    def built_for(self, processor: str) -> "Recipe":
        """The recipe of the same image for a processor."""
        return replace(self, processor=processor)

    @cached_property
    def content(self) -> str:
        """The hash of the files and arguments: the tag without the processor."""
        # The files one by one: the image of a job may copy hundreds of megabytes.
        hashes = tuple((name, _hash_of(data)) for name, data in self.files)
        programs = (self.programs,) if self.programs else ()
        return digest((hashes, self.args, *programs))

    @property
    def tag(self) -> str:
        return make_tag(self.content, self.processor)

    @property
    def reference(self) -> str:
        return f"batchml/{self.name}:{self.tag}"

    @property
    def has_dockerfile(self) -> bool:
        return any(name == DOCKERFILE for name, _ in self.files)


def make_recipe(
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
    """Make a recipe from the FILES of an image's folder and the runtime's sources.

    An image without settings for CUDA is the same in both flavors. `base` and `build_args` replace
    the values of the image.toml. `more` has other files of the build context; `programs` names the
    executable files. Raises ConfigError with every mistake.
    """
    settings, mistakes = _settings(folder)
    variant = Variant()
    if flavor == "cuda" and has_cuda(folder):
        variant = settings.cuda or variant
    else:
        flavor = "cpu" if flavor == "cuda" else flavor
    build_args = build_args or {}
    mistakes += _mistakes(name, flavor, base, build_args)
    if variant.base and not is_pinned(variant.base):
        mistakes.append(f"{SETTINGS}: cuda.base: {_unpinned(variant.base)}")
    if mistakes:
        raise ConfigError(f"images/{name}", mistakes)
    chosen = base or variant.base
    args = {**variant.build_args, **({"BASE": chosen} if chosen else {}), **build_args}
    files = {**more, **_context(folder, flavor), **runtime}
    kept = tuple(sorted(each for each in programs if each in files))
    return Recipe(
        name, flavor, tuple(sorted(files.items())), tuple(sorted(args.items())), kept,
        has_flavors=has_cuda(folder), gpu=settings.gpu,
    )  # fmt: skip


def has_cuda(folder: Mapping[str, bytes]) -> bool:
    """Whether the flavors cuda and cpu of an image differ."""
    return CUDA_REQUIREMENTS in folder or bool(_settings(folder)[0].cuda)


def has_whole_package(folder: Mapping[str, bytes]) -> bool:
    """Whether the image has all of batchml, and not only its runtime."""
    return _settings(folder)[0].whole


def flavor_for(gpus: int) -> str:
    """The flavor of the image of a job with this number of GPUs."""
    return "cuda" if gpus else "cpu"


def make_tag(content: str, processor: str) -> str:
    return f"{content}-{processor}" if processor else content


def parse_reference(text: str) -> ImageTag | None:
    """The parts of `batchml/NAME:HASH-PROCESSOR`; None for other references."""
    match = re.fullmatch(_REFERENCE, text)
    return ImageTag(match[1], match[2], match[3] or "") if match else None


def is_pinned(reference: str) -> bool:
    """Whether a reference has a digest, or a tag other than `latest`."""
    return bool(re.fullmatch(_PINNED, reference)) and not reference.endswith(":latest")


def _hash_of(data: bytes) -> str:
    return _hash(data) if len(data) > _SMALL else _hash_small(data)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# All images have the files of the runtime: of a thousand, their hashes would take most of the time.
_hash_small = lru_cache(maxsize=512)(_hash)


def digest(content: object) -> str:
    """A short hash of strings, bytes and tuples."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:_TAG_LENGTH]


def _context(folder: Mapping[str, bytes], flavor: str) -> dict[str, bytes]:
    """The build context without the runtime. The flavor decides its requirements.txt."""
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
    import tomllib  # late, as in `jobs.find`

    try:
        table = tomllib.loads(folder[SETTINGS].decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return ImageSettings(), [f"{SETTINGS}: not TOML: {error}."]
    settings, mistakes = read_struct(table, ImageSettings)
    mistakes += [
        f'gpu.{key}: found {text!r}. Write a compute capability such as "8.6".'
        for key in ("min_capability", "max_capability")
        if (text := getattr(settings.gpu, key)) and _capability(text) is None
    ]
    return settings, [f"{SETTINGS}: {mistake}" for mistake in mistakes]


def _mistakes(name: str, flavor: str, base: str, args: Mapping[str, str]) -> list[str]:
    found = []
    if not re.fullmatch(_NAME, name):
        found.append(
            f"the folder's name {name!r} is not valid for a repository: lower-case letters and "
            "digits, with single . _ or - between them."
        )
    if flavor not in FLAVORS:
        meant = did_you_mean(flavor, FLAVORS)
        found.append(f"--flavor: found {flavor!r}. Expected one of {', '.join(FLAVORS)}.{meant}")
    if base and not is_pinned(base):
        found.append(f"--base: {_unpinned(base)}")
    if base and "BASE" in args:
        found.append("--build-arg BASE and --base mean the same: give one of them.")
    if "BASE" in args and not is_pinned(args["BASE"]):
        found.append(f"--build-arg BASE: {_unpinned(args['BASE'])}")
    return found


def _unpinned(base: str) -> str:
    return (
        f"found {base!r}, which may be another image tomorrow. Give it a fixed tag, such as "
        "debian:bookworm-slim, or a digest."
    )


# --- `image` of a job.toml ------------------------------------------------------------------------


HERE = "."  # an `image` in the job's folder

_BASE_AND_FILE = r"\s*([^\s+]+)\s*\+\s*(\S.*?)\s*"


class OwnImage(Struct, frozen=True):
    """An `image` that is made from a file of the job's folder."""

    file: str = ""  # "": the only file of the folder that an image can be made from
    base: str = ""  # the image below images/ to build on; "": batchml's default for the file


def parse_own_image(image: str) -> OwnImage | None:
    """Parse `.`, `./FILE` or `BASE + FILE`; None for a name below images/ or a reference."""
    if image.rstrip("/") == HERE:
        return OwnImage()
    if image.startswith("./"):
        return OwnImage(image[2:])
    found = re.fullmatch(_BASE_AND_FILE, image)
    if found:
        return OwnImage(found[2].removeprefix("./"), found[1])
    return None


def is_reference(image: str) -> bool:
    """Whether an `image` is in a registry: neither a name below images/ nor a file."""
    return parse_own_image(image) is None and any(mark in image for mark in "/:@.")
