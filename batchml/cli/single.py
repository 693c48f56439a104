"""What `compute` and `queue` have in common: one resource, made by a plan of it alone."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.output import print_json, print_line, say
from batchml.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.client.place import Place
    from batchml.model.environment import Compute, Environment, Queue

Name = Annotated[str, typer.Argument(metavar="NAME", help="As batchml.toml has it, or any other.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Enable = Annotated[bool | None, typer.Option("--enable/--disable", help="Take jobs, or no more.")]

# What a state means: docs/behaviours.md, B7.
_STATES = {
    ("job queue", "DISABLED"): "disabled: it takes no more runs; those in it go on",
    ("job queue", "ENABLED"): "enabled: it takes runs",
    ("compute environment", "DISABLED"): "disabled: nothing more starts there; what runs goes on",
    ("compute environment", "ENABLED"): "enabled: runs start there",
}


def compute_api(place: "Place") -> Any:
    from batchml.aws.batch.resources import ComputeApi

    return ComputeApi(place.connect())


def described_environment(place: "Place") -> "Environment":
    """What batchml.toml says of the environment, which for `local` another one may stand for."""
    from batchml.cli.environments import model_of

    try:
        return model_of(place, None)[0]
    except UsageError:  # several could: then it has none
        return place.settings.environment


def given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def table_of(struct: "Compute | Queue") -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(struct))


def bare(place: "Place", name: str) -> str:
    """The name as batchml.toml has it."""
    from batchml.aws.naming import qualified

    return name.removeprefix(qualified(place.env, ""))


def find_one(
    place: "Place", name: str, kind: str, known: "Mapping[str, dict[str, Any]]"
) -> tuple[str, dict[str, Any]]:
    """A resource by its name here or in AWS. Raises NotFound."""
    from batchml.aws.naming import qualified

    for each in (qualified(place.env, name), name):
        if each in known:
            return each, known[each]
    names = [bare(place, each) for each in known]
    raise NotFound(kind, name, names, f"They are listed by batchml {_command(kind)} list.")


def _command(kind: str) -> str:
    return "queue" if "queue" in kind else "compute"


def refuse_existing(
    place: "Place", command: str, name: str, known: "Mapping[str, dict[str, Any]]"
) -> None:
    from batchml.aws.naming import qualified

    if qualified(place.env, name) in known:
        raise UsageError(
            f"{name} exists already. To change it: batchml {command} update {name}, or change "
            "batchml.toml and run batchml setup."
        )


def print_table(rows: list[list[str]], empty: str) -> None:
    from batchml.cli.render import table

    if len(rows) == 1:
        return say(empty)
    print_line(table(rows))


def make(
    place: "Place", computes: "dict[str, Compute]", queues: "dict[str, Queue]", json_: bool
) -> None:
    """Carry out the plan of these alone."""
    from msgspec.structs import replace

    from batchml.cli import environments
    from batchml.ops.setup import desired
    from batchml.ops.setup.apply import carry_out, look

    subject = environments.subject(place)
    narrowed = replace(subject.scheme.environment, compute=computes, queues=queues)
    scheme = replace(subject.scheme, environment=narrowed)
    tools = environments.tools(place)
    facts = look(scheme, tools)
    _refuse_without_stacks(place, scheme, facts, computes)
    made = []
    with environments.going_on(f"batchml compute list --env {place.env}") as course:
        course.has_begun = True
        for progress in carry_out(lambda now: desired.single(scheme, now), facts, tools, set()):
            step = progress.step
            if not progress.text:
                made.append({"kind": step.kind.value, "name": step.name})
                say(f"{step.kind.value} {step.name}: done")
    if json_:
        print_json(made)


def _refuse_without_stacks(
    place: "Place", scheme: Any, facts: Any, computes: "dict[str, Compute]"
) -> None:
    """Compute environments stand on the stacks of `setup`."""
    from batchml.ops.setup.desired import wanted_stacks

    if place.settings.is_local or not computes:
        return
    missing = [
        short
        for short in wanted_stacks(scheme)
        if short not in ("storage", "observability") and scheme.stack(short) not in facts.stacks
    ]
    if missing:
        raise UsageError(
            f"Environment {place.env} has no {' and no '.join(missing)} yet, which compute "
            f"environments stand on. Make it first: batchml setup --env {place.env}"
        )


def changed(kind: str, request: "Mapping[str, Any]") -> str:
    """What an update has come to, in words."""
    return _STATES.get((kind, request.get("state", "")), "changed")


def say_settled(place: "Place", kind: str, request: "Mapping[str, Any]", json_: bool) -> None:
    """Wait until AWS has taken an update request."""
    from batchml.cli import environments
    from batchml.ops.setup.batch_steps import settle

    tools = environments.tools(place)
    with environments.going_on(f"batchml {_command(kind)} list --env {place.env}") as course:
        course.has_begun = True
        detail = settle(request, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json(detail)
    else:
        name = request.get("jobQueue") or request["computeEnvironment"]
        print_line(f"{kind} {name} is {changed(kind, request)}.")


def unmake(place: "Place", kind: str, name: str, yes: bool, json_: bool) -> None:
    from batchml.cli import environments
    from batchml.ops.setup.batch_steps import remove
    from batchml.ops.setup.values import Kind

    if not environments.ask(f"Delete {kind} {name}? [y/N]", "--yes", yes=yes):
        say("Nothing was changed.")
        raise typer.Exit(1)
    tools = environments.tools(place)
    with environments.going_on(f"batchml {_command(kind)} list --env {place.env}") as course:
        course.has_begun = True
        remove(Kind(kind), name, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json([{"kind": kind, "name": name}])
    else:
        print_line(f"{kind} {name} is deleted.")


def used(queue: "Mapping[str, Any]") -> list[str]:
    order = sorted(queue["computeEnvironmentOrder"], key=lambda entry: entry["order"])
    return [entry["computeEnvironment"] for entry in order]
