"""The steps of a proof in order, and the decision which one is next (pure).

Amounts are US dollars, at AWS's list prices of us-east-1 in November 2026: an upper estimate for
the cap, not the bill.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Literal

from msgspec import Struct

from batchml.prove.claims import World, claims_of

# A NAT gateway 0.045, its address 0.005, three keys 3 x 1 / 730, and what is stored.
REST_USD_PER_HOUR = 0.06
# An m7i.large 0.1008 and its disk of 100 GiB 0.011; a g6.xlarge 0.8048 and its disk.
HOST_USD_PER_HOUR: Mapping[str, float] = {"": 0.0, "cpu": 0.112, "gpu": 0.816, "nodes": 0.224}

Ended = Literal["done", "failed", "skipped"]


class ProofStep(Struct, frozen=True):
    """A step. `seconds`: its usual time in AWS. `needs`: steps that must be done before it.

    `host`: the hosts that run meanwhile, a key of `HOST_USD_PER_HOUR`. `usd`: a cost that does not
    depend on the time: AWS bills a NAT gateway by whole hours, and a host with a GPU stays for some
    minutes. `throw_away`: only in a temporary environment. `removes`: it deletes what the proof
    made, whatever happened before.
    """

    name: str
    title: str
    seconds: int
    host: str = ""
    usd: float = 0.0
    needs: tuple[str, ...] = ()
    throw_away: bool = False
    removes: bool = False


STEPS = (
    ProofStep("doctor", "check credentials, permissions and quotas", 30),
    ProofStep("setup", "set up the environment", 330, usd=0.05, needs=("doctor",), throw_away=True),
    ProofStep("plan", "plan a second time", 30, needs=("doctor", "setup")),
    ProofStep("image", "push an image", 60, needs=("plan",)),
    ProofStep("probe", "a run that checks what it finds", 200, "cpu", needs=("plan", "image")),
    ProofStep("second", "a second run, with the same workspace", 20, "cpu", needs=("probe",)),
    ProofStep("array", "an array with a failing child", 60, "cpu", needs=("probe",)),
    ProofStep("sweep", "a detached sweep of two trials", 90, "cpu", needs=("probe",)),
    ProofStep("follow", "follow the log of a run", 40, "cpu", needs=("probe",)),
    ProofStep("shell", "run commands inside a run", 30, "cpu", needs=("probe",)),
    ProofStep("cancel", "cancel a run", 30, "cpu", needs=("shell",)),
    ProofStep("host", "terminate the host of a run", 200, "cpu", needs=("probe",)),
    ProofStep("gpu", "a run with a GPU", 420, "gpu", 0.1, ("probe",)),
    ProofStep("nodes", "a run on two nodes", 240, "nodes", needs=("probe",)),
    ProofStep("submitter", "submit with the submitter policy alone", 40, "cpu", needs=("image",)),
    ProofStep("doctor-role", "submit with doctor's policies alone", 40, "cpu", needs=("image",)),
    ProofStep("teardown", "delete the environment", 240, "cpu", throw_away=True, removes=True),
    ProofStep("search", "search for what is left", 10, needs=("teardown",), throw_away=True,
              removes=True),
)  # fmt: skip
BY_NAME = {step.name: step for step in STEPS}


def steps_of(world: World, options: Collection[str], *, throw_away: bool) -> tuple[ProofStep, ...]:
    """The steps of a proof. An environment of the user's own is neither set up nor deleted.

    A step without a claim there is left out, and counts as done for the steps that need it.
    """
    return tuple(
        step
        for step in STEPS
        if claims_of(step.name, world, options) and (throw_away or not step.throw_away)
    )


class ProofState(Struct, frozen=True):
    """How far a proof is. `ended`: step -> its end. `made`: something has to be deleted.

    `reasons`: a step that could not test its claims -> why.
    """

    ended: Mapping[str, Ended] = {}
    spent: float = 0.0
    made: bool = False
    interrupted: bool = False
    capped: str = ""  # why the cap stops the proof; it never starts again
    reasons: Mapping[str, str] = {}


class Ask(Struct, frozen=True):
    """Carry a step out, in at most so many seconds: those that --max-cost pays for."""

    step: ProofStep
    seconds: float = inf


class Skip(Struct, frozen=True):
    """Skip a step. `capped`: because of --max-cost, which also stops all later steps."""

    step: ProofStep
    why: str
    capped: bool = False


def next_action(
    steps: Sequence[ProofStep], state: ProofState, *, world: World, max_cost: float, keep: bool
) -> Ask | Skip | None:
    """Decide what to do with the next step; None at the end of the proof."""
    names = {step.name for step in steps}
    step = next((each for each in steps if each.name not in state.ended), None)
    if step is None:
        return None
    if step.removes:
        return _decide_removal(step, state, keep)
    if state.interrupted:
        return Skip(step, "interrupted")
    if state.capped:
        return Skip(step, state.capped, capped=True)
    missing = _missing(step, names, state)
    if missing:
        return Skip(step, state.reasons.get(missing) or f"the step {missing} did not succeed")
    usd = estimate(step, world)
    if state.spent + usd + _reserve(steps, world) > max_cost:
        why = f"--max-cost: ${state.spent:.2f} of ${max_cost:.2f} is spent, this needs ${usd:.2f}"
        return Skip(step, why, capped=True)
    hourly = _hourly(step, world, stands=True)
    left = max_cost - state.spent - step.usd - _reserve(steps, world)
    return Ask(step, left / hourly * 3600 if hourly else inf)


def _missing(step: ProofStep, names: Collection[str], state: ProofState) -> str:
    """The earlier step that did not succeed and that `step` needs; "" if there is none."""
    for need in step.needs:
        if need in names and state.ended.get(need) != "done":
            return _missing(BY_NAME[need], names, state) or need
    return ""


def _decide_removal(step: ProofStep, state: ProofState, keep: bool) -> Ask | Skip:
    if keep:
        return Skip(step, "--keep was given")
    if not state.made and not any(state.ended.get(need) == "done" for need in step.needs):
        return Skip(step, "nothing was made")
    if any(state.ended.get(need) != "done" for need in step.needs):
        return Skip(step, f"the step {step.needs[0]} did not succeed")
    return Ask(step)


def estimate(step: ProofStep, world: World) -> float:
    """The expected cost of a step, in dollars."""
    return cost_of(step, step.seconds, world, stands=step.name != "doctor")


def _reserve(steps: Sequence[ProofStep], world: World) -> float:
    """The cost of deleting the environment, which must stay within --max-cost."""
    return sum(estimate(step, world) for step in steps if step.removes)


def cost_of(step: ProofStep, seconds: float, world: World, *, stands: bool) -> float:
    """The cost of a step of so many seconds. `stands`: the environment exists meanwhile."""
    if world != "aws":
        return 0.0
    return step.usd + _hourly(step, world, stands=stands) * seconds / 3600


def _hourly(step: ProofStep, world: World, *, stands: bool) -> float:
    if world != "aws":
        return 0.0
    return HOST_USD_PER_HOUR[step.host] + (REST_USD_PER_HOUR if stands else 0.0)


class ClaimAnswer(Struct, frozen=True):
    """The answer to a claim. `held` is None if it was not tested; `why` then says the reason.

    `facts` are what was measured, in the order in which people read them.
    """

    claim: str
    held: bool | None
    why: str = ""
    facts: Mapping[str, object] = {}


def end_of(answers: Sequence[ClaimAnswer]) -> Ended:
    """How a step ended: done if every claim that it tested held, skipped if it tested none."""
    if any(answer.held is False for answer in answers):
        return "failed"
    return "done" if any(answer.held for answer in answers) else "skipped"


def exit_code(
    answers: Sequence[ClaimAnswer], child_codes: Collection[int], interrupted: bool
) -> int:
    """The exit code of a proof: 0 if every tested claim held.

    130: interrupted; 77 and 74: a command had no permission, or no answer from AWS, and a claim did
    not hold; else 1.
    """
    if interrupted:
        return 130
    if not any(answer.held is False for answer in answers):
        return 0
    return next((code for code in (77, 74) if code in child_codes), 1)
