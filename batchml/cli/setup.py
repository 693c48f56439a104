"""setup, teardown."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchml.cli.environments import Course, Subject
    from batchml.client.place import Place
    from batchml.ops.setup.tools import Tools
    from batchml.ops.setup.values import Facts, Step, Wanted

WOULD_CHANGE = 2  # what `--plan` exits with when something would change

Plan = Annotated[bool, typer.Option("--plan", help="Show the plan and stop: 0 nothing, 2 changes.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ContinueRollback = Annotated[
    bool, typer.Option("--continue-rollback", help="Where undoing an update is stuck.")
]
SkipResource = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="With --continue-rollback: leave this one as it is."),
]


@app.command(epilog="Example: batchml setup --env dev --plan")
def setup(
    plan: Plan = False,
    yes: Yes = False,
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="May lose what is in it. May be repeated."),
    ] = None,
    continue_rollback: ContinueRollback = False,
    skip_resource: SkipResource = None,
    like: Annotated[
        str | None, typer.Option(metavar="NAME", help="Set up local like this environment.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Make or update an environment, as batchml.toml describes it.

    Shows what it would do, asks, and does it; a second time there is nothing to do. What was
    interrupted goes on from where it was.
    """
    from batchml.cli import environments
    from batchml.cli.wiring import open_place
    from batchml.ops.setup import desired

    place = open_place(env)
    subject = environments.subject(place, like)
    tools = environments.tools(
        place, "setup", continue_rollback=_skipped(continue_rollback, skip_resource)
    )
    with environments.going_on(f"batchml setup --env {place.env}") as course:
        _run(
            place, subject, tools, course, lambda facts: desired.wanted(subject.scheme, facts),
            Wishes("setup", plan, yes, json_, tuple(allow_loss or ())),
        )  # fmt: skip


@app.command(epilog="Example: batchml teardown --env dev --plan")
def teardown(
    plan: Plan = False,
    yes: Yes = False,
    continue_rollback: ContinueRollback = False,
    skip_resource: SkipResource = None,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also the bucket, file system and logs, for good.")
    ] = False,
    delete_file_system: Annotated[
        bool,
        typer.Option("--delete-file-system", help="Also the file system, once it is archived."),
    ] = False,
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A file system that may go without an archive."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Delete an environment, in the order that AWS needs. What holds data stays."""
    from batchml.cli import environments
    from batchml.cli.wiring import open_place
    from batchml.ops.setup import desired

    place = open_place(env)
    subject = environments.subject(place)
    look: Callable[[], object] = lambda: None  # noqa: E731
    if delete_file_system and not delete_data:
        from functools import partial

        from msgspec.structs import replace

        from batchml.client.archived import check_archived

        look = partial(check_archived, place, allow_loss or ())
        subject = replace(subject, notes=(*subject.notes, str(look())))
    tools = environments.tools(
        place, "teardown", continue_rollback=_skipped(continue_rollback, skip_resource)
    )
    with environments.going_on(f"batchml teardown --env {place.env}") as course:
        _run(
            place, subject, tools, course,
            lambda facts: desired.leftovers(
                subject.scheme, facts, delete_data=delete_data, delete_files=delete_file_system
            ),
            Wishes(
                "teardown", plan, yes, json_, (),
                deletes_data=delete_data or delete_file_system, last_look=look,
            ),
        )  # fmt: skip


def _skipped(continue_rollback: bool, skip_resource: list[str] | None) -> tuple[str, ...] | None:
    return tuple(skip_resource or ()) if continue_rollback or skip_resource else None


class Wishes:
    """What the user said about a plan."""

    def __init__(
        self, command: str, plan: bool, yes: bool, json_: bool, allow_loss: "Sequence[str]",
        deletes_data: bool = False, last_look: "Callable[[], object]" = lambda: None,
    ) -> None:  # fmt: skip
        self.command, self.plan, self.yes, self.json = command, plan, yes, json_
        self.allow_loss, self.deletes_data = allow_loss, deletes_data
        self.last_look = last_look  # once the user has agreed, which may have taken hours


def _run(
    place: "Place", subject: "Subject", tools: "Tools", course: "Course",
    planner: "Callable[[Facts], Wanted]", wishes: Wishes,
) -> None:  # fmt: skip
    from msgspec.structs import replace

    from batchml.ops.setup.apply import forget, look_closely
    from batchml.ops.setup.plan import make_plan

    facts = look_closely(subject.scheme, tools, planner)
    steps = make_plan(planner(facts), facts)
    document = _document(place, subject, steps, wishes)
    if not wishes.json:
        for line in _shown(place, subject, steps, document):
            print_line(line)
    changing = [step for step in steps if step.changes]
    agreed: set[Step] = set()
    try:
        _refuse(planner(facts), steps, facts)
        if changing and not wishes.plan:
            agreed = _agreed(changing, wishes, place.env)
    finally:
        if not agreed:
            forget(facts, tools)
    if not agreed:
        if wishes.json:
            print_json({**document, "applied": False})
        raise typer.Exit(WOULD_CHANGE if changing else 0)
    wishes.last_look()
    losing = frozenset(step.name for step in agreed if step.loses)
    course.has_begun = True
    _apply(place, subject, replace(tools, replacing=losing), planner, facts, agreed)
    if wishes.json:
        print_json({**document, "applied": True})
    else:
        print_line(_next(place, wishes))


def _refuse(wanted: "Wanted", steps: "Sequence[Step]", facts: "Facts") -> None:
    """Raise UsageError for a plan that could not be carried out to its end."""
    from batchml.errors import UsageError
    from batchml.ops.setup.plan import refusals

    found = refusals(wanted, steps, facts)
    if found:
        raise UsageError("Nothing was changed.\n" + "\n".join(f"  - {each}" for each in found))


def _agreed(steps: "Sequence[Step]", wishes: Wishes, env: str) -> "set[Step]":
    """The steps that the user agrees to. Raises UsageError with the flag to add, typer.Exit."""
    from batchml.cli.environments import ask

    losing = [step for step in steps if step.loses]
    for name in set(wishes.allow_loss) - {step.name for step in losing}:
        say(f"--allow-loss {name}: nothing of that name would lose anything.")
    if wishes.command == "setup":
        for step in losing:
            if step.name not in wishes.allow_loss and not ask(
                f"{step.kind} {step.name} would lose {step.loses}. To agree, type its name:",
                f"--allow-loss {step.name}", yes=False, expected=(step.name,),
            ):  # fmt: skip
                say("Nothing was changed.")
                raise typer.Exit(1)
    if wishes.deletes_data and not wishes.yes:
        lost = ", ".join(step.loses for step in losing) or "its data"
        question = f"This deletes {lost} for good. Type the environment's name, {env}, to do it:"
        agreed = ask(question, "--yes", yes=False, expected=(env,))
    else:
        agreed = ask("Do this? [y/N]", "--yes", yes=wishes.yes)
    if not agreed:
        say("Nothing was changed.")
        raise typer.Exit(1)
    return set(steps)


def _apply(
    place: "Place", subject: "Subject", tools: "Tools",
    planner: "Callable[[Facts], Wanted]", facts: "Facts", agreed: "set[Step]",
) -> None:  # fmt: skip
    from batchml.cli.render import duration
    from batchml.client import known, submission
    from batchml.ops.setup.apply import BEGUN, carry_out

    known.forget(place)  # whatever of it is done, submissions look again
    for source in subject.image_sources:
        submission.publish(place, source)
    began = place.clock.monotonic()
    for progress in carry_out(planner, facts, tools, agreed):
        step = progress.step
        if progress.text == BEGUN:
            began = place.clock.monotonic()
            say(f"{step.action.value} {step.kind.value} {step.name}")
        elif progress.text:
            say(f"    {progress.text}")
        else:
            say(f"    done in {duration(place.clock.monotonic() - began)}")


def _document(
    place: "Place", subject: "Subject", steps: "Sequence[Step]", wishes: Wishes
) -> dict[str, Any]:
    from batchml.cli.costs import lines, to_json
    from batchml.ops.estimate import quote

    document: dict[str, Any] = {
        "env": place.env,
        "region": place.settings.environment.region or None,
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
    if wishes.command == "setup" and not place.settings.is_local:
        found = quote(subject.scheme.environment, place.prices)
        document["cost"] = to_json(found)
        document["notes"] += [*lines(found), *_quota_notes(place, subject)]
        if subject.scheme.environment.budget is not None:
            document["notes"].append(
                "The budget counts once batchml:env is activated as a cost allocation tag (Billing "
                "console), a day after the first cost."
            )
    return document


def _quota_notes(place: "Place", subject: "Subject") -> list[str]:
    """Quotas that are too small: 0 vCPUs of GPU instances is what a new account has."""
    from batchml.aws.iam import needed_quotas, read_quotas
    from batchml.errors import BatchmlError
    from batchml.ops.doctor.checks import quota_findings

    needs = needed_quotas(subject.scheme.environment)
    try:
        quotas = read_quotas(place.connect()) if needs else {}
    except BatchmlError as error:
        return [f"Quotas were not looked at: {str(error).splitlines()[0]}"]
    found = [each for each in quota_findings(needs, quotas) if each.mark != "ok"]
    return [line for each in found for line in (f"{each.mark}: {each.text}", *each.fix)]


def _shown(
    place: "Place", subject: "Subject", steps: "Sequence[Step]", document: dict[str, Any]
) -> list[str]:
    """The plan as people read it."""
    from collections import Counter

    from batchml.ops.setup.values import Action

    region = f" in {document['region']}" if document["region"] else " on this machine"
    changing = [step for step in steps if step.changes]
    width = max((len(f"{step.kind} {step.name}") for step in changing), default=0)
    shown = [f"Environment {place.env}{region}:"]
    for step in changing:
        what = f"{step.kind} {step.name}".ljust(width)
        first, *others = step.reasons or ("",)
        shown.append(f"  {step.action.value:<8} {what}  {first}".rstrip())
        shown += [f"  {'':<8} {'':<{width}}  {other}" for other in others]
        if step.loses:
            shown.append(f"  {'':<8} {'':<{width}}  LOSES {step.loses}")
    kept = [step for step in steps if step.action is Action.KEEP]
    shown += [
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
        parts.append(f"{counts[Action.KEEP]} as described")
    shown.append(f"Plan: {', '.join(parts)}." if changing else "Nothing to do.")
    return [*shown, *document["notes"]]


def _next(place: "Place", wishes: Wishes) -> str:
    if wishes.command == "teardown":
        return f"Environment {place.env} is torn down."
    flag = "" if place.env == place.settings.default else f" --env {place.env}"
    has_hello = (place.here / "jobs" / "hello" / "job.toml").is_file()
    job = "hello" if has_hello else "lenet"
    what = f"submit{flag} --wait {job}" if place.settings.is_local else f"queue list{flag}"
    return f"Environment {place.env} is ready. Try: batchml {what}"
