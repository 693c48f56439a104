"""A search on real trainings: LeNet on MNIST, our default against random search, on `local`.

Random search trains each of its trials to the end. TPE + ASHA is given as many trials, and then so
many that it uses about as many epochs. All of it is real: the job that ships with batchml, on few
digits (tests/support/few_digits.py), the embedded AWS Batch, the controller. What is best is the
highest validation accuracy that any trial printed so far; *match* is the share of random search's
epochs after which a search is as good as random search ever gets. Epochs do not count the starts
of programs, so the minutes are printed, too; they are those of this machine, which may be busy.

A minute or two, which show that it works; `BATCHML_BENCH_LONG=1` takes ten to fifteen minutes on
two cores that do nothing else. `BATCHML_BENCH_SEEDS` is the number of searches of each, with
other seeds (1 unless set).
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchml.client import Client
from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from batchml.model.sweep import Trial
from benchmarks.lenet import interpreter
from tests.support.few_digits import few_digits

SEEDS = int(os.environ.get("BATCHML_BENCH_SEEDS", "1"))
PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of random search's epochs
_SPACE = {"lr": {"log": [1e-4, 1.0]}, "batch_size": [16, 32, 64, 128, 256]}


class Size(NamedTuple):
    trials: int
    epochs: int
    images: int  # to train on
    validation: int
    more: int  # times the trials, for the search that uses about as many epochs as random search


SIZE = (
    Size(trials=24, epochs=9, images=4000, validation=4000, more=3)
    if os.environ.get("BATCHML_BENCH_LONG")
    else Size(trials=6, epochs=3, images=2000, validation=1000, more=2)
)


class Way(NamedTuple):
    """A way to search."""

    label: str
    method: str
    stops: bool
    trials: int


WAYS = (
    Way("random", "random", stops=False, trials=SIZE.trials),
    Way("TPE + ASHA", "tpe", stops=True, trials=SIZE.trials),
    Way("TPE + ASHA, more trials", "tpe", stops=True, trials=SIZE.more * SIZE.trials),
)


class Searched(NamedTuple):
    """What came of a search. `history` has the best accuracy after each epoch of training, of all
    trials together, in the order in which they were trained."""

    history: list[float]
    seconds: float

    def best(self, epochs: float) -> float:
        """After so many epochs, 0 before the first; after all of them where there were fewer."""
        return self.history[: int(epochs)][-1] if epochs >= 1 else 0.0

    def match(self, accuracy: float) -> int | None:
        """The epochs after which it was as good as that; None: it never was."""
        found = (count for count, best in enumerate(self.history, 1) if best >= accuracy)
        return next(found, None)


def main() -> None:
    environments = interpreter("pytorch").parents[2]
    print(
        f"{SIZE.trials} trials, {SIZE.epochs} epochs of {SIZE.images:,} images, "
        f"{SIZE.validation:,} to validate, {os.cpu_count()} at once; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = Home(folder / "home")
        home.prepare()
        home.envs.symlink_to(environments)
        few_digits(folder, "lenet", train=SIZE.images, validation=SIZE.validation)
        environ = {**os.environ, "BATCHML_HOME": str(home.root)}
        client = Client("local", folder, environ=environ)
        try:
            for seed in range(SEEDS):
                _show_all(client, seed)
        finally:
            control.stop_server(home, SystemClock())


def table(way: Way, seed: int) -> dict[str, Any]:
    """The sweep file."""
    stops = {"max": SIZE.epochs} if way.stops else {"method": "none"}
    return {
        "job": "lenet",
        "goal": {"max": "val_accuracy"},
        "method": way.method,
        "seed": seed,
        "space": {**_SPACE, "epochs": SIZE.epochs},
        "early_stop": stops,
        "limits": {"trials": way.trials, "parallel": os.cpu_count() or 1},
    }


def search(client: Client, way: Way, seed: int) -> Searched:
    start = time.perf_counter()
    handle = client.sweep(table(way, seed), name=f"{way.method}-{way.trials}-{seed}")
    handle.wait()
    return Searched(history(handle.trials()), time.perf_counter() - start)


def history(trials: Sequence[Trial]) -> list[float]:
    reports = sorted((each.at, each.values[0]) for trial in trials for each in trial.reports)
    found, best = [], 0.0
    for _, accuracy in reports:
        best = max(best, accuracy)
        found.append(best)
    return found


def _show_all(client: Client, seed: int) -> None:
    parts = "".join(f"{f'at {part:.1%}':>10}" for part in PARTS)
    print(f"seed {seed}: error of the best so far, after shares of random search's epochs")
    print(f"{'':<24}{'trials':>7}{'epochs':>7}{'min':>6}{parts}{'match':>7}", flush=True)
    floor: Searched | None = None
    for way in WAYS:
        found = search(client, way, seed)
        floor = floor or found
        print(_row(way, found, floor), flush=True)


def _row(way: Way, found: Searched, floor: Searched) -> str:
    every = len(floor.history)
    errors = "".join(f"{1 - found.best(part * every):>10.4f}" for part in PARTS)
    epochs = found.match(floor.history[-1])
    return (
        f"{way.label:<24}{way.trials:>7}{len(found.history):>7}{found.seconds / 60:>6.1f}{errors}"
        f"{'never' if epochs is None else f'{epochs / every:.2f}':>7}"
    )


if __name__ == "__main__":
    main()
