"""`batchml image`: build, push and list images."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context, read_pairs
from batchml.cli.output import print_json, print_line, say
from batchml.errors import (
    INTERRUPTED,
    AccessError,
    BatchmlError,
    ImageError,
    ServiceUnreachable,
    UsageError,
)

if TYPE_CHECKING:
    from batchml.aws.ecr import NotifyBuild
    from batchml.context import Context
    from batchml.jobs.find import ImageSource
    from batchml.jobs.images import ImageRow
    from batchml.model.image import Recipe

image_app = command_group(
    "image",
    "Build images, push them to ECR, and list them.",
    "batchml image push pytorch",
)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="Folders below images/, or jobs; default: all of images/."
    ),
]
Flavor = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda", help="Build this flavor; default: those of the environment."),
]
Base = Annotated[str, typer.Option(metavar="IMAGE", help="Build on this Debian or Ubuntu image.")]
BuildArg = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="Set an ARG of the Dockerfile.")
]


@image_app.command(epilog="Example: batchml image build pytorch --flavor cuda --push")
def build(
    names: Names = None,
    flavor: Flavor = None,
    base: Base = "",
    build_arg: BuildArg = None,
    push: Annotated[bool, typer.Option("--push", help="Also push the images.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Build images that the Docker engine lacks, from images/ or the files of jobs."""
    from batchml.aws.ecr import ImageEngine
    from batchml.jobs import images

    context = open_context(env)
    recipes = _recipes(context, names, flavor, base, build_arg)
    if push and not context.settings.is_local:
        _push(context, recipes, json_)
        return
    engine = ImageEngine()
    with show_build_progress() as notify:
        rows = [images.build(engine, recipe, notify) for recipe in recipes]
    if push:
        say(NO_PUSH)
    _print(rows, json_)


@image_app.command(epilog="Example: batchml image push pytorch --flavor cuda")
def push(
    names: Names = None,
    flavor: Flavor = None,
    base: Base = "",
    build_arg: BuildArg = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Push images that ECR lacks; first build those that the Docker engine lacks."""
    context = open_context(env)
    recipes = _recipes(context, names, flavor, base, build_arg)
    if context.settings.is_local:
        say(NO_PUSH)
        _print([], json_)
        return
    _push(context, recipes, json_)


@image_app.command("list", epilog="Example: batchml image list --json")
def list_(names: Names = None, env: Env = None, json_: Json = False) -> None:
    """List the images of images/ and of jobs, of the Docker engine, and of ECR."""
    from batchml.aws.ecr import Ecr, ImageEngine
    from batchml.jobs import images

    context = open_context(env)
    engine: ImageEngine | None = ImageEngine()
    ecr = None if context.settings.is_local else Ecr(context.connect())
    sources = _sources(context, names) if names else _with_jobs(context, _sources(context, None))
    processors = () if context.settings.is_local else context.settings.environment.processors
    while True:
        try:
            rows = images.list_images(engine, ecr, sources, processors)
            break
        except ImageError as error:
            say(f"{error}\nImages of the Docker engine are not listed.")
            engine = None
        except (AccessError, ServiceUnreachable) as error:
            say(f"{error}\nImages in ECR are not listed.")
            ecr = None
    if names:
        chosen = {source.name for source in sources}
        rows = [row for row in rows if row.name in chosen]
    if json_:
        _print(rows, json_)
        return
    print_line(_table(rows))


NO_PUSH = (
    "`local` needs no push: the embedded AWS Batch uses the images of this machine's Docker "
    "engine, and builds missing images."
)


def _push(context: "Context", recipes: "Sequence[Recipe]", json_: bool) -> None:
    from batchml.aws.ecr import Ecr, ImageEngine
    from batchml.jobs import images

    tags = dict(context.settings.environment.tags)
    engine, target = ImageEngine(), images.PushTarget(Ecr(context.connect()), context.env, tags)
    with show_build_progress() as notify:
        rows = [images.push(engine, target, each, notify, context.clock) for each in recipes]
    _print(rows, json_)


def _recipes(
    context: "Context",
    names: list[str] | None,
    flavor: str | None,
    base: str,
    args: list[str] | None,
) -> "list[Recipe]":
    from batchml.jobs.images import read_recipes, variants_of

    variants = variants_of(context.settings.environment, context.env, flavor or "")
    pairs = read_pairs(args, "--build-arg")
    return read_recipes(_sources(context, names), variants, base=base, build_args=pairs)


def _sources(context: "Context", names: list[str] | None) -> "list[ImageSource]":
    """Find the sources of the named images; without names, of all folders below images/."""
    from batchml.jobs.find import ImageSource, named_source

    if not names:
        folders: dict[str, Path] = {}  # of two images with one name, the first counts
        for below in context.image_folders:
            for path in sorted(below.glob("*/Dockerfile")):
                folders.setdefault(path.parent.name, path.parent)
        return [ImageSource(folder) for folder in folders.values()]
    sources = []
    for name in names:
        source = named_source(name, context.image_folders, context.job_folders, context.folder)
        if source is None:
            raise UsageError(
                f"{name}: give the name of a folder below images/, such as pytorch, or the folder "
                "of a job with its own requirements.txt."
            )
        sources.append(source)
    return sources


def _with_jobs(context: "Context", sources: "list[ImageSource]") -> "list[ImageSource]":
    """Add the images of jobs in the current folder, and print the mistakes of jobs."""
    from batchml.jobs.find import find_source, list_job_images

    found = list(sources)
    for folder, image in list_job_images(context.job_folders[:1], context.folder):
        try:
            source = find_source(image, context.image_folders, folder)
            if source is not None and source.file and source.recipe():
                found.append(source)
        except BatchmlError as error:
            say(str(error))
    return found


def _print(rows: "Sequence[ImageRow]", json_: bool) -> None:
    if json_:
        import msgspec

        print_json(msgspec.to_builtins(list(rows)))
        return
    for row in rows:
        done = [word for word, did in (("built", row.built), ("pushed", row.pushed)) if did]
        print_line(f"{row.reference}  {' and '.join(done) or 'was there'}")


def _table(rows: "Sequence[ImageRow]") -> str:
    from batchml.cli.render import table

    lines = [("NAME", "TAG", "FLAVOR", "BUILT", "PUSHED", "SIZE")]
    yes = {True: "yes", False: "-"}
    for row in rows:
        size = f"{row.size / 1e6:.0f} MB" if row.size is not None else "-"
        lines.append(
            (row.name, row.tag, row.flavor or "(old)", yes[row.built], yes[row.pushed], size)
        )
    return table(lines)


@contextmanager
def show_build_progress() -> "Iterator[NotifyBuild]":
    """Show progress on stderr: a live line on a terminal, else a line for each step."""
    from batchml.cli.render import printable
    from batchml.cli.terminal import is_dumb, live_line

    latest = ""

    def notify(text: str, is_step: bool) -> None:
        nonlocal latest
        latest = "" if is_step else printable(text)
        if is_step:
            say(printable(text))

    live = sys.stderr.isatty() and not is_dumb()
    try:
        with live_line(sys.stderr, lambda width: latest) if live else nullcontext():
            yield notify
    except KeyboardInterrupt:
        say("\nInterrupted. Repeat the command to continue.")
        raise typer.Exit(INTERRUPTED) from None
