"""The steps of a proof in their order, and the decision what comes next (pure).

Amounts are US dollars, at AWS's list prices of us-east-1 in November 2026: an upper estimate for
the cap, not the bill.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from batchml.prove.claims import World, claims_of

# A NAT gateway 0.045, its address 0.005, three keys 3 x 1 / 730, and what is stored.
REST_USD_PER_HOUR = 0.06
# An m7i.large 0.1008 and its disk of 100 GiB 0.011; a g6.xlarge 0.8048 and its disk.
HOST_USD_PER_HOUR: Mapping[str, float] = {"": 0.0, "cpu": 0.112, "gpu": 0.816, "nodes": 0.224}

Ended = Literal["done", "failed", "skipped"]


class ProofStep(Struct, frozen=True):
    """A step. `seconds` is what it takes in AWS, about; `needs` are steps that must be done before.

    `host`: what runs meanwhile, a key of `HOST_USD_PER_HOUR`. `usd` is paid besides, whatever the
    time: AWS counts a begun hour of a NAT gateway as a whole one, and a GPU's host goes on for some
    minutes. `throw_away`: only in an environment
    of the proof's own. `removes`: it takes away what was made, whatever happened before.
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
    ProofStep("doctor", "credentials, permissions, quotas", 30),
    ProofStep("setup", "make the environment", 330, usd=0.05, needs=("doctor",), throw_away=True),
    ProofStep("plan", "plan a second time", 30, needs=("doctor", "setup")),
    ProofStep("image", "push an image", 60, needs=("plan",)),
    ProofStep("probe", "a run that looks around", 200, "cpu", needs=("plan", "image")),
    ProofStep("second", "a second run beside it", 20, "cpu", needs=("probe",)),
    ProofStep("array", "an array with a failing child", 60, "cpu", needs=("probe",)),
    ProofStep("sweep", "a detached sweep of two trials", 90, "cpu", needs=("probe",)),
    ProofStep("follow", "follow a log", 40, "cpu", needs=("probe",)),
    ProofStep("shell", "a command inside a run", 30, "cpu", needs=("probe",)),
    ProofStep("cancel", "cancel it", 30, "cpu", needs=("shell",)),
    ProofStep("host", "end a host under a run", 200, "cpu", needs=("probe",)),
    ProofStep("gpu", "a GPU", 420, "gpu", 0.1, ("probe",)),
    ProofStep("nodes", "two nodes", 240, "nodes", needs=("probe",)),
    ProofStep("submitter", "submit as a submitter", 40, "cpu", needs=("image",)),
    ProofStep("doctor-role", "submit with doctor's statement", 40, "cpu", needs=("image",)),
    ProofStep("teardown", "take the environment away", 240, "cpu", throw_away=True, removes=True),
    ProofStep("search", "search for what is left", 10, needs=("teardown",), throw_away=True,
              removes=True),
)  # fmt: skip
BY_NAME = {step.name: step for step in STEPS}


def steps_of(world: World, options: Collection[str], *, throw_away: bool) -> tuple[ProofStep, ...]:
    """The steps of a proof. In an environment of the user's own nothing is made or taken away.

    A step without a claim there is left out, and counts as done for the steps that need it.
    """
    return tuple(
        step
        for step in STEPS
        if claims_of(step.name, world, options) and (throw_away or not step.throw_away)
    )


class ProofState(Struct, frozen=True):
    """How far a proof is. `ended`: step -> its end. `made`: something has to be taken away.

    `reasons`: a step that could not ask its claims -> why.
    """

    ended: Mapping[str, Ended] = {}
    spent: float = 0.0
    made: bool = False
    interrupted: bool = False
    capped: str = ""  # why the cap stops the proof; it never starts again
    reasons: Mapping[str, str] = {}


class Ask(Struct, frozen=True):
    step: ProofStep


class Skip(Struct, frozen=True):
    """Do not ask a step. `capped`: the cap is the reason, also for all later steps."""

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
        return Skip(step, state.reasons.get(missing) or f"the step {missing} did not end well")
    usd = estimate(step, world)
    if state.spent + usd + _reserve(steps, world) > max_cost:
        why = f"the cap: ${state.spent:.2f} of ${max_cost:.2f} are spent, this needs ${usd:.2f}"
        return Skip(step, why, capped=True)
    return Ask(step)


def _missing(step: ProofStep, names: Collection[str], state: ProofState) -> str:
    """The step that did not end well, so that `step` and others cannot be asked; "" without one."""
    for need in step.needs:
        if need in names and state.ended.get(need) != "done":
            return _missing(BY_NAME[need], names, state) or need
    return ""


def _decide_removal(step: ProofStep, state: ProofState, keep: bool) -> Ask | Skip:
    if keep:
        return Skip(step, "--keep")
    if not state.made and not any(state.ended.get(need) == "done" for need in step.needs):
        return Skip(step, "nothing was made")
    if any(state.ended.get(need) != "done" for need in step.needs):
        return Skip(step, f"the step {step.needs[0]} did not end well")
    return Ask(step)


def estimate(step: ProofStep, world: World) -> float:
    """What a step costs, in dollars, before it is asked."""
    return cost_of(step, step.seconds, world, stands=step.name != "doctor")


def _reserve(steps: Sequence[ProofStep], world: World) -> float:
    """What taking away costs: it has to be possible within the cap."""
    return sum(estimate(step, world) for step in steps if step.removes)


def cost_of(step: ProofStep, seconds: float, world: World, *, stands: bool) -> float:
    """What a step of so many seconds costs. `stands`: the environment exists meanwhile."""
    if world != "aws":
        return 0.0
    hourly = HOST_USD_PER_HOUR[step.host] + (REST_USD_PER_HOUR if stands else 0.0)
    return step.usd + hourly * seconds / 3600


class ClaimAnswer(Struct, frozen=True):
    """The answer to a claim. `held` is None if it was not asked; `why` then says the reason.

    `facts` are what was measured, in the order in which people read them.
    """

    claim: str
    held: bool | None
    why: str = ""
    facts: Mapping[str, object] = {}


def end_of(answers: Sequence[ClaimAnswer]) -> Ended:
    """How a step ended: done if every claim that it asked held, skipped if it asked none."""
    if any(answer.held is False for answer in answers):
        return "failed"
    return "done" if any(answer.held for answer in answers) else "skipped"


def exit_code(
    answers: Sequence[ClaimAnswer], child_codes: Collection[int], interrupted: bool
) -> int:
    """The exit code of a proof: 0 if every asked claim held.

    130: interrupted; 77 and 74: a command had no permission, or no answer from AWS, and a claim did
    not hold; else 1.
    """
    if interrupted:
        return 130
    if not any(answer.held is False for answer in answers):
        return 0
    return next((code for code in (77, 74) if code in child_codes), 1)
