"""Run the dashboard: the routes of its pages, its server, and the end of both."""

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from batchml.cli.output import say
from batchml.client import Client
from batchml.clock import Clock
from batchml.dashboard import logs, run, runs
from batchml.dashboard.access import AccessSecrets
from batchml.dashboard.acting.pages import ActingPages
from batchml.dashboard.acting.tools import Tools
from batchml.dashboard.app import Dashboard, PageQuery, Route, route
from batchml.dashboard.cluster import ClusterPages
from batchml.dashboard.compare import ComparePages
from batchml.dashboard.cost import CostPages
from batchml.dashboard.curves import curves_document, read_window
from batchml.dashboard.html import Html
from batchml.dashboard.hub import NEWEST, Hub
from batchml.dashboard.outputs import FilePages
from batchml.dashboard.server.workers import Workers
from batchml.dashboard.sweeps.routes import SweepPages
from batchml.dashboard.timeline import present_run, timeline_panel
from batchml.errors import AccessError, ServiceUnreachable
from batchml.model.run import Run

IDLE_AFTER = 3600.0  # seconds without a tab or a request, after which the dashboard ends
LOCAL_PACE, AWS_PACE = 0.5, 5.0  # seconds between two polls
_FIRST = 2.0  # seconds that the links wait for the newest runs
_LOOK = 5.0  # seconds between two looks whether a page is open


class Pages:
    """The pages of one environment: a method for each route."""

    def __init__(
        self,
        client: Client,
        hub: Hub,
        clock: Clock,
        opened: Tools,
        *,
        pace: float,
        read_only: bool = False,
    ) -> None:
        """`read_only`: show actions, with their command lines, but let nobody press them. `pace`:
        the least seconds between two readings of a sweep."""
        self._client, self._hub, self._clock = client, hub, clock
        self._read_only = read_only
        self._acting = ActingPages(client, opened, read_only=read_only)
        self._files = FilePages(client)
        self._sweeps = SweepPages(client, clock, pace=pace, read_only=read_only)
        self._compare = ComparePages(client, hub, clock)
        self._cluster = ClusterPages(client, hub, clock)
        self._costs = CostPages(client, hub, clock)
        self._cells = runs.RunCells()
        self._logs = logs.FollowedLogs(clock.monotonic)

    def drop_left(self) -> None:
        """End the threads that follow logs which no tab shows."""
        self._logs.drop_left()

    def stop(self) -> None:
        """End the threads that follow logs."""
        self._logs.stop()

    @property
    def _now(self) -> int:
        return int(self._clock.now() * 1000)

    def routes(self) -> list[Route]:
        return [
            route("/", self.runs),
            route("/api/runs", self.runs_document),
            route("/api/changes", self.changes),
            *self._cluster.routes(),
            *self._costs.routes(),
            *self._compare.routes(),
            *self._acting.routes(),
            *self._files.routes(),
            *self._sweeps.routes(),
            route("/run/*", self.run),
            route("/run/*/state", self.state),
            route("/run/*/metrics", lambda q: run.metrics_panel(self._run(q))),
            route("/run/*/usage", lambda q: run.usage_panel(self._run(q))),
            route("/run/*/cost", lambda q: run.cost_panel(self._run(q))),
            route("/run/*/request", self.request),
            route("/run/*/log", self.log),
            route("/run/*/lines", lambda q: logs.last_lines(self._run(q))),
            route("/run/*/log.txt", lambda q: logs.log_file(self._run(q))),
            route("/run/*/timeline", lambda q: timeline_panel(self._run(q), self._now)),
            route("/run/*/environment", lambda q: run.environment_panel(self._run(q).seen)),
            route("/run/*/series", self.series),
            route("/run/*/use", lambda q: curves_document(run.use_series(self._run(q)))),
        ]

    def runs(self, query: PageQuery) -> Html:
        self._hub.wait_until_fresh()
        words = query.params.get("q", "")
        if words:  # it may mean any run
            self._hub.wait_until_loaded()
        is_loaded = self._hub.is_loaded
        revision, found = self._hub.snapshot()
        known = self._cells.names(found, revision)
        shown = runs.matching(found, words, self._cells) if words else found
        return runs.runs_page(shown, revision, self._now, self._client.env,
                              query.params.get("cols", ""), self._hub.trouble, known,
                              is_loaded=is_loaded, words=words, total=len(found))  # fmt: skip

    def runs_document(self, query: PageQuery) -> dict[str, Any]:
        self._hub.wait_until_loaded()
        revision, found = self._hub.snapshot()
        return runs.runs_document(found, revision, self._now, query.params.get("cols", ""),
                                  self._cells, self._cells.names(found, revision))  # fmt: skip

    def changes(self, query: PageQuery) -> dict[str, Any]:
        """What a tab has missed since a revision: the document of those runs, or of all."""
        self._hub.wait_until_loaded()
        revision, found, is_whole = self._hub.changed_since(query.number("since", 0, 10**9))
        # A column may be of a parameter that the changed runs do not have.
        known = self._cells.names(self._hub.snapshot()[1], revision)
        columns = query.params.get("cols", "")
        document = runs.runs_document(found, revision, self._now, columns, self._cells, known)
        return {**document, "whole": is_whole}

    def _run(self, query: PageQuery) -> Any:
        known = self._hub.run(query.parts[0])
        return self._client.handle(known) if known else self._client.run(query.parts[0])

    def run(self, query: PageQuery) -> Html:
        found = self._run(query).seen
        state = self._state(found.run) if found.run else None  # as the hub knows it: no call
        return run.run_page(found, self._client.env, self._hub.trouble,
                            self._hub.snapshot()[0], state)  # fmt: skip

    def request(self, query: PageQuery) -> Html:
        return run.request_panel(self._run(query).seen)

    def state(self, query: PageQuery) -> Html:
        return self._state(present_run(self._run(query)))

    def _state(self, found: Run) -> Html:
        rows = self._hub.cluster.runs if self._hub.cluster else ()
        return run.state_panel(found, self._now, rows)

    def series(self, query: PageQuery) -> dict[str, Any]:
        handle, window = self._run(query), read_window(query.params)
        if window is not None:
            return curves_document([run.run_series(handle, window)])
        known, is_whole = self._logs.series(handle)
        found = curves_document([run.run_series(handle, known=known)])
        return {**found, "partial": not is_whole}

    def log(self, query: PageQuery) -> dict[str, Any]:
        return self._logs.document(self._run(query), query.number("after", 0, 10**9))

    def events(self, query: PageQuery) -> AsyncIterator[bytes]:
        return self._hub.events()


def serve(
    client: Client, known: AccessSecrets, listeners: list[socket.socket], clock: Clock, *,
    is_local: bool, begin: Callable[[], None], entered: Callable[[], None],
    opened: Tools,
) -> None:  # fmt: skip
    """Serve until Ctrl-C, the end of the terminal, or an hour without a page."""
    gc.enable()  # which short commands do without
    pace = LOCAL_PACE if is_local else AWS_PACE
    hub = Hub(client, clock.monotonic, pace=pace)
    pages = Pages(client, hub, clock, opened, pace=pace, read_only=known.read_only)
    try:
        asyncio.run(_serve(hub, pages, known, listeners, clock, begin, entered))
    finally:
        opened.close()


async def _serve(
    hub: Hub, pages: Pages, known: AccessSecrets, listeners: list[socket.socket], clock: Clock,
    begin: Callable[[], None], entered: Callable[[], None],
) -> None:  # fmt: skip
    import uvicorn

    last = clock.monotonic()

    def touch() -> None:
        nonlocal last
        last = clock.monotonic()
        hub.touch()

    app = Dashboard(known, pages.routes(), pages.events, touch, entered)
    config = uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
        http="h11", loop="asyncio", server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    await _load_newest(hub, over)
    threading.Thread(target=hub.poll_until_stopped, name="hub", daemon=True).start()
    serving = loop.create_task(server.serve(sockets=listeners))
    begin()
    while not over.is_set() and not serving.done():
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _LOOK)
        pages.drop_left()
        if is_idle(clock.monotonic() - last, has_listeners=hub.has_listeners):
            say("No page was open for an hour: the dashboard ends.")
            break
    hub.stop()
    pages.stop()
    await asyncio.sleep(
        0
    )  # the streams end by themselves, which the time-out below would break off
    server.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)


async def _load_newest(hub: Hub, over: asyncio.Event) -> None:
    """Read the newest runs; the others while the browser opens.

    An environment that is slow or denies is no reason to wait: the pages say so, and ask again.
    Raises what else the client raises, such as ConfigError.
    """
    reading = asyncio.wrap_future(Workers(1).submit(partial(hub.load, NEWEST)))
    ending = asyncio.ensure_future(over.wait())
    both: set[asyncio.Future[Any]] = {reading, ending}
    await asyncio.wait(both, timeout=_FIRST, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if reading.done():
        with suppress(AccessError, ServiceUnreachable):  # the next poll has it as `trouble`
            reading.result()
    else:
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())


def is_idle(seconds: float, *, has_listeners: bool) -> bool:
    """Whether the dashboard ends, so long after the last request. A tab tells that it is open."""
    return seconds > IDLE_AFTER and not has_listeners
