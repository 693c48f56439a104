"""`cfn/ami.yaml`: what holds without running it. What its scripts do: tests/process/test_ami.py."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.ami import Document, data, documents, files_of, scripts, template, template_text

ALL = scripts("build", "validate", "test")
FILES = {path: text for script in ALL for path, text in files_of(script)}


def properties(resource: str) -> dict[str, Any]:
    found: dict[str, Any] = template()["Resources"][resource]["Properties"]
    return found


# --- what the code that deploys it relies on ----------------------------------------------------


def test_parameters_and_outputs_are_those_that_setup_knows() -> None:
    parameters = template()["Parameters"]
    assert set(parameters) == {
        "EnvironmentName", "Subnet", "SecurityGroup", "ContentVersion", "ParentImage",
        "DriverVersion", "BuildInstanceType", "DiskGiB", "KeyArn", "LogBucket", "KeepImages",
        "EfaVersion", "EfaSource",
    }  # fmt: skip
    required = {name for name, parameter in parameters.items() if "Default" not in parameter}
    assert required == {"EnvironmentName", "Subnet", "SecurityGroup"}
    assert set(template()["Outputs"]) == {"ImageId"}
    both = [*parameters.values(), *template()["Outputs"].values()]
    assert all(each["Description"] for each in both)


def test_defaults_are_allowed_by_their_own_patterns() -> None:
    for name, parameter in template()["Parameters"].items():
        if "Default" in parameter and "AllowedPattern" in parameter:
            assert re.fullmatch(parameter["AllowedPattern"], str(parameter["Default"])), name


def test_it_can_be_deployed_without_a_bucket() -> None:
    assert len(template_text().encode()) <= 51_200


def test_no_component_is_longer_than_image_builder_takes() -> None:
    """Image Builder API reference, CreateComponent: `data` has up to 16,000 characters."""
    sizes = {name: len(text) for name, text in data().items()}
    assert {name: size for name, size in sizes.items() if size > 16_000} == {}, sizes


def test_the_driver_is_chosen_by_its_branch_unless_a_version_is_given() -> None:
    """An exact default would fail wherever the parent's release offers another version."""
    driver = template()["Parameters"]["DriverVersion"]
    assert re.fullmatch(r"[0-9]{3}", str(driver["Default"]))
    assert re.fullmatch(driver["AllowedPattern"], "580.159.03")


def test_whatever_cannot_be_changed_has_the_version_that_changes_with_it() -> None:
    for resource in template()["Resources"].values():
        if resource["Type"] in ("AWS::ImageBuilder::Component", "AWS::ImageBuilder::ImageRecipe"):
            assert resource["Properties"]["Version"] == {"Ref": "ContentVersion"}


# --- security -----------------------------------------------------------------------------------


def test_build_instances_have_no_key_no_old_metadata_service_and_are_always_ended() -> None:
    infrastructure = properties("Infrastructure")
    assert "KeyPair" not in infrastructure
    assert infrastructure["InstanceMetadataOptions"] == {
        "HttpTokens": "required", "HttpPutResponseHopLimit": 1,
    }  # fmt: skip
    assert infrastructure["TerminateInstanceOnFailure"] is True
    assert infrastructure["SubnetId"] == {"Ref": "Subnet"}
    assert infrastructure["SecurityGroupIds"] == [{"Ref": "SecurityGroup"}]


def test_the_disk_is_encrypted_and_the_image_shared_with_nobody() -> None:
    (disk,) = properties("Recipe")["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"] is True
    assert "AdditionalInstanceConfiguration" not in properties("Recipe"), "no user data"
    (distribution,) = properties("Distribution")["Distributions"]
    assert "LaunchPermissionConfiguration" not in distribution["AmiDistributionConfiguration"]


def test_roles_have_what_is_needed_and_each_its_own_service() -> None:
    resources = template()["Resources"]
    roles = {n: r["Properties"] for n, r in resources.items() if r["Type"] == "AWS::IAM::Role"}
    seen = {
        name: (
            [s["Principal"]["Service"]["Fn::Sub"].partition(".")[0]
             for s in role["AssumeRolePolicyDocument"]["Statement"]],
            [arn["Fn::Sub"].partition(":policy/")[2] for arn in role["ManagedPolicyArns"]],
        )
        for name, role in roles.items()
    }  # fmt: skip
    assert seen == {
        "BuildRole": (
            ["ec2"],
            ["EC2InstanceProfileForImageBuilder", "AmazonSSMManagedInstanceCore"],
        ),
        "CleanupRole": (["imagebuilder"], ["service-role/EC2ImageBuilderLifecycleExecutionPolicy"]),
    }
    assert "Policies" not in roles["CleanupRole"]
    condition, policies, otherwise = roles["BuildRole"]["Policies"]["Fn::If"]
    (policy,) = policies
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert (condition, otherwise) == ("HasLogBucket", {"Ref": "AWS::NoValue"})
    assert statement["Action"] == "s3:PutObject"
    assert statement["Resource"]["Fn::Sub"].endswith(":s3:::${LogBucket}/image-builder/*")


def test_logs_end_and_everything_is_tagged() -> None:
    assert properties("BuildLogs")["RetentionInDays"] == 90
    name = properties("Recipe")["Name"]["Fn::Sub"]
    group = properties("BuildLogs")["LogGroupName"]["Fn::Sub"]
    assert group == f"/aws/imagebuilder/{name}", "the group that Image Builder logs into"
    for logical, resource in template()["Resources"].items():
        if resource["Type"] != "AWS::IAM::InstanceProfile":
            assert "batchml:env" in json.dumps(resource["Properties"].get("Tags")), logical


# --- old images ---------------------------------------------------------------------------------


def test_the_image_before_stays_for_hosts_that_start_from_it_and_is_cleaned_up_later() -> None:
    image = template()["Resources"]["Image"]
    assert image["UpdateReplacePolicy"] == "Retain"
    assert image["DeletionPolicy"] == "Delete"
    cleanup = {"Fn::GetAtt": ["CleanupRole", "Arn"]}
    assert image["Properties"]["DeletionSettings"] == {"ExecutionRole": cleanup}
    policy = properties("OldImages")
    (detail,) = policy["PolicyDetails"]
    assert detail["Filter"] == {"Type": "COUNT", "Value": {"Ref": "KeepImages"}}
    assert template()["Parameters"]["KeepImages"]["MinValue"] >= 2, "this one and the one before"
    assert detail["Action"]["IncludeResources"] == {"Amis": True, "Snapshots": True}
    assert detail["ExclusionRules"]["Amis"]["LastLaunched"] == {"Unit": "WEEKS", "Value": 1}
    assert policy["ResourceSelection"]["TagMap"] == image["Properties"]["Tags"]


# --- component documents ------------------------------------------------------------------------


def test_documents_are_what_image_builder_takes() -> None:
    for name, text in data().items():
        assert len(text) <= 16_000, name
    for name, document in documents().items():
        phases = [phase.name for phase in document.phases]
        assert phases[:2] == ["build", "validate"] and len(set(phases)) == len(phases), name
        for phase in document.phases:
            steps = [step.name for step in phase.steps]
            assert len(set(steps)) == len(steps), name
            assert {step.onFailure for step in phase.steps} == {"Abort"}, name


@pytest.mark.parametrize(
    "document",
    [
        {"schemaVersion": 2.0},
        {"phases": []},
        {"phases": [{"name": "tests", "steps": []}]},
        {"phases": [{"name": "test", "steps": [{"name": "A", "action": "Bash", "inputs": {}}]}]},
        {"phases": [{"name": "test", "steps": [{"name": "A", "action": "ExecuteBash"}]}]},
        {"unknown": 1},
    ],
)
def test_documents_that_it_does_not_take_are_seen(document: dict[str, Any]) -> None:
    step = {"name": "A", "action": "ExecuteBash", "inputs": {"commands": ["true"]}}
    good = {
        "name": "n", "description": "d", "schemaVersion": 1.0,
        "phases": [{"name": "build", "steps": [step]}],
    }  # fmt: skip
    assert msgspec.convert(good, type=Document).phases[0].steps[0].name == "A"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **document}, type=Document)


def test_variables_of_image_builder_are_those_that_the_recipe_gives() -> None:
    """Anything else between two pairs of braces would be taken for one, and end the build."""
    given = {
        component["ComponentArn"]["Ref"]: [p["Name"] for p in component.get("Parameters", [])]
        for component in properties("Recipe")["Components"]
    }
    for name, document in documents().items():
        declared = [parameter for each in document.parameters for parameter in each]
        used = re.findall(r"\{\{(.*?)(?:\}\}|$)", data()[name], re.M)
        assert {each.strip() for each in used} == set(declared) == set(given[name]), name


def test_the_last_component_is_the_one_that_cleans() -> None:
    assert list(data())[-1] == "FinishComponent"
    (*_, last) = scripts("build")
    assert last.step == "Clean"


# --- scripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.id)
def test_a_step_ends_at_its_first_failure(script: Any) -> None:
    lines = script.text.strip().splitlines()
    assert len(lines) == 1 or lines[0] == "set -euo pipefail"


@pytest.mark.parametrize(
    ("name", "text"),
    [*((script.id, script.text) for script in ALL),
     *((path, text) for path, text in FILES.items() if text.startswith("#!"))],
    ids=lambda value: value if "\n" not in value and " " not in value else "",
)  # fmt: skip
def test_bash_and_shellcheck_have_nothing_to_say(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(re.sub(r"\{\{ [A-Za-z]+ \}\}", "580.178.04", text))
    shellcheck = str(Path(sys.executable).parent / "shellcheck")
    # SC2329, functions that nobody calls: the checks are called by name.
    check = [shellcheck, "--shell=bash", "--exclude=SC2329", str(file)]
    for command in (["bash", "-n", str(file)], check):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}\n{done.stdout}{done.stderr}"


def test_the_files_that_hosts_keep() -> None:
    assert set(FILES) == {
        "/usr/local/libexec/batchml/driver-folder",
        "/usr/local/libexec/batchml/check-host",
        "/etc/systemd/system/batchml-driver.service",
    }


def test_the_folder_is_ready_before_a_job_can_be() -> None:
    unit = FILES["/etc/systemd/system/batchml-driver.service"]
    assert re.search(r"^Before=.*\becs\.service\b", unit, re.M)
    assert re.search(r"^ExecStart=/usr/local/libexec/batchml/driver-folder$", unit, re.M)
    assert re.search(r"^WantedBy=multi-user\.target$", unit, re.M)
