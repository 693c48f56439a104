"""SweepHandle: a sweep in the Python API."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchml.context import Context, Notify
from batchml.jobs.written import note_written
from batchml.model.sweep import SweepSpec, Trial
from batchml.rich_html import to_html
from batchml.sweeps.control.inbox import SweepRequest, put_request
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.jobs import check_code, describe_old_code, send_code
from batchml.sweeps.manage import make_confirm, make_rerun, make_resume, make_top_up, stop_sweep
from batchml.sweeps.report.data import make_document
from batchml.sweeps.report.page import data_files, write_report
from batchml.sweeps.results import best_trial
from batchml.sweeps.run import control_sweep, detach_sweep
from batchml.sweeps.started import StartedSweep, load_started
from batchml.sweeps.stores import SweepStore, open_sweep_store
from batchml.sweeps.summary import SweepSnapshot, SweepSummary
from batchml.sweeps.view import SweepView


class SweepHandle:
    """One sweep. Each call reads what is new since the last one, for one thread at a time.

    Every method may raise AccessError, ServiceError, ServiceUnreachable, and SweepStoreError.
    """

    def __init__(self, context: Context, key: str, tell: Notify | None = None) -> None:
        self._context = context
        self.key = key
        self._tell = tell or (lambda _words: None)
        self._store: SweepStore | None = None
        self._sweep: StartedSweep | None = None
        self._view: SweepView | None = None

    def __repr__(self) -> str:
        return f"SweepHandle({self.key!r}, env={self._context.env!r})"

    def _repr_html_(self) -> str:
        """The sweep in a notebook as it is now: its state, its best trials, their history."""
        return to_html(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SweepHandle):
            return NotImplemented
        return (self.key, self._context.env) == (other.key, other._context.env)

    def __hash__(self) -> int:
        return hash((self.key, self._context.env))

    # --- State ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the sweep."""
        return self._started().name

    @property
    def spec(self) -> SweepSpec:
        """The sweep file, with all defaults: goals, space, method, limits."""
        return self._started().spec

    @property
    def started(self) -> StartedSweep:
        """The sweep as it was started: project, time, job, price."""
        return self._started()

    def describe(self, *, control: bool = False) -> SweepSummary:
        """The sweep as it is now, or its result: `snapshot`, `why`, `by`, `pareto`, `confirmed`.

        A later call changes the trials in the answer. With `control`, a sweep whose trials run
        without a controller is controlled for one round, which finds the trials that ended without
        a message.
        """
        view = self._open_view()
        if control:
            view.snapshot()
        return view.describe()

    def controller(self) -> str:
        """The sweep's controller, for people; "" if it has none."""
        return self._open_view().holder()

    def document(self) -> dict[str, Any]:
        """The content of the report as plain values: see `batchml.sweeps.report.data`."""
        return make_document(self._started(), self._state(), self._context.clock.now())

    def best(self) -> Trial | None:
        """The best trial so far; None without a result."""
        best = best_trial(self._state(), self._started().spec)
        return _copy(best) if best else None

    def trials(self) -> list[Trial]:
        """All trials so far, by their number."""
        return [_copy(trial) for _, trial in sorted(self._state().trials.items())]

    # --- Actions ----------------------------------------------------------------------------

    def wait(
        self,
        see: Callable[[SweepSnapshot], None] | None = None,
        timeout: float | None = None,
    ) -> SweepSummary:
        """Wait until the sweep has ended; its result. This process controls it if no other does.

        `see` is called with a snapshot each round. Raises TimeoutError after `timeout` seconds;
        submitted trials continue then, and another `wait` continues the sweep.
        """
        context = self._context
        end = None if timeout is None else context.clock.monotonic() + timeout
        view = SweepView(context, self._started(), self._open())
        controller = control_sweep(context, self._started(), self._open(), self._tell)
        source = view if view.holder() else controller
        with closing(source.snapshots()) as snapshots:
            for snapshot in snapshots:
                if see is not None:
                    see(snapshot)
                if end is not None and context.clock.monotonic() >= end and not snapshot.ended:
                    raise TimeoutError(f"Not ended after {timeout:g} seconds. Its trials continue.")
        return source.summary

    def detach(self) -> None:
        """Let the sweep run without this process: by itself, or with a controller that is a run."""
        detach_sweep(self._context, self._started(), self._open(), self._tell)

    def stop(self, *, now: bool = False) -> None:
        """Have every trial save and end, and begin no other; with `now`, without the grace period.

        Waits a few polls for the controller to read the stop signal; without a controller, until
        the sweep has ended.
        """
        stop_sweep(self._context, self._started(), self._open(), now=now, tell=self._tell)

    def resume(self) -> None:
        """Cancel a stop. The sweep continues with the next `wait` or `detach`.

        Raises UsageError for a sweep that has ended by itself.
        """
        self._request(make_resume(self._open()))

    def top_up(
        self,
        *,
        trials: int | None = None,
        hours: float | None = None,
        cost: float | None = None,
        parallel: int | None = None,
    ) -> None:
        """Set other limits, as totals. The sweep continues with the next `wait` or `detach`.

        `cost` is in USD. Raises UsageError with every mistake in the limits.
        """
        self._request(
            make_top_up(
                self._started(),
                self._open(),
                trials=trials,
                hours=hours,
                cost=cost,
                parallel=parallel,
            )
        )

    def rerun(self, trials: Sequence[int] = (), *, code: bool = False) -> bool:
        """Run these trials, or all failed ones, again from their beginning. False if none failed.

        With `code` they and all later trials run the present code. Raises UsageError for trials
        that do not exist or have not ended, and for code that cannot be sent.
        """
        request = make_rerun(self._open(), tuple(trials))
        if request is None:
            return False
        if code:
            send_code(self._context, self._started(), self._open(), tell=self._tell)
        elif words := describe_old_code(self._context, self._started(), self._open()):
            self._tell(words)
        self._request(request)
        return True

    def confirm(self, top: int | None = None, seeds: int | None = None) -> None:
        """Run the `top` best trials again, each with `seeds` other seeds.

        The defaults are those of the sweep file.

        Raises UsageError if no trial has a result.
        """
        self._request(make_confirm(self._started(), self._open(), top, seeds))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report: one HTML file that needs no network, with CSV and JSON beside it."""
        page = Path(path)
        write_report(self._started(), self._state(), page, self._context.clock)
        note_written(self._context.home, [page, *data_files(page)])
        return page

    # --- Internals --------------------------------------------------------------------------

    def _request(self, request: SweepRequest | None) -> None:
        """Write a request for the controller. Raises NotFound if the sweep's code is gone."""
        check_code(self._context, self._started(), self._open())
        if request is not None:
            put_request(self._open(), request)

    def _open(self) -> SweepStore:
        if self._store is None:
            self._store = open_sweep_store(self._context, self.key)
        return self._store

    def _started(self) -> StartedSweep:
        if self._sweep is None:
            self._sweep = load_started(self._open(), self.key)
        return self._sweep

    def _open_view(self) -> SweepView:
        if self._view is None:
            self._view = SweepView(self._context, self._started(), self._open())
        return self._view

    def _state(self) -> SweepState:
        return self._open_view().state


def _copy(trial: Trial) -> Trial:
    """The trial as it is now: the sweep's own is changed by what is read later."""
    reports, decisions = list(trial.reports), list(trial.decisions)
    return replace(trial, reports=reports, decisions=decisions, metrics=dict(trial.metrics))
