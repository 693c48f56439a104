"""Find a job's folder, and an image's, by the name that a user gives."""

import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchml.errors import ConfigError, NotFound
from batchml.model.job import JobSpec, read_job
from batchml.model.names import to_name


def find_job(name: str, folders: Sequence[Path], here: Path) -> Path:
    """The folder of a job: `name` itself when it has a job.toml, else below one of `folders`.

    The job.toml itself is as good as its folder. Raises NotFound, naming the jobs that there are.
    """
    if Path(name).name == "job.toml" and (here / name).is_file():
        return (here / name).parent
    for candidate in (here / name, *(folder / name for folder in folders)):
        if (candidate / "job.toml").is_file():
            return candidate
    known = {path.parent.name for folder in folders for path in folder.glob("*/job.toml")}
    known |= {path.parent.name for path in here.glob("*/job.toml")}
    hint = "Give a folder that has a job.toml, or one of those names."
    if (here / name).is_dir():
        hint = f"The folder {here / name} has no job.toml."
    elif (here / name).is_file():
        from shlex import join

        command = join(_started(Path(name)))
        hint = f"{name} is a file. As a command: batchml submit -- {command}"
        known = set()
    raise NotFound("Job", name, known, hint)


def _started(program: Path) -> list[str]:
    """How a program in a file is started, as its name tells."""
    runner = {".py": "python", ".sh": "bash", ".R": "Rscript", ".jl": "julia"}.get(program.suffix)
    if runner:
        return [runner, str(program)]
    return [str(program) if program.parent.name else f"./{program}"]


def load_job(
    folder: Path, image_folders: Sequence[Path] | None = None, lent: Collection[str] = ()
) -> JobSpec:
    """Read `job.toml`. The job's name is the folder's unless the file gives one.

    Raises ConfigError with every mistake of the file; that there is no such image only where
    `image_folders` are given. `lent` is as in `read_job`.
    """
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

    spec = read_job(table, str(path), check, lent)
    return spec if spec.name else msgspec.structs.replace(spec, name=to_name(folder.name))


def _with_own_image(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A job that names no image has that of its folder, if the folder has what makes one."""
    from batchml.model.project import HERE
    from batchml.ops.sources import beside

    return {"image": HERE, **table} if beside(folder) else table


def _image_mistakes(image: str, folders: Sequence[Path], folder: Path) -> Iterator[str]:
    from batchml.ops.sources import find_source

    try:
        find_source(image, folders, folder)
    except NotFound as error:
        yield f"image: {error}"
    except ConfigError as error:
        yield from error.mistakes


def find_image(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of an image, or None for a reference to a registry.

    Raises NotFound for a bare name that is neither: a misspelt image is not looked for on the net.
    """
    if any(mark in name for mark in "/:@."):
        return None
    for folder in folders:
        if (folder / name / "requirements.txt").is_file():
            return folder / name
    for folder in folders:
        if (folder / name).is_dir():
            hint = "An image's folder has one, if only an empty one: it is what pip installs."
            raise NotFound("File", f"{folder / name}/requirements.txt", [], hint)
    known = {path.parent.name for folder in folders for path in folder.glob("*/requirements.txt")}
    hint = "An image is a folder below images/, or a reference such as docker.io/library/python."
    raise NotFound("Image", name, known, hint)
