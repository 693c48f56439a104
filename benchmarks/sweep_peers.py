"""The tools that `sweep_local.py` compares with; run by the Python in which they are installed.

`python sweep_peers.py pool|optuna|ray TRIALS SLOTS PROGRAM`: random search for the best `score`,
each trial a process of its own, SLOTS at a time. Prints the best score.
"""

import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

LEAST, MOST = 1e-4, 1e-1  # of lr, as in the sweep file


def train(program: str, lr: float) -> float:
    """One trial: its score. Raises CalledProcessError when it fails."""
    words = [sys.executable, "-S", program, "--lr", str(lr)]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    return float(found.stdout.rpartition(b"score=")[2])


def _draw(seed: int) -> float:
    low, high = math.log(LEAST), math.log(MOST)
    return math.exp(random.Random(seed).uniform(low, high))


def _one(work: tuple[str, int]) -> float:
    program, number = work
    return train(program, _draw(number))


def pool(trials: int, slots: int, program: str) -> float:
    """The floor: nothing is kept but the best."""
    import multiprocessing

    with multiprocessing.Pool(slots) as workers:
        found = workers.imap_unordered(_one, [(program, number) for number in range(trials)])
        return max(found)


def _work(storage: str, trials: int, program: str) -> None:
    import optuna  # type: ignore[import-not-found,unused-ignore]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(
        study_name="s", storage=_storage(storage), sampler=optuna.samplers.RandomSampler()
    )
    study.optimize(
        lambda trial: train(program, trial.suggest_float("lr", LEAST, MOST, log=True)), trials
    )


def _storage(path: str) -> Any:
    from optuna.storages import JournalStorage  # type: ignore[import-not-found,unused-ignore]
    from optuna.storages.journal import (  # type: ignore[import-not-found,unused-ignore]
        JournalFileBackend,
    )

    return JournalStorage(JournalFileBackend(path))


def with_optuna(trials: int, slots: int, program: str) -> float:
    """As its documentation has it: processes that share a study, kept in its journal of a file."""
    import multiprocessing

    import optuna  # type: ignore[import-not-found,unused-ignore]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "journal")
        study = optuna.create_study(study_name="s", storage=_storage(path), direction="maximize")
        shares = [trials // slots + (place < trials % slots) for place in range(slots)]
        start = multiprocessing.get_context("spawn").Process
        workers = [start(target=_work, args=(path, share, program)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if len(study.trials) != trials:
            raise RuntimeError(f"{len(study.trials)} of {trials} trials")
        return float(study.best_value)


def with_ray(trials: int, slots: int, program: str) -> float:
    """A function that is tuned, with its output kept off the terminal."""
    import ray  # type: ignore[import-not-found,unused-ignore]
    from ray import tune

    def trainable(config: dict[str, float]) -> dict[str, float]:
        return {"score": train(program, config["lr"])}

    ray.init(num_cpus=slots, log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            trainable,
            param_space={"lr": tune.loguniform(LEAST, MOST)},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", num_samples=trials, max_concurrent_trials=slots
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        found = tuner.fit()
        if len(found) != trials or found.num_errors:
            raise RuntimeError(f"{len(found)} of {trials} trials, {found.num_errors} failed")
        return float(found.get_best_result().metrics["score"])


WAYS: dict[str, Callable[[int, int, str], float]] = {
    "pool": pool, "optuna": with_optuna, "ray": with_ray,
}  # fmt: skip


if __name__ == "__main__":
    way, trials, slots, program = sys.argv[1:]
    print(WAYS[way](int(trials), int(slots), program))
