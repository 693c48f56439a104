"""Any sweep, with any mishaps: what always holds."""

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import ConfirmSettings, TrialState
from batchml.sweeps.control.lease import LOCAL_INTERVALS
from tests.support.sweep_stores import Killed, KillingStore
from tests.support.sweep_world import Fault, World, spec_of

SHAPES = (
    ("random", "none", False), ("random", "asha", False), ("sobol", "median", False),
    ("tpe", "none", False), ("tpe", "asha", False), ("tpe", "asha", True),
    ("random", "halving", False),
)  # fmt: skip


def world_of(dice: Random, shape: tuple[str, str, bool], parallel: int) -> World:
    """A sweep of some trials, of which some have bad luck and some bad messengers."""
    method, stopping, resume = shape
    more: dict[str, Any] = {"confirm": ConfirmSettings(2, 2)} if dice.random() < 0.3 else {}
    trials = dice.randrange(1, 25)
    spec = spec_of(
        method, stopping, trials=trials, parallel=parallel, resume=resume, failed_share=None,
        steps=dice.choice([2, 9, 10]), **more,
    )  # fmt: skip
    kinds = ("fails", "nan", "vanishes", "mute")
    faults = {
        number: Fault(dice.choice(kinds), dice.randrange(3))
        for number in range(1, trials)
        if dice.random() < 0.2
    }
    world = World(spec, faults=faults, curve=lambda params, step, seed: dice.random())
    world.lose = lambda message: message["kind"] == "report" and dice.random() < 0.2
    world.twice = lambda message: dice.random() < 0.2
    world.delay = lambda message: dice.choice([0.0, 0.0, 1.5])
    return world


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(SHAPES), st.integers(1, 8))
def test_every_trial_is_told_of_once_and_the_width_is_kept(
    dice: Random, shape: tuple[str, str, bool], parallel: int
) -> None:
    world = world_of(dice, shape, parallel)
    for _ in range(dice.choice([0, 0, 1, 3])):
        try:
            world.run(KillingStore(world.store, dice.randrange(1, 60), before=dice.random() < 0.5))
        except Killed:
            world.clock.sleep(LOCAL_INTERVALS.lease + 1)
    world.run(who="last")
    state = world.state()
    assert state.ended is not None and world.most_running <= parallel
    assert max(Counter(world.runs).values(), default=1) == 1
    assert max(Counter(job.wave.number for job in world.jobs.made.values()).values()) == 1
    for trial in state.trials.values():
        assert trial.state.is_ended or trial.state is TrialState.PAUSED
        assert [each.step for each in trial.reports] == sorted({e.step for e in trial.reports})
    assert sum(state.counts.values()) == len(state.trials)
    planned = sum(1 for trial in state.trials.values() if trial.confirms is None)
    assert planned == world.spec.limits.trials or state.stopping is not None
