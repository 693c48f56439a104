"""What warm hosts, reservations and spot scores say, asked of an account in this process."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session as Model
from msgspec.structs import replace

from batchml.aws.batch.resources import compute_environment_request
from batchml.aws.capacity import (
    Reservation,
    fetch_placement_scores,
    fetch_reservations,
    score_requests,
)
from batchml.aws.ec2 import launch_template_request
from batchml.aws.naming import make_site
from batchml.config.environments import read_compute, read_environments
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.cost.capacity import ScoreQuestion, ask_scores, describe_reservation
from batchml.cost.estimate import make_estimate
from batchml.errors import BatchmlError, ConfigError, UsageError
from batchml.local.server.protocol import problems
from batchml.model.environment import Compute
from batchml.setup.commands.capacity import (
    explain_scores,
    print_scores,
    read_question,
    read_warm_columns,
    report_cost,
    warm_hosts,
)
from tests.cost import test_costs as costs
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

NOW = costs.NOW
BLOCK = "cr-0123456789abcdef0"
TOML = (
    costs.TOML
    + f"""
[env.dev.compute.block]
instance_types = ["p5.48xlarge"]
max_vcpus = 768
capacity_block = "{BLOCK}"
"""
)


class Aws(costs.Aws):
    """The account of the costs, with a reservation, and scores of two pages."""

    def __init__(self) -> None:
        super().__init__()
        self.reservation: Mapping[str, Any] | str = {
            "CapacityReservationId": BLOCK, "InstanceType": "p5.48xlarge", "State": "active",
            "AvailabilityZone": "us-east-1a", "TotalInstanceCount": 4, "AvailableInstanceCount": 3,
            "StartDate": datetime(2026, 11, 20, tzinfo=UTC), "ReservationType": "capacity-block",
            "EndDate": datetime(2026, 11, 22, 17, tzinfo=UTC),
        }  # fmt: skip
        self.scores: Mapping[str, Any] | str = {}

    def _DescribeCapacityReservations(self, _: Any) -> Mapping[str, Any] | str:
        if isinstance(self.reservation, str):
            return self.reservation
        return {"CapacityReservations": [self.reservation]}

    def _GetSpotPlacementScores(self, params: Mapping[str, Any]) -> Mapping[str, Any] | str:
        if isinstance(self.scores, str):
            return self.scores
        if "NextToken" not in params:
            first = {"Region": "eu-west-1", "Score": 3}
            return {"SpotPlacementScores": [first], "NextToken": "more"}
        return {"SpotPlacementScores": [{"Region": "us-east-1", "Score": 9}]}


@pytest.fixture
def aws() -> Aws:
    return Aws()


@pytest.fixture(scope="module")
def wire() -> Iterator[costs.Wire]:
    """Clients take long to make: all tests have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "k")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        yield costs.Wire()


@pytest.fixture
def context(tmp_path: Path, aws: Aws, wire: costs.Wire) -> Context:
    (tmp_path / "batchml.toml").write_text(TOML)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "dev")
    made = Context(settings, FakeClock(NOW), tmp_path)
    wire.aws, made._session = aws, wire.session
    wire.session.calls.clear()
    return made


def detail(types: list[str], low: int, now: int, *, spot: bool = False, delay: int = 0) -> Any:
    return {
        "computeResources": {
            "type": "SPOT" if spot else "EC2", "instanceTypes": types, "minvCpus": low,
            "desiredvCpus": now, "maxvCpus": 64,
            "scalingPolicy": {"minScaleDownDelayMinutes": delay},
        }
    }  # fmt: skip


# --- warm hosts -----------------------------------------------------------------------------


def test_what_is_warm_and_what_runs_have_their_price(context: Context) -> None:
    found = read_warm_columns(context, {
        "batchml-dev-gpu": detail(["g5.xlarge"], 8, 12, delay=60),
        "batchml-dev-cheap": detail(["g5.xlarge", "g5.4xlarge"], 0, 16, spot=True),
        "theirs": {"type": "UNMANAGED"},
    })  # fmt: skip
    assert found.heads == ["WARM", "NOW"]
    # A disk of 100 GiB at 0.073 a month is a cent an hour.
    assert found.cells("batchml-dev-gpu") == ["$2.02/h", "$3.03/h"]
    assert found.cells("batchml-dev-cheap") == ["-", "$0.31 to $2.04/h"]
    assert found.cells("theirs") == ["", ""]
    lines = list(found.lines())
    assert lines[0] == (
        "gpu: kept warm, even without jobs: 8 vCPUs, 2 x g5.xlarge: $2.02 an hour, $48.48 a day"
    )
    assert lines[1].startswith("gpu: an idle host stays 1 h after its last job, and is paid for")
    told = found.json("batchml-dev-gpu")
    assert told["warm"]["vcpus"] == 8
    assert told["warm"]["usdPerHour"]["low"] == pytest.approx(2.02)


def test_nothing_is_asked_where_nothing_runs_nor_on_this_machine(
    context: Context, tmp_path: Path
) -> None:
    found = read_warm_columns(context, {"batchml-dev-gpu": detail(["g5.xlarge"], 0, 0)})
    assert found.cells("batchml-dev-gpu") == ["-", "-"]
    assert found.json("batchml-dev-gpu")["warm"] == {"vcpus": 0, "usdPerHour": None, "why": None}
    assert not _calls(context)
    local = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    here = read_warm_columns(
        Context(local, FakeClock(), tmp_path), {"x": detail(["g5.xlarge"], 8, 8)}
    )
    assert (here.heads, here.cells("x"), list(here.lines()), here.json("x")) == ([], [], [], {})


def test_a_price_that_aws_does_not_say_is_unknown_with_the_reason(
    context: Context, aws: Aws
) -> None:
    aws.refused = {"GetProducts"}
    found = read_warm_columns(context, {"batchml-dev-gpu": detail(["g5.xlarge"], 8, 0)})
    assert found.cells("batchml-dev-gpu") == ["price unknown", "-"]
    (line,) = found.lines()
    assert "pricing:GetProducts is not allowed" in line
    assert found.json("batchml-dev-gpu")["warm"]["usdPerHour"] is None


def test_an_update_says_its_price_and_what_undoes_it(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    before = detail(["g5.xlarge"], 0, 0)
    assert warm_hosts(context, 3, None, before) == 12
    assert warm_hosts(context, 0, None, before) == 0
    checked = Compute(instance_types=("g5.xlarge",), min_vcpus=12, max_vcpus=64)
    report_cost(context, "gpu", before, checked, {"min_vcpus": 12})
    told = capsys.readouterr().err
    assert "12 vCPUs, 3 x g5.xlarge: $3.03 an hour, $72.72 a day" in told
    assert "batchml compute update gpu --min-vcpus 0 --env dev" in told
    late = Compute(instance_types=("g5.xlarge",), max_vcpus=64, scale_down_delay="30m")
    report_cost(context, "gpu", before, late, {"scale_down_delay": "30m"})
    assert "paid for: scale_down_delay, $0.51 each time." in capsys.readouterr().err
    for hosts, low, words in ((3, 4, "set the same value"), (-1, None, "0 or more")):
        with pytest.raises(UsageError, match=words):
            warm_hosts(context, hosts, low, before)
    with pytest.raises(UsageError, match="Give --min-vcpus instead"):
        warm_hosts(context, 1, None, detail(["optimal"], 0, 0))


# --- reservations ---------------------------------------------------------------------------


def test_a_block_is_prepaid_and_says_until_when(context: Context) -> None:
    found = read_warm_columns(context, {"batchml-dev-block": detail(["p5.48xlarge"], 192, 192)})
    assert found.cells("batchml-dev-block") == ["prepaid", "prepaid"]
    assert list(found.lines())[-1] == (
        f"block: capacity block {BLOCK}: 4 x p5.48xlarge in us-east-1a, 3 free, until "
        "2026-11-22 16:30 UTC, when EC2 begins to end its hosts (in 24 h 30 min)"
    )
    assert found.json("batchml-dev-block")["reservation"]["isBlock"] is True


@pytest.mark.parametrize(
    ("reservation", "words"),
    [
        (Reservation("cr-1", state="gone"), "capacity reservation cr-1: gone"),
        (Reservation("cr-1", "g5", "a", "active", 1, 1), "until it is cancelled"),
        (Reservation("cr-1", "g5", "a", "scheduled", 1, 0, start=NOW + 60), "scheduled, begins"),
        (Reservation("cr-1", "g5", "a", "expired", 1, 0, end=NOW - 60), "expired, over since"),
        (Reservation("cr-1", "g5", "a", "active", 1, 0, end=NOW + 7200), "(in 2 h)"),
    ],
)
def test_reservations_in_words(reservation: Reservation, words: str) -> None:
    assert words in describe_reservation(reservation, NOW)


def test_one_that_is_gone_and_one_that_may_not_be_seen(context: Context, aws: Aws) -> None:
    aws.reservation = "InvalidCapacityReservationId.NotFound: no"
    assert fetch_reservations(context.connect(), ["", BLOCK]).found[BLOCK].state == "gone"
    aws.reservation = "UnauthorizedOperation: no"
    found = fetch_reservations(context.connect(), [BLOCK])
    assert (found.found, found.why) == ({}, "ec2:DescribeCapacityReservations is not allowed")


def test_a_block_starts_as_awss_own_samples_do() -> None:
    """And EC2 and AWS Batch would take the requests, by their own models."""
    _, environments = read_environments(
        {"env": {"dev": {"region": "us-east-1", "compute": {"block": {
            "instance_types": ["p5.48xlarge"], "max_vcpus": 768, "capacity_block": BLOCK,
        }}}}}, "batchml.toml",
    )  # fmt: skip
    environment = environments["dev"]
    compute = environment.compute["block"]
    site = make_site("dev", environment, {"SubnetIds": "subnet-1", "InstanceProfileArn": "arn"})
    template = launch_template_request(site, "block", compute)
    data = template["LaunchTemplateData"]
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = {"CapacityReservationTarget": {"CapacityReservationId": BLOCK}}
    assert data["CapacityReservationSpecification"] == target
    made = compute_environment_request(site, "block", compute, None)
    assert made["computeResources"]["type"] == "EC2"
    assert made["computeResources"]["allocationStrategy"] == "BEST_FIT"
    ec2 = Model().get_service_model("ec2")
    shape = ec2.operation_model("CreateLaunchTemplate").input_shape
    assert not [*problems(shape, template, strict=True)]
    assert data["InstanceMarketOptions"]["MarketType"] in ec2.shape_for("MarketType").enum


def test_all_mistakes_of_a_block_are_said() -> None:
    table = {
        "instance_types": ["p5", "p4d.24xlarge"], "max_vcpus": 8, "capacity_block": "mine",
        "spot": True, "capacity_reservation": "open", "allocation_strategy": "BEST_FIT_PROGRESSIVE",
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_compute("block", table, "here")
    said = str(caught.value)
    for words in (
        "capacity_block: found 'mine'",
        "Remove spot = true",
        "excludes capacity_reservation",
        "one type",
        "A capacity_block needs BEST_FIT",
    ):
        assert words in said


def test_an_estimate_leaves_the_block_to_its_own_bill(context: Context) -> None:
    from batchml.aws.pricing.prices import InstanceTypes, PriceTable

    made = replace(context.settings.environment, compute={
        "block": context.settings.environment.compute["block"]
    })  # fmt: skip
    found = make_estimate(made, PriceTable(), InstanceTypes())
    assert not found.computes
    assert any("a capacity block is paid when it is reserved" in each for each in found.left_out)


# --- scores ---------------------------------------------------------------------------------


def test_scores_stand_best_first_beside_the_price(
    context: Context, aws: Aws, capsys: pytest.CaptureFixture[str]
) -> None:
    question = read_question(context, (), 8, None, (), False)
    assert question == ScoreQuestion(("g5.xlarge", "g5.4xlarge"), 8, "units")
    answer = ask_scores(context, question, lambda context, regions: context.connect())
    print_scores(question, answer, json_=False)
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()] == [
        ["SCORE", "REGION", "SPOT", "USD/H", "OF", "A", "HOST"],
        ["9", "of", "10", "us-east-1", "0.300", "to", "0.500"],
        ["3", "of", "10", "eu-west-1", "0.300", "to", "0.500"],
    ]
    assert "10 of 10: EC2 very likely has 8 spot hosts in a region now" in shown.err
    assert "Fewer than 3 types always score low" in shown.err
    print_scores(question, answer, json_=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["score"] for row in rows] == [9, 3]
    asked = [params for name, params in _calls(context) if name == "GetSpotPlacementScores"]
    assert len(asked) == 2
    assert asked[0]["TargetCapacityUnitType"] == "units"


def test_scores_of_zones_are_of_the_regions_that_were_named(context: Context) -> None:
    regions = [f"us-east-{number}" for number in range(1, 13)]
    first, second = score_requests(["b", "a", "b"], 64, "vcpu", regions, zones=True)
    assert first["InstanceTypes"] == ["a", "b"]
    assert (len(first["RegionNames"]), len(second["RegionNames"])) == (10, 2)
    shape = Model().get_service_model("ec2").operation_model("GetSpotPlacementScores").input_shape
    assert not [*problems(shape, first, strict=True)]
    question = ScoreQuestion(("a", "b", "c"), 64, "vcpu", tuple(regions), zones=True)
    assert "64 spot vCPUs in one zone" in explain_scores(question, ask_nothing(question))[0]


def ask_nothing(question: ScoreQuestion) -> Any:
    from batchml.cost.capacity import ScoreAnswer

    return ScoreAnswer([], question.types)


def test_too_many_questions_of_a_day_have_a_remedy(context: Context, aws: Aws) -> None:
    aws.scores = "MaxConfigLimitExceeded: You have exceeded"
    with pytest.raises(
        BatchmlError,
        match="limits the number of different score requests of an account in 24 hours",
    ):
        fetch_placement_scores(
            context.connect(), score_requests(["g5.xlarge"], 1, "units", [], zones=False)
        )


def test_all_mistakes_of_a_question_are_said(context: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_question(context, ("G5!",), 0, 3, ("mars",), False)
    said = str(caught.value)
    for words in ("--instance-type G5!", "Give either", "--instances 0", "--region mars"):
        assert words in said
    (tmp_path / "batchml.toml").unlink()
    local = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, None)
    with pytest.raises(UsageError, match="--instance-type: missing"):
        read_question(Context(local, FakeClock(), tmp_path), (), 1, None, (), False)


def _calls(context: Context) -> list[tuple[str, dict[str, Any]]]:
    session = context.connect()
    assert isinstance(session, ScriptedSession)
    return session.calls
