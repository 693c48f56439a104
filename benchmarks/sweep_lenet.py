"""A search on real trainings: LeNet on MNIST, our default against random search, on `local`.

Random search trains each of its trials to the end. TPE + ASHA is given as many trials, and then so
many that it uses about as many epochs. All of it is real: the job that ships with batchml, on few
digits (tests/support/few_digits.py), the embedded AWS Batch, the controller. What is best is the
highest validation accuracy that any trial printed so far; *match* is the share of random search's
epochs after which a search is as good as random search ever gets. Epochs do not count the starts
of programs, so the time is a row, too.

A minute or two, which show that it works; `--full` takes ten to fifteen minutes on two cores that
do nothing else. `BATCHML_BENCH_SEEDS` is the number of searches of each, with other seeds (1 unless
set).
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchml.client import Client
from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from batchml.model.sweep import Trial
from benchmarks.lenet import interpreter
from benchmarks.rows import Finding, LeftOut, alone, paired
from benchmarks.running import main
from tests.support.few_digits import few_digits

SEEDS = int(os.environ.get("BATCHML_BENCH_SEEDS", "1"))
_SPACE = {"lr": {"log": [1e-4, 1.0]}, "batch_size": [16, 32, 64, 128, 256]}


class Size(NamedTuple):
    trials: int
    epochs: int
    images: int  # to train on
    validation: int
    more: int  # times the trials, for the search that uses about as many epochs as random search


SIZE = Size(trials=6, epochs=3, images=2000, validation=1000, more=2)
FULL = Size(trials=24, epochs=9, images=4000, validation=4000, more=3)


class Way(NamedTuple):
    """A way to search."""

    label: str
    method: str
    stops: bool
    trials: int


def ways(size: Size) -> tuple[Way, ...]:
    return (
        Way("random", "random", stops=False, trials=size.trials),
        Way("tpe_asha", "tpe", stops=True, trials=size.trials),
        Way("tpe_asha_more", "tpe", stops=True, trials=size.more * size.trials),
    )


class Searched(NamedTuple):
    """What came of a search. `history` has the best accuracy after each epoch of training, of all
    trials together, in the order in which they were trained."""

    history: list[float]
    seconds: float

    def match(self, accuracy: float) -> int | None:
        """The epochs after which it was as good as that; None: it never was."""
        found = (count for count, best in enumerate(self.history, 1) if best >= accuracy)
        return next(found, None)


def measure(full: bool) -> Iterator[Finding]:
    size = FULL if full else SIZE
    environments = interpreter("pytorch").parents[2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = Home(folder / "home")
        home.prepare()
        home.envs.symlink_to(environments)
        few_digits(folder, "lenet", train=size.images, validation=size.validation)
        client = Client("local", folder, environ={**os.environ, "BATCHML_HOME": str(home.root)})
        try:
            found = {
                way.label: [search(client, size, way, seed) for seed in range(SEEDS)]
                for way in ways(size)
            }
        finally:
            control.stop_server(home, SystemClock())
    yield from _rows(found, size)


def _rows(found: dict[str, list[Searched]], size: Size) -> Iterator[Finding]:
    floors = found.pop("random")
    trials = f"{size.trials} trials of {size.epochs} epochs, {size.images:,} images"
    for label, searched in found.items():
        pairs = list(zip(searched, floors, strict=True))
        values: dict[str, tuple[str, Callable[[Searched], float]]] = {
            "error": ("", lambda each: 1 - each.history[-1]),
            "epochs": ("epochs", lambda each: float(len(each.history))),
            "seconds": ("s", lambda each: each.seconds),
        }
        for what, (unit, value) in values.items():
            yield paired(
                f"sweep_lenet/{label}.{what}", f"{what} of {label}, {trials}", unit,
                [(value(ours), value(theirs)) for ours, theirs in pairs], beside="random search",
            )  # fmt: skip
        shares = [
            (ours.match(theirs.history[-1]) or math.inf) / len(theirs.history)
            for ours, theirs in pairs
        ]
        if math.isfinite(max(shares)):
            yield alone(
                f"sweep_lenet/{label}.match", f"match of {label}, {trials}", "of random's epochs",
                shares, goal=0.5,
            )  # fmt: skip
        else:
            yield LeftOut(
                name=f"sweep_lenet/{label}.match", why="it was never as good as random search"
            )


def table(size: Size, way: Way, seed: int) -> dict[str, Any]:
    """The sweep file."""
    stops = {"max": size.epochs} if way.stops else {"method": "none"}
    return {
        "job": "lenet",
        "goal": {"max": "val_accuracy"},
        "method": way.method,
        "seed": seed,
        "space": {**_SPACE, "epochs": size.epochs},
        "early_stop": stops,
        "limits": {"trials": way.trials, "parallel": os.cpu_count() or 1},
    }


def search(client: Client, size: Size, way: Way, seed: int) -> Searched:
    start = time.perf_counter()
    handle = client.sweep(table(size, way, seed), name=f"{way.method}-{way.trials}-{seed}")
    handle.wait()
    return Searched(history(handle.trials()), time.perf_counter() - start)


def history(trials: Sequence[Trial]) -> list[float]:
    reports = sorted((each.at, each.values[0]) for trial in trials for each in trial.reports)
    found, best = [], 0.0
    for _, accuracy in reports:
        best = max(best, accuracy)
        found.append(best)
    return found


if __name__ == "__main__":
    main(measure)
