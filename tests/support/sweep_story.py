"""Made-up sweeps, told by events as a ledger would: of any size, with all that can happen."""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.local.home import Home
from batchml.model.sweep import (
    Dimension,
    EarlyStop,
    Goal,
    Params,
    SweepLimits,
    SweepSpec,
    Trial,
)
from batchml.runtime.protocol.sweep import END, MessageSender, add_end, make_message
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    MessageReceived,
    NoticeGiven,
    PlannedTrial,
    SweepEnded,
    TrialBatch,
)
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.samplers.choose import Suggestion, suggest_trials
from batchml.sweeps.started import StartedSweep, write_started
from batchml.sweeps.stores import SweepStore, open_sweep_store
from tests.support.fakes import FakeClock

BEGAN = 1_790_000_000.0
JOB = "6b0e2f6c-0000-0000-0000-000000000000"
RUNGS = (1, 3, 9)
MAX = 27

SPEC = SweepSpec(
    name="lenet-tune",
    job="lenet",
    goals=(Goal("val_accuracy", "max"),),
    space={
        "lr": Dimension("float", 1e-4, 1e-1, log=True),
        "optimizer": Dimension("choice", values=("sgd", "adamw", "lion")),
        "momentum": Dimension("float", 0.8, 0.99, when={"optimizer": ("sgd",)}),
        "layers": Dimension("int", 1, 6),
        "width": Dimension("int", 16, 256, log=True),
        "dropout": Dimension("float", 0.0, 0.6),
        "batch_size": Dimension("choice", values=(32, 64, 128, 256)),
        "epochs": Dimension("constant", values=(MAX,)),
    },
    early_stop=EarlyStop("asha", "epoch", MAX, 1, 3),
    limits=SweepLimits(trials=100, parallel=16, hours=4, cost=20.0),
    seed=7,
)

PARETO = SweepSpec(
    name="both",
    job="lenet",
    goals=(Goal("val_accuracy", "max"), Goal("latency_ms", "min")),
    space={"width": SPEC.space["width"], "lr": SPEC.space["lr"]},
    method="random",
    limits=SweepLimits(trials=200),
)


def started(spec: SweepSpec = SPEC, hourly: float | None = 0.5) -> StartedSweep:
    job = {"name": "lenet", "image": "pytorch", "command": ["python", "train.py", "{params}"]}
    return StartedSweep(
        key="2bcdefgh2345abcde", name=spec.name, env="dev", spec=spec, job=job, queue="default",
        image="pytorch", created_at=BEGAN, user="ada", commit="0dec0de", hourly=hourly,
    )  # fmt: skip


def told(count: int, spec: SweepSpec = SPEC, *, until: float = math.inf) -> SweepState:
    """A sweep of `count` trials; as it stood `until` seconds after it began, if that is sooner."""
    state = SweepState()
    for event in story(count, spec):
        if not isinstance(event, TrialBatch | BatchSubmitted) and _at(event) > BEGAN + until:
            continue
        state.apply(event)
    return state


def _at(event: Event) -> float:
    return (
        float(event.message["at"])
        if isinstance(event, MessageReceived)
        else getattr(event, "at", 0.0)
    )


def story(count: int, spec: SweepSpec = SPEC) -> Iterator[Event]:
    random = Random(count)
    free = [BEGAN + 4.0] * spec.limits.parallel
    known: dict[int, list[float]] = {}
    messages: list[MessageReceived] = []
    planned = []
    for number in range(count):
        params = _params(spec, random)
        planned.append(PlannedTrial(number, params, number * 7919, "random"))
        slot = min(range(len(free)), key=free.__getitem__)
        start = free[slot] + random.uniform(0.5, 6)
        mine = list(_trial(number, params, spec, start, known, random))
        messages += mine
        free[slot] = mine[-1].message["at"]
    yield TrialBatch(1, BEGAN, "0123456789abcdef-1", tuple(planned))
    yield BatchSubmitted(1, JOB, BEGAN + 1)
    yield from sorted(messages, key=lambda each: each.message["at"])
    yield NoticeGiven("spot", "2 hosts were lost; their trials run again.", BEGAN + 90)
    yield SweepEnded(f"all {count} trials are over", max(free) + 2)


def _params(spec: SweepSpec, random: Random) -> Params:
    found: Params = {}
    for name, dimension in spec.space.items():
        if not all(found.get(parent) in values for parent, values in dimension.when.items()):
            continue
        if dimension.kind in ("choice", "constant"):
            found[name] = random.choice(dimension.values)
            continue
        value = random.uniform(dimension.low, dimension.high)
        if dimension.log:
            low, high = math.log(dimension.low), math.log(dimension.high)
            value = math.exp(random.uniform(low, high))
        found[name] = round(value) if dimension.kind == "int" else value
    return found


def _trial(
    number: int, params: Params, spec: SweepSpec, start: float, known: dict[int, list[float]],
    random: Random,
) -> Iterator[MessageReceived]:  # fmt: skip
    """Its messages: a start, one for each step, an end. A good learning rate is near 0.01."""

    sender = MessageSender(1, number, 1, number, f"{JOB}:{number}", start)

    def tell(seq: int, at: float, kind: str, **more: Any) -> MessageReceived:
        return MessageReceived(make_message(sender, seq, kind, at, **more))

    def end(
        seq: int, at: float, state: str, code: int, why: str, tail: Sequence[str] = ()
    ) -> MessageReceived:
        return MessageReceived(add_end(make_message(sender, seq, END, at), state, code, why, tail))

    width = float(params["width"])
    speed = (2 + width / 64) * random.uniform(0.9, 1.2)
    yield tell(0, start, "start")
    at = start + random.uniform(8, 20)  # its imports and its data
    fate = _fate(params, random)
    if fate:
        yield end(1, at, *fate)
        return
    if not spec.early_stop.max:
        values = [_reached(params, 27, random), speed * 3]
        yield tell(1, at + 90, "report", points=[[1, values, at + 90]])
        yield end(2, at + 91, "DONE", 0, "")
        return
    seq = 0
    for step in range(1, MAX + 1):
        at += speed
        value = _reached(params, step, random)
        decisions = []
        if step in RUNGS:
            others = known.setdefault(step, [])  # rising
            cutoff = others[-1 - len(others) // 3] if len(others) >= 3 else None
            goes_on = cutoff is None or value >= cutoff
            decisions = [[step, value, cutoff, len(others), goes_on]]
            insort(others, value)
        seq += 1
        yield tell(seq, at, "report", points=[[step, [value], at]], decisions=decisions,
                   metrics={"loss": 1 - value})  # fmt: skip
        if decisions and not decisions[0][4]:
            why = f"epoch {step}: {value:.4f}, others had {cutoff:.4f}"
            yield end(seq + 1, at + 1, "PRUNED", 0, why)
            return
    yield end(seq + 1, at + 1, "DONE", 0, "")


def _fate(params: Params, random: Random) -> tuple[str, int, str, list[str]] | None:
    """A few trials come to a bad end."""
    roll = random.random()
    if roll < 0.02:
        tail = ["Traceback (most recent call last):", '  File "train.py", line 41, in <module>',
                f"RuntimeError: CUDA out of memory: {random.randrange(100, 900)} MiB"]  # fmt: skip
        return "FAILED", 1, "exit code 1", tail
    if roll < 0.03:
        return "FAILED", 1, "exit code 1", ["ValueError: <img src=x onerror=alert(1)> & </script>"]
    if float(params["lr"]) > 0.08 and roll < 0.3:
        return "DIVERGED", 0, "val_accuracy is nan", [f"epoch 1 loss nan lr {params['lr']:.3f}"]
    return None


def _reached(params: Params, step: int, random: Random) -> float:
    """A curve that rises to what the parameters allow."""
    away = abs(math.log10(float(params["lr"])) + 2) / 2
    top: float = 0.995 - 0.25 * away**1.5 - 0.04 * abs(math.log2(float(params["width"])) - 6.5) / 3
    top -= 0.06 if params.get("optimizer") == "lion" else 0.0
    top -= 0.05 * float(params.get("dropout", 0.2)) ** 2
    value = top * (1 - 0.55 * math.exp(-step / 4)) + random.gauss(0, 0.004)
    return min(0.9993, max(0.05, value))


@pytest.fixture
def context(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("BATCHML_HOME", str(home.root))
    monkeypatch.chdir(tmp_path)
    environ = {"BATCHML_HOME": str(home.root)}
    return Context(load_settings(environ, tmp_path, None), FakeClock(BEGAN + 1e6), tmp_path)


def fill(context: Context, sweep: StartedSweep, events: Iterable[Event]) -> SweepStore:
    store = open_sweep_store(context, sweep.key)
    assert write_started(store, replace(sweep, project=context.project))
    SweepLedger(store).append(list(events))
    return store


def unfinished(count: int) -> Sequence[Event]:
    return [event for event in story(count) if not isinstance(event, SweepEnded)][: count * 2]


def suggest(spec: SweepSpec, trials: Sequence[Trial], number: int) -> Suggestion | None:
    """The parameters of one trial; None: nothing is left to try."""
    return next(iter(suggest_trials(spec, trials, [number])), None)
