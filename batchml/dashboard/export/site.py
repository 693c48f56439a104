"""Write the pages of an environment as files: which ones, with which data, and how much of it."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import msgspec
from msgspec import Struct

from batchml.cli.render import timestamp
from batchml.client import Client
from batchml.clock import Clock
from batchml.dashboard import cluster, cost
from batchml.dashboard.acting.tools import Tools
from batchml.dashboard.app import Answer, answer_query, read_query
from batchml.dashboard.curves import curves_document
from batchml.dashboard.export.folder import ExportFolder
from batchml.dashboard.export.rewrite import ExportedPages, PageFrame, rewrite_page
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.hub import Hub
from batchml.dashboard.layout import page, static_files, static_name
from batchml.dashboard.logs import LogLines
from batchml.dashboard.notebook.plots import curves
from batchml.dashboard.outputs import file_key
from batchml.dashboard.run import run_series, use_series
from batchml.dashboard.runs import chips
from batchml.dashboard.service import Pages
from batchml.errors import BatchmlError
from batchml.handles import RunHandle
from batchml.runs.compare.columns import FACTS, KnownNames, known_names
from batchml.runs.search import FoundRun

DEFAULT_LIMIT = 200  # runs with a page of their own, the newest
MOST_SWEEPS = 50  # with a page of their own
MOST_COMPARISONS = 12
MOST_COMPARED = 100  # runs of one comparison
MOST_LINES = 2_000  # of a run's log, the newest
MOST_CHARACTERS = 300_000  # of these lines
MOST_POINTS = 2_000  # of one chart of a run
_MOST_METRICS = 6  # columns of the list of runs
_PLAIN_LINES = 100  # of a log without scripts
_COLUMNS = ("name", "status", "queue", "submitted", "ran", "params", "cost", "id")
_READERS = 8  # pages that are made at once
_PACE = 5.0  # seconds between two messages
_DATA = "data/files.js"
_DOCUMENTS = ("/series", "/use", "/log")  # places that a script fills


class Comparison(Struct, frozen=True):
    """The runs of one job that are compared, the newest first."""

    name: str
    runs: tuple[FoundRun, ...]

    @property
    def path(self) -> str:
        return f"/compare?runs={','.join(each.job_id for each in self.runs)}"


class ExportSummary(Struct, frozen=True):
    """What was written. `missing`: the parts that could not be read, and why."""

    runs: int
    pages: int
    sweeps: int
    comparisons: int
    size: int
    missing: Mapping[str, str] = {}


def safe_name(name: str) -> str:
    """A file's name for a job id or a key."""
    return name if re.fullmatch(r"[A-Za-z0-9-]{1,100}", name) else file_key(name)


def choose_comparisons(runs: Iterable[FoundRun]) -> list[Comparison]:
    """The jobs with several runs, the one with the newest run first."""
    groups: dict[str, list[FoundRun]] = {}
    for each in runs:
        groups.setdefault(each.name, []).append(each)
    found = [Comparison(name, tuple(each[:MOST_COMPARED])) for name, each in groups.items()
             if len(each) > 1]  # fmt: skip
    return found[:MOST_COMPARISONS]


def choose_list_columns(known: KnownNames) -> str:
    """The columns of the list of runs: facts, and some metrics, as `?cols=` has them."""
    metrics = [name for name in sorted(known.metrics)
               if re.fullmatch(r"[A-Za-z_][\w./-]*", name) and name not in FACTS
               and name not in known.params]  # fmt: skip
    return ",".join((*_COLUMNS, *metrics[:_MOST_METRICS]))


def data_script(answers: Mapping[str, Any]) -> str:
    """A script that has JSON documents by the paths that a page asks for.

    They are texts, which the page reads as JSON: no name in them can be a property of an object.
    """
    lines = ["globalThis.batchmlAnswers ??= {};"]
    lines += [f"batchmlAnswers[{_quoted(path)}] = {_quoted(_json(each))};"
              for path, each in answers.items()]  # fmt: skip
    return "\n".join([*lines, ""])


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _quoted(text: str) -> str:
    """A text as a literal of JavaScript."""
    for char, coded in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(char, coded)
    return f"'{text}'"


def log_document(handle: RunHandle) -> dict[str, Any]:
    """The newest lines of a log, as the page of a run asks for them."""
    kept = LogLines("export")
    try:
        for line in handle.logs():
            kept.take(line)
    except BatchmlError as error:
        kept.notice = str(error)
    total = kept.total
    lines = kept.document(max(0, total - MOST_LINES))["lines"]
    while lines and sum(len(text) for _, _, text in lines) > MOST_CHARACTERS:
        lines = lines[len(lines) // 10 + 1 :]
    if len(lines) < total and not kept.notice:
        kept.notice = f"The export has the last {len(lines):,} of {total:,} lines."
    document = {**kept.document(total), "lines": lines, "over": True}
    return {**document, "first": 0, "total": len(lines), "oldest": 0}


def _plain_log(document: dict[str, Any]) -> Html:
    """The last lines, for a browser without scripts."""
    shown = document["lines"][-_PLAIN_LINES:]
    if not shown:
        return tag("p", document["notice"] or "It has printed nothing.", class_="dim")
    return join(
        tag("div", f"{child} | {text}" if child else text, class_="line")
        for _, child, text in shown
    )


class SiteWriter:
    """Writes the export of one environment into a folder."""

    def __init__(
        self, client: Client, clock: Clock, folder: ExportFolder, *,
        limit: int = DEFAULT_LIMIT, tell: Callable[[str], None] = lambda words: None,
    ) -> None:  # fmt: skip
        """`limit`: the runs that have a page of their own. `tell` gets the progress."""
        self._client, self._clock, self._folder, self._tell = client, clock, folder, tell
        self._hub = Hub(client, clock.monotonic, pace=0)
        self._pages = Pages(client, self._hub, clock, Tools(client.folder), pace=0, read_only=True)
        self._routes = self._pages.routes()
        self._limit = limit
        self._missing: dict[str, str] = {}
        self._lock = threading.Lock()
        self._note = ""
        self._exported = ExportedPages({})

    def write(self) -> ExportSummary:
        """Write all pages. Raises what the client raises if the runs cannot be listed."""
        self._hub.load()
        self._hub.poll()
        runs = self._hub.snapshot()[1]
        shown = runs[: self._limit]
        sweeps = [each.key for each in self._client.sweeps(all_projects=True)][:MOST_SWEEPS]
        compared = choose_comparisons(shown)
        self._note = (
            f"Exported {timestamp(int(self._clock.now() * 1000))[:16].replace('T', ' ')} UTC"
        )
        files = self._files(sweeps, compared)
        runs_files = {f"/run/{each.job_id}": f"run/{safe_name(each.job_id)}.html" for each in shown}
        self._exported = ExportedPages({**files, **runs_files})
        self._write_static(files, [each.job_id for each in shown])
        self._write_list(runs, len(shown))
        self._write_costs_and_cluster()
        self._write_sweeps(sweeps)
        self._write_comparisons(compared)
        self._write_runs(shown)
        return ExportSummary(len(runs), len(shown), len(sweeps), len(compared), self._folder.size,
                             dict(self._missing))  # fmt: skip

    # --- which files ------------------------------------------------------------------------

    def _files(self, sweeps: Sequence[str], compared: Sequence[Comparison]) -> dict[str, str]:
        """The files of all pages but those of runs, by their paths."""
        files = {"/": "index.html", "/sweeps": "sweeps.html", "/compare": "compare.html"}
        files |= {f"/sweep/{each}": f"sweep/{safe_name(each)}.html" for each in sweeps}
        files |= {each.path: f"compare/{number}.html" for number, each in enumerate(compared, 1)}
        for path, name, word, default in (
            ("/cost", "since", cost.PERIODS, cost.DEFAULT_PERIOD),
            ("/cluster", "span", cluster.STRIP_PACES, cluster.DEFAULT_WINDOW),
        ):
            for each in word:
                file = f"{path[1:]}.html" if each == default else f"{path[1:]}-{each}.html"
                files[f"{path}?{name}={each}"] = file
            files[path] = f"{path[1:]}.html"
        return files

    def _write_static(self, files: Mapping[str, str], ids: Sequence[str]) -> None:
        for name, (_, content) in static_files().items():
            self._folder.write(f"static/{name}", content)
        safe = [each for each in ids if safe_name(each) == each]
        text = _quoted(_json({"files": files, "runs": safe}))
        self._folder.write(_DATA, f"globalThis.batchmlFiles = JSON.parse({text});\n")

    # --- asking the pages -------------------------------------------------------------------

    def _ask(self, path: str) -> Answer:
        """What the server would answer. Raises what the route raises."""
        plain, _, query = path.partition("?")
        answer = answer_query(self._routes, read_query(plain, query))
        assert answer is not None, f"no route has {path}"
        return answer

    def _fill(self, path: str) -> Html | None:
        """The content of a panel; a part that cannot be read says why."""
        plain = path.partition("?")[0]
        if plain.endswith("/actions"):
            return None
        try:
            answer = self._ask(path)
        except BatchmlError as error:
            self._miss(path, error)
            return tag("p", str(error), class_="dim")
        assert isinstance(answer, Html), path
        return answer

    def _miss(self, path: str, error: BatchmlError) -> None:
        with self._lock:
            self._missing[path] = str(error)

    def _save(
        self, path: str, source: Answer, answers: Mapping[str, Any] | None = None,
        places: Mapping[str, Html] | None = None, note: str = "", address: str = "",
    ) -> None:  # fmt: skip
        """Write a page and its data. `places`: the content of places that a script fills."""
        assert isinstance(source, Html), path
        file, known = self._exported.files[path], places or {}
        root = "../" * file.count("/")

        def fill(asked: str) -> Html | None:
            if asked in known:
                return known[asked]
            return None if asked.partition("?")[0].endswith(_DOCUMENTS) else self._fill(asked)

        scripts = [static_name("export.js")[1:]]
        if not path.startswith("/run/"):
            scripts.insert(0, _DATA)
        if answers:
            name = f"data/{file.removesuffix('.html')}.js"
            self._folder.write(name, data_script(answers))
            scripts.insert(0, name)
        frame = PageFrame(address or path.partition("?")[0], root, self._exported, fill, scripts,
                          note or self._note)  # fmt: skip
        self._folder.write(file, rewrite_page(source.source, frame))

    # --- the pages --------------------------------------------------------------------------

    def _write_list(self, runs: Sequence[FoundRun], pages: int) -> None:
        columns = choose_list_columns(known_names(runs))
        note = self._note
        if pages < len(runs):
            note += f"; the newest {pages:,} of {len(runs):,} runs have a page"
        document = self._ask(f"/api/runs?cols={columns}")
        self._save("/", self._ask(f"/?cols={columns}"), {"/api/runs": document}, note=note)

    def _write_costs_and_cluster(self) -> None:
        for period in reversed(cost.PERIODS):  # the longest answers the others, too
            path = f"/cost?since={period}"
            self._save(path, self._ask(path))
        for window in cluster.STRIP_PACES:
            path = f"/cluster?span={window}"
            self._save(path, self._ask(path))

    def _write_sweeps(self, keys: Sequence[str]) -> None:
        self._ask("/sweeps/rows")  # waits until the sweeps are read
        self._save("/sweeps", self._ask("/sweeps"))
        self._each("sweeps", keys, self._write_sweep)

    def _write_sweep(self, key: str) -> None:
        path, rows = f"/sweep/{key}", "rows=100000"
        try:
            live = self._ask(f"{path}/live?{rows}")
            source = self._ask(f"{path}?{rows}")
        except BatchmlError as error:
            self._miss(path, error)
            self._save(path, page("Sweep", tag("h1", key), tag("p", str(error)),
                                  env=self._client.env, current="/sweeps"))  # fmt: skip
            return
        assert isinstance(live, dict), path
        panels = {
            name: rewrite_page(each, self._part(path)) for name, each in live["panels"].items()
        }
        self._save(path, source, {f"{path}/live": {**live, "panels": panels, "over": True}})

    def _part(self, path: str) -> PageFrame:
        root = "../" * self._exported.files[path].count("/")
        return PageFrame(path, root, self._exported, self._fill)

    def _write_comparisons(self, compared: Sequence[Comparison]) -> None:
        rows = [
            tag("tr", tag("th", tag("a", each.name, href=each.path), scope="row"),
                tag("td", len(each.runs), class_="number"),
                tag("td", timestamp(each.runs[0].created_at)[:16].replace("T", " ")),
                tag("td", chips(each.runs[0].params.items())))
            for each in compared
        ]  # fmt: skip
        names = ("Job", "Runs", "Newest, UTC", "Its parameters")
        heading = (tag("th", each, scope="col", class_="number" if each == "Runs" else None)
                   for each in names)  # fmt: skip
        table = tag("table", tag("caption", "Comparisons", class_="unseen"),
                    tag("thead", tag("tr", *heading)), tag("tbody", *rows))  # fmt: skip
        words = "The runs of each job, side by side." if rows else "No job has several runs."
        self._save("/compare", page(
            "Compare", tag("h1", "Compare runs"), tag("p", words),
            tag("div", table, class_="scroll") if rows else None,
            env=self._client.env, current="/compare",
        ))  # fmt: skip
        self._each("comparisons", compared, self._write_comparison)

    def _write_comparison(self, compared: Comparison) -> None:
        query = compared.path.partition("?")[2]
        answers: dict[str, Any] = {}
        places: dict[str, Html] = {}
        results = f"/compare/results?{query}"
        filled = self._fill(results)  # reads the logs; the values have the metrics then
        if filled is not None:
            places[results] = filled
        try:
            answers["/compare/series"] = self._ask(f"/compare/series?{query}")
        except BatchmlError as error:
            self._miss(compared.path, error)
        answers["/compare/document"] = self._ask(f"/compare/document?{query}")
        self._save(compared.path, self._ask(compared.path), answers, places)

    def _write_runs(self, runs: Sequence[FoundRun]) -> None:
        self._each("runs", runs, self._write_run)

    def _write_run(self, found: FoundRun) -> None:
        path = f"/run/{found.job_id}"
        handle = self._client.handle(found)
        log = log_document(handle)
        answers: dict[str, Any] = {f"{path}/log": log}
        places = {f"{path}/log": _plain_log(log)}
        try:
            series = run_series(handle)
            answers[f"{path}/series"] = curves_document([series], MOST_POINTS)
            answers[f"{path}/use"] = curves_document(use_series(handle), MOST_POINTS)
            drawn = curves([series])
            if drawn is not None:
                places[f"{path}/series"] = drawn
        except BatchmlError as error:
            self._miss(f"{path}/series", error)
        self._save(path, self._ask(path), answers, places)

    def _each(self, what: str, items: Sequence[Any], work: Callable[[Any], None]) -> None:
        """Do a work for each item, several at once; an error ends them all."""
        told = self._clock.monotonic()
        with ThreadPoolExecutor(_READERS, "export") as pool:
            futures = [pool.submit(work, each) for each in items]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if self._clock.monotonic() - told >= _PACE:
                        told = self._clock.monotonic()
                        self._tell(f"{number} of {len(items)} {what} ...")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
