"""`batchml prove --endpoint` against moto's AWS: it holds, it is interrupted, AWS says no."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from batchml.prove.claims import CLAIMS, claims_of
from batchml.prove.folder import find_leftovers, read_records
from batchml.prove.steps import STEPS
from tests.e2e.test_moto import write_images
from tests.support.cli import Cli, Shown, read_rest, read_until
from tests.support.executor_rig import docker, need_engine
from tests.support.moto_aws import MotoAws, moto_aws
from tests.support.registry_rig import need_registry

LIMIT = 180.0
# The steps that need no running job.
ANSWERED = ("doctor", "setup", "plan", "image", "submitter", "doctor-role", "teardown", "search")


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoAws]:
    need_engine()
    need_registry()
    before = set(_images())
    with moto_aws(tmp_path_factory.mktemp("registry")) as aws:
        yield aws
    for image in set(_images()) - before:
        if "/prove-" in image:  # other images are of tests that run at the same time
            docker("image", "rm", "-f", image)


def _images() -> list[str]:
    return docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()


@pytest.fixture
def aws(account: MotoAws, cli: Cli, tmp_path: Path) -> Iterator[MotoAws]:
    """The account, for commands of a project with small images."""
    (cli.folder / "batchml.toml").write_text('[env.mine]\nregion = "us-east-1"\n')
    write_images(cli.folder)
    (tmp_path / "t").mkdir()
    cli.environ |= account.environ(HOME=str(cli.folder), TMPDIR=str(tmp_path / "t"))
    del cli.environ["AWS_ENDPOINT_URL"]  # --endpoint says it
    yield account
    account.set(denied=[], scp=[], keys="valid", quotas={}, not_enabled=[], not_offered=[])


def prove(
    cli: Cli, aws: MotoAws, *more: str, region: str = "us-east-1"
) -> tuple[int, dict[str, Any], str]:
    words = ("prove", "--endpoint", aws.url, "--region", region, "--json", *more)
    shown = cli(*words, timeout=LIMIT)
    return shown.code, shown.json if shown.out else {}, shown.err


def left_in(aws: MotoAws, home: Home) -> list[str]:
    """What the proofs of a state folder have left: stacks, roles, repositories, queues, buckets."""
    proofs = [each.id for each in read_records(home.root)]
    batch, repositories = aws.client("batch"), aws.client("ecr").describe_repositories()
    found = [
        *(each["StackName"] for each in aws.client("cloudformation").describe_stacks()["Stacks"]),
        *(each["RoleName"] for each in aws.client("iam").list_roles()["Roles"]),
        *(each["jobQueueName"] for each in batch.describe_job_queues()["jobQueues"]),
        *(each["Name"] for each in aws.client("s3").list_buckets()["Buckets"]),
        *(str(aws.client("ecr").list_tags_for_resource(resourceArn=each["repositoryArn"])["tags"])
          for each in repositories["repositories"]),
        *(str(each.get("Tags")) for each in aws.client("ec2").describe_vpcs()["Vpcs"]),
    ]  # fmt: skip
    return [each for each in found if any(proof in each for proof in proofs)]


def is_clean(home: Home, tmp_path: Path) -> bool:
    return not find_leftovers(home.root) and not list((tmp_path / "t").glob("batchml-prove-*"))


def test_moto_holds_every_claim_that_needs_no_running_job(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path
) -> None:
    code, document, err = prove(cli, aws)
    claims = {each["id"]: each for each in document["claims"]}
    wrong = [each for each in claims.values() if each["result"] == "did not"]
    assert not wrong and code == 0, (wrong, err)
    asked = {claim.id for step in ANSWERED for claim in claims_of(step, "endpoint")}
    assert {each for each, found in claims.items() if found["result"] == "held"} == asked
    for claim in CLAIMS:
        if claim.id not in asked and "endpoint" in claim.where and not claim.needs:
            assert "the endpoint does not run jobs" in claims[claim.id]["why"], claim
    assert left_in(aws, home) == [] and is_clean(home, tmp_path)


STOPS = [step.name for step in STEPS if step.name in ANSWERED and not step.removes]


def watch_proof(cli: Cli, aws: MotoAws, *more: str) -> subprocess.Popen[str]:
    return cli.watch("prove", "--endpoint", aws.url, "--region", "us-east-1", *more)


@pytest.mark.parametrize("step", STOPS[:-2])
def test_interrupted_in_a_step_it_leaves_nothing(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path, step: str
) -> None:
    """After the line of the step before it: in the middle of `step`."""
    watching = watch_proof(cli, aws)
    if step == "doctor":
        aws.wait_for_call()
    else:
        read_until(watching, f"{STOPS[STOPS.index(step) - 1]} ")
    watching.send_signal(signal.SIGINT)
    out, err = read_rest(watching, LIMIT)
    assert watching.returncode == 130, (out, err)
    assert left_in(aws, home) == [] and is_clean(home, tmp_path)


def test_two_proofs_at_once_do_not_meet_and_are_interrupted_in_their_last_steps(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path
) -> None:
    both = {step: watch_proof(cli, aws) for step in STOPS[-2:]}
    for step, watching in both.items():
        before = STOPS[: STOPS.index(step)]
        out = read_until(watching, f"{before[-1]} ")
        watching.send_signal(signal.SIGINT)
        held = [line.split()[0] for line in out.splitlines() if " held " in line]
        assert held == before and "does not hold" not in out, out
    for watching in both.values():
        out, err = read_rest(watching, LIMIT)
        assert watching.returncode == 130 and "does not hold" not in out, (out, err)
    assert left_in(aws, home) == [] and is_clean(home, tmp_path)


@pytest.mark.parametrize(
    "denied",
    [
        {"setup": "cloudformation:CreateStack"},
        {"setup": "batch:CreateComputeEnvironment"},
        {"image": "ecr:CreateRepository", "search": "tag:GetResources"},
        {"probe": "batch:SubmitJob", "submitter": "iam:CreateRole",
         "teardown": "cloudformation:DeleteStack"},
    ],
)  # fmt: skip
def test_a_denied_call_is_named_and_what_is_left_is_told_with_the_command_that_removes_it(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path, denied: dict[str, str]
) -> None:
    # doctor would find it, and nothing would be made: it is denied when doctor has been asked.
    watching = watch_proof(cli, aws, "--json")
    aws.wait_for_call("batch:DescribeJobQueues")
    aws.set(denied=list(denied.values()))
    out, err = read_rest(watching, LIMIT)
    document = json.loads(out)
    for step, action in denied.items():
        whys = [f"{each['why']}" for each in document["claims"] if each["step"] == step]
        assert any(action in why for why in whys), whys
    if "teardown" in denied:
        command = f"batchml prove --remove {document['proof']}"
        assert document["left"] == command and left_in(aws, home), err
        aws.set(denied=[])
        shown = cli(*command.split()[1:], timeout=LIMIT)
        assert shown.code == 0, shown.err
    assert left_in(aws, home) == [] and is_clean(home, tmp_path), err


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"keys": "expired"}, "expired"),
        ({"keys": "unknown"}, "does not know"),
        ({"scp": ["cloudformation:CreateStack"]}, "SCP"),
        ({"quotas": {"Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 0}},
         "0 vCPUs"),
    ],
)  # fmt: skip
def test_what_doctor_finds_stops_it_before_anything_is_made(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path, rules: dict[str, Any], words: str
) -> None:
    aws.set(**rules)
    code, document, err = prove(cli, aws)
    (found,) = [each for each in document["claims"] if each["id"] == "doctor"]
    assert found["result"] == "did not" and words in found["why"], (found, err)
    assert code in (1, 77)
    aws.set(keys="valid")
    assert left_in(aws, home) == [] and is_clean(home, tmp_path)


DEV = """
[env.dev]
region = "REGION"
[env.dev.compute.cpu]
instance_types = ["m7i.large"]
max_vcpus = 4
[env.dev.queues.default]
compute = ["cpu"]
"""


def plan(cli: Cli, aws: MotoAws, region: str) -> Shown:
    """`setup --plan` of an environment in the region."""
    (cli.folder / "batchml.toml").write_text(DEV.replace("REGION", region))
    return cli("setup", "--env", "dev", "--plan", AWS_ENDPOINT_URL=aws.url)


def created(aws: MotoAws, seen: int) -> list[str]:
    return [each.operation for each in aws.calls()[seen:] if each.operation.startswith("Create")]


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ("us-east-9", "there is no region 'us-east-9' aws ec2 describe-regions --all-regions"),
        ("eu-south-2", "the account has not enabled the region eu-south-2 aws account enable-region"
                       " --region-name eu-south-2"),
    ],
)  # fmt: skip
def test_a_region_that_cannot_be_used_is_told_before_anything_is_made(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path, region: str, words: str
) -> None:
    aws.set(not_enabled=["eu-south-2"])
    seen = len(aws.calls())
    code, document, err = prove(cli, aws, region=region)
    (found,) = [each for each in document["claims"] if each["id"] == "doctor"]
    assert (found["result"], code) == ("did not", 1), (found, err)
    assert found["why"].startswith(words) and "\n" not in found["why"], found
    assert created(aws, seen) == [] and is_clean(home, tmp_path)
    planned = plan(cli, aws, region)
    (told, *_) = planned.err.splitlines()
    assert planned.code == 77 and "is not allowed" in told, planned
    assert f"has not enabled {region}: batchml doctor tells" in told


def test_instance_types_that_no_zone_offers_are_told_before_anything_is_made(
    cli: Cli, home: Home, aws: MotoAws, tmp_path: Path
) -> None:
    aws.set(not_offered=["m7i.large", "m6i.large"])
    seen = len(aws.calls())
    _, document, err = prove(cli, aws)
    (found,) = [each for each in document["claims"] if each["id"] == "setup"]
    assert found["result"] == "did not", (found, err)
    for each in ("m7i.large", "m6i.large"):
        text = f"no zone of us-east-1 offers {each}. Did you mean 'm"
        assert text in found["why"], found
    assert created(aws, seen) == [] and is_clean(home, tmp_path)
    planned = plan(cli, aws, "us-east-1")
    (told,) = [line for line in planned.err.splitlines() if "no zone" in line]
    assert planned.code == 2 and "no zone of us-east-1 offers m7i.large" in told
    assert "Did you mean" in told and "m6i.large" not in told


def test_without_credentials_it_says_where_they_come_from(
    cli: Cli, home: Home, aws: MotoAws
) -> None:
    del cli.environ["AWS_ACCESS_KEY_ID"]
    code, document, _ = prove(cli, aws)
    (found,) = [each for each in document["claims"] if each["id"] == "doctor"]
    assert code == 77 and "aws configure" in found["why"], found
    assert left_in(aws, home) == []
