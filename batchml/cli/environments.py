"""What `setup`, `teardown`, `compute` and `queue` have in common: an environment and its tools."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Stacks
from batchml.aws.ec2 import LaunchApi
from batchml.aws.naming import Platform
from batchml.cli.output import say
from batchml.client import submission
from batchml.client.place import Place
from batchml.errors import INTERRUPTED, NotFound, UsageError
from batchml.model.environment import LOCAL, Environment
from batchml.ops.setup.desired import STACKS, Scheme
from batchml.ops.setup.tools import Tools
from batchml.ops.sources import ImageSource
from batchml.resources import shipped


class Subject(Struct, frozen=True):
    """An environment that is set up or torn down. `notes` is what the user should know of it."""

    scheme: Scheme
    notes: tuple[str, ...] = ()
    image_sources: tuple[ImageSource, ...] = ()


def subject(place: Place, like: str | None = None) -> Subject:
    """The environment of a command. Raises ConfigError, NotFound."""
    environment, notes = model_of(place, like)
    jobs, more = _jobs(place, environment)
    sources = tuple(job.image_source for job in jobs if job.image_source is not None)

    def definitions(platform: Platform) -> Mapping[str, dict[str, Any]]:
        made = [job.request(platform) for job in jobs]
        return {request["jobDefinitionName"]: request for request in made}

    templates = {short: (shipped("cfn") / f"{short}.yaml").read_text("utf-8") for short in STACKS}
    scheme = Scheme(place.env, environment, templates, definitions)
    return Subject(scheme, (*notes, *more), sources)


def model_of(place: Place, like: str | None) -> tuple[Environment, list[str]]:
    """What `batchml.toml` says; of `local`, where it says nothing, what it says of another.

    So one file describes the laptop and AWS alike.
    """
    known = place.settings.environments
    if like is not None and like not in known:
        raise NotFound("Environment", like, known, "It came from flag --like.")
    own = place.settings.environment
    if like is not None and (not place.settings.is_local or own.compute or own.queues):
        what = "local" if place.settings.is_local else place.env
        raise UsageError(f"--like is for local without a description of its own, not for {what}.")
    if not place.settings.is_local or own.compute or own.queues or own.jobs:
        return own, []
    others = sorted(name for name in known if name != LOCAL)
    model = like or (place.settings.default if place.settings.default != LOCAL else None)
    model = model or (others[0] if len(others) == 1 else None)
    if model is None and others:
        flags = " or ".join(f"--like {name}" for name in others)
        raise UsageError(f"Which of {len(others)} environments local is to be like: {flags}?")
    if model is None or model == LOCAL:
        return own, []
    place.settings.check(model)
    there = known[model]
    note = f"local takes the compute environments, queues and jobs of {model}."
    return replace(own, compute=there.compute, queues=there.queues, jobs=there.jobs), [note]


def _jobs(place: Place, environment: Environment) -> tuple[list[submission.Job], list[str]]:
    """The jobs whose definitions are wanted, and why others cannot be registered yet."""
    found, notes = [], []
    for name in environment.jobs:
        try:
            found += submission.resolve(place, [name])
        except NotFound as missing:
            if not missing.kind.startswith("Image"):
                raise
            notes.append(f"job definition of {name}: not yet. {missing}")
    return found, notes


def tools(place: Place, command: str = "setup", **more: Any) -> Tools:
    """What steps are taken with; `command` is what to type again, `more` are further fields."""
    session = place.connect()
    more["command"] = command
    if place.settings.is_local:
        return Tools(Stacks(session), ComputeApi(session), place.batch, place.clock, **more)
    from batchml.aws.s3 import empty_bucket

    return Tools(
        Stacks(session), ComputeApi(session), place.batch, place.clock,
        launch=LaunchApi(session),
        empty_bucket=lambda bucket: say(f"    {empty_bucket(session, bucket)} objects deleted"),
        **more,
    )  # fmt: skip


class Course:
    """How far a command is: `has_begun` once something was asked for."""

    has_begun = False


@contextmanager
def going_on(command: str) -> Iterator[Course]:
    """On Ctrl-C say that nothing is lost: what was asked for goes on by itself."""
    course = Course()
    try:
        yield course
    except KeyboardInterrupt:
        if course.has_begun:
            say(f"\nInterrupted. What was asked for goes on by itself; to go on: {command}")
        else:
            say("\nNothing was changed.")
        raise typer.Exit(INTERRUPTED) from None


def ask(question: str, flag: str, *, yes: bool, expected: Sequence[str] = ("y", "yes")) -> bool:
    """Ask on the terminal. Raises UsageError with the flag that answers, where there is none."""
    import sys

    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"Nothing was changed. This is to be confirmed: add {flag}.")
    print(f"{question} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {answer.lower() for answer in expected}
