"""Where a job's image comes from: a folder below `images/`, or a file of the job's own folder."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from batchml.errors import ConfigError
from batchml.model.image import DOCKERFILE, REQUIREMENTS, Recipe, is_whole, recipe
from batchml.model.project import FILES as PROJECT_FILES
from batchml.model.project import (
    HERE,
    Word,
    choose,
    image_name,
    is_reference,
    kind_of,
    parse_word,
    word_mistakes,
)
from batchml.ops.jobs import find_image, load_job
from batchml.ops.own_image import make, read_files
from batchml.runtime.package import sources

PLAIN = "python"  # the image that a folder's requirements.txt is put on


class ImageSource(Struct, frozen=True):
    """What an image is made from. Without `file`: all of a folder below `images/`."""

    folder: Path
    file: str = ""  # of a job's folder: what decides
    base: Path | None = None  # the image below images/ that its packages are put on
    word: str = ""  # as `image` says it

    @property
    def name(self) -> str:
        return image_name(self.folder.resolve().name) if self.file else self.folder.name

    def recipe(
        self, flavor: str = "cpu", *, base: str = "", build_args: Mapping[str, str] | None = None
    ) -> Recipe:
        """All that decides the image. Raises ConfigError with every mistake of its files."""
        if self.file:
            files, more, programs = make(self.folder, self.file, self.base)
        else:
            files, more, programs = read_files(self.folder), {}, frozenset[str]()
        return recipe(
            self.name, files, sources(is_whole(files)), flavor, base=base, build_args=build_args,
            more=more, programs=programs,
        )  # fmt: skip

    def said(self, here: Path) -> str:
        """How `batchml image push` is told of it from a folder."""
        if not self.file:
            return self.folder.name
        folder, here = self.folder.resolve(), here.resolve()
        if folder == here:
            return self.word or HERE
        return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def find_source(image: str, folders: Sequence[Path], folder: Path) -> ImageSource | None:
    """What `image` of a job in `folder` is made from; None for a reference to a registry.

    Raises NotFound for an image that is not there, ConfigError for a file that is not, or where
    several could be meant.
    """
    word = parse_word(image)
    if word is None:
        found = find_image(image, folders)
        return None if found is None else ImageSource(found)
    return _of_folder(word, image, folders, folder)


def named_source(
    name: str, folders: Sequence[Path], job_folders: Sequence[Path], here: Path
) -> ImageSource | None:
    """The image of a name that a person gives: of a folder below `images/`, of a job, of a folder
    with a file that makes one, or as `image` of a job.toml says it. None for a registry's.

    Raises NotFound, ConfigError.
    """
    word = parse_word(name)
    if not word and not is_reference(name) and any((each / name).is_dir() for each in folders):
        return find_source(name, folders, here)
    places = [here / name] if word else [here / name, *(each / name for each in job_folders)]
    for place in places:
        if (place / "job.toml").is_file():
            return find_source(load_job(place).image, folders, place)
        if place.is_dir() and beside(place):
            return find_source(HERE, folders, place)
    return find_source(name, folders, here)


def job_images(job_folders: Sequence[Path], here: Path) -> Iterator[tuple[Path, str]]:
    """The folders of jobs here that have files for an image, and what their `image` says.

    A job.toml that is wrong is left out: who submits it is told.
    """
    files = [
        here / "job.toml",
        *(each for below in job_folders for each in sorted(below.glob("*/job.toml"))),
    ]
    for folder in (file.parent for file in files if file.is_file()):
        if beside(folder):
            with suppress(ConfigError):
                yield folder, load_job(folder).image


def beside(folder: Path) -> tuple[str, ...]:
    """The files of a folder that could make an image of their own."""
    return tuple(name for name in PROJECT_FILES if (folder / name).is_file())


def unused(image: str, folder: Path) -> str:
    """A word for who may think that the folder's requirements are in the image; empty if none.

    A reference may well have been built from them, elsewhere.
    """
    if parse_word(image) is not None or is_reference(image):
        return ""
    found = beside(folder)
    if not found:
        return ""
    ways = f'image = "." makes it of {found[0] if len(found) == 1 else "one of them"}'
    if REQUIREMENTS in found:
        ways += f', image = "{image} + {REQUIREMENTS}" adds its packages to {image}'
    return f"{' and '.join(found)} beside the job: not used, the image is {image}. {ways}."


def _of_folder(word: Word, image: str, folders: Sequence[Path], folder: Path) -> ImageSource:
    there = [word.file] if word.file and (folder / word.file).is_file() else list(beside(folder))
    mistakes = word_mistakes(word, there)
    file = word.file
    if not file:
        texts = {name: (folder / name).read_text("utf-8", "replace") for name in there}
        file, mistakes = choose(texts)
    if mistakes:
        raise ConfigError(str(folder), mistakes)
    base = None
    if kind_of(file) == REQUIREMENTS:
        base = find_image(word.base or PLAIN, folders)
        if base is None:
            why = f"image: {image}: packages are put on an image below images/, not on a reference."
            raise ConfigError(str(folder), [f"{why} For any other write a {DOCKERFILE}."])
    return ImageSource(folder, file, base, image)
