"""What quotes, bills and totals ask of AWS, and how often; and the same on this machine."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session as Model
from msgspec.structs import replace

from batchml.aws.batch.hosts import HostPool, RunHost, fetch_host_pools, find_hosts
from batchml.aws.session import Session
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.cost.bill import round_usd
from batchml.cost.quote import ContainerNeed
from batchml.cost.service import bill_of, limit_cost, list_spending, make_bills, quote_of
from batchml.errors import NotFound, UsageError
from batchml.local.machine import read_machine
from batchml.local.server.protocol import problems
from batchml.model.job import JobSpec, Resources, Retry
from batchml.model.run import Attempt, JobStatus, Record, Run
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

NOW = 1_795_276_800  # 2026-11-21T16:00:00Z
HOUR = 3_600_000
MS = NOW * 1000
QUEUE = "batchml-dev-default"
TOML = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.compute.gpu]
instance_types = ["g5.xlarge"]
max_vcpus = 64
disk = "100 GiB"
[env.dev.compute.cheap]
instance_types = ["g5.xlarge", "g5.4xlarge"]
max_vcpus = 64
spot = true
[env.dev.queues.default]
compute = ["gpu"]
[env.dev.queues.both]
compute = ["cheap", "gpu"]
"""
_BATCH = "arn:aws:batch:us-east-1:123456789012"
_POOL = f"{_BATCH}:compute-environment"
SIZES = {"g5.xlarge": (4, 16_384), "g5.4xlarge": (16, 65_536)}
PRICES = {"g5.xlarge": "1.00", "g5.4xlarge": "1.60"}


class Aws:
    """Answers for one account; everything that a test changes is a member."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.types = {"gpu": ["g5.xlarge"], "cheap-r2": ["g5.xlarge", "g5.4xlarge"]}
        self.kinds = {"gpu": "EC2", "cheap-r2": "SPOT"}
        self.instances: dict[str, tuple[str, str]] = {}  # of ECS: id -> type, zone
        self.jobs: dict[str, dict[str, Any]] = {}

    def __call__(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any] | str:
        if operation in self.refused:
            return "AccessDeniedException: no"
        found: Mapping[str, Any] | str = getattr(self, f"_{operation}")(params)
        return found

    def _DescribeComputeEnvironments(self, _: Any) -> dict[str, Any]:
        return {
            "computeEnvironments": [
                {
                    "computeEnvironmentName": f"batchml-dev-{name}", "status": "VALID",
                    "computeEnvironmentArn": f"{_POOL}/batchml-dev-{name}",
                    "ecsClusterArn": f"arn:aws:ecs:us-east-1:123456789012:cluster/{name}",
                    "computeResources": {
                        "type": self.kinds[name], "instanceTypes": types, "maxvCpus": 64,
                    },
                }
                for name, types in self.types.items()
            ]
        }  # fmt: skip

    def _DescribeJobQueues(self, _: Any) -> dict[str, Any]:
        order = {QUEUE: ["gpu"], "batchml-dev-both": ["cheap-r2", "gpu"], "theirs": ["gpu"]}
        return {
            "jobQueues": [
                {
                    "jobQueueName": name, "priority": 1, "status": "VALID", "state": "ENABLED",
                    "jobQueueArn": f"{_BATCH}:job-queue/{name}",
                    "computeEnvironmentOrder": [
                        {"order": 1, "computeEnvironment": f"{_POOL}/batchml-dev-{each}"}
                        for each in environments
                    ],
                }
                for name, environments in order.items()
            ]
        }  # fmt: skip

    def _DescribeInstanceTypes(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "InstanceTypes": [
                {
                    "InstanceType": name, "VCpuInfo": {"DefaultVCpus": vcpus},
                    "MemoryInfo": {"SizeInMiB": memory},
                    "GpuInfo": {"Gpus": [{"Manufacturer": "NVIDIA", "Count": 1}]},
                    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
                }
                for name, (vcpus, memory) in SIZES.items()
                if name in params["Filters"][0]["Values"]
            ]
        }  # fmt: skip

    def _GetProducts(self, params: Mapping[str, Any]) -> dict[str, Any]:
        wanted = json.dumps(params)
        return {
            "PriceList": [
                _product({"instanceType": name, "usagetype": f"BoxUsage:{name}"}, "Hrs", usd)
                for name, usd in PRICES.items()
                if name in wanted
            ]
            + [_product({"volumeApiName": "gp3", "usagetype": "EBS:VolumeUsage.gp3"}, "GB-Mo",
                        "0.073")]
        }  # fmt: skip

    def _DescribeSpotPriceHistory(self, params: Mapping[str, Any]) -> dict[str, Any]:
        zones = [each["Values"] for each in params.get("Filters", ())]
        return {
            "SpotPriceHistory": [
                {
                    "InstanceType": name, "AvailabilityZone": zone, "SpotPrice": usd,
                    "Timestamp": datetime(2026, 11, 1, tzinfo=UTC),
                }
                for name in params["InstanceTypes"]
                for zone, usd in (("us-east-1a", "0.30"), ("us-east-1b", "0.50"))
                if not zones or zone in zones[0]
            ]
        }  # fmt: skip

    def _DescribeContainerInstances(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if not params["cluster"].endswith("/cheap-r2"):
            return {"containerInstances": []}
        return {
            "containerInstances": [
                {
                    "containerInstanceArn": f"arn:aws:ecs:us-east-1:123456789012:"
                    f"container-instance/cheap/{each}",
                    "attributes": [
                        {"name": "ecs.instance-type", "value": self.instances[each][0]},
                        {"name": "ecs.availability-zone", "value": self.instances[each][1]},
                    ],
                }
                for each in params["containerInstances"]
                if each in self.instances
            ]
        }

    def _DescribeInstances(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "Reservations": [
                {
                    "Instances": [
                        {
                            "InstanceId": params["Filters"][0]["Values"][0],
                            "InstanceType": "g5.4xlarge", "InstanceLifecycle": "spot",
                            "Placement": {"AvailabilityZone": "us-east-1b"},
                        }
                    ]
                }
            ]
        }  # fmt: skip

    def _ListJobs(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "jobSummaryList": [
                {"jobId": name, "jobName": job["jobName"], "status": job["status"],
                 "createdAt": job["createdAt"]}
                for name, job in self.jobs.items()
                if job["jobQueue"] == params["jobQueue"] and ":" not in name
            ]
        }  # fmt: skip

    def _DescribeJobs(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"jobs": [self.jobs[each] for each in params["jobs"] if each in self.jobs]}


def _product(attributes: dict[str, str], unit: str, usd: str) -> str:
    term = {
        "effectiveDate": "2026-10-01T00:00:00Z",
        "priceDimensions": {"d": {"unit": unit, "beginRange": "0", "pricePerUnit": {"USD": usd}}},
    }
    return json.dumps({"product": {"attributes": attributes}, "terms": {"OnDemand": {"t": term}}})


class Wire:
    """Clients take long to make: all tests have the same, each with an account of its own."""

    def __init__(self) -> None:
        self.aws = Aws()
        self.session = ScriptedSession(lambda operation, params: self.aws(operation, params))


class Account(Context):
    """A context whose calls never leave."""

    def __init__(self, folder: Path, toml: str, wire: "Wire") -> None:
        (folder / "batchml.toml").write_text(toml)
        environ = {"BATCHML_HOME": str(folder / "home")}
        super().__init__(load_settings(environ, folder, None), FakeClock(NOW), folder)
        self.aws = wire.aws = Aws()
        self.scripted = wire.session
        self.scripted.calls.clear()

    def connect(self) -> Session:
        return self.scripted

    @property
    def calls(self) -> list[str]:
        return [name for name, _ in self.scripted.calls]


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "k")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        yield Wire()


@pytest.fixture
def context(tmp_path: Path, wire: Wire) -> Account:
    return Account(tmp_path, TOML, wire)


def run(
    *attempts: Attempt,
    queue: str = QUEUE,
    status: str = "SUCCEEDED",
    job_id: str = "j",
    **more: Any,
) -> Run:
    given = {"vcpus": 4, "memory_mib": 8_192, "gpus": 1, "created_at": MS - 5 * HOUR, **more}
    return Run(job_id, "lenet", queue, JobStatus(status), attempts=attempts, **given)


def attempt(hours: float, host: str = "", ago: float = 0) -> Attempt:
    """One that took so many hours, and ended so many hours ago."""
    stop = MS - int(ago * HOUR)
    return Attempt(stop - int(hours * HOUR), stop, 0, host=host)


NEED = ContainerNeed(4, 8_192, 1)


@pytest.mark.parametrize(
    ("service", "operation", "asked"),
    [
        ("batch", "DescribeComputeEnvironments", {}),
        ("batch", "DescribeJobQueues", {}),
        ("batch", "ListJobs", {"jobQueue": QUEUE}),
        ("batch", "DescribeJobs", {"jobs": ["x"]}),
        ("ec2", "DescribeInstanceTypes", {"Filters": [{"Values": ["g5.xlarge"]}]}),
        ("ec2", "DescribeInstances", {"Filters": [{"Values": ["i-1"]}]}),
        ("ecs", "DescribeContainerInstances", {"cluster": "/cheap-r2", "containerInstances": "a"}),
        ("pricing", "GetProducts", {"Value": "g5.xlarge"}),
    ],
)
def test_the_account_answers_as_botocores_model_says(
    service: str, operation: str, asked: dict[str, Any]
) -> None:
    aws = Aws()
    aws.instances["a"] = ("g5.xlarge", "us-east-1b")
    aws.jobs["x"] = job("x")
    shape = Model().get_service_model(service).operation_model(operation).output_shape
    assert list(problems(shape, aws(operation, asked), strict=True)) == []


def test_a_quote_for_a_described_queue_asks_batch_nothing(context: Account) -> None:
    found = quote_of(context, NEED, "default")
    assert found.hour is not None
    assert round_usd(found.hour.low) == 1.01  # with a hundredth for the disk
    assert context.calls == ["DescribeInstanceTypes", "GetProducts", "GetProducts"]
    quote_of(context, NEED, "default")
    assert len(context.calls) == 3  # prices are kept


def test_a_quote_for_a_queue_of_others_asks_for_its_compute_environments(context: Account) -> None:
    found = quote_of(context, NEED, "theirs")
    assert found.hour is not None
    assert context.calls[:2] == ["DescribeComputeEnvironments", "DescribeJobQueues"]
    nowhere = quote_of(context, NEED, "nowhere")
    assert nowhere.unknown == {"the queue nowhere": "the queue nowhere has no compute environments"}


def test_a_budget_is_the_time_that_it_buys_on_the_dearest_host(context: Account) -> None:
    spec = JobSpec(resources=Resources(4, "8 GiB", 1), retry=Retry(3))
    variables, words = limit_cost(context, spec, 2.02)
    assert variables == {"BATCHML_MAX_SECONDS": "7200", "BATCHML_PRICE": "1.010000"}
    assert words == (
        "--max-cost $2.02: the run may run 2:00:00, all attempts together, at $1.01 an hour; "
        "then it saves and stops."
    )
    many, words = limit_cost(context, spec, 2.02, children=4)
    assert many["BATCHML_MAX_SECONDS"] == "1800"
    assert "each of 4 containers may run 30:00," in words


def test_a_budget_without_prices_is_refused(context: Account) -> None:
    context.aws.refused.add("GetProducts")
    with pytest.raises(UsageError, match=r"price of g5.xlarge is unknown: pricing:GetProducts is"):
        limit_cost(context, JobSpec(resources=Resources(4, "8 GiB", 1)), 2.0)


def test_a_bill_on_one_kind_of_host_asks_about_no_host(context: Account) -> None:
    found = make_bills(context, [run(attempt(2, "c" * 32))])["j"]
    assert found.upper_bound == 2.02
    assert context.calls == [
        "DescribeComputeEnvironments", "DescribeJobQueues", "DescribeInstanceTypes", "GetProducts",
        "GetProducts",
    ]  # fmt: skip


def test_a_host_that_lives_is_found_in_its_cluster(context: Account) -> None:
    context.aws.instances["abc"] = ("g5.4xlarge", "us-east-1b")
    found = make_bills(context, [run(attempt(2, "abc"), queue="batchml-dev-both")])["j"]
    assert found.attempts[0].host == "g5.4xlarge spot in us-east-1b"
    assert context.calls.count("DescribeContainerInstances") == 1
    (asked,) = context.scripted.asked("DescribeSpotPriceHistory")
    assert asked["Filters"] == [{"Name": "availability-zone", "Values": ["us-east-1b"]}]
    # 4 of 16 vCPUs, but its one GPU: the whole host.
    assert found.attempts[0].share.low == 1
    assert found.usd.low == found.usd.high


def test_a_host_that_was_lost_is_asked_of_ec2(context: Account) -> None:
    found = find_hosts(context.connect(), ["i-0abc"], [])
    assert found == {"i-0abc": RunHost("g5.4xlarge", "us-east-1b", True)}
    many = [f"i-{number:017x}" for number in range(201)]
    find_hosts(context.connect(), many, [])
    asked = [each["Filters"][0]["Values"] for each in context.scripted.asked("DescribeInstances")]
    assert [len(values) for values in asked] == [1, 200, 1]
    context.aws.refused.add("DescribeInstances")
    assert find_hosts(context.connect(), ["i-0abc"], []) == {}


def test_what_ec2_refuses_to_tell_ecs_may_still(context: Account) -> None:
    context.aws.refused.add("DescribeInstances")
    context.aws.instances["abc"] = ("g5.4xlarge", "us-east-1b")
    pool = fetch_host_pools(context.connect())["batchml-dev-both"]
    assert set(find_hosts(context.connect(), ["i-0abc", "abc"], pool)) == {"abc"}


def test_hosts_of_long_ago_are_not_asked_about_and_the_bill_lies_between(context: Account) -> None:
    found = make_bills(context, [run(attempt(1, "abc", ago=3), queue="batchml-dev-both")])["j"]
    assert "DescribeContainerInstances" not in context.calls
    # spot from the cheapest zone, on demand with its disk
    assert (round_usd(found.usd.low), round_usd(found.usd.high)) == (0.31, 1.01)
    assert found.attempts[0].host == "g5.xlarge spot or g5.4xlarge spot or g5.xlarge"


def test_a_queue_that_is_gone_is_known_from_the_file_or_unknown(context: Account) -> None:
    context.aws.refused |= {"DescribeJobQueues"}
    assert make_bills(context, [run(attempt(1))])["j"].upper_bound == 1.01
    gone = make_bills(context, [run(attempt(1), queue="gone")])["j"]
    assert gone.unknown == {"an unknown host": "asking for compute environments is not allowed"}
    context.aws.refused.clear()
    gone = make_bills(context, [run(attempt(1), queue="gone")])["j"]
    assert gone.unknown == {"an unknown host": "the queue gone does not exist any more"}


def test_pools_say_why_they_have_no_hosts(context: Account) -> None:
    context.aws.kinds["gpu"] = "FARGATE"
    context.aws.types["cheap-r2"] = []
    found = fetch_host_pools(context.connect())["batchml-dev-both"]
    assert [each.why.split()[0] for each in found] == ["the", "Fargate"]
    assert make_bills(context, [run(attempt(1))])["j"].unknown == {
        "an unknown host": "batchml-dev-gpu: Fargate has no hosts, and its prices are not supported"
    }
    assert found[0] == HostPool(
        "batchml-dev-cheap-r2",
        why="the compute environment batchml-dev-cheap-r2 is unmanaged",
    )


def test_a_hundred_runs_take_as_many_calls_as_one(context: Account) -> None:
    runs = [run(attempt(1, ago=3), queue="batchml-dev-both", job_id=f"j{n}") for n in range(100)]
    found = make_bills(context, runs)
    assert len(found) == 100
    assert sorted(context.calls) == [
        "DescribeComputeEnvironments", "DescribeInstanceTypes", "DescribeJobQueues",
        "DescribeSpotPriceHistory", "GetProducts", "GetProducts",
    ]  # fmt: skip


def job(name: str, status: str = "SUCCEEDED", queue: str = QUEUE, **more: Any) -> dict[str, Any]:
    return {
        "jobId": name, "jobName": "lenet", "jobQueue": queue, "status": status,
        "createdAt": MS - 2 * HOUR, "startedAt": MS - HOUR, "stoppedAt": MS, "jobDefinition": "d",
        "attempts": [{"startedAt": MS - HOUR, "stoppedAt": MS, "container": {"exitCode": 0}}],
        "container": {
            "resourceRequirements": [
                {"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "8192"},
                {"type": "GPU", "value": "1"},
            ]
        },
        **more,
    }  # fmt: skip


def test_the_children_of_an_array_are_described_a_hundred_a_call(context: Account) -> None:
    context.aws.jobs = {f"a:{n}": job(f"a:{n}") for n in range(150)}
    found = make_bills(context, [run(job_id="a", array_size=150)])["a"]
    assert found.upper_bound == round(150 * 1.01, 2)
    assert context.calls.count("DescribeJobs") == 2
    del context.aws.jobs["a:0"]
    ended = run(job_id="a", array_size=150)
    going = replace(ended, status=JobStatus.PENDING, children={"SUCCEEDED": 1})
    unmade = replace(ended, status=JobStatus.PENDING, children={"PENDING": 150})
    for array, is_lower_bound in ((ended, True), (going, True), (unmade, False)):
        assert make_bills(context, [array])["a"].is_lower_bound == is_lower_bound


def test_totals_are_of_batch_and_of_what_it_has_forgotten(context: Account) -> None:
    context.aws.jobs = {"x": job("x"), "y": job("y", queue="theirs")}
    context.home.prepare()
    history = context.home.root / "history.jsonl"
    kept = {
        "job_id": "old", "name": "resnet", "env": "dev", "queue": QUEUE, "at": MS - 9 * 24 * HOUR,
        "status": "SUCCEEDED", "cost": 7.5, "key": "3" + "a" * 16,
    }  # fmt: skip
    history.write_text(json.dumps(kept) + "\n")
    spent, rates = list_spending(context, MS - 30 * 24 * HOUR)
    assert [(each.job_id, round_usd(each.usd.high)) for each in spent] == [
        ("x", 1.01), ("y", 1.01), ("old", 7.5)
    ]  # fmt: skip
    assert {rate.source for rate in rates} == {"AWS Price List"}
    only, _ = list_spending(context, MS - 30 * 24 * HOUR, "theirs")
    assert [each.job_id for each in only] == ["y"]


def test_a_cost_is_kept_for_when_batch_has_forgotten_the_run(context: Account) -> None:
    context.home.prepare()
    context.history.add(Record(key="3" + "b" * 16, job_id="x", name="lenet", env="dev", queue=QUEUE,
                             at=MS))  # fmt: skip
    context.aws.jobs = {"x": job("x"), "y": job("y", status="RUNNING", stoppedAt=None)}
    assert bill_of(context, "x")[1].upper_bound == 1.01
    context.aws.jobs = {}
    found, bill = bill_of(context, "x")
    assert (found.name, bill.upper_bound, bill.is_from_history) == ("lenet", 1.01, True)
    with pytest.raises(NotFound, match="not known to the server, and its cost"):
        bill_of(context, "y")


# --- this machine ---------------------------------------------------------------------------


def test_this_machine_costs_nothing_unless_the_file_says_so(wire: Wire, tmp_path: Path) -> None:
    here = Account(tmp_path, "", wire)
    assert make_bills(here, [run(attempt(1))])["j"].is_free
    assert quote_of(here, NEED, "default").is_free
    assert limit_cost(here, JobSpec(), 1.0)[0] == {}
    assert here.calls == []


def test_a_price_of_this_machine_is_shared_by_its_runs(wire: Wire, tmp_path: Path) -> None:
    here = Account(tmp_path, "[env.local]\nusd_per_hour = 2\n", wire)
    vcpus = read_machine(with_gpus=False).vcpus
    one = run(attempt(3), vcpus=1, memory_mib=4, gpus=0)
    found = make_bills(here, [one, replace(one, job_id="k", vcpus=vcpus + 1)])
    assert found["j"].upper_bound == pytest.approx(6 / vcpus)
    assert found["k"].upper_bound == 6  # never more than the machine
    quote = quote_of(here, ContainerNeed(1, 4), "default")
    assert quote.hour is not None
    assert round_usd(quote.hour.high) == pytest.approx(2 / vcpus)
    assert here.calls == []
