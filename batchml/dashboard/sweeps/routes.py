"""The routes of the pages of sweeps."""

from typing import Any
from urllib.parse import quote

from batchml.client import Client
from batchml.clock import Clock
from batchml.dashboard.app import PageQuery, Response, Route, route
from batchml.dashboard.html import Html
from batchml.dashboard.sweeps.actions import VERBS, TrialStops, actions_panel
from batchml.dashboard.sweeps.page import live_document, sweep_page
from batchml.dashboard.sweeps.reading import SweepReader, SweepReading
from batchml.dashboard.sweeps.table import MOST, sweeps_page, sweeps_rows
from batchml.errors import NotFound, UsageError, did_you_mean

_FIRST_PAINT = 0.15  # seconds that a page waits for sweeps; its script asks for the others
_PATIENCE = 20.0  # seconds that the script waits


class SweepPages:
    """The pages of all sweeps and of one."""

    def __init__(
        self, client: Client, clock: Clock, *, pace: float, read_only: bool = False
    ) -> None:
        self._client, self._clock, self._read_only = client, clock, read_only
        self._reader = SweepReader(client, clock.monotonic, pace=pace, read_only=read_only)
        self._stops = TrialStops(client.env_option, read_only)

    def routes(self) -> list[Route]:
        return [
            route("/sweeps", self.sweeps),
            route("/sweeps/rows", self.rows),
            route("/sweep/*", self.sweep),
            route("/sweep/*/live", self.live),
            route("/sweep/*/trial/*", self.trial),
            route("/sweep/*/actions", self.actions),
            route("/act/sweep/*/*", self.act),
        ]

    def sweeps(self, query: PageQuery) -> Html:
        lines, total = self._reader.lines(MOST, _FIRST_PAINT)
        words = query.params.get("q", "")
        return sweeps_page(lines, total, self._clock.now(), self._client.env, words)

    def rows(self, query: PageQuery) -> Html:
        lines, total = self._reader.lines(MOST, _PATIENCE)
        return sweeps_rows(lines, total, self._clock.now(), query.params.get("q", ""))

    def sweep(self, query: PageQuery) -> Html:
        reading = self._reader.read(query.parts[0], _FIRST_PAINT)
        return sweep_page(query.parts[0], reading, query, self._client.env, self._stops)

    def live(self, query: PageQuery) -> dict[str, Any]:
        return live_document(self._read(query), query, self._stops)

    def trial(self, query: PageQuery) -> Response:
        """To the page of a trial's run. Raises NotFound."""
        for each in self._read(query).trials:
            if str(each.number) == query.parts[1] and each.job_id:
                return Response(b"", status=303, headers={"location": f"/run/{quote(each.job_id)}"})
        raise NotFound("Run of trial", query.parts[1], [], "It has not begun.")

    def actions(self, query: PageQuery) -> Html:
        return actions_panel(self._read(query), self._client.env_option,
                             read_only=self._read_only)  # fmt: skip

    def act(self, query: PageQuery) -> dict[str, Any]:
        """The routes /act/sweep/KEY/VERB."""
        key, verb = query.parts
        work = VERBS.get(verb)
        if work is None:
            raise UsageError(f"{verb}: a sweep cannot do this.{did_you_mean(verb, VERBS)}")
        return work(self._reader.handle(key), query.body)

    def _read(self, query: PageQuery) -> SweepReading:
        reading = self._reader.read(query.parts[0])
        assert reading is not None, "without patience it waits"
        return reading
