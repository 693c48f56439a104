"""Carry a proof out: run each step, note its time and cost, and delete what was made."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batchml.clock import Clock
from batchml.prove import account, everyday
from batchml.prove.children import CommandInterrupted, CommandOverdue
from batchml.prove.claims import BY_ID, CLAIMS, claims_of, why_not_asked
from batchml.prove.proof import Asker, Proof
from batchml.prove.steps import (
    Ask,
    ClaimAnswer,
    ProofState,
    ProofStep,
    Skip,
    cost_of,
    end_of,
    next_action,
    steps_of,
)

T = TypeVar("T")

ASKERS: Mapping[str, Asker] = {**everyday.ASKERS, **account.ASKERS}


class StepResult(Struct, frozen=True):
    """The result of a step. `why`: why it was not carried out, or not to its end."""

    step: ProofStep
    answers: tuple[ClaimAnswer, ...]
    seconds: float = 0.0
    usd: float = 0.0
    why: str = ""


class ProofResult(Struct, frozen=True):
    steps: tuple[StepResult, ...]
    answers: Mapping[str, ClaimAnswer]  # of every claim
    seconds: float
    usd: float
    is_interrupted: bool = False
    left: str = ""  # the command that deletes what is left

    def count(self, held: bool | None) -> int:
        return sum(each.held is held for each in self.answers.values())


class Interruptions:
    """Counts Ctrl-C and SIGTERM. The first ends the running step, and the environment is deleted;
    the second ends the deletion, too.
    """

    def __init__(self, proof: Proof, say: Callable[[str], None]) -> None:
        self.count = 0
        self.is_removing = False
        self.is_finished = False  # only the report is missing
        self._proof = proof
        self._say = say

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_finished:
            return
        self.count += 1
        if self.count == 1:
            self._say("Interrupted: deleting what was made. Another Ctrl-C leaves it as it is.")
            if self.is_removing:
                return
        self._proof.commands.interrupt()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle signals in the block, and let none end this process."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self.handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def prove(
    proof: Proof, clock: Clock, *, max_cost: float, keep: bool,
    begin: Callable[[ProofStep], None] = lambda _: None,
    tell: Callable[[StepResult], None] = lambda _: None, say: Callable[[str], None],
    finish: Callable[[ProofResult], None] = lambda _: None, askers: Mapping[str, Asker] = ASKERS,
) -> ProofResult:  # fmt: skip
    """Carry out every step, and delete what was made, also when the user interrupts.

    `begin` gets each step before it, `tell` its result, and `finish` the result of the proof, which
    it writes: no signal ends this process before that.
    """
    began = clock.monotonic()
    begin, tell, say = _without_failure(begin), _without_failure(tell), _without_failure(say)
    steps = steps_of(proof.world, proof.options, throw_away=proof.throw_away)
    interruptions = Interruptions(proof, say)
    state, results = ProofState(), list[StepResult]()
    with interruptions.caught():
        while True:
            state = replace(
                state, made=proof.folder.record.made, interrupted=interruptions.count > 0
            )
            action = next_action(steps, state, world=proof.world, max_cost=max_cost, keep=keep)
            if action is None:
                break
            if isinstance(action, Skip):
                result = _skip(proof, action)
                state = replace(state, capped=state.capped or (action.why if action.capped else ""))
            else:
                interruptions.is_removing = action.step.removes
                if action.step.removes and interruptions.count < 2:
                    proof.commands.resume()
                begin(action.step)
                result = _ask(proof, action, askers, clock, state)
            results.append(result)
            tell(result)
            ended = end_of(result.answers) if isinstance(action, Ask) else "skipped"
            why = result.answers[0].why if isinstance(action, Ask) and ended == "skipped" else ""
            state = replace(
                state, ended={**state.ended, result.step.name: ended},
                reasons={**state.reasons, result.step.name: why},
                spent=state.spent + result.usd,
            )  # fmt: skip
        if keep and proof.folder.record.made:
            proof.folder.update(kept=True)
        if not proof.throw_away and proof.folder.record.made:
            _end_runs(proof, interruptions, keep=keep)
        whole = ProofResult(
            tuple(results), _answers(proof, results), clock.monotonic() - began, state.spent,
            interruptions.count > 0,
            proof.folder.record.removal() if proof.folder.record.made else "",
        )  # fmt: skip
        interruptions.is_finished = True
        finish(whole)
    return whole


def _without_failure(function: Callable[[T], None]) -> Callable[[T], None]:
    """A function that prints and never fails: what was made must be deleted all the same.

    OSError: the terminal or pipe is closed. RuntimeError: Ctrl-C came while a line was printed, and
    a stream does not print two at once (documentation of Python's `io`, "Reentrancy").
    """

    def call(value: T) -> None:
        try:
            function(value)
        except (OSError, RuntimeError):
            pass

    return call


def _ask(
    proof: Proof, action: Ask, askers: Mapping[str, Asker], clock: Clock, state: ProofState
) -> StepResult:
    began = clock.monotonic()
    answers: list[ClaimAnswer] = []
    why, was_ended = "", True
    proof.commands.limit_to(action.seconds)
    try:
        for each in askers[action.step.name](proof):
            answers.append(each)
        was_ended = False
    except CommandInterrupted:
        why = "interrupted"
    except CommandOverdue:
        why = f"--max-cost: it was ended after {clock.monotonic() - began:.0f} s"
    except Exception as error:
        # A command printed something unknown, or the disk is full. Whatever it was, the environment
        # has to be deleted.
        why = f"the command's output could not be read: {type(error).__name__}: {error}"
        was_ended = False
    seconds = clock.monotonic() - began
    asked = {each.claim for each in answers}
    for claim in claims_of(action.step.name, proof.world, proof.options):
        if claim.id not in asked:
            # A claim without an answer does not hold, although its step has ended.
            held = None if was_ended else False
            answers.append(ClaimAnswer(claim.id, held, why or _because(answers)))
    stands = proof.folder.record.made or state.made
    usd = cost_of(action.step, seconds, proof.world, stands=stands)
    return StepResult(action.step, tuple(answers), seconds, usd, why)


def _because(answers: Sequence[ClaimAnswer]) -> str:
    return next(
        (f"because of {each.claim}: {each.why}" for each in answers if each.held is False), ""
    )


def _skip(proof: Proof, action: Skip) -> StepResult:
    claims = claims_of(action.step.name, proof.world, proof.options)
    answers = tuple(ClaimAnswer(claim.id, None, action.why) for claim in claims)
    return StepResult(action.step, answers, why=action.why)


def _answers(proof: Proof, results: Sequence[StepResult]) -> dict[str, ClaimAnswer]:
    found = {each.claim: each for result in results for each in result.answers}
    for claim in CLAIMS:
        why = why_not_asked(claim, proof.world, proof.options)
        why = why or "prove sets up and deletes only temporary environments"
        found.setdefault(claim.id, ClaimAnswer(claim.id, None, why))
    return {claim: found[claim] for claim in BY_ID}


def _end_runs(proof: Proof, interruptions: Interruptions, *, keep: bool) -> None:
    """Cancel what still runs in an environment of the user's own."""
    interruptions.is_removing = True
    proof.commands.limit_to(inf)
    if interruptions.count < 2:
        proof.commands.resume()
    try:
        if keep or everyday.end_runs(proof):
            proof.folder.update(made=False)
    except (CommandInterrupted, OSError):
        pass  # `removal` says what is left


def to_json(result: StepResult) -> dict[str, Any]:
    """A step as JSON: seconds, dollars, and the number of claims that held."""
    return {
        "step": result.step.name,
        "title": result.step.title,
        "seconds": round(result.seconds, 1),
        "usd": round(result.usd, 4),
        "held": sum(each.held is True for each in result.answers),
        "refuted": sum(each.held is False for each in result.answers),
        "why": result.why or None,
    }
