"""diff: two runs side by side."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.ops.compare import Difference, Value
    from batchml.ops.search import Found

Word = Annotated[str, typer.Argument(metavar="RUN", help="Job id, prefix, name or @last~1.")]
LONGEST = 48  # characters of a value in the table
LEAST = 12


@app.command(epilog="Example: batchml diff @last~1 @last")
def diff(
    left: Word,
    right: Word,
    all_: Annotated[bool, typer.Option("--all", help="Also what is the same in both.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Compare two runs.

    Parameters, code, image, resources, outcome, times, cost and metrics; what differs is shown.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.finding import recall
    from batchml.client.runs import select
    from batchml.ops.compare import compare, what_matters

    place = open_place(env)
    one, other = (_measured(place, each) for each in recall(place, select(place, [left, right])))
    found = compare(one, other, int(place.clock.now() * 1000))
    shown = [each for each in found if all_ or not each.same]
    if json_:
        print_json(
            {
                "runs": [one.job_id, other.job_id],
                "differences": [
                    {"what": each.what, "left": each.left, "right": each.right} for each in shown
                ],
            }
        )
        return
    shown = shown if all_ else [each for each in what_matters(shown) if not each.same]
    if shown:
        print_line(_table(one, other, shown))
    if not any(not each.same for each in found):
        say("The two do not differ in anything that is known of them.")
    elif one.commit and other.commit and one.commit != other.commit:
        say(f"The code: git diff {one.commit[:12]} {other.commit[:12]}")


def _measured(place: "Place", found: "Found") -> "Found":
    """With its metrics, from its log if nobody has read that yet."""
    from msgspec.structs import replace

    from batchml.client.finding import measure, with_start
    from batchml.model.record import Record

    found = with_start(place, found)
    record = found.record or Record()
    if found.run is None or record.measured:
        return found
    last = measure(place, found.run, found.record).last
    return replace(found, record=replace(record, metrics=last or record.metrics))


def _table(one: "Found", other: "Found", shown: "list[Difference]") -> str:
    from batchml.cli.colour import screen
    from batchml.cli.render import cells as cells_of
    from batchml.cli.render import printable, table

    # Both sides get the same room, whatever stands there.
    facts = max(cells_of(each.what) for each in shown)
    width = screen().width
    most = min(LONGEST, max(LEAST, (width - facts - len("CHANGE") - 10) // 2)) if width else LONGEST
    rows = [["", *(_title(each, most) for each in (one, other)), "CHANGE"]]
    for each in shown:
        change = each.change
        differs = change is not None and change != 0 and each.what != "exitCode"
        cells = [
            each.what,
            *_pair(each.left, each.right, most),
            f"{change:+.6g}" if differs else "",
        ]
        rows.append(cells)
    return table([[printable(cell) for cell in row] for row in rows])


def _title(found: "Found", most: int) -> str:
    """The name, shorter if it must be, and the id, which never is."""
    from batchml.cli.render import cut
    from batchml.model.names import short_id

    word = short_id(found.job_id)
    return f"{cut(found.name, max(1, most - len(word) - 1))} {word}"


def _pair(left: "Value", right: "Value", most: int) -> list[str]:
    """Two values, cut to where they differ when they are long."""
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
