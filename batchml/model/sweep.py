"""SweepSpec: a sweep as its file says it. Read and judged by `model/sweepfile.py`."""

from typing import Literal

from msgspec import Struct

from batchml.model.job import Scalar

Params = dict[str, Scalar]  # what a trial is run with: only its active parameters

Method = Literal["tpe", "random", "sobol", "grid", "list", "gp", "cmaes", "nsga2"]
MODELS = ("tpe", "gp", "cmaes", "nsga2")  # each suggestion follows from the results before it

Stopping = Literal["asha", "halving", "median", "none"]

PARALLEL = 16  # trials at once unless the file says how many


class Goal(Struct, frozen=True):
    """One objective: which metric, and whether more or less of it is better."""

    metric: str
    direction: Literal["max", "min"]

    def loss(self, value: float) -> float:
        """The value with its sign turned where that is needed: less is always better."""
        return -value if self.direction == "max" else value


class Dimension(Struct, frozen=True):
    """One parameter of the space.

    float, int: from `low` to `high`, both included, `log`-uniform or not, in steps of `step`.
    normal: around `mu` with `sigma`; with `log` its logarithm is. choice: one of `values`.
    constant: `values[0]`. `when`: active only where each named parameter has one of the values.
    """

    kind: Literal["float", "int", "normal", "choice", "constant"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    mu: float = 0.0
    sigma: float = 1.0
    values: tuple[Scalar, ...] = ()
    when: dict[str, tuple[Scalar, ...]] = {}


Space = dict[str, Dimension]  # parents stand before the parameters that depend on them


class EarlyStop(Struct, frozen=True):
    """How trials that do badly are ended early. `min` and `max` count steps."""

    method: Stopping = "none"
    step: str = "epoch"  # the name printed beside the metric
    max: int = 0  # steps of a full training; 0: unknown, only with `none`
    min: int = 1
    eta: int = 3
    resume: bool = False  # trials end at rungs and go on from their checkpoints when promoted


class Limits(Struct, frozen=True):
    """What ends a sweep, whichever comes first; None: no such limit."""

    trials: int | None = None
    parallel: int = PARALLEL
    hours: float | None = None
    cost: float | None = None  # USD
    failed_share: float | None = 0.2  # of the trials that have ended
    failed_count: int | None = None  # instead of a share
    target: float | None = None  # of the first goal


class Confirm(Struct, frozen=True):
    """Run the best `top` trials again, `seeds` times each."""

    top: int = 3
    seeds: int = 3


class SweepSpec(Struct, frozen=True):
    """A sweep. `space` has every parameter of the file; `seed` decides every suggestion."""

    name: str
    job: str
    goals: tuple[Goal, ...]
    space: Space
    method: Method = "tpe"
    early_stop: EarlyStop = EarlyStop()
    limits: Limits = Limits()
    confirm: Confirm | None = None
    seed: int = 0
    where: tuple[str, ...] = ()  # conditions on the parameters that every trial satisfies
    points: tuple[Params, ...] = ()  # `list`: all there is to try; else what is tried first

    @property
    def goal(self) -> Goal:
        """The first goal: the only one unless there are several."""
        return self.goals[0]
