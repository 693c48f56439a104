"""`batchml.sweeps.forecast`: the size, time and cost that `sweep check` prints."""

import shlex
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.job import JobSpec, read_job
from batchml.model.names import long_duration
from batchml.model.sweep import SweepSpec, Trial, TrialReport, TrialState
from batchml.sweeps.control.pruning import RungResults, rung_ends
from batchml.sweeps.forecast import Forecast, RungForecast, describe, make_forecast
from batchml.sweeps.spec.file import read_sweep

SPACE = {"lr": {"log": [1e-4, 0.1]}, "opt": ["sgd", "adamw"]}


def sweep(**table: Any) -> SweepSpec:
    whole = {"job": "lenet", "goal": {"max": "acc"}, "space": SPACE, "seed": 1}
    limits = {"trials": 64, "parallel": 16}
    return read_sweep({**whole, "limits": limits, **table}, "sweep.toml")


def job(**table: Any) -> JobSpec:
    whole = {"image": "i", "command": ["python", "train.py", "{params}"], "params": {"n": 2}}
    return read_job({**whole, **table}, "job.toml")


def test_the_rungs_of_stopping_halving_and_promoting() -> None:
    stopping = make_forecast(sweep(early_stop={"max": 27}))
    assert stopping.rungs == (
        RungForecast(1, 64, 64, 64, 64),
        RungForecast(3, 22, 64, 44, 128),
        RungForecast(9, 11, 64, 66, 384),
        RungForecast(27, 7, 64, 126, 1152),
    )
    assert (stopping.steps, stopping.steps_at_worst, stopping.steps_in_full) == (300, 1728, 1728)
    assert stopping.trainings == 4.0
    halving = make_forecast(sweep(early_stop={"max": 27, "method": "halving"}))
    assert (halving.steps, halving.steps_at_worst) == (184, 184)
    assert halving.trainings == pytest.approx((4 * 1 + 2 * 2 + 1 * 6 + 1 * 18) / 27, abs=0.01)
    promoting = make_forecast(sweep(early_stop={"max": 27, "resume": True}))
    assert [(rung.trials, rung.at_worst) for rung in promoting.rungs] == [
        (64, 64), (25, 62), (11, 60), (4, 58),
    ]  # fmt: skip
    assert promoting.trainings == 4.0
    alone = make_forecast(sweep(early_stop={"max": 27, "resume": True}, limits={"trials": 1}))
    assert [(rung.trials, rung.at_worst) for rung in alone.rungs] == [(1, 1)] * 4


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("count", "eta"), [(8, 3), (16, 3), (30, 4), (64, 2)])
def test_the_forecast_is_what_the_rules_of_the_rungs_decide(
    resume: bool, count: int, eta: int
) -> None:
    spec = sweep(
        early_stop={"max": 27, "eta": eta, "resume": resume},
        limits={"trials": count},
        method="random",
    )
    found = make_forecast(spec)
    assert found.steps is not None
    ran = [run_steps(spec, list(numbers(seed, count))) for seed in range(60)]
    assert found.steps == pytest.approx(sum(ran) / len(ran), rel=0.12)
    rising = run_steps(spec, [number / count for number in range(count)])
    assert max(ran) <= rising <= (found.steps_at_worst or 0)


def numbers(seed: int, count: int) -> Iterator[float]:
    random = Random(seed)
    return (random.random() for _ in range(count))


def run_steps(spec: SweepSpec, values: Sequence[float]) -> int:
    """The steps of trials with these values, one trial after the other, by the cut-offs."""
    rungs, ends = RungResults(spec), rung_ends(spec)
    trials = [Trial(number, {}, 0) for number in range(len(values))]

    def reach(trial: Trial, step: int) -> None:
        trial.reports.append(TrialReport(step, (values[trial.number],)))
        trial.state = TrialState.PAUSED if step < ends[-1] else TrialState.DONE
        rungs.note(trial)

    for trial in trials:
        if spec.early_stop.resume:
            reach(trial, ends[0])
            while chosen := rungs.promotable(1):
                reach(trials[chosen[0][0]], chosen[0][1])
            continue
        for number, step in enumerate(ends):
            cutoff = rungs.cutoffs(0).rungs.get(number)
            reach(trial, step)
            if cutoff is not None and values[trial.number] < cutoff[1]:
                break
    if all(trial.state is not TrialState.DONE for trial in trials):
        reach(trials[rungs.best_paused() or 0], ends[-1])
    return sum(trial.step for trial in trials)


def test_without_early_stopping_all_are_trained_fully() -> None:
    found = make_forecast(
        sweep(early_stop={"max": 10, "method": "none"}, confirm={"top": 2, "seeds": 3})
    )
    assert found.rungs == (RungForecast(10, 64, 64, 640, 640),)
    assert (found.confirming, found.steps, found.steps_at_worst) == (6, 700, 700)
    assert found.trainings == 5.0


def test_what_nobody_can_tell_is_not_told() -> None:
    found = make_forecast(sweep(limits={"cost": 20}))
    assert (found.trials, found.rungs, found.steps, found.trainings) == (None, (), None, None)
    assert (found.trial_hours, found.cost, found.points) == (None, 20.0, None)
    free = make_forecast(sweep())
    assert free.cost is None
    assert any("not bounded" in line for line in describe(free))


def test_money_is_bounded_by_the_first_limit_that_is_met() -> None:
    limits = {"trials": 64, "parallel": 16}
    long = job(timeout="2h", retry={"attempts": 3})
    assert make_forecast(sweep(), long, hourly=0.5).trial_hours == 64 * 3 * 2
    assert make_forecast(sweep(), long, hourly=0.5).cost == 192.0
    assert make_forecast(sweep(limits={**limits, "hours": 3}), long, hourly=0.5).trial_hours == 48
    assert make_forecast(sweep(limits={**limits, "cost": 9}), long, hourly=0.5).cost == 9.0
    assert make_forecast(sweep(), long).cost is None
    # A trial that goes on from its checkpoint is another container, with a timeout of its own.
    halving = sweep(early_stop={"max": 9, "method": "halving"})
    assert make_forecast(halving, job(timeout="1h")).trial_hours == 64 + 21 + 7


def test_sample_commands_are_those_of_the_first_trials() -> None:
    found = make_forecast(sweep(), job())
    assert len(found.commands) == 3
    for command in found.commands:
        words = shlex.split(command)
        assert words[:4] == ["python", "train.py", "--n", "2"]
        assert words[4::2] == ["--lr", "--opt"]
    assert found.commands == make_forecast(sweep(), job()).commands
    given = make_forecast(sweep(), job(), samples=[{"lr": 0.5, "opt": "a b"}])
    assert given.commands == ("python train.py --n 2 --lr 0.5 --opt 'a b'",)
    small = sweep(method="grid", space={"opt": ["sgd", "adamw"]}, limits={})
    assert len(make_forecast(small, job()).commands) == 2


def test_the_forecast_in_words() -> None:
    spec = sweep(early_stop={"max": 27}, confirm={}, limits={
        "trials": 64, "hours": 12, "cost": 50, "target": 0.995, "failed": "10%"
    })  # fmt: skip
    assert describe(
        make_forecast(spec, job(), hourly=1.0, samples=[{"lr": 0.5, "opt": "sgd"}])
    ) == [
        "Space: 2 parameters, infinitely many points; method tpe, seed 1.",
        "Trials: 64, 16 at once, then 9 more to confirm the best.",
        "Rungs: asha, eta 3, counted in epoch.",
        "     until   trials  at worst      steps",
        "         1       64        64         64",
        "         3       22        64         44",
        "         9       11        64         66",
        "        27        7        64        126",
        "  Trials are compared after 1 epoch: raise early_stop.min if that is too early.",
        "Steps: about 543, 1,971 at worst: 28 % of 1,971 without early stopping.",
        "  That is for trials in random order. The better trials that tpe finds run on: "
        "two or three times as many are possible.",
        "At longest: 5 full trainings one after the other.",
        "Time of all containers: 192 hours at worst.",
        "Cost: 50.00 USD at worst.",
        "Ends early at: 12 hours, 50.00 USD, acc 0.995, more than 10% failed.",
        "The first trials:",
        "  python train.py --n 2 --lr 0.5 --opt sgd",
        "The job's [params] has no lr, opt: {params} passes them to the program.",
    ]


def test_times_are_said_in_words_and_what_is_free_has_no_cost() -> None:
    found = make_forecast(sweep(limits={"hours": "5s", "parallel": 2, "failed": 3}), hourly=0.0)
    said = [line for line in describe(found) if line.startswith(("Time", "Cost", "Ends"))]
    assert said == [
        "Time of all containers: 10 seconds at worst.",
        "Ends early at: 5 seconds, more than 3 failed.",
    ]
    shown = [
        long_duration(hours * 3600) for hours in (1 / 3600, 0.5, 1, 1.5, 2, 2.25, 1 / 3, 20_000)
    ]
    assert shown == [
        "1 second", "30 minutes", "1 hour", "90 minutes", "2 hours", "2.25 hours", "20 minutes",
        "20,000 hours",
    ]  # fmt: skip


def test_it_travels_as_json() -> None:
    found = make_forecast(sweep(early_stop={"max": 27}), job(), hourly=1.0)
    assert msgspec.convert(msgspec.to_builtins(found), Forecast) == found


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 500), st.integers(1, 64), st.integers(2, 100), st.integers(2, 10),
    st.sampled_from(["asha", "halving", "median", "none"]), st.booleans(),
)  # fmt: skip
def test_the_worst_is_never_less_than_the_expected_nor_more_than_all(
    trials: int, parallel: int, most: int, eta: int, method: str, resume: bool
) -> None:
    stop = {"max": most, "min": 1, "eta": eta, "method": method}
    if method == "asha":
        stop["resume"] = resume
    found = make_forecast(sweep(early_stop=stop, limits={"trials": trials, "parallel": parallel}))
    assert found.steps is not None and found.steps_at_worst is not None
    assert found.steps <= found.steps_at_worst <= trials * most == found.steps_in_full
    assert found.rungs[-1].until == most
    assert describe(found)
