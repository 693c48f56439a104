"""Sweeps: a suggestion, the ledger, the report page, the controller."""

import tempfile
import time
from collections.abc import Callable, Iterator

from batchml.model.sweep import Dimension
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import MessageSender
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control.events import MessageReceived, PlannedTrial, TrialBatch
from batchml.sweeps.control.lease import AWS_INTERVALS
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.report.page import render_page, to_csv
from benchmarks.curves.cost import cpu, sizes
from benchmarks.rows import Curve
from benchmarks.sweep_quality import ask_times
from tests.support.sweep_story import BEGAN, started, told
from tests.support.sweep_world import World, spec_of

STEPS, PARALLEL = 27, 64
STEP_SECONDS = 20.0
SPACE = {
    "x": Dimension("float", 0.0, 1.0),
    **{f"float{n}": Dimension("float", 1e-4, 1e-1, log=n > 1) for n in range(4)},
    **{f"int{n}": Dimension("int", 1, 256, log=n > 0) for n in range(2)},
    "choice": Dimension("choice", values=("sgd", "adamw", "lion")),
}


def suggestions(full: bool) -> Iterator[Curve]:
    found = ask_times(sizes(full, 10_000, 10_000), peers=sizes(full, 1_000, 10_000))
    yield Curve(
        name="curves/suggestion", title="A suggestion of TPE, 64 at once", axis="trials",
        unit="ms of CPU", how="eight parameters; a few trials have changed; after 100 suggestions",
        points=found["of 64 at once"],
        peers={name: points for name, points in found.items() if name == "Optuna"},
    )  # fmt: skip
    yield Curve(
        name="curves/suggestion_alone", title="A suggestion of TPE, one at a time", axis="trials",
        unit="ms of CPU", how="eight parameters; a few trials have changed; after 100 suggestions",
        points=found["alone"],
        peers={name: points for name, points in found.items() if name == "Optuna"},
    )  # fmt: skip


def ledger(full: bool) -> Iterator[Curve]:
    loads, rounds, packs = [], [], []
    for size in sizes(full, 10_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            written = _write_ledger(folder, size)
            reports = size * STEPS
            packs.append((size, cpu(written.pack) / reports * 1e6))
            load = cpu(lambda: SweepLedger(FolderStore(folder)).load())
            loads.append((size, load / reports * 1e6))
            events = [MessageReceived(_message(number, STEPS)) for number in range(100)]
            rounds.append((size, cpu(lambda: written.append(events)) / 100 * 1e6))  # noqa: B023
    for name, title, points in (
        ("load", "Reading a ledger", loads),
        ("append", "Writing reports to a ledger", rounds),
        ("pack", "Packing a ledger", packs),
    ):
        yield Curve(
            name=f"curves/ledger_{name}", title=title, axis="trials", unit="us of CPU a report",
            how=f"{STEPS} reports of each trial", points=points,
        )  # fmt: skip


def _write_ledger(folder: str, trials: int) -> SweepLedger:
    written = SweepLedger(FolderStore(folder))
    written.take_over()
    planned = tuple(
        PlannedTrial(n, {"lr": 0.01, "optimizer": "sgd"}, n, "random") for n in range(trials)
    )
    written.append([TrialBatch(1, 1.0, "key", planned)])
    for step in range(1, STEPS + 1):
        written.append(MessageReceived(_message(number, step)) for number in range(trials))
    return written


def _message(number: int, step: int) -> dict[str, object]:
    job = f"6b0e1111-1111-4111-8111-111111111111:{number}"
    found = messages.make_message(
        MessageSender(1, number, 1, number, job, 10.0), step, messages.REPORT, 10.0 + step,
        [[step, [1 / (number + step)], 10.0 + step]], metrics={"loss": 1 / step},
    )  # fmt: skip
    return messages.add_end(found, messages.DONE, 0) if step == STEPS else found


def report(full: bool) -> Iterator[Curve]:
    pages, tables, bytes_ = [], [], []
    for size in sizes(full, 10_000, 100_000):
        state, sweep, now = told(size), started(), BEGAN + 1e6
        text: list[str] = []

        def draw(render: Callable[[], str]) -> None:
            text.append(render())  # noqa: B023

        pages.append((size, cpu(lambda: draw(lambda: render_page(sweep, state, now))) / size * 1e6))  # noqa: B023
        tables.append((size, cpu(lambda: to_csv(sweep, state, now)) / size * 1e6))  # noqa: B023
        bytes_.append((size, len(text[0].encode()) / 1024))
    yield Curve(
        name="curves/report_page", title="The report page of a sweep", axis="trials",
        unit="us of CPU a trial", how="a made-up sweep with TPE and asha", points=pages,
    )  # fmt: skip
    yield Curve(
        name="curves/report_csv", title="The table of a sweep as CSV", axis="trials",
        unit="us of CPU a trial", how="a made-up sweep with TPE and asha", points=tables,
    )  # fmt: skip
    yield Curve(
        name="curves/report_size", title="Size of the report page", axis="trials", unit="KiB",
        how="most of the trials are drawn together from some thousand on", points=bytes_,
        whole=True,
    )  # fmt: skip


def controller(full: bool) -> Iterator[Curve]:
    """The trials are scripted and the time is simulated (tests/support/sweep_world.py); the
    controller, its ledger, sampler and messages are the real ones, on a store in memory."""
    points = [(size, _control(size)) for size in sizes(full, 1_000, 10_000)]
    yield Curve(
        name="curves/controller", title="Controlling a sweep", axis="trials",
        unit="ms of CPU a trial",
        how=f"TPE and asha, {STEPS} steps, {PARALLEL} at once, simulated trials", points=points,
    )  # fmt: skip


def _control(trials: int) -> float:
    spec = spec_of("tpe", "asha", trials=trials, parallel=PARALLEL, steps=STEPS, space=SPACE)
    world = World(spec, intervals=AWS_INTERVALS, step_seconds=STEP_SECONDS)
    world.clock.others = 0.0  # what the script itself takes
    start, counted = time.process_time(), 0
    for snapshot in world.controller().snapshots():
        counted = snapshot.over
    return (time.process_time() - start - world.clock.others) / counted * 1000
