"""The table that a run shows of itself in a notebook."""

import threading
from collections.abc import Iterator
from typing import Any

from batchml.errors import ServiceUnreachable
from batchml.model.run import JobStatus, Run
from batchml.runs.watch.events import (
    MetricsReported,
    OutputLine,
    PollingPaused,
    RunEnded,
    RunEvent,
    StatusChanged,
)
from batchml.runs.watch.live_table import LiveTable, kernel_display, show_live_table
from tests.support.fakes import FakeClock


def run_in(status: JobStatus, **more: Any) -> Run:
    return Run("6b0e0000-0000-4000-8000-000000000001", "train", "default", status, **more)


def fed(*events: RunEvent) -> dict[str, str]:
    table = LiveTable(FakeClock(), {"loss": r"loss=([0-9.]+)"})
    for event in table.metrics.watch(events):
        table.take(event)
    return dict(table.rows())


def test_it_has_status_metrics_and_last_lines() -> None:
    rows = fed(
        StatusChanged(run_in(JobStatus.RUNNING)),
        *(OutputLine(0, f"epoch {n} loss={1 / n}") for n in (1, 2, 4, 8)),
        MetricsReported("s", ({"accuracy": 0.75},)),
    )
    assert rows["Run"] == "train 6b0e0000" and rows["Status"].startswith("RUNNING 0:00")
    assert rows["loss"].startswith("0.125 ") and rows["accuracy"].startswith("0.75 ")
    assert rows["Output"] == "epoch 2 loss=0.5\nepoch 4 loss=0.25\nepoch 8 loss=0.125"


def test_a_failed_run_says_why() -> None:
    ended = run_in(
        JobStatus.FAILED, exit_code=3, status_reason="Essential container in task exited",
        started_at=1,
    )  # fmt: skip
    rows = fed(StatusChanged(ended), RunEnded(ended))
    assert rows["Status"].endswith("FAILED") and "ended with code 3" in rows["Why"]


def test_an_array_shows_its_children() -> None:
    children = {"RUNNING": 2, "SUCCEEDED": 3, "FAILED": 1}
    rows = fed(
        StatusChanged(run_in(JobStatus.PENDING, children=children, array_size=6)),
        OutputLine(0, "hello", "4"),
    )
    assert rows["Children"] == "2 RUNNING, 4/6 done, 1 FAILED" and rows["Output"] == "4 | hello"


def test_texts_of_the_program_are_no_markup() -> None:
    table = LiveTable(FakeClock())
    table.take(OutputLine(0, "<script>alert(1)</script>"))
    assert "&lt;script&gt;" in table.to_html() and "<script>" not in table.to_html()


class Notebook:
    """Collects what a notebook shows: `display` of IPython, and the handle that it returns."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "Notebook":
        assert raw and display_id
        self.shown.append(bundle["text/html"])
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.shown.append(bundle["text/html"])


def test_it_is_current_until_the_run_has_ended() -> None:
    notebook, may_go_on = Notebook(), threading.Event()
    done = run_in(JobStatus.SUCCEEDED)

    def events() -> Iterator[RunEvent]:
        yield StatusChanged(run_in(JobStatus.RUNNING))
        may_go_on.wait(30)
        yield OutputLine(0, "loss=1")
        yield PollingPaused()
        yield StatusChanged(done)
        yield RunEnded(done)

    thread = show_live_table(events(), LiveTable(FakeClock()), notebook, "RunHandle(...)")
    assert len(notebook.shown) in (1, 2)  # the cell is done while the run goes on
    may_go_on.set()
    thread.join(30)
    assert "submitted" in notebook.shown[0] and "RUNNING" in notebook.shown[1]
    assert "loss=1" in notebook.shown[2] and "SUCCEEDED" in notebook.shown[-1]


def test_a_run_that_cannot_be_watched_any_more_says_so() -> None:
    def events() -> Iterator[RunEvent]:
        yield StatusChanged(run_in(JobStatus.RUNNING))
        raise ServiceUnreachable("no answer for 15 minutes")

    notebook = Notebook()
    show_live_table(events(), LiveTable(FakeClock()), notebook, "").join(30)
    assert "no answer for 15 minutes" in notebook.shown[-1]


def test_outside_a_notebook_there_is_no_display() -> None:
    assert kernel_display() is None
