"""image build, push, list."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json, read_pairs
from batchml.cli.output import print_json, print_line, say
from batchml.errors import INTERRUPTED, AccessError, ImageError, ServiceUnreachable

if TYPE_CHECKING:
    from batchml.aws.ecr import Tell
    from batchml.client.place import Place
    from batchml.model.image import Recipe
    from batchml.ops.images import Shown, Target
    from batchml.ops.sources import ImageSource

image_app = command_group(
    "image",
    "Images by content: build, push to ECR, list.",
    "batchml image push pytorch",
)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="Folders of images/, or of jobs; all of images/ unless given."
    ),
]
Flavor = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda", help="Those that the environment needs unless given."),
]
Base = Annotated[str, typer.Option(metavar="IMAGE", help="Build on this Debian or Ubuntu image.")]
BuildArg = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="For an ARG of the Dockerfile.")
]


@image_app.command(epilog="Example: batchml image build pytorch --flavor cuda --push")
def build(
    names: Names = None,
    flavor: Flavor = None,
    base: Base = "",
    build_arg: BuildArg = None,
    push: Annotated[bool, typer.Option("--push", help="Push them as well.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Build images, of images/ or of a job's own files, unless the Docker engine has them."""
    from batchml.aws.ecr import Engine
    from batchml.cli.wiring import open_place
    from batchml.ops import images

    place = open_place(env)
    wanted = _recipes(place, names, flavor, base, build_arg)
    if push and not place.settings.is_local:
        _push(place, wanted, json_)
        return
    engine = Engine()
    with _telling() as tell:
        shown = [images.build(engine, one, tell) for one in wanted]
    if push:
        say(_LOCAL)
    _print(shown, json_)


@image_app.command(epilog="Example: batchml image push pytorch --flavor cuda")
def push(
    names: Names = None,
    flavor: Flavor = None,
    base: Base = "",
    build_arg: BuildArg = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Put images into ECR, unless they are there; builds what is missing."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    wanted = _recipes(place, names, flavor, base, build_arg)
    if place.settings.is_local:
        say(_LOCAL)
        _print([], json_)
        return
    _push(place, wanted, json_)


@image_app.command("list", epilog="Example: batchml image list --json")
def list_(names: Names = None, env: Env = None, json_: Json = False) -> None:
    """Show images: in the folders, in the Docker engine, and in ECR."""
    from batchml.aws.ecr import Ecr, Engine
    from batchml.cli.wiring import open_place
    from batchml.ops import images

    place = open_place(env)
    engine: Engine | None = Engine()
    ecr = None if place.settings.is_local else Ecr(place.connect())
    sources = _sources(place, names) if names else _with_jobs(place, _sources(place, None))
    while True:
        try:
            shown = images.listing(engine, ecr, sources)
            break
        except ImageError as error:
            say(f"{error}\nShown without what an engine has.")
            engine = None
        except (AccessError, ServiceUnreachable) as error:
            say(f"{error}\nShown without what ECR has.")
            ecr = None
    if names:
        wanted = {source.name for source in sources}
        shown = [one for one in shown if one.name in wanted]
    if json_:
        _print(shown, json_)
        return
    print_line(_rows(shown))


@image_app.command(epilog="Example: batchml image prune --older 7d")
def prune(
    older: Annotated[str, typer.Option(metavar="DURATION", help="What was made before.")] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Remove old environments of this machine's processes; a run that wants one makes it again."""
    from batchml.cli.wiring import open_place
    from batchml.errors import UsageError
    from batchml.local.pruning import find_old, remove
    from batchml.model.tables import parse_duration
    from batchml.ops.code import size_words

    place = open_place(env)
    if not place.settings.is_local:
        raise UsageError(
            f"image prune is for local. In ECR the newest 50 of each image are kept, in "
            f"{place.env} as anywhere."
        )
    seconds = parse_duration(older)
    if seconds is None:
        raise UsageError(f'--older: found {older!r}. Write a duration such as "30d" or "12h".')
    old = find_old(place.home, place.clock.now() - seconds)
    gone = old if dry_run else [each for each in old if remove(each)]
    if json_:
        print_json([{"name": each.path.name, "size": each.size} for each in gone])
        return
    for each in gone:
        print_line(f"{each.path.name}  {size_words(each.size)}")
    total = size_words(sum(each.size for each in gone))
    done = "Would free" if dry_run else "Freed"
    say(f"{done} {total}. Images of the Docker engine: docker image ls")


_LOCAL = (
    "local needs no push: its server takes images from this machine's Docker engine, and builds "
    "what is missing."
)


def _push(place: "Place", wanted: "Sequence[Recipe]", json_: bool) -> None:
    from batchml.aws.ecr import Engine
    from batchml.ops import images

    engine, target = Engine(), _target(place)
    with _telling() as tell:
        _print([images.push(engine, target, one, tell, place.clock) for one in wanted], json_)


def _target(place: "Place") -> "Target":
    from batchml.aws.ecr import Ecr
    from batchml.ops.images import Target

    return Target(Ecr(place.connect()), place.env, dict(place.settings.environment.tags))


def _recipes(
    place: "Place", names: list[str] | None, flavor: str | None, base: str, args: list[str] | None
) -> "list[Recipe]":
    from batchml.ops.images import flavors_of, read_recipes

    flavors = (flavor,) if flavor else flavors_of(place.settings.environment, place.env)
    pairs = read_pairs(args, "--build-arg")
    return read_recipes(_sources(place, names), flavors, base=base, build_args=pairs)


def _sources(place: "Place", names: list[str] | None) -> "list[ImageSource]":
    """What images are made from, those of the current folder before the shipped ones."""
    from batchml.errors import UsageError
    from batchml.ops.sources import ImageSource, named_source

    if not names:
        every = [path.parent for below in place.image_folders
                 for path in sorted(below.glob("*/Dockerfile"))]  # fmt: skip
        folders = {folder.name: folder for folder in reversed(every)}.values()
        return [ImageSource(folder) for folder in folders][::-1]
    found = []
    for name in names:
        source = named_source(name, place.image_folders, place.job_folders, place.here)
        if source is None:
            raise UsageError(
                f"{name}: give the name of a folder below images/, such as pytorch, or the folder "
                "of a job whose image is made from its own requirements.txt."
            )
        found.append(source)
    return found


def _with_jobs(place: "Place", sources: "list[ImageSource]") -> "list[ImageSource]":
    """Those, and the images that jobs here have of their own. What is wrong with one is said."""
    from batchml.errors import BatchmlError
    from batchml.ops.sources import find_source, job_images

    found = list(sources)
    for folder, image in job_images(place.job_folders[:1], place.here):
        try:
            source = find_source(image, place.image_folders, folder)
            if source is not None and source.file and source.recipe():
                found.append(source)
        except BatchmlError as error:
            say(str(error))
    return found


def _print(shown: "Sequence[Shown]", json_: bool) -> None:
    if json_:
        import msgspec

        print_json(msgspec.to_builtins(list(shown)))
        return
    for one in shown:
        done = [word for word, did in (("built", one.built), ("pushed", one.pushed)) if did]
        print_line(f"{one.reference}  {' and '.join(done) or 'was there'}")


def _rows(shown: "Sequence[Shown]") -> str:
    from batchml.cli.render import table

    rows = [("NAME", "TAG", "FLAVOR", "BUILT", "PUSHED", "SIZE")]
    for one in shown:
        size = f"{one.size / 1e6:.0f} MB" if one.size is not None else "-"
        yes = {True: "yes", False: "-"}
        rows.append(
            (one.name, one.tag, one.flavor or "(old)", yes[one.built], yes[one.pushed], size)
        )
    return table(rows)


@contextmanager
def _telling() -> "Iterator[Tell]":
    """Show progress on stderr: one live line on a terminal, a line for each step elsewhere."""
    from batchml.cli.render import printable

    live = sys.stderr.isatty()

    def tell(text: str, is_step: bool) -> None:
        text = printable(text)
        if not live:
            if is_step:
                say(text)
            return
        width = _width()
        sys.stderr.write(f"\r\033[K{text[: width - 1]}" + ("\n" if is_step else ""))
        sys.stderr.flush()

    try:
        yield tell
    except KeyboardInterrupt:
        say("\nInterrupted. Nothing is half-done; the same command goes on from here.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if live:
            sys.stderr.write("\r\033[K")


def _width() -> int:
    import shutil

    return max(20, shutil.get_terminal_size().columns)
