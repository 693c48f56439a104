"""Cancel a run, or submit it again: the buttons of its page, and what they do."""

from typing import Any

from batchml.client import Client
from batchml.dashboard.act import PageAction, action_buttons, done, read_text, shell
from batchml.dashboard.app import PageQuery
from batchml.dashboard.html import Html
from batchml.handles import RunHandle
from batchml.model.names import short_id
from batchml.runs.search import FoundRun


def actions_panel(found: FoundRun, env_option: str, *, read_only: bool) -> Html:
    """The buttons for the present state of a run."""
    run = found.run
    actions = []
    if run is not None and not run.status.is_terminal and run.node_index is None:
        actions.append(cancel_action(found, env_option))
    return action_buttons(actions, read_only=read_only)


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
