"""cfn-lint, checkov and CloudFormation Guard find nothing in cfn/, and would find something."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.cloudformation import FILES, Template, load
from tests.security.scan import cfn_lint, checkov, guard, need_scanners

pytestmark = pytest.mark.full  # their environment takes longer than all rules of our own

# What checkov is told to leave alone, with its reason beside it in the template.
SKIPPED = {("storage.yaml", "CKV_AWS_18")}

ROLES = next(path for path in FILES if path.name == "roles.yaml")


@pytest.fixture(autouse=True)
def scanners() -> None:
    need_scanners()


def test_there_are_templates() -> None:
    assert {path.stem for path in FILES} >= {"network", "roles", "storage", "observability"}


def test_cfn_lint_finds_nothing_but_what_is_wrong(tmp_path: Path) -> None:
    """Warnings count: T17, an action that does not exist, is one. One run: a start takes long."""
    wrong = tmp_path / "wrong.yaml"
    text = ROLES.read_text("utf-8")
    assert "batch:SubmitJob\n" in text
    wrong.write_text(text.replace("batch:SubmitJob\n", "batch:SubmitJobs\n", 1), "utf-8")
    assert [found.split(":")[0] for found in cfn_lint(*FILES, wrong)] == ["W3037 wrong.yaml"]


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(PUBLIC_BUCKET), "utf-8")
    found = checkov([*FILES, bad])
    assert found["unread"] == []
    failed = {(Path(each["file_path"]).name, each["check_id"]) for each in found["failed"]}
    assert ("bad.json", "CKV_AWS_20") in failed
    assert {each for each in failed if each[0] != "bad.json"} == set()
    skipped = {(Path(each["file_path"]).name, each["check_id"]) for each in found["skipped"]}
    assert skipped == SKIPPED
    assert all(each["check_result"]["suppress_comment"] for each in found["skipped"])
    seen = {Path(each["file_path"]).name for each in found["passed"]}
    assert seen >= {path.name for path in FILES}


PUBLIC_BUCKET = {
    "AWSTemplateFormatVersion": "2010-09-09",
    "Resources": {"B": {"Type": "AWS::S3::Bucket", "Properties": {"AccessControl": "PublicRead"}}},
}


def properties(template: Template, name: str) -> dict[str, Any]:
    found = template["Resources"][name]["Properties"]
    assert isinstance(found, dict)
    return found


# Template, the rule that must fail, and a fault.
GUARD_FAULTS: list[tuple[str, str, Callable[[Template], object]]] = [
    ("storage", "buckets_are_private",
     lambda t: properties(t, "Bucket")["PublicAccessBlockConfiguration"].update(
         BlockPublicPolicy=False)),
    ("storage", "buckets_keep_data", lambda t: t["Resources"]["Bucket"].pop("DeletionPolicy")),
    ("network", "no_address_comes_in",
     lambda t: properties(t, "JobGroup").update(SecurityGroupIngress=[{"CidrIp": "10.0.0.0/8"}])),
    ("network", "no_address_comes_in_by_rule",
     lambda t: properties(t, "JobsFromJobs").update(CidrIp="0.0.0.0/0")),
    ("network", "no_address_goes_out_by_rule",
     lambda t: properties(t, "JobsToJobs").update(CidrIp="0.0.0.0/0")),
    ("network", "subnets_give_no_addresses",
     lambda t: properties(t, "PrivateSubnet2").update(MapPublicIpOnLaunch=True)),
    ("network", "endpoints_are_private",
     lambda t: properties(t, "EcsEndpoint").update(PrivateDnsEnabled=False)),
    ("storage", "keys_are_rotated",
     lambda t: properties(t, "Key").update(EnableKeyRotation=False)),
    ("observability", "logs_end_and_are_encrypted",
     lambda t: properties(t, "JobLogs").pop("RetentionInDays")),
    ("storage", "efs_is_encrypted_and_kept",
     lambda t: properties(t, "Efs").update(Encrypted=False)),
    ("storage", "lustre_is_encrypted_and_kept", lambda t: properties(t, "Lustre").pop("KmsKeyId")),
    ("roles", "roles_are_trusted_by_services",
     lambda t: properties(t, "JobRole")["AssumeRolePolicyDocument"]["Statement"][0].update(
         Principal={"AWS": "*"})),
    ("ami", "builders_have_no_way_in",
     lambda t: properties(t, "Infrastructure").update(KeyPair="mine")),
    ("ami", "parents_have_encrypted_disks",
     lambda t: properties(t, "Recipe")["BlockDeviceMappings"][0]["Ebs"].update(Encrypted=False)),
]  # fmt: skip


def test_guard_finds_nothing_but_what_is_wrong() -> None:
    templates = {path.stem: load(path) for path in FILES}
    faulty = {}
    for stem, rule, fault in GUARD_FAULTS:
        faulty[rule] = copy.deepcopy(templates[stem])
        fault(faulty[rule])
    found = guard({**templates, **faulty})
    assert {stem: found[stem]["failed"] for stem in templates} == {stem: [] for stem in templates}
    assert {rule: found[rule]["failed"] for rule in faulty} == {rule: [rule] for rule in faulty}
    # Every rule speaks of something that is there, and every rule can fail.
    assert {rule for stem in templates for rule in found[stem]["passed"]} == set(faulty)
