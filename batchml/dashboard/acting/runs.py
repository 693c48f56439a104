"""Cancel a run, or submit it again: the buttons of its page, and what they do."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchml.client import Client
from batchml.dashboard.act import (
    ActionField,
    PageAction,
    action_buttons,
    done,
    paragraphs,
    preview_body,
    read_flag,
    read_text,
    shell,
)
from batchml.dashboard.acting.submit import (
    command_field,
    image_field,
    option_fields,
    param_fields,
    preview_html,
    read_command_and_image,
    read_options,
)
from batchml.dashboard.acting.tools import tool_actions
from batchml.dashboard.app import PageQuery
from batchml.dashboard.html import Html
from batchml.handles import RunHandle
from batchml.model.names import short_id
from batchml.runs.options import SubmitOptions
from batchml.runs.rerun.rules import changeable_command
from batchml.runs.search import FoundRun

# What a rerun changes, in the words of its button.
_WORDS = {
    "memory": "{} of memory", "vcpus": "{} vCPUs", "gpus": "{} GPUs", "timeout": "{} of time",
    "attempts": "{} attempts", "max_cost": "a budget of ${}", "queue": "the queue {}",
    "image": "the image {}", "failed": "the failed children only", "resume": "its checkpoint",
    "code": "the code as it is now",
}  # fmt: skip
_CORRECT = "Correct it here, then submit."
_CHANGED = ("memory", "vcpus", "gpus", "timeout", "queue", "attempts", "max_cost", "name")


def actions_panel(found: FoundRun, env_option: str, project: str = "", *, read_only: bool) -> Html:
    """The buttons for the present state of a run. `project`: the one of the dashboard."""
    run = found.run
    again = [rerun_action(found, env_option)] if can_run_again(found) else []
    actions = [in_own_project(each, found, project) for each in again]
    actions += tool_actions(found, env_option)
    # The last one: when it disappears, no other button moves.
    if run is not None and not run.status.is_terminal and run.node_index is None:
        actions.append(cancel_action(found, env_option))
    return action_buttons(actions, read_only=read_only)


def can_run_again(found: FoundRun) -> bool:
    """Whether `batchml rerun` is for this run: not for a node, a worker or a trial."""
    is_known = found.run is not None or found.record is not None
    is_node = found.run is not None and found.run.node_index is not None
    return is_known and not (is_node or found.is_worker or found.sweep)


def cancel_action(found: FoundRun, env_option: str) -> PageAction:
    who = _who(found)
    children = found.run.array_size if found.run else None
    notes = [f"All {children} children end with it."] if children else []
    return PageAction(
        label="Cancel", question=f"Cancel {who}?", path="/act/cancel", body={"run": found.job_id},
        command=shell("batchml", "cancel", short_id(found.shown_id)) + env_option,
        confirm="Cancel the run", back="Leave it", is_destructive=True, notes=tuple(notes),
        cost=f"/run/{found.job_id}/cost",
    )  # fmt: skip


def rerun_action(
    found: FoundRun, env_option: str, preset: Mapping[str, str] | None = None,
    hints: Mapping[str, str] = {}, command: Sequence[str] | None = None,
    suspect: str | None = None,
) -> PageAction:  # fmt: skip
    """The form of a rerun. `preset`: values for options and checkboxes, other than the run's;
    `hints`: of parameters; `command`: another one than the run's. `suspect`: the part of the
    command that seems to be wrong, "" if that is not known."""
    run, given = found.run, preset or {}
    present = changeable_command(found)
    fields = []
    if present:
        fields.append(command_field(
            present, command, is_more=bool(found.params), suspect=suspect,
            hint="As in a shell." if suspect is None else _CORRECT,
        ))  # fmt: skip
    word = short_id(found.shown_id)
    flags = []
    if run is not None and run.children.get("FAILED"):
        flags.append(("failed", "Only the children that failed"))
    if run is not None and run.status.is_terminal and (run.attempts or run.children):
        flags.append(("resume", "Go on from its checkpoint"))
    if found.code:
        flags.append(("code", "With the code as it is now"))
    changes = " and ".join(_WORDS.get(name, f"{name} {{}}").format(value)
                           for name, value in given.items())  # fmt: skip
    changes = changes.replace("the image .", "an image made of its files now")
    return PageAction(
        label=f"Run again with {changes}" if changes else "Run again",
        question=f"Run {_who(found)} again?", path="/act/rerun", body={"run": found.job_id},
        command=shell("batchml", "rerun", word) + env_option, confirm="Submit",
        preview="/preview/rerun",
        fields=(
            *param_fields(found.params, hints=hints), *fields,
            *(ActionField(name=name, label=label, flag=f"--{name}", is_flag=True,
                          value=given.get(name, ""), present="") for name, label in flags),
            *([image_field(given.get("image", ""))] if found.code else []),
            *option_fields(_CHANGED, _present(found), given),
        ),
    )  # fmt: skip


def in_own_project(action: PageAction, found: FoundRun, project: str) -> PageAction:
    """The rerun of a run of another project than the dashboard's `project`: it stays in its own."""
    own = found.project
    if action.path != "/act/rerun" or own in ("", project):
        return action
    note = f"It is of the project {own}, and so is the new run."
    command = f"{action.command} {shell('--project', own)}"
    return replace(action, command=command, notes=(*action.notes, note))


def _present(found: FoundRun) -> dict[str, str]:
    """The values of options that the run had, as far as they are known."""
    run, record = found.run, found.record
    asked, spec = run or record, record.spec if record else {}
    values: dict[str, object] = {"name": found.name}
    if asked is not None:
        values |= {"vcpus": asked.vcpus or "", "gpus": asked.gpus}
        values["memory"] = f"{asked.memory_mib} MiB" if asked.memory_mib else ""
    values["timeout"] = spec.get("timeout") or ""
    values["attempts"] = (spec.get("retry") or {}).get("attempts", 1) if spec else ""
    values["max_cost"] = (record.max_cost if record else None) or ""
    return {name: str(value) for name, value in values.items()}


def read_rerun_flags(words: Sequence[str]) -> dict[str, str] | None:
    """The flags of `batchml rerun` by option, as texts; None if the form has no field for one."""
    preset: dict[str, str] = {}
    rest = list(words)
    while rest:
        name = rest.pop(0).removeprefix("--").replace("-", "_")
        if name in ("failed", "resume", "code"):
            preset[name] = "true"
        elif name in (*_CHANGED, "image") and rest:
            preset[name] = rest.pop(0)
        else:
            return None
    return preset


def rerun(client: Client, query: PageQuery) -> dict[str, Any]:
    """The route /act/rerun: `run`, `params`, `command`, `image`, `options`, and the
    checkboxes `failed`, `resume`, `code`."""
    handle, flags, options = _read_rerun(client, query.body)
    again = handle.rerun(**flags, **options)
    if again is None:
        return done("None of its children has failed: nothing was submitted.")
    return done(f"Submitted {again.name}.", f"/run/{again.job_id}")


def preview_rerun(client: Client, query: PageQuery) -> Html:
    """The route /preview/rerun, with the body of /act/rerun."""
    handle, flags, options = _read_rerun(client, preview_body(query).body)
    found = handle.preview_rerun(**flags, **options)
    if found is None:
        return paragraphs(["None of its children has failed: nothing would be submitted."])
    return preview_html(found)


def _read_rerun(
    client: Client, body: Mapping[str, Any]
) -> tuple[RunHandle, dict[str, bool], SubmitOptions]:
    flags = {name: read_flag(body, name) for name in ("failed", "resume", "code")}
    options = read_command_and_image(body, read_options(body, _CHANGED))
    handle = client.run(read_text(body, "run"))
    own = handle.seen.project if handle.seen else ""
    if own not in ("", client.project):  # as the command line of `in_own_project`
        handle = Client(client.env, client.folder, project=own).run(handle.job_id)
    return handle, flags, options


def cancel(client: Client, query: PageQuery) -> dict[str, Any]:
    """The route /act/cancel: `run`."""
    handle = client.run(read_text(query.body, "run"))
    if handle.describe().status.is_terminal:
        return done(f"{_named(handle)} had ended already.")
    handle.cancel("Cancelled in the dashboard")
    return done(f"{_named(handle)} is stopping.")


def _named(handle: RunHandle) -> str:
    return _who(handle.seen) if handle.seen else handle.name


def _who(found: FoundRun) -> str:
    """The name and the short id of a run: `lenet 1a2b3c4d`."""
    return f"{found.name} {short_id(found.shown_id)}"
