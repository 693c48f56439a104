"""explain: why a run waits or failed."""

from typing import TYPE_CHECKING, Any

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, OneRun
from batchml.cli.output import print_json, print_line, say

if TYPE_CHECKING:
    from batchml.ops.explain.look import Told

_NARROWEST = 20  # columns: below, folding does not help


@app.command(epilog="Example: batchml explain @last")
def explain(run: OneRun, env: Env = None, json_: Json = False) -> None:
    """Say why a run waits or failed: one verdict, what it rests on, one command.

    It asks AWS six questions at most, and of a log only the last page.
    """
    from batchml.cli.render import printable
    from batchml.cli.wiring import open_place
    from batchml.client.explaining import explain_run

    place = open_place(env)
    told = explain_run(place, run)
    if json_:
        print_json(to_json(told))
        return
    print_line(to_text(told, _width(), place.clock.now()))
    if told.note:
        say(printable(told.note))
    if told.unasked:
        say(f"Not asked, so that the verdict rests on less: {', '.join(told.unasked)}.")


def _width() -> int:
    """Columns of the terminal; 0 where there is none, and lines stay whole."""
    import shutil
    import sys

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def to_text(told: "Told", width: int = 0, now: float = 0.0) -> str:
    """The run, the verdict, the evidence line by line, and last the command alone on its line.

    With the time of now, in seconds, it says how old the run is: `@last` is easily another one.
    The command is never broken: it is there to be copied.
    """
    import textwrap

    from batchml.cli.render import job_title, printable
    from batchml.model.record import NOT_KNOWN
    from batchml.model.run import shown_state
    from batchml.ops.explain.words import minutes

    def folded(text: str, first: str, more: str) -> str:
        text = printable(text)
        if width < _NARROWEST:
            return first + text
        return textwrap.fill(
            text, width - 1, initial_indent=first, subsequent_indent=more,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    found = told.explanation
    forgotten = f" (from the history of this machine: {NOT_KNOWN})"
    state = (
        "unknown"
        if told.is_forgotten and not told.run.status.is_terminal
        else shown_state(told.run)
    )
    lines = [f"{job_title(told.run)} {state}{forgotten if told.is_forgotten else ''}"]
    if now and told.run.created_at:
        lines[0] += f", submitted {minutes(now * 1000 - told.run.created_at)} ago"
    lines += ["", folded(found.verdict, "", "")]
    lines += [folded(each, "  - ", "    ") for each in found.evidence if each]
    lines += ["", folded(found.fix, "", "")] if found.fix else [""]
    lines += [f"  {printable(found.command)}"] if found.command else []
    return "\n".join(lines)


def to_json(told: "Told") -> dict[str, Any]:
    """AWS's names for what AWS names, ours for the rest."""
    from batchml.cli.render import run_json

    found = told.explanation
    return {
        **run_json(told.run),
        "containerReason": told.run.reason or None,
        "cause": found.cause,
        "verdict": found.verdict,
        "isProblem": found.is_problem,
        "evidence": [each for each in found.evidence if each],
        "fix": found.fix or None,
        "command": found.command or None,
        "isForgotten": told.is_forgotten,
        "calls": told.calls,
        "notAsked": list(told.unasked),
    }
