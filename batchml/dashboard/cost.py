"""The page of costs: by day, project, owner, queue and job, with ranges where prices are ranges."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from batchml.cli.render import timestamp
from batchml.client import Client
from batchml.clock import Clock
from batchml.config.project import short_project
from batchml.cost.bill import CostTotal, RunCost, group_costs, sum_costs
from batchml.cost.quote import NOT_COUNTED, Usd
from batchml.cost.render import FREE, money
from batchml.dashboard.app import PageQuery, Route, route
from batchml.dashboard.cluster import data_table, meter
from batchml.dashboard.html import Child, Html, join, tag
from batchml.dashboard.hub import Hub
from batchml.dashboard.layout import STYLES, command_line, page
from batchml.dashboard.runs import note
from batchml.errors import BatchmlError, UsageError
from batchml.model.names import distinct_names, dollars, duration, short_duration

PATH = "/cost"
HOUR, DAY = 3_600_000, 86_400_000  # ms
PERIODS = {"24h": DAY, "7d": 7 * DAY, "30d": 30 * DAY, "90d": 90 * DAY}
DEFAULT_PERIOD = "7d"
FRESH = 60.0  # seconds for which an answer is not asked for again
MOST_ROWS = 30  # of a table
_WORDS = {"24h": "24 hours", "7d": "7 days", "30d": "30 days", "90d": "90 days"}
_CHART = 150  # px
_NONE = "none"


class CostAnswer(Struct, frozen=True):
    """The costs of a period. `at`: when they were asked for, in ms. `trouble`: why they are old."""

    costs: tuple[RunCost, ...]
    at: int
    trouble: str = ""


class CostBook:
    """Asks for the costs of a period, at most once a minute, and never twice at a time.

    If the environment does not answer, the last answer is given again, with the reason.
    """

    def __init__(self, ask: Callable[[float], Sequence[RunCost]], now: Callable[[], float]) -> None:
        """`ask`: the costs since a time, in seconds since the epoch. `now`: such a time."""
        self._ask, self._now = ask, now
        self._known: dict[str, CostAnswer] = {}
        self._locks = {each: threading.Lock() for each in PERIODS}

    def known(self, period: str) -> CostAnswer | None:
        """The last answer, without asking."""
        return self._known.get(period)

    def get(self, period: str) -> CostAnswer:
        """The costs of a period. Raises what the client raises if there is no earlier answer."""
        with self._locks[period]:
            known, now = self._known.get(period), self._now()
            if known and now - known.at / 1000 < FRESH:
                return known
            longer = self._fresh_longer(period, now)
            if longer:
                return longer
            try:
                costs = tuple(self._ask(now - PERIODS[period] / 1000))
            except BatchmlError as error:
                if known is None:
                    raise
                return CostAnswer(known.costs, known.at, str(error))
            found = self._known[period] = CostAnswer(costs, int(now * 1000))
            return found

    def _fresh_longer(self, period: str, now: float) -> CostAnswer | None:
        """The costs of this period from the answer for a longer one."""
        for name, known in list(self._known.items()):
            if PERIODS[name] > PERIODS[period] and now - known.at / 1000 < FRESH:
                return within_period(known, period)
        return None


def within_period(answer: CostAnswer, period: str) -> CostAnswer:
    """The answer for a longer period, without the runs before this one."""
    start = answer.at - PERIODS[period]
    return replace(answer, costs=tuple(each for each in answer.costs if each.at >= start))


class CostFilter(Struct, frozen=True):
    """The runs to sum: a period, and the values of groups."""

    period: str = DEFAULT_PERIOD
    chosen: tuple[tuple[str, str], ...] = ()  # (a word of GROUPS, its value)

    def query(self, **changes: str | None) -> str:
        """The parameters of its URL, with some groups replaced; None leaves a group out."""
        named = {**dict(self.chosen), **changes}
        kept = {name: value for name, value in named.items() if value is not None}
        return urlencode({"since": self.period, **kept})

    def takes(self, cost: RunCost) -> bool:
        return all((GROUPS[name](cost) or _NONE) == value for name, value in self.chosen)


GROUPS: Mapping[str, Callable[[RunCost], str]] = {
    "project": lambda cost: cost.project,
    "owner": lambda cost: cost.owner,
    "queue": lambda cost: cost.queue,
    "job": lambda cost: cost.job,
}


def read_filter(params: Mapping[str, str]) -> CostFilter:
    """The filter of `?since=30d&queue=gpu`. Raises UsageError."""
    period = params.get("since", "") or DEFAULT_PERIOD
    if period not in PERIODS:
        raise UsageError(f"since={period}: choose one of {', '.join(PERIODS)}.")
    return CostFilter(period, tuple((each, params[each]) for each in GROUPS if params.get(each)))


def cost_page(
    answer: CostAnswer | None, chosen: CostFilter, now_ms: int, env: str, *, is_local: bool = False,
    trouble: str = "", env_option: str = "",
) -> Html:  # fmt: skip
    """The page. Without an answer, its content is asked for by the script, or by a link."""
    content = cost_panel(answer, chosen, now_ms, is_local=is_local) if answer else None
    links = (
        tag("a", words, href=f"{PATH}?{CostFilter(each, chosen.chosen).query()}",
            aria_current="true" if each == chosen.period else None)
        for each, words in _WORDS.items()
    )  # fmt: skip
    choice = tag("nav", tag("span", "The last", class_="dim"), *links, class_="choice",
                 aria_label="Period")  # fmt: skip
    wait = tag("noscript", tag("a", "Show the costs", href=f"{PATH}?{chosen.query()}&wait=1"))
    return page(
        "Cost", tag("h1", "Cost"), note(trouble), choice,
        tag("div", "" if content else "Asking for runs and prices ...", content,
            data_panel=f"{PATH}/panel?{chosen.query()}", data_live=True),
        None if content else wait,
        tag("div", command_line(f"batchml cost --since {chosen.period} --all{env_option}"),
            class_="foot"),
        env=env, current=PATH, view="cost", scripts=("theme.js", "app.js", "cost.js"),
        styles=(*STYLES, "cluster.css"),
    )  # fmt: skip


def cost_panel(
    answer: CostAnswer, chosen: CostFilter, now_ms: int, *, is_local: bool = False
) -> Html:
    """The content of the page: total, chart, and a table for each kind of group."""
    costs = [each for each in answer.costs if chosen.takes(each)]
    total = sum_costs("", costs)
    is_free = is_local and not total.usd.high and not total.is_lower_bound
    slots = cost_slots(costs, chosen.period, answer.at)
    reasons = list(dict.fromkeys(why for each in costs for why in each.unknown))
    if not costs:
        body: Child = tag("p", "No runs in this period", " with these values." if chosen.chosen
                          else ".", class_="dim")  # fmt: skip
    else:
        tables = (
            _section(f"By {name}", group_table(costs, name, chosen, is_free=is_free))
            for name in GROUPS
        )
        body = join((
            _section(f"By {'hour' if chosen.period == '24h' else 'day'}",
                     bars(slots, is_free=is_free), _slot_table(slots), wide=True),
            *tables,
            _section("Longest runs" if is_free else "Most expensive runs",
                     run_table(costs, is_free=is_free), wide=True),
        ))  # fmt: skip
    return join((
        _age(answer, now_ms),
        _chips(chosen),
        _totals(total, costs, is_free=is_free),
        *(tag("p", f"Price unknown: {why}.", class_="warning") for why in reasons[:4]),
        tag("div", body, class_="cards"),
        tag("p", FREE if is_free else f"Not counted: {NOT_COUNTED}.", class_="dim"),
    ))  # fmt: skip


def _section(title: str, *content: Child, wide: bool = False) -> Html:
    return tag("section", tag("h2", title), *content, class_="card wide" if wide else "card")


def _age(answer: CostAnswer, now_ms: int) -> Html | None:
    age = max(0, now_ms - answer.at) / 1000
    if answer.trouble:
        return tag("p", f"These values are {short_duration(age)} old: {answer.trouble}",
                   class_="warning")  # fmt: skip
    return None


def _chips(chosen: CostFilter) -> Html | None:
    """The chosen values, each with a link that leaves it out."""
    if not chosen.chosen:
        return None
    parts = (
        tag("a", f"{name}: {value} \u00d7", class_="chip", title=f"All of {name} again",
            href=f"{PATH}?{chosen.query(**{name: None})}")
        for name, value in chosen.chosen
    )  # fmt: skip
    return tag("p", "Only ", join(parts, " "))


def amount(usd: Usd, *, is_lower_bound: bool = False) -> str:
    """`$0.25 to $1.01`, `at least $3.10`; "-" is unknown."""
    words = money(usd, is_lower_bound=is_lower_bound)
    return "-" if words == "unknown" else words


def _totals(total: CostTotal, costs: Sequence[RunCost], *, is_free: bool) -> Html:
    running = sum(each.is_running for each in costs)
    tiles = [
        ("Cost", "$0" if is_free else amount(total.usd, is_lower_bound=total.is_lower_bound),
         "no price" if is_free else None),
        ("Failed attempts", amount(total.failed), _part(total.failed.high, total.usd.high)),
        ("Runs", f"{total.runs:,}", f"{running} still running" if running else None),
        ("Running time", short_duration(total.seconds), None),
    ]  # fmt: skip
    if is_free:
        del tiles[1]
    shown = (
        tag("div", tag("dt", name), tag("dd", tag("strong", value), " ", more))
        for name, value, more in tiles
    )
    return tag("dl", *shown, class_="tiles")


def _part(part: Decimal, whole: Decimal) -> str | None:
    if not (part and whole):
        return None
    return "under 1% of it" if 100 * part < whole else f"{100 * part / whole:.0f}% of it"


# --- tables ---------------------------------------------------------------------------------------


def group_table(
    costs: Sequence[RunCost], name: str, chosen: CostFilter, *, is_free: bool = False
) -> Html:
    """The cost of each group, the dearest first; a name is a link to this group alone."""
    read = GROUPS[name]
    groups = group_costs(costs, lambda each: read(each) or _NONE)
    most = _size(groups[0], is_free=is_free) if groups else 0.0
    known = [each.project for each in costs]
    rows: list[list[Child]] = []
    for each in groups[:MOST_ROWS]:
        label = short_project(each.name, known) if name == "project" else each.name
        link = tag("a", label, href=f"{PATH}?{chosen.query(**{name: each.name})}", title=each.name)
        count, ran, cost, failed = _cells(each, is_free=is_free)
        share = meter(_size(each, is_free=is_free), most)
        if is_free:
            rows.append([link, join((ran, share)), count])
        else:
            rows.append([link, join((cost, share)), failed, ran, count])
    amounts = () if is_free else ("Cost", "Failed")
    headings = (name.capitalize(), *amounts, "Ran", "Runs")
    table = data_table(f"Cost by {name}", headings, rows, number=" nnnn")
    words = f"{len(groups) - MOST_ROWS} more" if len(groups) > MOST_ROWS else None
    hint = None
    if name == "owner" and [each.name for each in groups] == [_NONE]:
        hint = tag("p", "A run has an owner by the tag ", tag("code", "--tag owner=NAME"),
                   ", or by its share of a queue with fair share.", class_="dim")  # fmt: skip
    return join((table, tag("p", words, class_="dim") if words else None, hint))


def _cells(total: CostTotal, *, is_free: bool) -> list[Child]:
    cost = "$0" if is_free else amount(total.usd, is_lower_bound=total.is_lower_bound)
    failed = amount(total.failed) if total.failed.high else "$0"
    return [f"{total.runs:,}", duration(total.seconds), cost, failed]


def _size(total: CostTotal, *, is_free: bool) -> float:
    return total.seconds if is_free else float(total.usd.high)


def run_table(costs: Iterable[RunCost], *, is_free: bool = False) -> Html:
    """The dearest runs."""
    ordered = sorted(costs, key=lambda each: (-each.usd.high, -each.seconds, each.job_id))
    rows: list[list[Child]] = [
        [
            tag("a", each.name, href=f"/run/{each.job_id}", title=each.job_id),
            "$0" if is_free else amount(each.usd, is_lower_bound=bool(each.unknown)),
            amount(each.failed) if each.failed.high else "$0",
            f"{duration(each.seconds)}{' so far' if each.is_running else ''}",
            each.queue,
            tag("time", timestamp(each.at)[:16].replace("T", " "), datetime=timestamp(each.at)),
        ]
        for each in ordered[:MOST_ROWS]
    ]  # fmt: skip
    headings = ("Run", "Cost", "Failed", "Ran", "Queue", "Submitted (UTC)")
    return data_table("Most expensive runs", headings, rows, number=" nnn")


# --- the chart ------------------------------------------------------------------------------------


def cost_slots(costs: Iterable[RunCost], period: str, until: int) -> list[CostTotal]:
    """A total for each day of a period, or for each hour of a day, by the time of submission.

    Days are those of UTC, as in AWS's bills. The name of a total is its time.
    """
    step, cut = (HOUR, 16) if period == "24h" else (DAY, 10)
    first, last = (until - PERIODS[period]) // step, until // step
    groups: dict[int, list[RunCost]] = {each: [] for each in range(first, last + 1)}
    for each in costs:
        groups.setdefault(min(last, max(first, each.at // step)), []).append(each)
    return [
        sum_costs(timestamp(place * step)[:cut].replace("T", " "), groups[place])
        for place in sorted(groups)
    ]


def _slot_table(slots: Sequence[CostTotal]) -> Html:
    rows: list[list[Child]] = [
        [each.name, *_cells(each, is_free=False)] for each in reversed(slots) if each.runs
    ]
    table = data_table("Cost by time", ("Time (UTC)", "Runs", "Ran", "Cost", "Failed"), rows,
                       number=" nnnn")  # fmt: skip
    return tag("details", tag("summary", "As a table", id="slots-name"), table, id="slots")


def bars(slots: Sequence[CostTotal], *, is_free: bool = False) -> Html:
    """A bar for each slot: what failed, the rest, and how much more it may be."""
    most = max((_size(each, is_free=is_free) for each in slots), default=0.0)
    unit, sign = (3600.0, "h") if most >= 3600 else (60.0, "min")
    top = nice_top(most / unit) * unit if is_free else nice_top(most)
    width = 100 / max(1, len(slots))
    every = -(-len(slots) // 8)
    parts: list[Html] = []
    labels: list[Html] = []
    for part in (0.5, 1.0):
        y = 14 + _CHART * (1 - part)
        label = f"{top * part / unit:g} {sign}" if is_free else dollars(Decimal(str(top * part)))
        parts.append(tag("line", x1="0", x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}"))
        labels.append(tag("text", label, x=0, y=f"{y - 3:.1f}"))
    for place, each in enumerate(slots):
        parts.append(_bar(each, place * width, width, top, is_free=is_free))
        if (len(slots) - 1 - place) % every == 0:
            words = each.name[11:] if len(each.name) > 10 else each.name[5:]
            x, is_last = (place + 0.5) * width, place == len(slots) - 1
            labels.append(tag("text", words, y=_CHART + 30, class_="end" if is_last else "middle",
                              x="100%" if is_last else f"{max(5.0, x):.2f}%"))  # fmt: skip
    parts += labels  # above the bars
    parts.append(tag("line", class_="base", x1="0", x2="100%", y1=_CHART + 14, y2=_CHART + 14))
    drawn = tag("svg", *parts, class_="chart", width="100%", height=_CHART + 36,
                aria_hidden="true")  # fmt: skip
    legend = [("cost", "running time" if is_free else "cost")]
    if any(each.failed.high for each in slots) and not is_free:
        legend.insert(0, ("failed", "of this, failed attempts"))
    if any(each.usd.high > each.usd.low for each in slots):
        legend.append(("maybe", "up to this: the host or its price is not known exactly"))
    keys = (
        tag("span", tag("svg", tag("rect", width=12, height=12, rx=2, class_=kind), width=12,
                        height=12, aria_hidden="true", class_="chart"), " ", words)
        for kind, words in legend
    )  # fmt: skip
    said = "Hours" if len(slots) and len(slots[0].name) > 10 else "Days, as in AWS's bills,"
    said += " in UTC, by the time of submission"
    return join((drawn, tag("p", *keys, tag("span", said, class_="dim"),
                            class_="keys")))  # fmt: skip


def _bar(slot: CostTotal, x: float, width: float, top: float, *, is_free: bool) -> Html:
    failed, low, high = 0.0, slot.seconds, slot.seconds
    if not is_free:
        failed, low, high = (float(each) for each in (slot.failed.low, slot.usd.low, slot.usd.high))
    said = (
        duration(slot.seconds) if is_free else amount(slot.usd, is_lower_bound=slot.is_lower_bound)
    )
    title = f"{slot.name}: {said}, {slot.runs} runs"
    place, wide = f"{x + width * 0.1:.3f}%", f"{width * 0.8:.3f}%"
    shown = [tag("title", title)]
    begin = 0.0
    for kind, value in (("failed", failed), ("cost", low), ("maybe", high)):
        height = _CHART * max(0.0, value - begin) / top if top else 0.0
        y = 14 + _CHART * (1 - max(value, begin) / top) if top else 0.0
        if height:
            shown.append(tag("rect", class_=kind, x=place, width=wide, y=f"{y:.2f}",
                             height=f"{height:.2f}"))  # fmt: skip
        begin = max(begin, value)
    return tag("g", *shown)


def nice_top(most: float) -> float:
    """The end of an axis: the least 1, 2, 2.5 or 5 times a power of ten that is not below."""
    if most <= 0:
        return 1.0
    power = 10.0 ** Decimal(str(most)).adjusted()
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= most * 0.999999)


# --- routes ---------------------------------------------------------------------------------------


class CostPages:
    """The routes of the page of costs."""

    def __init__(self, client: Client, hub: Hub, clock: Clock) -> None:
        self._client, self._hub, self._clock = client, hub, clock
        self._book = CostBook(self._ask, clock.now)

    def routes(self) -> list[Route]:
        return [route(PATH, self.page), route(f"{PATH}/panel", self.panel)]

    def _ask(self, since: float) -> list[RunCost]:
        """The costs of all projects, with names of queues for people."""
        costs = self._client.costs(since=since, all_projects=True)
        labels = distinct_names({each.queue for each in costs}, self._client.resource_label)
        return [replace(each, queue=labels[each.queue]) for each in costs]

    @property
    def _now(self) -> int:
        return int(self._clock.now() * 1000)

    @property
    def _is_local(self) -> bool:
        return self._hub.cluster is not None and self._hub.cluster.is_local

    def page(self, query: PageQuery) -> Html:
        chosen = read_filter(query.params)
        wait = "wait" in query.params  # a browser without scripts
        answer = (self._book.get if wait else self._book.known)(chosen.period)
        return cost_page(
            answer, chosen, self._now, self._client.env, is_local=self._is_local,
            trouble=self._hub.trouble, env_option=self._client.env_option,
        )  # fmt: skip

    def panel(self, query: PageQuery) -> Html:
        chosen = read_filter(query.params)
        answer = self._book.get(chosen.period)
        return cost_panel(answer, chosen, self._now, is_local=self._is_local)
