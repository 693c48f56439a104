"""batchml explain: why a run waits or failed."""

import shutil
import sys
import textwrap
from typing import Any

from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import job_title, printable, run_json
from batchml.explain.ask import ExplainedRun, explain_run
from batchml.explain.suggest import describe_time
from batchml.model.run import NOT_KNOWN, effective_state

_NARROWEST = 20  # columns of a terminal below which lines are not folded


@app.command(epilog="Example: batchml explain @last")
def explain(run: OneRun, env: Env = None, project: Project = None, json_: Json = False) -> None:
    """Say why a run waits or failed: one verdict, its evidence, one command.

    It makes at most six calls to AWS, and reads only the last page of the log.
    """
    context = open_context(env, project)
    explained = explain_run(context, run)
    if json_:
        print_json(to_json(explained))
        return
    print_line(to_text(explained, _width(), context.clock.now()))
    if explained.note:
        say(printable(explained.note))
    if explained.failed_calls:
        failed = ", ".join(explained.failed_calls)
        say(f"The verdict has less evidence, because calls failed: {failed}.")


def _width() -> int:
    """Columns of the terminal; 0 without one, so that lines are not folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def to_text(explained: ExplainedRun, width: int = 0, now: float = 0.0) -> str:
    """The run, the verdict, the evidence line by line, and the command on a line of its own.

    With the present time (`now`, in seconds) the text says how old the run is, because `@last` may
    be another run than the user expects. The command is not folded, so that it can be copied.
    """

    def fold(text: str, first: str = "", more: str = "") -> str:
        text = printable(text)
        if width < _NARROWEST:
            return first + text
        return textwrap.fill(
            text, width - 1, initial_indent=first, subsequent_indent=more,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    found = explained.explanation
    forgotten = f" (from the history of this machine: {NOT_KNOWN})"
    state = (
        "unknown"
        if explained.is_forgotten and not explained.run.status.is_terminal
        else effective_state(explained.run)
    )
    lines = [f"{job_title(explained.run)} {state}{forgotten if explained.is_forgotten else ''}"]
    if now and explained.run.created_at:
        lines[0] += f", submitted {describe_time(now * 1000 - explained.run.created_at)} ago"
    lines += ["", fold(found.verdict)]
    lines += [fold(each, "  - ", "    ") for each in found.evidence if each]
    lines += ["", fold(found.fix)] if found.fix else [""]
    lines += [f"  {printable(found.command)}"] if found.command else []
    return "\n".join(lines)


def to_json(explained: ExplainedRun) -> dict[str, Any]:
    """The JSON of `explain --json`: AWS's names for AWS's values, our names for the others."""
    found = explained.explanation
    return {
        **run_json(explained.run),
        "containerReason": explained.run.reason or None,
        "cause": found.cause,
        "verdict": found.verdict,
        "isProblem": found.is_problem,
        "evidence": [each for each in found.evidence if each],
        "fix": found.fix or None,
        "command": found.command or None,
        "isForgotten": explained.is_forgotten,
        "calls": explained.calls,
        "notAsked": list(explained.failed_calls),
    }
