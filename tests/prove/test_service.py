"""A proof whose steps answer at once: what it asks, notes, and takes away, whatever happens."""

import json
import os
import runpy
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchml.prove
from batchml.prove.children import Commands
from batchml.prove.claims import CLAIMS, World, claims_of
from batchml.prove.folder import aws_config, find_leftovers, make_folder
from batchml.prove.page import describe_fact, make_document, render_page
from batchml.prove.proof import Asker, Proof, answer
from batchml.prove.service import ProofResult, StepResult, prove
from batchml.prove.steps import STEPS, ClaimAnswer

NAMES = [step.name for step in STEPS]


class StoppedClock:
    """A clock that goes on by a second at each look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 1_790_000_000.0

    def monotonic(self) -> float:
        self.seconds += 1
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Trial:
    """A proof with steps of the test's own. `asked` are the steps that it has asked."""

    def __init__(self, state: Path, world: World = "aws", *, throw_away: bool = True) -> None:
        self.state = state
        self.clock = StoppedClock()
        name = f"prove-{os.urandom(3).hex()}"
        folder = make_folder(
            state, name, aws_config(name, "us-east-1", ""), began=0.0, world=world,
            env=name, throw_away=throw_away, temporary=state.parent,
        )  # fmt: skip
        commands = Commands({}, Path(folder.record.work), self.clock)
        self.proof = Proof(world, name, folder, commands, ("gpu", "nodes"), throw_away=throw_away)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.told: list[StepResult] = []
        self.askers: dict[str, Asker] = {name: self.holding(name) for name in NAMES}

    def holding(self, step: str) -> Asker:
        """A step all of whose claims hold; `setup` makes something, `teardown` takes it away."""

        def ask(proof: Proof) -> Iterator[ClaimAnswer]:
            self.asked.append(step)
            if step in ("setup", "teardown"):
                proof.folder.update(made=step == "setup")
            for claim in claims_of(step, proof.world, proof.options):
                yield answer(claim.id, True)

        return ask

    def run(self, *, max_cost: float = 2.0, keep: bool = False) -> ProofResult:
        result = prove(
            self.proof, self.clock, max_cost=max_cost, keep=keep, say=self.said.append,
            tell=self.told.append, askers=self.askers,
        )  # fmt: skip
        self.proof.folder.close()
        return result


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "state")


def test_every_step_is_asked_once_in_its_order(trial: Trial) -> None:
    result = trial.run()
    assert trial.asked == NAMES == [each.step.name for each in trial.told]
    assert all(each.held for each in result.answers.values())
    assert not os.path.exists(trial.proof.folder.record.work)


@pytest.mark.parametrize("at", NAMES)
@pytest.mark.parametrize("fault", ["denied", "nonsense", "silent"])
def test_whatever_goes_wrong_in_a_step_what_was_made_is_taken_away(
    trial: Trial, at: str, fault: str
) -> None:
    made = trial.askers[at]

    def ask(proof: Proof) -> Iterator[ClaimAnswer]:
        for each in made(proof):
            if at == "teardown":
                proof.folder.update(made=True)
            if fault == "denied":
                yield answer(each.claim, False, "AWS denies ec2:CreateVpc")
            elif fault == "nonsense":
                raise KeyError("findings")

    trial.askers[at] = ask
    result = trial.run()
    refuted = {each.claim for each in result.answers.values() if each.held is False}
    assert refuted == {claim.id for claim in claims_of(at, "aws", trial.proof.options)}
    if at == "doctor":
        assert trial.asked == ["doctor"]
    elif at == "teardown":
        assert result.left.startswith("batchml prove --remove prove-")
        assert trial.asked[-1] == "teardown"
    else:
        assert trial.asked[-2:] == ["teardown", "search"]
        assert not result.left


@pytest.mark.parametrize("at", NAMES)
def test_ctrl_c_in_a_step_leads_to_the_removal_of_what_was_made(trial: Trial, at: str) -> None:
    made = trial.askers[at]

    def ask(proof: Proof) -> Iterator[ClaimAnswer]:
        found = list(made(proof))
        os.kill(os.getpid(), signal.SIGINT)
        if at not in ("teardown", "search"):
            proof.commands.run("doctor")  # raises, as every command after Ctrl-C
        yield from found

    trial.askers[at] = ask
    result = trial.run()
    assert result.is_interrupted and len(trial.said) == 1
    assert not result.left and not find_leftovers(trial.state)
    after = trial.asked[trial.asked.index(at) + 1 :]
    removal = ["teardown", "search"]
    assert after == {"doctor": [], "teardown": ["search"], "search": []}.get(at, removal)
    if at not in ("teardown", "search"):
        assert all(result.answers[claim.id].why == "interrupted" for claim in
                   claims_of(at, "aws", trial.proof.options))  # fmt: skip


def test_a_second_ctrl_c_leaves_everything_and_says_the_command(trial: Trial) -> None:
    def ask(proof: Proof) -> Iterator[ClaimAnswer]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        proof.commands.run("teardown")
        yield from ()

    trial.askers["teardown"] = ask
    result = trial.run()
    record = trial.proof.folder.record
    assert result.answers["teardown"].why == "interrupted"
    assert result.left == record.removal() == f"batchml prove --remove {record.id}"
    assert os.path.exists(record.config), "the command needs the file"
    assert [each.id for each in find_leftovers(trial.state)] == [record.id]


def test_with_keep_it_is_left_and_is_no_leftover(trial: Trial) -> None:
    result = trial.run(keep=True)
    assert "teardown" not in trial.asked and "prove --remove" in result.left
    assert not find_leftovers(trial.state)


def test_at_the_cap_it_takes_away_and_says_why_the_rest_was_not_asked(trial: Trial) -> None:
    result = trial.run(max_cost=0.15)
    assert trial.asked[-2:] == ["teardown", "search"] and "gpu" not in trial.asked
    why = result.answers["gpu-smi"].why
    assert why.startswith("--max-cost: $0.0") and "of $0.15 is spent" in why
    assert result.usd <= 0.15


def test_a_step_that_takes_longer_than_the_cap_pays_for_is_ended_and_all_is_taken_away(
    trial: Trial,
) -> None:
    def ask(proof: Proof) -> Iterator[ClaimAnswer]:
        trial.clock.sleep(24 * 3600)
        proof.commands.run("ls")
        yield answer("workspace-shared", True)

    trial.askers["second"] = ask
    result = trial.run()
    assert result.answers["workspace-shared"].held is None
    assert result.answers["workspace-shared"].why.startswith("--max-cost: it was ended after 864")
    assert result.answers["array-fails"].why.startswith("--max-cost")
    assert trial.asked[-2:] == ["teardown", "search"] and not result.left


def test_what_a_step_costs_counts_by_its_real_time(trial: Trial) -> None:
    def ask(proof: Proof) -> Iterator[ClaimAnswer]:
        trial.clock.sleep(3600)
        yield answer("workspace-shared", True)

    trial.askers["second"] = ask
    trial.run()
    [second] = [each for each in trial.told if each.step.name == "second"]
    assert second.usd == pytest.approx(0.172, abs=0.001)


def test_an_environment_of_the_users_own_stays(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "state", throw_away=False)
    result = trial.run()
    assert not {"setup", "teardown", "search"} & set(trial.asked)
    assert result.answers["setup"].why == "prove sets up and deletes only temporary environments"


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("reentrant call")])
def test_a_terminal_that_takes_no_line_does_not_stop_the_removal(
    trial: Trial, error: Exception
) -> None:
    def tell(_: object) -> None:
        raise error

    result = prove(
        trial.proof, trial.clock, max_cost=2.0, keep=False, tell=tell, say=tell, askers=trial.askers
    )
    assert trial.asked == NAMES and not result.left


def test_an_interruption_at_the_end_does_not_cost_the_report(trial: Trial) -> None:
    written: list[ProofResult] = []

    def finish(result: ProofResult) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        written.append(result)

    result = prove(
        trial.proof, trial.clock, max_cost=2.0, keep=False, say=trial.said.append,
        askers=trial.askers, finish=finish,
    )  # fmt: skip
    assert written == [result] and not result.is_interrupted


def test_a_node_takes_no_byte_of_the_next_exchange() -> None:
    path = Path(batchml.prove.__file__).parent / "probe" / "probe.py"
    exchange = runpy.run_path(str(path))["exchange"]
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"first second")
        assert exchange(here, b"123456", 0) == b"first "
        assert exchange(here, b"123456", 0) == b"second"


def test_two_proofs_at_once_do_not_meet(tmp_path: Path) -> None:
    first, second = Trial(tmp_path / "state"), Trial(tmp_path / "state")
    first.proof.folder.update(made=True)
    assert not find_leftovers(tmp_path / "state"), "a proof that goes on is none"
    one, other = first.proof.folder.record, second.proof.folder.record
    assert one.env != other.env and one.home != other.home and one.config != other.config
    second.run()
    assert os.path.isdir(one.work)
    first.proof.folder.close()
    assert [each.id for each in find_leftovers(tmp_path / "state")] == [one.id]


def test_a_record_that_is_cut_or_of_a_later_version_is_ignored(trial: Trial) -> None:
    trial.proof.folder.update(made=True)
    trial.proof.folder.close()
    path = trial.proof.folder.root / "record.json"
    path.write_text('{"id": "prove-')
    assert find_leftovers(trial.state) == []


def document_of(trial: Trial, result: ProofResult) -> dict[str, Any]:
    document = make_document(trial.proof.folder.record, result)
    parsed: dict[str, Any] = json.loads(json.dumps(document))
    return parsed


def test_the_page_has_every_claim_and_says_what_is_known_of_each_assumption(trial: Trial) -> None:
    trial.askers["host"] = lambda _: iter([answer("host-lost", False, "no <second> attempt")])
    document = document_of(trial, trial.run())
    assert len(document["claims"]) == len(CLAIMS) and document["refuted"] == 1
    rows = {(each["file"], each["words"]): each for each in document["assumptions"]}
    hosts = rows["docs/decisions/034-cluster-view.md", "in ListContainerInstances"]
    assert (hosts["result"], hosts["why"]) == ("did not", "no <second> attempt")
    shell = rows["docs/decisions/028-inside-a-run.md", "the target's form"]
    assert shell["result"] == "held"
    page = render_page(document)
    assert "no &lt;second&gt; attempt" in page and "<script" not in page


@pytest.mark.parametrize(
    ("claim", "name", "value", "text"),
    [
        ("log-complete", "lines", 20, "20 lines"),
        ("doctor", "problems", 0, "no problems"),
        ("host-lost", "attempts", 1, "1 attempt"),
        ("shared-memory", "mib", 24105, "24,105 MiB"),
        ("rerun-failed", "ran", [(1, 2)], "child 1, in its run 2"),
        ("sweep-detached", "trials", {"DONE": 2}, "2 done"),
        ("follow-latency", "longestSeconds", 1.19, "the slowest line took 1.2 s"),
        ("batch-reachable", "status", 403, "it answers HTTP 403 to a request without a signature"),
        ("missing-key", "namesListBucket", False, "S3's message does not name s3:ListBucket"),
        ("image-processor", "processors", ["amd64"], "amd64"),
        ("user-1000", "uid", None, ""),
    ],
)
def test_the_page_has_facts_in_words(claim: str, name: str, value: object, text: str) -> None:
    assert describe_fact(claim, name, value) == text
