"""batchml.toml: what it may say, and every mistake in it at once."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from batchml.config.environments import read_compute, read_config, read_environments, read_queue
from batchml.errors import ConfigError
from batchml.model.environment import Environment, is_arm_type, is_gpu_type

CONTRACT = """
default = "dev"
[env.dev]
region = "us-east-1"
profile = "research"
ami = "build"                          # build | ecs-gpu | ami-0123...
gpu_access = "driver-mount"            # driver-mount (privileged) | toolkit (unprivileged)
[env.dev.storage]
workspace = "efs"                      # efs | fsx-lustre | none
[env.dev.compute.gpu]
instance_types = ["g5.xlarge", "g6.xlarge"]
max_vcpus = 64
[env.dev.compute.gpu-spot]
instance_types = ["g5", "g6"]
spot = true
max_vcpus = 256
[env.dev.queues.default]
priority = 10
compute = ["gpu-spot", "gpu"]          # in this order; the next takes what the one before cannot
[env.dev.queues.urgent]
priority = 100
compute = ["gpu"]
"""

VALID: dict[str, Any] = {
    "region": "us-east-1",
    "compute": {"gpu": {"instance_types": ["g5"], "max_vcpus": 8}},
    "queues": {"default": {"compute": ["gpu"]}},
}


def test_the_contracts_example_is_read() -> None:
    default, found = read_environments(tomllib.loads(CONTRACT), "batchml.toml")
    dev = found["dev"]
    assert (default, dev.region, dev.gpu_mode) == ("dev", "us-east-1", "driver-mount")
    assert dev.compute["gpu-spot"].strategy == "SPOT_PRICE_CAPACITY_OPTIMIZED"
    assert dev.compute["gpu"].strategy == "BEST_FIT_PROGRESSIVE"
    assert dev.queues["default"].compute == ("gpu-spot", "gpu")
    assert found["local"] == Environment()


README = Path(__file__).parents[2] / "README.md"


def test_every_batchml_toml_of_the_readme_is_read() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    read = [tomllib.loads(block) for block in blocks if "[env." in block]
    for table in read:
        read_environments(table, "README.md")


def mistakes(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_environments(table, "batchml.toml")
    assert error.value.exit_code == 78
    assert "nothing was sent" in str(error.value)
    return list(error.value.mistakes)


def merged(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a table with one key, `a.b.c`, set."""
    first, _, rest = path.partition(".")
    inner = merged(table.get(first, {}), rest, value) if rest else value
    return {**table, first: inner}


TAGS = {f"k{number}": "v" for number in range(46)}
SUBNET, GROUP, VPC = "subnet-0123abcd", "sg-0123abcd", "vpc-0123abcd"

# The key that is set in VALID, its value, and what is said about it.
MISTAKES: list[tuple[str, Any, str]] = [
    ("region", "", "region: missing"),
    ("region", "USEAST", 'Expected a region such as "us-east-1"'),
    ("regoin", "us-east-1", "region"),
    ("ami", "debian", '"build", "ecs-gpu" or an AMI\'s id'),
    ("gpu_access", "root", "driver-mount"),
    ("network.cidr", "10.0.0.0/8", "/16 to /22"),
    ("network.cidr", "10.300.0.0/16", "/16 to /22"),
    ("network.zones", 7, "network.zones"),
    ("network.zones", "2", "network.zones"),
    ("network.egress", "none", "endpoints"),
    ("network.subnets", ["net-1"], "ids like subnet-"),
    ("network.security_groups", ["default"], "ids like sg-"),
    ("network.vpc", "main", "an id like vpc-"),
    ("network", {"vpc": VPC}, "go together"),
    ("network", {"subnets": [SUBNET], "security_groups": [GROUP]}, "go together"),
    ("storage.workspace", "nfs", "fsx-lustre"),
    ("storage", {"workspace": "fsx-lustre", "size": "1300 GiB"}, "1200 GiB, or n x 2400 GiB"),
    ("storage", {"workspace": "fsx-lustre", "throughput": 200}, "storage.throughput"),
    ("logs.retention_days", 91, "logs.retention_days"),
    ("budget", {"email": "a@b.c"}, "budget.usd: missing"),
    ("budget", {"usd": 0, "email": "a@b.c"}, "budget.usd"),
    ("budget", {"usd": 5, "email": "nobody"}, "Expected the address for warnings"),
    ("tags", {"aws:x": "y"}, "are reserved"),
    ("tags", {"batchml:env": "y"}, "are reserved"),
    ("tags", {"": "y"}, "1 to 128 characters"),
    ("tags", {"k": "v" * 257}, "up to 256"),
    ("tags", TAGS, "at most 45"),
    ("compute", {"bad name": VALID["compute"]["gpu"]}, "is not a valid name"),
    ("compute", {"gpu-r2": VALID["compute"]["gpu"]}, "-r2 are reserved"),
    ("compute.gpu", {"max_vcpus": 8}, "instance_types: missing"),
    ("compute.gpu", {"instance_types": ["g5"]}, "max_vcpus: missing"),
    ("compute.gpu.instance_types", ["G5 large"], "instance_types"),
    ("compute.gpu.instance_types", ["g5", "g5g"], "Arm and x86"),
    ("compute.gpu.max_vcpus", 0, "compute.gpu.max_vcpus"),
    ("compute.gpu.max_vcpus", "many", "compute.gpu.max_vcpus"),
    ("compute.gpu.min_vcpus", 9, "more than max_vcpus, 8"),
    ("compute.gpu.allocation_strategy", "FASTEST", "BEST_FIT"),
    ("compute.gpu.allocation_strategy", "SPOT_CAPACITY_OPTIMIZED", "needs spot = true"),
    ("compute.gpu", {**VALID["compute"]["gpu"], "spot": True, "allocation_strategy": "BEST_FIT"},
     "AWS has no BEST_FIT for spot"),
    ("compute.gpu.bid_percentage", 50, "needs spot = true"),
    ("compute.gpu.bid_percentage", 101, "compute.gpu.bid_percentage"),
    ("compute.gpu.ami", "mine", "an AMI's id"),
    ("compute.gpu.disk", "20 GiB", '"30 GiB" to "16384 GiB"'),
    ("compute.gpu.disk", "large", '"30 GiB" to "16384 GiB"'),
    ("compute.gpu.capacity_reservation", "mine", '"open" or "none"'),
    ("compute.gpu", {**VALID["compute"]["gpu"], "spot": True,
                     "capacity_reservation": "cr-0123abcd"}, "for on-demand"),
    ("compute.gpu.efa", "yes", "compute.gpu.efa: found 'yes'. Expected one of true, false, auto."),
    ("compute.gpu.efa", 1, "compute.gpu.efa: found 1. Expected one of true, false, auto."),
    ("compute.gpu.efa", True, "compute.gpu.efa: "),
    ("compute.gpu.scale_down_delay", "5m", '"20m" to "7d"'),
    ("compute.gpu.scale_down_delay", "later", '"20m" to "7d"'),
    ("compute.gpu.stop_timeout", "10s", '"30s" to "120s"'),
    ("compute.gpu.stop_timeout", "3m", '"30s" to "120s"'),
    ("compute.gpu.tags", {"aws:x": "y"}, "are reserved"),
    ("compute.gpu.tpyo", 1, "tpyo"),
    ("queues", {"bad name": {"compute": ["gpu"]}}, "is not a valid name"),
    ("queues.default.priority", 1001, "queues.default.priority"),
    ("queues.default.compute", [], "1 to 3"),
    ("queues.default.compute", ["gpu", "gpu"], "named twice"),
    ("queues.default.compute", ["gup"], "there is no compute.gup"),
    ("queues.default.time_limits", {"bored": "1h"}, "Known: no-capacity"),
    ("queues.default.time_limits", {"no-capacity": "5m"}, '"10m" to "24h"'),
    ("queues.default.fair_share.decay", "8d", 'up to "7d"'),
    ("queues.default.fair_share.shares", {"a-b": 1.0}, "not a share identifier"),
    ("queues.default.fair_share.shares", {"a": 0}, "queues.default.fair_share.shares"),
    ("queues.default.fair_share.shares", {"a": 0.001}, "0.0011 to 9999"),
    ("queues.default.fair_share.reservation", 100, "queues.default.fair_share.reservation"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "said"), MISTAKES)
def test_a_mistake_is_told_with_its_key_and_what_is_allowed(
    key: str, value: Any, said: str
) -> None:
    found = mistakes({"env": {"dev": merged(VALID, key, value)}})
    assert any(said in mistake for mistake in found), found
    place = key if key.count(".") < 2 else key.rpartition(".")[0]
    assert any(mistake.startswith(f"env.dev.{place.partition('.')[0]}") for mistake in found), found


def test_a_mistake_is_told_once() -> None:
    """What the types say is not said again by the checks that look at values."""
    for key, value, _ in MISTAKES:
        found = mistakes({"env": {"dev": merged(VALID, key, value)}})
        assert len(found) == len(set(found)), found


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    table = {
        "default": "dve",
        "env": {
            "dev": {
                "region": "nowhere", "ami": 5,
                "compute": {"gpu": {"max_vcpus": -1, "disk": "1 GiB"}},
                "queues": {"default": {"compute": ["cpu"], "priority": "high"}},
            },
            "Bad_Name": {"region": "us-east-1"},
        },
        "extra": 1,
    }  # fmt: skip
    found = mistakes(table)
    for key in (
        "default: there is no environment 'dve'", "env.dev.region", "env.dev.ami",
        "env.dev.compute.gpu.max_vcpus", "env.dev.compute.gpu.disk",
        "env.dev.compute.gpu.instance_types", "env.dev.queues.default.compute",
        "env.dev.queues.default.priority", "env.Bad_Name", "extra",
    ):  # fmt: skip
        assert any(mistake.startswith(key) for mistake in found), (key, found)


def test_the_default_environment_must_be_one_and_a_near_name_is_named() -> None:
    (found,) = mistakes({"default": "dve", "env": {"dev": VALID}})
    assert "'dev'" in found


def test_arm_and_x86_are_not_in_one_queue() -> None:
    arm = {"instance_types": ["g5g.xlarge"], "max_vcpus": 8}
    table = merged(VALID, "compute", {**VALID["compute"], "arm": arm})
    found = mistakes({"env": {"dev": merged(table, "queues.default.compute", ["gpu", "arm"])}})
    assert "Arm and x86" in " ".join(found)


def test_local_is_this_machine_and_takes_no_region() -> None:
    (found,) = mistakes({"env": {"local": {"region": "us-east-1"}}})
    assert found.startswith("env.local.region: local is this machine")
    queues = {"compute": VALID["compute"], "queues": VALID["queues"]}
    _, known = read_environments({"env": {"local": queues}}, "batchml.toml")
    assert known["local"].queues["default"].compute == ("gpu",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ami", "ami-0123456789abcdef0"),
        ("network", {"vpc": VPC, "subnets": [SUBNET], "security_groups": [GROUP]}),
        ("network", {"egress": "endpoints", "zones": 3, "cidr": "10.0.0.0/22"}),
        ("storage", {"workspace": "fsx-lustre", "size": "2400 GiB", "throughput": 250}),
        ("budget", {"usd": 500, "email": "a@example.org"}),
        ("compute.gpu.instance_types", ["default_x86_64"]),
        ("compute.gpu.capacity_reservation", "cr-0123abcd"),
        ("compute.gpu.scale_down_delay", "20m"),
        ("compute.gpu.efa", "auto"),
        (
            "compute.gpu",
            {"instance_types": ["p5.48xlarge"], "max_vcpus": 192, "efa": True, "ami": "build"},
        ),
        ("queues.default.time_limits", {}),
        ("queues.default.time_limits", {"no-capacity": 0}),
        ("queues.default.fair_share", {"shares": {"team*": 2}, "decay": "2h", "reservation": 99}),
        ("jobs", ["lenet"]),
    ],
)
def test_what_is_allowed_is_read(key: str, value: Any) -> None:
    read_environments({"env": {"dev": merged(VALID, key, value)}}, "batchml.toml")


def test_words_become_the_numbers_that_aws_takes() -> None:
    compute = read_compute(
        "gpu",
        {"instance_types": ["g5"], "max_vcpus": 8, "disk": "1 TiB", "scale_down_delay": "1h"},
        "flags",
    )
    assert (compute.disk_gib, compute.scale_down_minutes, compute.stop_seconds) == (1024, 60, 110)
    queue = read_queue("q", {"compute": ["any"], "time_limits": {"no-capacity": "6h"}}, "flags")
    assert queue.limits_seconds == {"CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": 21_600}


def test_flags_are_judged_like_the_file() -> None:
    with pytest.raises(ConfigError) as error:
        read_compute("gpu", {"instance_types": ["?"], "max_vcpus": 8, "disk": "1 GiB"}, "flags")
    assert len(error.value.mistakes) == 2
    assert all(not mistake.startswith(".") for mistake in error.value.mistakes)
    with pytest.raises(ConfigError) as error:
        read_queue("q", {"compute": [], "time_limits": {"no-capacity": "1m"}}, "flags")
    assert len(error.value.mistakes) == 2


@pytest.mark.parametrize(
    ("name", "gpu", "arm"),
    [
        ("g5.xlarge", True, False), ("p4d.24xlarge", True, False), ("g5g", True, True),
        ("p5en.48xlarge", True, False), ("g4ad.xlarge", False, False), ("g4dn", True, False),
        ("c7i.large", False, False), ("m7g.medium", False, True), ("c7gn", False, True),
        ("default_arm64", False, True), ("default_x86_64", False, False),
        ("g6e.12xlarge", True, False), ("p3dn.24xlarge", True, False), ("gr6.4xlarge", True, False),
    ],
)  # fmt: skip
def test_what_an_instance_type_is(name: str, gpu: bool, arm: bool) -> None:
    assert (is_gpu_type(name), is_arm_type(name)) == (gpu, arm)


def test_a_key_at_the_wrong_place_is_told_the_right_one() -> None:
    dev = {"region": "us-east-1", "cidr": "10.0.0.0/16", "network": {"ami": "build"}}
    found = read_config({"usd_per_hour": 1, "region": "x", "env": {"dev": dev}}).mistakes
    assert [text.split("belongs ")[1] for text in (*found[""], *found["dev"])] == [
        "under [env.local].",
        "under [env.dev].",
        "under [env.dev.network].",
        "under [env.dev].",
    ]
    (unsure,) = read_config({"queues": {}}).mistakes[""]
    assert unsure.endswith("belongs under [env.NAME].")
