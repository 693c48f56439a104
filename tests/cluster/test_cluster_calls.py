"""What a look at a cluster asks of AWS: how often, and what is left when something is denied."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.batch.cluster import ClusterApi, to_host, to_launched
from batchml.aws.batch.jobs import JobApi, LiveApi
from batchml.aws.pricing.prices import Price, PriceTable
from batchml.cluster.rows import ClusterState, host_rows
from batchml.cluster.service import (
    COMPUTE_EVERY,
    ClusterPoller,
    ComputePoller,
    HostPrices,
    poll_queues,
)
from batchml.cluster.snapshot import ClusterSnapshot
from batchml.local.batch.reads import (
    ReadView,
    describe_container_instances,
    list_container_instances,
)
from batchml.local.batch.state import empty_state
from batchml.local.machine import MachineCapacity
from batchml.local.store.journal import Journal
from batchml.model.hosts import ClusterHost, HostResources, HostState
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

ARN = "arn:aws:ecs:us-east-1:1:container-instance/C/"
BATCH = "arn:aws:batch:us-east-1:000000000000:"
CE = "batchml-dev-ce"
DENIED = "AccessDeniedException"
JOINED = datetime(2026, 11, 22, 20, tzinfo=UTC)


def resources(vcpus: int, mib: int, gpus: int) -> list[dict[str, Any]]:
    names = [f"GPU-{number}" for number in range(gpus)]
    return [
        {"name": "CPU", "type": "INTEGER", "integerValue": vcpus * 1024},
        {"name": "MEMORY", "type": "INTEGER", "integerValue": mib},
        {"name": "PORTS", "type": "STRINGSET", "stringSetValue": ["22"]},
        {"name": "GPU", "type": "STRINGSET", "stringSetValue": names},
    ]


def instance(number: int) -> dict[str, Any]:
    return {
        "containerInstanceArn": f"{ARN}{number}", "ec2InstanceId": f"i-{number}",
        "status": "ACTIVE", "agentConnected": True, "runningTasksCount": 1,
        "pendingTasksCount": 0, "registeredAt": JOINED,
        "registeredResources": resources(48, 180_000, 4),
        "remainingResources": resources(24, 90_000, 1),
        "attributes": [{"name": "ecs.instance-type", "value": "g5.12xlarge"},
                       {"name": "ecs.availability-zone", "value": "us-east-1b"},
                       {"name": "ecs.capability.x"}],
    }  # fmt: skip


class Account:
    """A queue on one compute environment; runs by state, hosts by number, denials by operation."""

    def __init__(self) -> None:
        self.hosts = 2
        self.desired = 96
        self.denied: dict[str, str] = {}
        self.status = {"1": "RUNNING", "2": "RUNNABLE", "3": "RUNNABLE"}
        self.launched: list[dict[str, Any]] = []

    def __call__(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation in self.denied:
            return self.denied[operation]
        answer: Callable[[dict[str, Any]], Mapping[str, Any]] = getattr(self, operation)
        return answer(params)

    def DescribeJobQueues(self, _: Any) -> dict[str, Any]:
        ce = {"order": 1, "computeEnvironment": f"{BATCH}compute-environment/{CE}"}
        return {"jobQueues": [{"jobQueueName": "gpu", "priority": 7, "state": "ENABLED",
                               "status": "VALID", "computeEnvironmentOrder": [ce]}]}  # fmt: skip

    def DescribeComputeEnvironments(self, _: Any) -> dict[str, Any]:
        resources = {"type": "SPOT", "minvCpus": 0, "desiredvCpus": self.desired, "maxvCpus": 256,
                     "instanceTypes": ["g5"]}  # fmt: skip
        return {"computeEnvironments": [
            {"computeEnvironmentName": CE, "state": "ENABLED", "status": "VALID",
             "ecsClusterArn": "C", "computeResources": resources}
        ]}  # fmt: skip

    def ListJobs(self, params: Any) -> dict[str, Any]:
        of = [each for each, status in self.status.items() if status == params["jobStatus"]]
        return {"jobSummaryList": [
            {"jobId": each, "jobName": f"n{each}", "status": params["jobStatus"],
             "createdAt": int(each)} for each in of
        ]}  # fmt: skip

    def DescribeJobs(self, params: Any) -> dict[str, Any]:
        needs = [{"type": "VCPU", "value": "24"}, {"type": "MEMORY", "value": "90000"},
                 {"type": "GPU", "value": "3"}]  # fmt: skip
        return {"jobs": [
            {"jobId": each, "jobName": f"n{each}", "jobQueue": "gpu", "startedAt": 0,
             "createdAt": int(each), "status": self.status[each],
             "container": {"logStreamName": f"s{each}", "resourceRequirements": needs,
                           "containerInstanceArn": f"{ARN}0"}} for each in params["jobs"]
        ]}  # fmt: skip

    def GetJobQueueSnapshot(self, _: Any) -> dict[str, Any]:
        jobs = [{"jobArn": f"{BATCH}job/{each}", "earliestTimeAtPosition": 1}
                for each in ("3", "2")]  # fmt: skip
        return {"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": 1}}

    def ListContainerInstances(self, params: Any) -> dict[str, Any]:
        start = int(params.get("nextToken", 0))
        found = [f"{ARN}{number}" for number in range(self.hosts)][start : start + 100]
        more = {"nextToken": str(start + 100)} if start + 100 < self.hosts else {}
        return {"containerInstanceArns": found, **more}

    def DescribeContainerInstances(self, params: Any) -> dict[str, Any]:
        numbers = [int(arn.rpartition("/")[2]) for arn in params["containerInstances"]]
        assert len(numbers) <= 100
        return {"containerInstances": [instance(number) for number in numbers], "failures": []}

    def DescribeInstances(self, params: Any) -> dict[str, Any]:
        assert {"Name": "tag:batchml:env", "Values": ["dev"]} in params["Filters"]
        return {"Reservations": [{"Instances": self.launched}]}

    def FilterLogEvents(self, params: Any) -> dict[str, Any]:
        mark = {"timestamp": 1, "message": "::batchml usage cpu=12 gpu=50"}
        return {"events": [{"logStreamName": name, **mark} for name in params["logStreamNames"]]}


class Rig:
    def __init__(self, session: ScriptedSession, account: Account) -> None:
        self.account = account
        self.session = session
        self.clock = FakeClock()
        self.api = ClusterApi(self.session, "dev")
        look = ComputePoller(self.api, self.clock.now)
        session = self.session
        self.poller = ClusterPoller(JobApi(session), LiveApi(session), self.clock.now, look)

    def look(self, *queues: str, **more: bool) -> ClusterSnapshot:
        """What is said to have been asked is what was."""
        before = len(self.session.calls)
        found = self.poller.poll(queues, **more)
        assert found.calls == len(self.session.calls) - before
        return found


@pytest.fixture(scope="module")
def session() -> Iterator[tuple[ScriptedSession, list[Account]]]:
    """Clients that are made once, and the account that answers: the last one."""
    accounts: list[Account] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", "x")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield ScriptedSession(lambda *asked: accounts[-1](*asked)), accounts


@pytest.fixture
def rig(session: tuple[ScriptedSession, list[Account]]) -> Rig:
    made, accounts = session
    accounts.append(Account())
    made.calls.clear()
    return Rig(made, accounts[-1])


def test_a_host_is_read_from_what_ecs_says() -> None:
    host = to_host(instance(7), "C")
    assert host == ClusterHost(
        "7", "C", "", "i-7", "g5.12xlarge", "us-east-1b", "ACTIVE", True, 1,
        int(JOINED.timestamp() * 1000), HostResources(48, 180_000, 4, 24, 90_000, 3),
    )  # fmt: skip
    assert to_host({"containerInstanceArn": "a/b/c"}, "C").resources == HostResources()


def test_a_round_is_few_calls_and_the_next_one_fewer(rig: Rig) -> None:
    first = rig.look()
    # Queues, environments, five states, details, usage, the queue's order, and hosts by two.
    assert first.calls == 1 + 1 + 5 + 1 + 1 + 1 + 2
    assert [(row.run.job_id, row.position) for row in first.runs] == [
        ("1", None), ("3", 1), ("2", 2)
    ]  # fmt: skip
    assert first.runs[0].hosts == ("i-0",)
    assert first.queues[0].reason == "waits for a host"
    assert first.queues[0].asked_gpus == 6
    assert first.hosts is not None
    assert [(row.host.name, len(row.runs)) for row in first.hosts] == [("i-0", 1), ("i-1", 0)]
    assert first.hosts[0].usage["gpu"] == 1.5
    rig.clock.time += 3
    assert rig.look().calls == 5
    rig.clock.time += COMPUTE_EVERY
    assert rig.look().calls == 1 + 1 + 5 + 1 + 1 + 2


def test_hundreds_of_hosts_are_asked_about_by_the_hundred(rig: Rig) -> None:
    rig.account.hosts, rig.account.desired = 250, 0
    found = rig.look("gpu")
    assert found.hosts is not None and len(found.hosts) == 250
    assert len(rig.session.asked("ListContainerInstances")) == 3
    assert len(rig.session.asked("DescribeContainerInstances")) == 3


def test_hosts_that_have_not_joined_are_asked_for_only_where_vcpus_are_short(rig: Rig) -> None:
    assert rig.look() and not rig.session.asked("DescribeInstances")
    rig.account.desired = 144
    here = {"Key": "batchml:name", "Value": "ce"}
    launch = {"InstanceType": "g5.12xlarge", "Placement": {"AvailabilityZone": "us-east-1c"},
              "LaunchTime": JOINED}  # fmt: skip
    rig.account.launched = [
        {"InstanceId": "i-1", **launch, "Tags": [here]},  # has joined
        {"InstanceId": "i-9", **launch, "Tags": [here]},
        {"InstanceId": "i-8", **launch, "Tags": []},  # no host of a compute environment
    ]
    rig.clock.time += COMPUTE_EVERY
    found = rig.look()
    assert [(row.host.name, row.computes) for row in found.hosts or ()] == [
        ("i-0", (CE,)), ("i-1", (CE,)), ("i-9", (CE,))
    ]  # fmt: skip
    assert found.queues[0].reason == "hosts are starting"
    known = [CE, f"{CE}-r2", f"{CE}-research"]
    host = to_launched(rig.account.launched[1], "dev", known)
    assert (host.compute, host.state) == (f"{CE}-r2", HostState.STARTING)
    assert to_launched(rig.account.launched[2], "dev", known).compute == ""


def test_hosts_are_not_asked_for_where_nothing_waits_and_nobody_wants_them(rig: Rig) -> None:
    rig.account.status = {"1": "RUNNING"}
    found = rig.look(with_hosts=False, with_usage=False)
    assert (found.calls, found.hosts) == (1 + 1 + 5 + 1, None)


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        ("DescribeComputeEnvironments", "batch:DescribeComputeEnvironments"),
        ("GetJobQueueSnapshot", "batch:GetJobQueueSnapshot"),
        ("ListContainerInstances", "ecs:ListContainerInstances"),
        ("DescribeContainerInstances", "ecs:DescribeContainerInstances"),
        ("DescribeInstances", "ec2:DescribeInstances"),
    ],
)
def test_what_is_denied_is_named_and_the_rest_is_shown(
    rig: Rig, operation: str, action: str
) -> None:
    rig.account.denied, rig.account.desired = {operation: DENIED}, 999
    found = rig.poller.poll()
    assert found.missing == (f"{action} is not allowed",)
    assert len(found.runs) == 3
    assert {row.position for row in found.runs} == {None, 1, 2}  # by age, where need be
    count = len(rig.session.asked(operation))
    rig.clock.time += 3
    rig.poller.poll()
    assert len(rig.session.asked(operation)) == count  # nobody insists
    rig.account.denied = {}
    rig.clock.time += COMPUTE_EVERY
    assert rig.poller.poll().missing == ()


def test_a_cluster_that_is_gone_has_no_hosts_and_is_no_trouble(rig: Rig) -> None:
    rig.account.denied = {"ListContainerInstances": "ClusterNotFoundException"}
    assert rig.poller.poll().missing == ()


def test_what_waits_is_asked_about_once_and_again_when_it_starts(rig: Rig) -> None:
    rig.look()
    rig.account.status = {"1": "RUNNABLE", "2": "RUNNING", "3": "RUNNABLE"}  # 1 is tried again
    rig.clock.time += 1
    found = rig.look()
    assert rig.session.asked("DescribeJobs")[-1]["jobs"] == ["2", "1"]
    assert found.queues[0].vcpus == 24
    rig.account.status = {"1": "RUNNING", "2": "RUNNING"}
    rig.look()
    assert rig.session.asked("DescribeJobs")[-1]["jobs"] == ["1"]


def test_of_thousands_that_wait_a_hundred_are_asked_about_a_round(rig: Rig) -> None:
    rig.account.status = {str(number): "RUNNABLE" for number in range(1, 251)}
    found = [rig.look().queues[0] for _ in range(4)]
    assert [(row.is_exact, row.asked_vcpus // 24) for row in found] == [
        (False, 100), (False, 200), (True, 250), (True, 250)
    ]  # fmt: skip


# --- for commands -----------------------------------------------------------------------------


class Place:
    """As much of a place as these need."""

    env = "dev"
    clock = FakeClock()

    def __init__(self, session: ScriptedSession) -> None:
        self.connect = lambda: session
        self.batch = JobApi(session)
        self.asked: list[list[str]] = []
        self.settings: Any = type("", (), {"is_local": False, "environment": self})
        self.region = "us-east-1"
        self.prices = self

    def ask(self, region: str, items: list[str]) -> PriceTable:
        self.asked.append(list(items))
        price = Price(Decimal("1.5"), Decimal("2.5"), "hour", 1, "", "")
        return PriceTable({item: price for item in items if "g5" in item}, {"x": "not known"})


def test_queues_are_listed_also_where_runs_may_not_be(rig: Rig) -> None:
    place: Any = Place(rig.session)
    found, refused = poll_queues(place)
    assert (found.queues[0].running, found.queues[0].waiting, refused) == (1, 2, "")
    rig.account.denied = {"ListJobs": DENIED}
    found, refused = poll_queues(place)
    assert refused == "batch:ListJobs is not allowed"
    assert [row.state and row.state.priority for row in found.queues] == [7]


def test_the_price_of_a_kind_of_host_is_asked_for_once(rig: Rig) -> None:
    place: Any = Place(rig.session)
    prices = HostPrices(place)
    found = rig.look()
    for _ in range(2):
        priced = prices.add_to(found)
        assert [row.price for row in priced.hosts or ()] == [Decimal("2.5")] * 2
    assert place.asked == [["spot:g5.12xlarge"]]
    assert prices.add_to(ClusterSnapshot(0)) == ClusterSnapshot(0)
    assert host_rows(ClusterState(), [], {}) == ()


def test_this_machine_is_read_as_any_host_is(tmp_path: Path) -> None:
    """What the embedded server writes of itself, and what is read of it."""
    machine = MachineCapacity(4, 1000, ("GPU-0", "GPU-1"))
    state = replace(empty_state(machine), free=MachineCapacity(3, 900, ("GPU-1",)))
    asked = {"cluster": "batchml-local"}
    view = ReadView(state, Journal(tmp_path / "journal.db"), "key")
    (arn,) = list_container_instances(view, asked)["containerInstanceArns"]
    answer = describe_container_instances(view, {**asked, "containerInstances": [arn]})
    host = to_host(answer["containerInstances"][0], "batchml-local")
    assert (host.name, host.state) == ("this-machine", HostState.MIXED)
    assert host.resources == HostResources(4, 1000, 2, 1, 100, 1)
