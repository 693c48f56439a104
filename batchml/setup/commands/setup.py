"""batchml setup and teardown: make, update or delete an environment."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from msgspec.structs import replace

from batchml.aws.capacity import (
    Quota,
    needed_quotas,
    new_account_quotas,
    read_quotas,
    startable_queues,
)
from batchml.aws.pricing.prices import describe_failure
from batchml.cli.app import app
from batchml.cli.options import Env, Json, Offline, choose_offline, open_context
from batchml.cli.output import confirm, print_json, print_line, say
from batchml.cli.render import duration
from batchml.context import Context, drop_cache
from batchml.cost.estimate import estimate_environment
from batchml.cost.render import estimate_json, estimate_lines
from batchml.errors import BatchmlError, UsageError
from batchml.jobs.commands import NO_PUSH, show_build_progress
from batchml.jobs.placement import too_small_computes
from batchml.model.environment import Environment
from batchml.model.fabric import describe_fabric
from batchml.runs import job_images
from batchml.setup import desired, pushing
from batchml.setup.apply import BEGUN, apply_plan, discard_change_sets, read_state_for_plan
from batchml.setup.commands.shared import (
    CommandProgress,
    SetupSubject,
    Yes,
    choose_description,
    explain_interrupt,
    open_tools,
    read_subject,
    with_offers,
)
from batchml.setup.desired import SetupSpec, deployed_content
from batchml.setup.doctor import aws_cli_flags, quota_findings
from batchml.setup.leftovers import (
    Leftover,
    fetch_leftovers,
    leftover_lines,
    leftovers,
    leftovers_json,
)
from batchml.setup.plan import make_plan, refusals
from batchml.setup.sharing import Action, CurrentState, PlanStep, ResourceKind, WantedState
from batchml.setup.tools import SetupTools
from batchml.workspace.deletion_guard import check_archived

WOULD_CHANGE = 2  # the exit code of `--plan` if it shows changes

Plan = Annotated[
    bool, typer.Option("--plan", help="Show the plan and stop; exit with 2 if it has changes.")
]
ContinueRollback = Annotated[
    bool, typer.Option("--continue-rollback", help="Continue a stuck rollback of an update.")
]
SkipResource = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="With --continue-rollback: skip this resource."),
]


@app.command(epilog="Example: batchml setup --env dev --plan")
def setup(
    plan: Plan = False,
    yes: Yes = False,
    push: Annotated[
        bool, typer.Option("--push", help="Also build and push the images of this folder's jobs.")
    ] = False,
    offline: Offline = False,
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Allow the loss of this resource's data. May be repeated."
        ),
    ] = None,
    rebuild_image: Annotated[
        bool,
        typer.Option("--rebuild-image", help="Rebuild the AMI, to get AWS's patches."),
    ] = False,
    continue_rollback: ContinueRollback = False,
    skip_resource: SkipResource = None,
    like: Annotated[
        str | None, typer.Option(metavar="NAME", help="Set up local like this environment.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Make or update an environment, as batchml.toml describes it.

    Shows the plan, asks, and carries it out. A second setup changes nothing. After an interruption
    it continues from there. Without AWS credentials, --plan shows the plan of a new environment.
    """
    context = open_context(env)
    choose_description(context, like)  # a wrong flag comes before missing credentials
    context = choose_offline(context, offline, plan, "--plan")
    subject = read_subject(context, like)
    options = PlanOptions("setup", plan, yes, json_, tuple(allow_loss or ()))
    skipped = _resources_to_skip(continue_rollback, skip_resource)
    if context.is_offline:
        needs_aws = {
            "--push": push, "--allow-loss": allow_loss, "--rebuild-image": rebuild_image,
            "--continue-rollback": skipped is not None,
        }  # fmt: skip
        flags = [flag for flag, given in needs_aws.items() if given]
        _show_offline_plan(context, subject, options, flags, was_chosen=offline)
    subject = with_offers(context, subject)
    if push and context.settings.is_local:
        say(NO_PUSH)
    elif push:
        missing = _images_to_push(context, plan)
        names = ", ".join(each.recipe.reference for each in missing)
        note = f"Images to push: {names}." if missing else "ECR has the images of the jobs."
        subject = replace(subject, notes=(*subject.notes, note))
        options = options._replace(push=partial(_push, context, missing) if missing else None)
    tools = open_tools(context, "setup", continue_rollback=skipped)
    if rebuild_image:
        subject = replace(subject, spec=_with_rebuild(subject.spec, tools))
    with explain_interrupt(f"batchml setup --env {context.env}") as command:
        _plan_and_apply(context, subject, tools, command, desired.wanted_state, options)


def _with_rebuild(spec: SetupSpec, tools: SetupTools) -> SetupSpec:
    """The spec with which setup rebuilds the AMI. Raises UsageError if it has none."""
    if spec.is_local:
        raise UsageError("--rebuild-image: local has no AMIs; its host is this machine.")
    if not spec.environment.builds_image:
        raise UsageError(
            f'--rebuild-image: no compute environment of {spec.name} has ami = "build". To use '
            "AWS's newest AMI: batchml compute update NAME --refresh"
        )
    deployed = deployed_content(tools.stacks.read(spec.stack("ami")))
    if not deployed:
        raise UsageError("--rebuild-image: the AMI is not built yet. Run batchml setup without it.")
    return replace(spec, rebuild_of=deployed)


@app.command(epilog="Example: batchml teardown --env dev --plan")
def teardown(
    plan: Plan = False,
    yes: Yes = False,
    continue_rollback: ContinueRollback = False,
    skip_resource: SkipResource = None,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Delete bucket, file system and logs for good.")
    ] = False,
    delete_file_system: Annotated[
        bool,
        typer.Option("--delete-file-system", help="Delete the file system if it is archived."),
    ] = False,
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Allow the loss of a queue's runs, or of a file system that is not archived.",
        ),
    ] = None,
    detach_policy: Annotated[
        bool,
        typer.Option(
            "--detach-policy", help="Detach the submitter policy from users, groups and roles."
        ),
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Delete an environment, in the order that AWS needs. Resources with data stay."""
    context = open_context(env)
    subject = read_subject(context, has_hosts=False)
    check: Callable[[], object] = lambda: None  # noqa: E731
    if delete_file_system and not delete_data:
        check = partial(check_archived, context, allow_loss or ())
        subject = replace(subject, notes=(*subject.notes, str(check())))
    tools = open_tools(
        context, "teardown", continue_rollback=_resources_to_skip(continue_rollback, skip_resource)
    )
    with explain_interrupt(f"batchml teardown --env {context.env}") as command:
        _plan_and_apply(
            context, subject, tools, command,
            partial(
                desired.state_after_teardown,
                delete_data=delete_data, delete_files=delete_file_system, detach=detach_policy,
            ),
            PlanOptions(
                "teardown", plan, yes, json_, tuple(allow_loss or ()),
                deletes_data=delete_data or delete_file_system, last_check=check,
            ),
        )  # fmt: skip


def _resources_to_skip(
    continue_rollback: bool, skip_resource: list[str] | None
) -> tuple[str, ...] | None:
    return tuple(skip_resource or ()) if continue_rollback or skip_resource else None


class PlanOptions(NamedTuple):
    """The user's options for a plan."""

    command: str
    plan: bool
    yes: bool
    json: bool
    allow_loss: Sequence[str] = ()
    deletes_data: bool = False
    last_check: Callable[[], object] = lambda: None  # the confirmation may take hours: check again
    push: Callable[[SetupSubject], SetupSubject] | None = None  # push images; read the jobs again


def _plan_and_apply(
    context: Context, subject: SetupSubject, tools: SetupTools, command: CommandProgress,
    plan_for: Callable[[SetupSpec, CurrentState], WantedState], options: PlanOptions,
) -> None:  # fmt: skip
    planner = partial(plan_for, subject.spec)
    current = read_state_for_plan(subject.spec, tools, planner)
    steps = make_plan(planner(current), current)
    document = _plan_json(context, subject, steps, options)
    if not options.json:
        for line in _plan_lines(context, subject, steps, document):
            print_line(line)
    changing = [step for step in steps if step.changes]
    agreed: set[PlanStep] = set()
    try:
        _refuse(planner(current), steps, current)
        if changing and not options.plan:
            agreed = _confirm_steps(context, changing, options)
    finally:
        if not agreed:
            discard_change_sets(current, tools)
    if options.push and not options.plan:
        subject = options.push(subject)
        planner = partial(plan_for, subject.spec)
    if not agreed:
        if options.json:
            print_json({**document, "applied": False})
        raise typer.Exit(WOULD_CHANGE if changing else 0)
    options.last_check()
    losing = frozenset(step.name for step in agreed if step.loses)
    command.has_begun = True
    _apply(context, subject, replace(tools, replacing=losing), planner, current, agreed)
    left = _leftovers(context, tools, current, steps) if options.command == "teardown" else []
    if options.json:
        print_json({**document, "applied": True, "left": leftovers_json(left)})
    else:
        print_line(_describe_end(context, options))
        for line in leftover_lines(left):
            print_line(line)


def _leftovers(
    context: Context, tools: SetupTools, before: CurrentState, steps: Sequence[PlanStep]
) -> list[Leftover]:
    """What the teardown has left in the account."""
    if context.settings.is_local:
        return []
    deleted = {step.name for step in steps if step.action is Action.DELETE}
    facts = fetch_leftovers(
        context.connect(), tools.compute, context.env, before.stacks,
        [name for name in before.stacks if name not in deleted],
        any(step.how == "without-files" for step in steps),
        aws_cli_flags(context.settings.environment),
    )  # fmt: skip
    return list(leftovers(facts))


def _refuse(wanted: WantedState, steps: Sequence[PlanStep], current: CurrentState) -> None:
    """Raise UsageError for a plan that could not be carried out to its end."""
    found = refusals(wanted, steps, current)
    if found:
        raise UsageError("Nothing was changed.\n" + "\n".join(f"  - {each}" for each in found))


def _confirm_steps(
    context: Context, steps: Sequence[PlanStep], options: PlanOptions
) -> set[PlanStep]:
    """Ask the user to confirm the steps. Raises UsageError with the flag to add, typer.Exit."""
    losing, env = [step for step in steps if step.loses], context.env
    names = {context.resource_label(step.name): step for step in losing}
    allowed = set(map(context.resource_label, options.allow_loss))
    if options.command == "setup":
        for name in allowed - names.keys():
            say(f"--allow-loss {name}: no resource of that name would lose data.")
    for name, step in names.items():
        # A teardown deletes data only with flags that say so, but any teardown deletes queues.
        is_asked = options.command == "setup" or step.kind is ResourceKind.QUEUE
        if is_asked and name not in allowed and not confirm(
            f"{step.kind} {name} would lose {step.loses}. To agree, type its name:",
            f"--allow-loss {name}", yes=False, expected=(name,),
        ):  # fmt: skip
            say("Nothing was changed.")
            raise typer.Exit(1)
    if options.deletes_data and not options.yes:
        lost = ", ".join(step.loses for step in losing) or "its data"
        question = f"This deletes {lost} for good. Type the environment's name, {env}, to confirm:"
        agreed = confirm(question, "--yes", yes=False, expected=(env,))
    else:
        agreed = confirm("Carry out this plan? [y/N]", "--yes", yes=options.yes)
    if not agreed:
        say("Nothing was changed.")
        raise typer.Exit(1)
    return set(steps)


def _apply(
    context: Context, subject: SetupSubject, tools: SetupTools,
    planner: Callable[[CurrentState], WantedState], current: CurrentState, agreed: set[PlanStep],
) -> None:  # fmt: skip
    drop_cache(context)  # submissions must read the new state, even after a failure
    for source in subject.image_sources:
        job_images.publish_image(context, source)
    began = context.clock.monotonic()
    for progress in apply_plan(planner, current, tools, agreed):
        step = progress.step
        if progress.text == BEGUN:
            began = context.clock.monotonic()
            say(f"{step.action.value} {step.kind.value} {context.resource_label(step.name)}")
        elif progress.text:
            say(f"    {progress.text}")
        else:
            say(f"    done in {duration(context.clock.monotonic() - began)}")


def _plan_json(
    context: Context, subject: SetupSubject, steps: Sequence[PlanStep], options: PlanOptions
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "env": context.env,
        "region": context.settings.environment.region or None,
        "offline": context.is_offline,
        "steps": [
            {
                "action": step.action.value,
                "kind": step.kind.value,
                "name": step.name,
                "reasons": list(step.reasons),
                "loses": step.loses or None,
            }
            for step in steps
        ],
        "notes": list(subject.notes),
    }
    if options.command == "setup" and not context.settings.is_local:
        found = estimate_environment(subject.spec.environment, context.prices)
        document["cost"] = estimate_json(found)
        environment = subject.spec.environment
        lines = [
            *(line.text for line in describe_fabric(environment)),
            *too_small_computes(environment),
        ]
        document["notes"] += [f"{line[0].upper()}{line[1:]}." for line in lines]
        document["notes"] += [*estimate_lines(found), *_quota_notes(context, subject)]
        if subject.spec.environment.budget is not None:
            document["notes"].append(
                "The budget works once batchml:env is activated as a cost allocation tag (Billing "
                "console), a day after the first cost."
            )
    return document


def _quota_notes(context: Context, subject: SetupSubject) -> list[str]:
    """Notes on quotas that are too small: a new account may start 0 vCPUs of GPU instances."""
    environment = subject.spec.environment
    needs = needed_quotas(environment)
    if context.is_offline:
        return list(_queue_notes(environment, new_account_quotas(needs), "In a new account "))
    try:
        quotas = read_quotas(context.connect()) if needs else {}
    except BatchmlError as error:
        reason = describe_failure("servicequotas:ListServiceQuotas", error)
        return [f"Quotas were not checked: {reason}."]
    flags = aws_cli_flags(environment)
    found = [each for each in quota_findings(needs, quotas, flags=flags) if each.mark != "ok"]
    lines = [line for each in found for line in (f"{each.mark}: {each.text}", *each.fix)]
    return [*lines, *_queue_notes(environment, quotas)]


def _queue_notes(
    environment: Environment, quotas: Mapping[str, Quota], where: str = ""
) -> Iterator[str]:
    """A note on the queues that can start hosts, if quotas prevent others from it."""
    ready, others = startable_queues(environment, quotas)
    if not others:
        return
    wait = f"{_list_queues(others)} cannot, until a quota is raised"
    if ready:
        text = f"{where}{_list_queues(ready)} can start hosts; {wait}"
    else:
        text = f"{where}{_list_queues(others)} cannot start hosts until a quota is raised"
    yield f"{text[0].upper()}{text[1:]}. To raise it: batchml doctor"


def _list_queues(names: Sequence[str]) -> str:
    return f"the queue{'s'[: len(names) != 1]} {', '.join(names)}"


# --- without AWS ----------------------------------------------------------------------------


def _show_offline_plan(
    context: Context, subject: SetupSubject, options: PlanOptions, flags: Sequence[str],
    *, was_chosen: bool,
) -> NoReturn:  # fmt: skip
    """Show the plan of an environment that does not exist, and exit.

    `flags`: given options that need AWS. `was_chosen`: by --offline; else no credentials were
    found. Raises UsageError if the user asked for both.
    """
    if flags and was_chosen:
        raise UsageError(f"--offline: {', '.join(flags)} need{'s'[len(flags) != 1 :]} AWS.")
    alone = "this plan is made from batchml.toml and the templates, as if nothing existed in AWS."
    notes = [f"{context.why_offline}: {alone}"]
    notes += [f"{flag} has no effect on it." for flag in flags]
    owner = subject.spec.environment.storage.shared_with
    if owner:
        notes.append(f"It uses the workspace of {owner}. Run first: batchml setup --env {owner}")
    if not was_chosen:
        notes.append(f"To see which credentials are missing: batchml doctor --env {context.env}")
    subject = replace(subject, notes=(*notes, *subject.notes))
    current = CurrentState()
    steps = make_plan(desired.wanted_state(subject.spec, current), current)
    document = _plan_json(context, subject, steps, options)
    if options.json:
        print_json({**document, "applied": False})
    else:
        for line in _plan_lines(context, subject, steps, document):
            print_line(line)
    raise typer.Exit(WOULD_CHANGE)


# --- images ---------------------------------------------------------------------------------


def _images_to_push(context: Context, plan: bool) -> list[pushing.NeededImage]:
    """The images of the folder's jobs that ECR lacks. Raises ImageError if none can be built."""
    needed = pushing.needed_images(context, pushing.own_jobs(context))
    missing = pushing.missing_images(context, needed)
    if not plan:
        pushing.check_engine(missing)
    return missing


def _push(
    context: Context, missing: Sequence[pushing.NeededImage], subject: SetupSubject
) -> SetupSubject:
    """Push images, and read the jobs again: definitions name images by their digests."""
    try:
        with show_build_progress() as notify:
            for reference in pushing.push_images(context, missing, notify):
                say(f"pushed {reference}")
    except BatchmlError:
        say("Nothing else was made, because setup pushes images first.")
        raise
    again = read_subject(context)
    spec = replace(subject.spec, definitions=again.spec.definitions)
    return replace(subject, spec=spec, image_sources=again.image_sources)


def _plan_lines(
    context: Context, subject: SetupSubject, steps: Sequence[PlanStep], document: dict[str, Any]
) -> list[str]:
    """The plan as text."""
    steps = [_with_labels(context, step) for step in steps]
    region = f" in {document['region']}" if document["region"] else " on this machine"
    changing = [step for step in steps if step.changes]
    width = max((len(f"{step.kind} {step.name}") for step in changing), default=0)
    lines = [f"Environment {context.env}{region}:"]
    for step in changing:
        what = f"{step.kind} {step.name}".ljust(width)
        first, *others = step.reasons or ("",)
        lines.append(f"  {step.action.value:<8} {what}  {first}".rstrip())
        lines += [f"  {'':<8} {'':<{width}}  {other}" for other in others]
        if step.loses:
            lines.append(f"  {'':<8} {'':<{width}}  LOSES {step.loses}")
    kept = [step for step in steps if step.action is Action.KEEP]
    lines += [
        f"  {'keep':<8} {f'{step.kind} {step.name}'.ljust(width)}  {step.reasons[0]}"
        for step in kept if step.reasons
    ]  # fmt: skip
    counts = Counter(step.action for step in steps)
    words = {
        Action.CREATE: "to create", Action.UPDATE: "to update", Action.REPLACE: "to replace",
        Action.DELETE: "to delete",
    }  # fmt: skip
    parts = [f"{counts[action]} {text}" for action, text in words.items() if counts[action]]
    if counts[Action.KEEP]:
        parts.append(f"{counts[Action.KEEP]} unchanged")
    lines.append(f"Plan: {', '.join(parts)}." if changing else "Nothing to do.")
    return [*lines, *document["notes"]]


def _with_labels(context: Context, step: PlanStep) -> PlanStep:
    """The step for people: on `local` the names of resources are without the project."""
    if not context.settings.is_local:
        return step
    own = context.qualified("")
    reasons = tuple(reason.replace(own, "") for reason in step.reasons)
    return replace(step, name=context.bare(step.name), reasons=reasons)


def _describe_end(context: Context, options: PlanOptions) -> str:
    """The result in words, and the next commands."""
    if options.command == "teardown":
        return f"Environment {context.env} is torn down."
    ready = f"Environment {context.env} is ready."
    if not context.settings.is_local:
        return "\n  ".join((f"{ready} Next:", *pushing.next_steps(context)))
    flag = "" if context.env == context.settings.default else f" --env {context.env}"
    has_hello = (context.folder / "jobs" / "hello" / "job.toml").is_file()
    return f"{ready} Try: batchml submit{flag} --wait {'hello' if has_hello else 'lenet'}"
