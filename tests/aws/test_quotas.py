"""vCPU quotas: what an environment needs, what the account has, and what to ask for."""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.capacity import (
    Quota,
    QuotaNeed,
    find_quota,
    needed_quotas,
    new_account_quotas,
    quota_class,
    quota_names,
    read_quotas,
    startable_queues,
)
from batchml.model.environment import Compute, Environment, Queue
from batchml.runtime.protocol.instance_types import vcpus_of
from batchml.setup.doctor import quota_findings
from tests.support.wire import Refusal, Wire
from tests.support.wire import keys as keys

ON_DEMAND_G = "Running On-Demand G and VT instances"
ON_DEMAND_P = "Running On-Demand P instances"
SPOT_G = "All G and VT Spot Instance Requests"


def env(**compute: Compute) -> Environment:
    return Environment(region="us-east-1", compute=compute)


def gpu(*types: str, **more: Any) -> Compute:
    return Compute(instance_types=types, **{"max_vcpus": 64, **more})


STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"


@pytest.mark.parametrize(
    ("quotas", "ready"),
    [
        ({STANDARD: 5, ON_DEMAND_G: 0, SPOT_G: 0}, ("default",)),
        ({STANDARD: 0, ON_DEMAND_G: 0, SPOT_G: 0}, ()),
        ({STANDARD: 1, ON_DEMAND_G: 4, SPOT_G: 0}, ("gpu",)),  # an m7i.large has 2 vCPUs
        ({STANDARD: 2, ON_DEMAND_G: 3, SPOT_G: 4}, ("default", "gpu")),  # spot alone suffices
        ({STANDARD: 2, SPOT_G: 0}, ("default", "gpu")),  # one that is not listed is not missing
    ],
)
def test_a_queue_is_ready_if_one_of_its_hosts_fits_a_quota(
    quotas: dict[str, int], ready: tuple[str, ...]
) -> None:
    made = Environment(
        region="us-east-1",
        compute={
            "cpu": gpu("m7i.large", "m7i.xlarge"),
            "gpu": gpu("g6.xlarge"),
            "gpu-spot": gpu("g6.xlarge", spot=True),
        },
        queues={"default": Queue(compute=("cpu",)), "gpu": Queue(compute=("gpu-spot", "gpu"))},
    )
    known = {name: Quota(name, "L-1", value) for name, value in quotas.items()}
    assert startable_queues(made, known)[0] == ready
    assert sorted(sum(startable_queues(made, known), ())) == ["default", "gpu"]
    fresh = new_account_quotas(needed_quotas(made))
    assert startable_queues(made, fresh) == (("default",), ("gpu",))


@pytest.mark.parametrize(
    ("instance_type", "expected"),
    [
        ("p5.48xlarge", "P"), ("p6-b200", "P"), ("g5", "G and VT"), ("g4dn.xlarge", "G and VT"),
        ("gr6.4xlarge", "G and VT"), ("vt1", "G and VT"), ("dl1.24xlarge", "DL"), ("d3", None),
        ("trn1", "Trn"), ("inf2.xlarge", "Inf"), ("x2iedn", "X"), ("t3.large", None),
        ("m5.large", None), ("hpc7a", "HPC"), ("h1", None), ("u-6tb1.metal", "High Memory"),
        ("optimal", None), ("default_x86_64", None), ("c7g", None), ("f2", "F"), ("i4i", None),
    ],
)  # fmt: skip
def test_a_type_counts_against_the_quota_of_its_class(
    instance_type: str, expected: str | None
) -> None:
    assert quota_class(instance_type) == (expected or "Standard (A, C, D, H, I, M, R, T, Z)")


def test_p_types_have_two_quotas_on_spot_and_one_on_demand() -> None:
    assert quota_names("p5.48xlarge", spot=True)[0] == "All P5 Spot Instance Requests"
    assert quota_names("p4d", spot=True)[0] == "All P4, P3 and P2 Spot Instance Requests"
    assert quota_names("p4d", spot=True)[1] == "All P Spot Instance Requests"
    assert quota_names("p4d", spot=False) == quota_names("p5", spot=False) == (ON_DEMAND_P,)


@pytest.mark.parametrize(
    ("instance_type", "expected"),
    [
        ("g5.xlarge", 4), ("g5", 4), ("p3", 8), ("p5", 16), ("p4d.24xlarge", 96), ("t3.micro", 2),
        ("p5.48xlarge", 192), ("m5.large", 2), ("c5", 2), ("g5g.metal", 96), ("optimal", 2),
        ("c7i.metal-24xl", 96), ("p6-b300", 192),
    ],
)  # fmt: skip
def test_vcpus_follow_from_names(instance_type: str, expected: int) -> None:
    assert vcpus_of(instance_type) == expected


def test_needs_are_summed_by_quota_and_spot_is_apart() -> None:
    environment = env(
        one=gpu("g5.xlarge", "g6.2xlarge", max_vcpus=16),
        two=gpu("g5.12xlarge", max_vcpus=96, min_vcpus=48),
        spot=gpu("g5", spot=True, max_vcpus=256),
    )
    spot, on_demand = needed_quotas(environment)
    assert spot == QuotaNeed(SPOT_G, (SPOT_G,), ("spot",), smallest=4, least=0, most=256)
    assert on_demand == QuotaNeed(
        ON_DEMAND_G, (ON_DEMAND_G,), ("one", "two"), smallest=48, least=48, most=112
    )


def test_a_section_of_several_classes_may_take_all_from_either() -> None:
    needs = needed_quotas(env(any=gpu("g5.xlarge", "p4d", min_vcpus=4, max_vcpus=200)))
    assert [(need.quota, need.smallest, need.least, need.most) for need in needs] == [
        (ON_DEMAND_G, 4, 0, 200),
        (ON_DEMAND_P, 96, 0, 200),
    ]
    assert needed_quotas(env()) == ()


# --- findings ------------------------------------------------------------------------------------

NEED = QuotaNeed(ON_DEMAND_G, (ON_DEMAND_G,), ("gpu",), smallest=4, least=0, most=64)


def having(value: float, need: QuotaNeed = NEED) -> Any:
    quota = Quota(need.quota, "L-DB2E81BA", value)
    (found,) = quota_findings([need], {need.quota: quota}, flags=" --region us-east-1")
    return found


def test_a_quota_of_0_is_a_problem_with_its_code_its_value_and_the_request() -> None:
    found = having(0)
    assert found.mark == "problem"
    for words in (ON_DEMAND_G, "L-DB2E81BA", "is 0 vCPUs", "compute.gpu", "needs 4", "64"):
        assert words in found.text
    (fix,) = found.fix
    assert fix == (
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
        "L-DB2E81BA --desired-value 64 --region us-east-1"
    )


@given(st.integers(0, 200), st.integers(1, 96), st.integers(0, 96), st.integers(1, 200))
def test_marks_follow_what_can_start_and_what_can_be_reached(
    value: int, smallest: int, least: int, most: int
) -> None:
    need = QuotaNeed(ON_DEMAND_G, (ON_DEMAND_G,), ("gpu",), smallest, least, most)
    found = having(value, need)
    if value < smallest or value < least:
        assert found.mark == "problem"
    else:
        assert found.mark == ("warning" if value < most else "ok")
    assert bool(found.fix) == (found.mark != "ok")
    if found.fix:
        words = shlex.split(found.fix[0])
        assert int(words[words.index("--desired-value") + 1]) >= max(smallest, most)


def test_a_quota_that_is_not_there_is_said_and_no_code_is_invented() -> None:
    (found,) = quota_findings([NEED], {})
    assert (found.mark, "L-" in found.text + found.fix[0]) == ("warning", False)


def test_names_are_compared_without_case_and_an_old_one_will_do() -> None:
    (need,) = needed_quotas(env(p=gpu("p4d", spot=True)))
    old = Quota("All P spot instance requests", "L-7212CCBC", 8)
    assert find_quota(need, {old.name: old}) == old
    new = Quota("All P4, P3 and P2 Spot Instance Requests", "L-7212CCBC", 9)
    assert find_quota(need, {old.name: old, new.name: new}) == new
    assert find_quota(NEED, {old.name: old}) is None


# --- reading -------------------------------------------------------------------------------------


def entry(name: str, code: str, value: float) -> dict[str, Any]:
    return {"ServiceCode": "ec2", "QuotaName": name, "QuotaCode": code, "Value": value}


@pytest.mark.usefixtures("keys")
def test_all_pages_are_read() -> None:
    def pages(params: dict[str, Any]) -> dict[str, Any]:
        if "NextToken" not in params:
            return {"Quotas": [entry(ON_DEMAND_P, "L-417A185B", 0)], "NextToken": "t"}
        return {"Quotas": [entry(ON_DEMAND_G, "L-DB2E81BA", 8.0)]}

    wire = Wire({"ListServiceQuotas": pages})
    found = read_quotas(wire.session())
    assert found[ON_DEMAND_G] == Quota(ON_DEMAND_G, "L-DB2E81BA", 8.0)
    assert found[ON_DEMAND_P].value == 0
    assert wire.operations == ["ListServiceQuotas"] * 2
    assert wire.wrong == []


@pytest.mark.usefixtures("keys")
def test_an_answer_without_a_value_is_no_traceback() -> None:
    from batchml.errors import AccessError, ServiceUnreachable

    broken = entry(ON_DEMAND_G, "L-DB2E81BA", 1)
    del broken["Value"]
    with pytest.raises(ServiceUnreachable, match="cut off"):
        read_quotas(Wire({"ListServiceQuotas": {"Quotas": [broken]}}).session())
    with pytest.raises(AccessError):
        read_quotas(Wire({"ListServiceQuotas": Refusal("AccessDeniedException")}).session())
