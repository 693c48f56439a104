"""Find a job's folder and the source of its image by the names that a user gives."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.errors import ConfigError, InputNotFound, NotFound
from batchml.jobs.own_image import (
    OWN_IMAGE_FILES,
    choice_mistakes,
    choose_file,
    file_kind,
    image_name,
    is_file,
    make_files,
    read_files,
)
from batchml.model.image import (
    DOCKERFILE,
    HERE,
    REQUIREMENTS,
    OwnImage,
    Recipe,
    has_whole_package,
    is_reference,
    make_recipe,
    parse_own_image,
)
from batchml.model.job import JobSpec, read_job
from batchml.model.names import to_name
from batchml.runtime.package import sources


def find_job(name: str, folders: Sequence[Path], here: Path) -> Path:
    """Find the folder of a job: `name` itself if it has a job.toml, else below one of `folders`.

    `name` may also be the job.toml itself. Raises NotFound, with the names of the existing jobs.
    """
    if Path(name).name == "job.toml" and (here / name).is_file():
        return (here / name).parent
    for candidate in (here / name, *(folder / name for folder in folders)):
        if (candidate / "job.toml").is_file():
            return candidate
    known = {path.parent.name for folder in folders for path in folder.glob("*/job.toml")}
    known |= {path.parent.name for path in here.glob("*/job.toml")}
    hint = "Give a folder with a job.toml, or one of those names."
    if (here / "job.toml").is_file() and name == _job_name(here):
        hint = f"The job of this folder is called {name}: name it '.', as in batchml submit ."
    if (here / name).is_dir():
        hint = f"The folder {here / name} has no job.toml."
    elif (here / name).is_file():
        command = shlex.join(_command_of(Path(name)))
        hint = f"{name} is a file. As a command: batchml submit -- {command}"
        known = set()
    raise InputNotFound("Job", name, known, hint)


class KnownJob(Struct, frozen=True):
    """A job that can be submitted by its name. `mistakes` are those of its file, without a spec."""

    name: str  # the word for `submit`: the folder's name, or "." for the current folder
    folder: Path
    spec: JobSpec | None
    mistakes: tuple[str, ...] = ()


def list_jobs(folders: Sequence[Path], here: Path) -> list[KnownJob]:
    """The jobs that `find_job` finds by their names: first those of `here`, then of `folders`.

    A name that stands in several folders means the first of them.
    """
    found: dict[str, KnownJob] = {}
    files = [here / "job.toml", *sorted(here.glob("*/job.toml"))]
    files += [file for folder in folders for file in sorted(folder.glob("*/job.toml"))]
    for file in files:
        folder = file.parent
        name = "." if folder == here else folder.name
        if name in found or not file.is_file():
            continue
        try:
            found[name] = KnownJob(name, folder, load_job(folder))
        except ConfigError as error:
            found[name] = KnownJob(name, folder, None, tuple(error.mistakes))
        except OSError as error:
            found[name] = KnownJob(name, folder, None, (f"{error.strerror}.",))
    return list(found.values())


def _job_name(folder: Path) -> str:
    """The name of a folder's job; "" for a job.toml with mistakes."""
    with suppress(ConfigError):
        return load_job(folder).name
    return ""


def _command_of(program: Path) -> list[str]:
    """Make the command that starts a program file, by its suffix."""
    runner = {".py": "python", ".sh": "bash", ".R": "Rscript", ".jl": "julia"}.get(program.suffix)
    if runner:
        return [runner, str(program)]
    return [str(program) if program.parent.name else f"./{program}"]


def load_job(
    folder: Path, image_folders: Sequence[Path] | None = None, provided_params: Collection[str] = ()
) -> JobSpec:
    """Read `job.toml`. The job's name is the folder's unless the file has one.

    Raises ConfigError with every mistake of the file. The image is only looked for in
    `image_folders`. `provided_params` is that of `read_job`.
    """
    import tomllib  # late: a run of a command reads no job.toml

    path = folder / "job.toml"
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"not TOML: {error}."]) from error

    if "image" not in table:
        table = _with_own_image(table, folder)

    def check(spec: JobSpec) -> Iterator[str]:
        if image_folders is not None and spec.image:
            yield from _image_mistakes(spec.image, image_folders, folder)

    spec = read_job(table, str(path), check, provided_params)
    return spec if spec.name else msgspec.structs.replace(spec, name=to_name(folder.name))


def _with_own_image(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Choose the job's own image for a job without `image`, if its folder has a file for one."""
    return {"image": HERE, **table} if own_image_files(folder) else table


def _image_mistakes(image: str, folders: Sequence[Path], folder: Path) -> Iterator[str]:
    try:
        find_source(image, folders, folder)
    except NotFound as error:
        yield f"image: {error}"
    except ConfigError as error:
        yield from error.mistakes


def find_image(name: str, folders: Sequence[Path]) -> Path | None:
    """Find the folder of an image; None for a reference to a registry.

    Raises NotFound for any other name: a misspelt name is not looked for in a registry.
    """
    if any(mark in name for mark in "/:@."):
        return None
    for folder in folders:
        if name and is_file(f"{folder}/{name}/{REQUIREMENTS}"):
            return folder / name
    for folder in folders:
        if name and (folder / name).is_dir():
            hint = "An image's folder needs this file, which may be empty."
            raise InputNotFound("File", f"{folder / name}/requirements.txt", [], hint)
    known = {path.parent.name for folder in folders for path in folder.glob("*/requirements.txt")}
    hint = "An image is a folder below images/, or a reference such as docker.io/library/python."
    raise InputNotFound("Image", name, known, hint)


# --- Sources of images ----------------------------------------------------------------------------


BASE_IMAGE = "python"  # the image to which the packages of a requirements.txt are added


class ImageSource(Struct, frozen=True):
    """The source of an image: a folder below `images/`, or a file of a job's folder."""

    folder: Path
    file: str = ""  # the file of a job's folder; "" for a folder below images/
    base: Path | None = None  # the folder of the image to which packages are added
    word: str = ""  # the value of `image` in job.toml

    @property
    def name(self) -> str:
        return image_name(self.folder.resolve().name) if self.file else self.folder.name

    def recipe(
        self, flavor: str = "cpu", *, base: str = "", build_args: Mapping[str, str] | None = None
    ) -> Recipe:
        """Read the recipe of the image. Raises ConfigError with every mistake of its files."""
        args = tuple((build_args or {}).items())
        if not self.file:
            files = tuple(read_files(self.folder).items())
            return _make_recipe(self.name, files, flavor, base, args)
        own, more, programs = make_files(self.folder, self.file, self.base)
        return _make_recipe.__wrapped__(
            self.name, tuple(own.items()), flavor, base, args, tuple(more.items()), programs
        )

    def push_argument(self, here: Path) -> str:
        """Return the argument of `batchml image push` for this image, in the folder `here`."""
        if not self.file:
            return self.folder.name
        folder, here = self.folder.resolve(), here.resolve()
        if folder == here:
            return self.word or HERE
        return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


# Of the images of the last submissions: with the hash of its 140 files, a recipe takes a tenth of
# a submission. A job's own image is not kept: it may have large files.
@lru_cache(maxsize=8)
def _make_recipe(
    name: str,
    files: tuple[tuple[str, bytes], ...],
    flavor: str,
    base: str,
    build_args: tuple[tuple[str, str], ...],
    more: tuple[tuple[str, bytes], ...] = (),
    programs: frozenset[str] = frozenset(),
) -> Recipe:
    folder = dict(files)
    return make_recipe(
        name, folder, sources(has_whole_package(folder)), flavor, base=base,
        build_args=dict(build_args), more=dict(more), programs=programs,
    )  # fmt: skip


def find_source(image: str, folders: Sequence[Path], folder: Path) -> ImageSource | None:
    """Find the source of the `image` of a job in `folder`; None for a reference to a registry.

    Raises NotFound for a missing image, ConfigError for a missing file or an ambiguous choice.
    """
    choice = parse_own_image(image)
    if choice is None:
        found = find_image(image, folders)
        return None if found is None else ImageSource(found)
    return _own_source(choice, image, folders, folder)


def named_source(
    name: str, folders: Sequence[Path], job_folders: Sequence[Path], here: Path
) -> ImageSource | None:
    """Find the source of an image by a user's name for it; None for a reference to a registry.

    The name is that of a folder below `images/`, of a job, of a folder with a file for an image, or
    a value of `image`. Raises NotFound, ConfigError.
    """
    choice = parse_own_image(name)
    if not choice and not is_reference(name) and any((each / name).is_dir() for each in folders):
        return find_source(name, folders, here)
    places = [here / name] if choice else [here / name, *(each / name for each in job_folders)]
    for folder in places:
        if (folder / "job.toml").is_file():
            return find_source(load_job(folder).image, folders, folder)
        if folder.is_dir() and own_image_files(folder):
            return find_source(HERE, folders, folder)
    return find_source(name, folders, here)


def list_job_images(job_folders: Sequence[Path], here: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of jobs that have files for an image, each with the value of `image`.

    Jobs with mistakes are left out: `submit` reports them.
    """
    files = [
        here / "job.toml",
        *(each for below in job_folders for each in sorted(below.glob("*/job.toml"))),
    ]
    for folder in (file.parent for file in files if file.is_file()):
        if own_image_files(folder):
            with suppress(ConfigError):
                yield folder, load_job(folder).image


def own_image_files(folder: Path) -> tuple[str, ...]:
    """Return the files of a folder from which an image can be made."""
    return tuple(name for name in OWN_IMAGE_FILES if is_file(f"{folder}/{name}"))


def unused_files_notice(image: str, folder: Path) -> str:
    """Make a notice if the job's folder has files for an image that the job does not use; else "".

    A reference gets no notice: the image may have been built from these files.
    """
    if parse_own_image(image) is not None or is_reference(image):
        return ""
    found = own_image_files(folder)
    if not found:
        return ""
    fixes = f'image = "." makes an image of {found[0] if len(found) == 1 else "one of them"}'
    if REQUIREMENTS in found:
        fixes += f', image = "{image} + {REQUIREMENTS}" adds its packages to {image}'
    return f"{' and '.join(found)} in the job's folder: not used, the image is {image}. {fixes}."


def _own_source(choice: OwnImage, image: str, folders: Sequence[Path], folder: Path) -> ImageSource:
    file = choice.file
    exists = file and (folder / file).is_file()
    names = [file] if exists else list(own_image_files(folder))
    mistakes = choice_mistakes(choice, names)
    if not file:
        texts = {name: (folder / name).read_text("utf-8", "replace") for name in names}
        file, mistakes = choose_file(texts)
    if mistakes:
        raise ConfigError(str(folder), mistakes)
    base = None
    if file_kind(file) == REQUIREMENTS:
        base = find_image(choice.base or BASE_IMAGE, folders)
        if base is None:
            why = (
                f"image: {image}: packages are added to an image below images/, not to a reference."
            )
            raise ConfigError(str(folder), [f"{why} For a reference, write a {DOCKERFILE}."])
    return ImageSource(folder, file, base, image)
