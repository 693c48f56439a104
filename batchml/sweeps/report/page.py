"""Write a report: an HTML page, a CSV and a JSON file.

The page contains the document of `data.py` as JSON, the script that draws it, and the style, and
loads nothing: its content security policy allows this script only, by its hash. The script inserts
texts of the document as text, never as HTML.
"""

import base64
import csv
import hashlib
import json
import math
from functools import cache
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from batchml.cli.render import time_json
from batchml.clock import Clock
from batchml.model.sweep import Trial
from batchml.runtime.storage.files import write_atomically
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.report.data import SHOWN, make_document
from batchml.sweeps.results import rank_trials
from batchml.sweeps.started import StartedSweep

MOST = 2_000_000  # bytes of a page; a larger one draws fewer trials one by one
PLOTS = ("draw.js", "plots.js")  # the parts of the script that other pages may use, in their order

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>
{style}</style>
<header></header>
{files}
<main class="grid"></main>
<noscript>A script in this file draws the plots; it loads nothing. \
The CSV and JSON files have the same data.</noscript>
<footer></footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</html>
"""


def render_page(
    sweep: StartedSweep, state: SweepState, now: float, files: tuple[str, ...] = ()
) -> str:
    """The report as HTML. Above `MOST` bytes fewer trials are drawn one by one, down to 500.

    `files`: names of files beside the page, to which it links.
    """
    most = SHOWN
    while True:
        page = _page(sweep, make_document(sweep, state, now, most), files)
        if len(page.encode()) <= MOST or most <= 500:
            return page
        most //= 2


def _page(sweep: StartedSweep, document: dict[str, Any], files: tuple[str, ...]) -> str:
    style, script = _sources()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    links = " ".join(f'<a href="./{escape(quote(name))}">{escape(name)}</a>' for name in files)
    return _PAGE.format(
        digest=digest,
        title=escape(f"{sweep.name}: sweep"),
        style=style,
        files=f'<p class="files">{links}</p>' if links else "",
        data=to_script(document),
        script=script,
    )


def to_script(document: object) -> str:
    """JSON for a script element, with `<` escaped: so no text in it can end the element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


@cache
def _sources() -> tuple[str, str]:
    """The style, and the script in a scope of its own."""
    style, plots = plot_sources()
    page = _read("page.js")
    given = 'JSON.parse(document.getElementById("data").textContent)'
    script = f'"use strict";((D, GRID, KEPT) => {{\n{plots}{page}}})({given}, ' + (
        'document.querySelector(".grid"), new Map());\n'
    )
    return _read("page.css") + style, script


def plot_sources() -> tuple[str, str]:
    """The style of the plots, and the functions that draw them, for a page of another kind.

    The functions stand in the scope of `D`, the document of `make_document`; `GRID`, the element
    for the cards; and `KEPT`, a Map of what was chosen.
    """
    return _read("plots.css"), "".join(map(_read, PLOTS))


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text("utf-8")


# --- CSV and JSON, for other programs -------------------------------------------------------------


_COLUMNS = (
    "trial", "rank", "state", "origin", "confirms", "wave", "job_id", "attempts", "step", "ran",
    "planned_at", "started_at", "stopped_at", "exit_code", "why", "seed",
)  # fmt: skip


def to_csv(sweep: StartedSweep, state: SweepState, now: float) -> str:
    """A row for each trial, by number: `_COLUMNS`, `goal.NAME` and `param.NAME`.

    Times are seconds since the epoch, `ran` is in seconds. An inactive parameter is empty.
    """
    goals = [f"goal.{goal.metric}" for goal in sweep.spec.goals]
    names = list(sweep.spec.space)
    ranks = {trial.number: rank for rank, trial in enumerate(rank_trials(state, sweep.spec), 1)}
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_COLUMNS, *goals, *(f"param.{name}" for name in names)])
    for number, trial in sorted(state.trials.items()):
        values = trial.values or (None,) * len(goals)
        params = [trial.params.get(name) for name in names]
        row = [*_columns(trial, ranks.get(number), now), *values, *params]
        rows.writerow(str(cell).lower() if isinstance(cell, bool) else cell for cell in row)
    return text.getvalue()


def _columns(trial: Trial, rank: int | None, now: float) -> list[Any]:
    return [
        trial.number, rank, trial.state.value, trial.origin, trial.confirms, trial.wave,
        trial.job_id, trial.attempt, trial.step, round(trial.ran(now), 3), trial.planned_at,
        trial.started_at, trial.stopped_at, trial.exit_code, _plain(trial.why), trial.seed,
    ]  # fmt: skip


def _plain(text: str) -> str:
    """The text in one line. A program's output must not become a formula in a spreadsheet."""
    plain = " ".join(text.split())
    return f"'{plain}" if plain[:1] in ("=", "+", "-", "@") else plain


def to_json(sweep: StartedSweep, state: SweepState, now: float) -> str:
    """The sweep's spec, and each trial with all its reports, decisions and metrics.

    NaN and infinity, which JSON does not have, are null.
    """
    trials = [
        {**_times_as_text(_finite(msgspec.to_builtins(trial))), "ran": round(trial.ran(now), 3)}
        for _, trial in sorted(state.trials.items())
    ]
    document = {
        "sweepId": sweep.key,
        "name": sweep.name,
        "env": sweep.env,
        "createdAt": _time_json(sweep.created_at),
        "writtenAt": _time_json(now),
        "ended": state.ended.why if state.ended else None,
        "best": next((trial.number for trial in rank_trials(state, sweep.spec)), None),
        "reports": "each: [step, [values of the goals], time]",
        "decisions": "each: [step, value, cut-off or null, its version, whether it went on]",
        "spec": msgspec.to_builtins(sweep.spec),
        "trials": trials,
    }
    if len(trials) < 200:  # short enough to be read by people
        return json.dumps(document, indent=1, allow_nan=False)
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _times_as_text(trial: dict[str, Any]) -> dict[str, Any]:
    """The trial, with its times in ISO 8601."""
    times = {name: _time_json(value) for name, value in trial.items() if name.endswith("_at")}
    reports = [[step, values, _time_json(at)] for step, values, at in trial["reports"]]
    return {**trial, **times, "reports": reports}


def _time_json(seconds: float | None) -> str | None:
    return time_json(None if seconds is None else round(seconds * 1000))


def _finite(value: Any) -> Any:
    """The value with None for each float that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


# --- Writing the three files ----------------------------------------------------------------------


def write_report(sweep: StartedSweep, state: SweepState, path: Path, clock: Clock) -> Path:
    """Write the page to `path`, and beside it files of the same name with `.csv` and `.json`.

    Each replaces an older file as a whole. Raises OSError.
    """
    now = clock.now()
    path.parent.mkdir(parents=True, exist_ok=True)
    table, document = data_files(path)
    write_atomically(str(table), to_csv(sweep, state, now).encode(), 0o644)
    write_atomically(str(document), to_json(sweep, state, now).encode(), 0o644)
    text = render_page(sweep, state, now, (table.name, document.name))
    write_atomically(str(path), text.encode(), 0o644)
    return path


def data_files(path: Path) -> tuple[Path, Path]:
    """The paths of the CSV and the JSON file of a report."""
    return path.with_suffix(".csv"), path.with_suffix(".json")
