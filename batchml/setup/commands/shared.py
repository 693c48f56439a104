"""Read an environment, and change one resource: for the commands `setup`, `compute` and `queue`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.bootstrap import read_script
from batchml.aws.capacity import fetch_offers
from batchml.aws.cloudformation import Stacks
from batchml.aws.ec2 import LaunchApi, newest_neuron_image
from batchml.aws.leftovers import PolicyApi
from batchml.aws.naming import Platform
from batchml.aws.s3 import empty_bucket
from batchml.cli.output import confirm, print_json, print_line, say
from batchml.cli.render import table
from batchml.context import Context
from batchml.errors import INTERRUPTED, ConfigError, NotFound, UsageError
from batchml.jobs.find import ImageSource
from batchml.jobs.gpus import describe_access
from batchml.model.environment import LOCAL, Compute, Environment, Queue
from batchml.resources import shipped_folder
from batchml.runs import job_images
from batchml.setup import desired
from batchml.setup.apply import apply_plan, read_state
from batchml.setup.desired import STACKS, SetupSpec, wanted_stacks
from batchml.setup.fabric import ask_fabric, fabric_mistakes
from batchml.setup.sharing import ResourceKind
from batchml.setup.steps import remove, settle
from batchml.setup.tools import SetupTools


class SetupSubject(Struct, frozen=True):
    """An environment to set up or tear down. `notes`: messages for the user."""

    spec: SetupSpec
    notes: tuple[str, ...] = ()
    image_sources: tuple[ImageSource, ...] = ()


def read_subject(
    context: Context, like: str | None = None, *, has_hosts: bool = True
) -> SetupSubject:
    """The environment of a command. Raises ConfigError, NotFound.

    `has_hosts`: whether the command makes hosts, so that their bootstrap scripts are read.
    """
    environment, notes = choose_description(context, like)
    scripts = _read_scripts(context, environment, notes) if has_hosts else {}
    jobs, more = _jobs(context, environment)
    sources = tuple(job.image_source for job in jobs if job.image_source is not None)

    def definitions(platform: Platform) -> Mapping[str, dict[str, Any]]:
        requests = [job.request(platform) for job in jobs]
        return {request["jobDefinitionName"]: request for request in requests}

    templates = {
        short: (shipped_folder("cfn") / f"{short}.yaml").read_text("utf-8") for short in STACKS
    }
    project = context.project if context.settings.is_local else ""
    spec = SetupSpec(context.env, environment, templates, definitions, project, scripts=scripts)
    access = describe_access(environment) if has_hosts and not context.settings.is_local else ""
    return SetupSubject(spec, (*notes, *filter(None, [access]), *more), sources)


def _read_scripts(context: Context, environment: Environment, notes: list[str]) -> dict[str, str]:
    """The bootstrap scripts by their names. Raises ConfigError with the mistakes of all."""
    users = {name: each.bootstrap for name, each in environment.compute.items() if each.bootstrap}
    config = context.settings.config
    if context.settings.is_local or config is None:
        if users:
            notes.append(f"bootstrap of {', '.join(users)} does nothing on local.")
        return {}
    scripts, mistakes = dict[str, str](), list[str]()
    for name, script in users.items():
        text, wrong = read_script(Path(config).parent, script)
        scripts[script] = text
        mistakes += [f"env.{context.env}.compute.{name}.bootstrap: {each}" for each in wrong]
    if mistakes:
        raise ConfigError(config, mistakes)
    return scripts


def with_offers(context: Context, subject: SetupSubject) -> SetupSubject:
    """Ask AWS which zones offer the instance types, for its AMI for Neuron chips, and whether hosts
    with EFA can have it; the last two only if there are such hosts.

    Raises AccessError, ServiceError, ServiceUnreachable.
    """
    if context.settings.is_local:
        return subject
    spec = subject.spec
    names = {each for one in spec.environment.compute.values() for each in one.instance_types}
    offers = fetch_offers(context.connect(), spec.environment.region, names)
    notes = subject.notes
    if offers.why:
        why = offers.why.rstrip(".")
        notes += (f"Zones were not chosen by the instance types that they offer: {why}.",)
    has_neurons = any(each.has_neurons for each in spec.environment.compute.values())
    image = newest_neuron_image(context.connect()) if has_neurons else ""
    fabric = ask_fabric(context.connect(), spec.environment)
    if fabric.why:
        notes += (f"The network of hosts with EFA was not checked: {fabric.why.rstrip('.')}.",)
    mistakes = tuple(fabric_mistakes(fabric))
    spec = replace(spec, offers=offers, neuron_image=image, mistakes=mistakes)
    return replace(subject, spec=spec, notes=notes)


def choose_description(context: Context, like: str | None) -> tuple[Environment, list[str]]:
    """The description in `batchml.toml`; `local` without one uses that of another environment.

    So one file describes the laptop and AWS.
    """
    known = context.settings.environments
    if like is not None and like not in known:
        raise NotFound("Environment", like, known, "--like names an environment of batchml.toml.")
    own = context.settings.environment
    if like is not None and (not context.settings.is_local or own.compute or own.queues):
        what = "local" if context.settings.is_local else context.env
        raise UsageError(f"--like is only for local without its own description, not for {what}.")
    if not context.settings.is_local or own.compute or own.queues or own.jobs:
        return own, []
    others = sorted(name for name in known if name != LOCAL)
    model = like or (context.settings.default if context.settings.default != LOCAL else None)
    model = model or (others[0] if len(others) == 1 else None)
    if model is None and others:
        flags = " or ".join(f"--like {name}" for name in others)
        raise UsageError(f"Choose the environment that local is like: {flags}.")
    if model is None or model == LOCAL:
        return own, []
    context.settings.check(model)
    there = known[model]
    note = f"local uses the compute environments, queues and jobs of {model}."
    return replace(own, compute=there.compute, queues=there.queues, jobs=there.jobs), [note]


def _jobs(
    context: Context, environment: Environment
) -> tuple[list[job_images.JobWithImage], list[str]]:
    """The jobs whose definitions setup registers, and why others cannot be registered yet."""
    found, missing = job_images.resolve_jobs(context, environment.jobs)
    return found, [f"job definition of {name}: not yet. {error}" for name, error in missing]


def open_tools(context: Context, command: str = "setup", **more: Any) -> SetupTools:
    """The tools of setup steps. `command`: the command to repeat. `more`: other fields."""
    session = context.connect()
    if not context.settings.is_local:
        more["launch"] = LaunchApi(session)
        more["policies"] = PolicyApi(session)
        more["empty_bucket"] = lambda bucket: say(
            f"    {empty_bucket(session, bucket)} objects deleted"
        )
    return SetupTools(
        Stacks(session), ComputeApi(session), context.batch, context.clock,
        command=command, **more,
    )  # fmt: skip


class CommandProgress:
    """The progress of a command. `has_begun`: AWS was asked for a change."""

    has_begun = False


@contextmanager
def explain_interrupt(command: str) -> Iterator[CommandProgress]:
    """On Ctrl-C say that AWS continues, and which command follows it."""
    progress = CommandProgress()
    try:
        yield progress
    except KeyboardInterrupt:
        if progress.has_begun:
            say(f"\nInterrupted. AWS continues the changes; to follow them: {command}")
        else:
            say("\nNothing was changed.")
        raise typer.Exit(INTERRUPTED) from None


# --- one compute environment or queue -------------------------------------------------------


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name in batchml.toml, or a new name.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Enable = Annotated[
    bool | None, typer.Option("--enable/--disable", help="Accept new jobs, or refuse them.")
]

# The meaning of states: docs/behaviours.md, B7.
_STATES = {
    ("job queue", "DISABLED"): "disabled: it accepts no new runs; its runs continue",
    ("job queue", "ENABLED"): "enabled: it accepts runs",
    ("compute environment", "DISABLED"): "disabled: no new run starts there; its runs continue",
    ("compute environment", "ENABLED"): "enabled: runs start there",
}


def compute_api(context: Context) -> Any:
    return ComputeApi(context.connect())


def described_environment(context: Context) -> Environment:
    """The description of the environment; for `local` perhaps that of another environment."""
    try:
        return choose_description(context, None)[0]
    except UsageError:  # several environments could describe it
        return context.settings.environment


def drop_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def override(described: Compute | Queue | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The table of batchml.toml, if the file has it, with the options of the command line."""
    return {**(msgspec.to_builtins(described) if described else {}), **options}


def find_resource(
    context: Context, name: str, kind: str, known: Mapping[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Find a resource by its name in batchml.toml or in AWS. Raises NotFound."""
    for each in (context.qualified(name), name):
        if each in known:
            return each, known[each]
    names = [context.bare(each) for each in known]
    raise NotFound(kind, name, names, f"To list them: batchml {_command(kind)} list")


def _command(kind: str) -> str:
    return "queue" if "queue" in kind else "compute"


def refuse_existing(
    context: Context, command: str, name: str, known: Mapping[str, dict[str, Any]]
) -> None:
    names = {context.qualified(name), *([name] if context.settings.is_local else [])}
    if names & known.keys():
        raise UsageError(
            f"{name} exists already. To change it: batchml {command} update {name}, or change "
            "batchml.toml and run batchml setup."
        )


def print_table(rows: list[list[str]], empty: str) -> None:
    if len(rows) == 1:
        return say(empty)
    print_line(table(rows))


def create_resources(
    context: Context,
    computes: dict[str, Compute],
    queues: dict[str, Queue],
    json_: bool,
    shared: Iterable[str] = (),
) -> None:
    """Create compute environments and queues by a plan for them alone.

    `shared`: compute environments that the queues use by their names in AWS.
    """
    subject = read_subject(context)
    narrowed = replace(subject.spec.environment, compute=computes, queues=queues)
    subject = replace(
        subject, spec=replace(subject.spec, environment=narrowed, shared=frozenset(shared))
    )
    spec = (with_offers(context, subject) if computes else subject).spec
    tools = open_tools(context)
    current = read_state(spec, tools)
    _refuse_without_stacks(context, spec, current, computes)
    mistakes = desired.wanted_by_command(spec, current).mistakes
    if mistakes:
        raise UsageError("Nothing was changed.\n" + "\n".join(f"  - {each}" for each in mistakes))
    made = []
    with explain_interrupt(f"batchml compute list --env {context.env}") as command:
        command.has_begun = True
        for progress in apply_plan(
            lambda now: desired.wanted_by_command(spec, now), current, tools, set()
        ):
            step = progress.step
            if not progress.text:
                made.append({"kind": step.kind.value, "name": step.name})
                say(f"{step.kind.value} {context.resource_label(step.name)}: done")
    if json_:
        print_json(made)


def _refuse_without_stacks(
    context: Context, spec: Any, current: Any, computes: dict[str, Compute]
) -> None:
    """Raise UsageError if the stacks are missing that compute environments need."""
    if context.settings.is_local or not computes:
        return
    missing = [
        short
        for short in wanted_stacks(spec)
        if short not in ("storage", "observability") and spec.stack(short) not in current.stacks
    ]
    if missing:
        raise UsageError(
            f"Environment {context.env} has no {' and no '.join(missing)} yet, which compute "
            f"environments need. First: batchml setup --env {context.env}"
        )


def describe_change(kind: str, request: Mapping[str, Any]) -> str:
    """The result of an update in words."""
    return _STATES.get((kind, request.get("state", "")), "changed")


def report_update(context: Context, kind: str, request: Mapping[str, Any], json_: bool) -> None:
    """Wait until AWS has applied an update request, and report the result."""
    tools = open_tools(context)
    with explain_interrupt(f"batchml {_command(kind)} list --env {context.env}") as command:
        command.has_begun = True
        detail = settle(request, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json(detail)
    else:
        name = context.resource_label(request.get("jobQueue") or request["computeEnvironment"])
        print_line(f"{kind} {name} is {describe_change(kind, request)}.")


def delete_resource(context: Context, kind: str, name: str, yes: bool, json_: bool) -> None:
    label = context.resource_label(name)
    if not confirm(f"Delete {kind} {label}? [y/N]", "--yes", yes=yes):
        say("Nothing was changed.")
        raise typer.Exit(1)
    tools = open_tools(context)
    with explain_interrupt(f"batchml {_command(kind)} list --env {context.env}") as command:
        command.has_begun = True
        remove(ResourceKind(kind), name, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json([{"kind": kind, "name": name}])
    else:
        print_line(f"{kind} {label} is deleted.")


def compute_order(queue: Mapping[str, Any]) -> list[str]:
    order = sorted(queue["computeEnvironmentOrder"], key=lambda entry: entry["order"])
    return [entry["computeEnvironment"] for entry in order]
