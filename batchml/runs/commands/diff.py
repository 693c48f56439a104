"""diff: show how the requests and the code of two runs differ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import cells as cells_of
from batchml.cli.render import cut, printable, table
from batchml.cli.terminal import paint, screen
from batchml.model.names import short_id
from batchml.runs.compare.facts import RunDifference, Value
from batchml.runs.compare.service import compare_requests
from batchml.runs.find import select
from batchml.runs.search import FoundRun

if TYPE_CHECKING:
    from batchml.jobs.code_diff import FileDifference

Word = Annotated[str, typer.Argument(metavar="RUN", help="Job id, prefix, name or @last~1.")]
LONGEST = 48  # characters of a value in the table
LEAST = 12
MAX_LINES = 200  # of the code's diff, without --full
_COLOURS = {"+": "good", "-": "bad", "@": "dim"}  # of lines of a diff, by their first character


@app.command(epilog="Example: batchml diff @last~1 @last")
def diff(
    left: Word,
    right: Word,
    full: Annotated[
        bool, typer.Option("--full", help="Also show equal values, and the whole code diff.")
    ] = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show how the requests of two runs differ: parameters, code, image, resources.

    Then it shows the files of the code that differ, as a unified diff. Their results: batchml
    compare.
    """
    context = open_context(env, project)
    found = compare_requests(context, *select(context, [left, right]))
    one, other, files = found.left, found.right, found.files
    shown = [each for each in found.facts if full or not each.same]
    if files is None:
        say(f"The files of the code cannot be compared. {found.why}")
    if json_:
        print_json(
            {
                "runs": [one.job_id, other.job_id],
                "differences": [
                    {"what": each.what, "left": each.left, "right": each.right} for each in shown
                ],
                "files": files if files is None else list(map(_file_json, files)),
            }
        )
        return
    if shown:
        print_line(_table(one, other, shown))
    if all(each.same for each in found.facts):
        say("The two runs do not differ, as far as AWS Batch and the history describe them.")
    if files:
        _print_files(files, None if full else MAX_LINES)
    elif files is None and one.commit and other.commit and one.commit != other.commit:
        say(f"The code: git diff {one.commit[:12]} {other.commit[:12]}")


def _file_json(each: "FileDifference") -> dict[str, Any]:
    diff = "\n".join(each.lines) + "\n" if each.lines else None
    return {"name": each.name, "change": each.change, "diff": diff}


def _print_files(files: "Sequence[FileDifference]", most: int | None) -> None:
    from batchml.jobs.code_diff import diff_text

    lines = diff_text(files, most)
    is_cut = most is not None and len(lines) > most
    for line in lines:
        text = printable(line)
        print_line(paint(text, _COLOURS.get(line[:1], "")) if screen().colour else text)
    if is_cut:
        say("--full shows the whole diff.")


def _table(one: FoundRun, other: FoundRun, shown: list[RunDifference]) -> str:

    # Both runs get columns of the same width.
    names = max(cells_of(each.what) for each in shown)
    width = screen().width
    most = min(LONGEST, max(LEAST, (width - names - len("CHANGE") - 10) // 2)) if width else LONGEST
    rows = [["", *(_title(each, most) for each in (one, other)), "CHANGE"]]
    for each in shown:
        change = each.change
        differs = change is not None and change != 0
        cells = [
            each.what,
            *_pair(each.left, each.right, most),
            f"{change:+.6g}" if differs else "",
        ]
        rows.append(cells)
    return table([[printable(cell) for cell in row] for row in rows])


def _title(found: FoundRun, most: int) -> str:
    """The name, shortened if necessary, and the whole id."""
    word = short_id(found.shown_id)
    return f"{cut(found.name, max(1, most - len(word) - 1))} {word}"


def _pair(left: Value, right: Value, most: int) -> list[str]:
    """Two values; long ones are cut around their first difference."""
    texts = [_text(left), _text(right)]
    if max(map(len, texts)) <= most:
        return texts
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
    start = max(0, (min(map(len, texts)) if same is None else same) - most // 3)
    return [_cut(text, start, most) for text in texts]


def _cut(text: str, start: int, most: int) -> str:
    before = "..." if start and text else ""
    rest, room = text[start:], most - len(before)
    return before + (rest if len(rest) <= room else rest[: room - 3] + "...")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
