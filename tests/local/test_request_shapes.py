"""`batchml.local.server.protocol`: values against botocore's shapes."""

from typing import Any

import pytest
from botocore.model import DenormalizedStructureBuilder

from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.reads import READS
from batchml.local.server.protocol import _compile, clean, problems, service_model


def shape(**members: dict[str, Any]) -> Any:
    return DenormalizedStructureBuilder().with_members(members).build_model()


def found(members: dict[str, Any], value: Any, *, strict: bool = False) -> dict[str, str]:
    return dict(problems(shape(**members), value, strict=strict))


STRING = {"type": "string"}
NUMBER = {"type": "integer"}


def test_a_fitting_value_has_no_problems() -> None:
    members = {"name": STRING, "sizes": {"type": "list", "member": NUMBER}}
    assert found(members, {"name": "a", "sizes": [1, 2]}) == {}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("string", 1), ("string", None), ("string", True), ("integer", "1"), ("integer", 1.5),
        ("integer", True), ("boolean", 1), ("boolean", "true"), ("double", "1"),
        ("long", []), ("timestamp", {}),
    ],
)  # fmt: skip
def test_a_wrong_type_is_a_problem(kind: str, value: Any) -> None:
    assert list(found({"x": {"type": kind}}, {"x": value})) == ["x"]


@pytest.mark.parametrize("value", ["text", 3, [], None, True])
def test_a_structure_must_be_an_object(value: Any) -> None:
    assert found({"x": STRING}, value)


def test_every_problem_is_found_with_its_path() -> None:
    members: dict[str, Any] = {
        "jobs": {"type": "list", "member": {"type": "structure", "members": {"id": STRING}}},
        "tags": {"type": "map", "key": STRING, "value": STRING},
    }
    value = {"jobs": [{"id": "a"}, {"id": 2}, "b"], "tags": {"k": 1}}
    assert sorted(found(members, value)) == ["jobs[1].id", "jobs[2]", "tags.k"]


def test_missing_required_members_are_problems_and_null_counts_as_missing() -> None:
    submit = service_model("batch").operation_model("SubmitJob").input_shape
    paths = {path for path, _ in problems(submit, {"jobName": "a", "jobQueue": None})}
    assert {"jobQueue", "jobDefinition"} <= paths
    assert "jobName" not in paths


@pytest.mark.parametrize(("value", "is_wrong"), [("", True), ("a", False), ("abc", True)])
def test_lengths_are_checked(value: str, is_wrong: bool) -> None:
    assert bool(found({"x": {**STRING, "min": 1, "max": 2}}, {"x": value})) is is_wrong


@pytest.mark.parametrize(("size", "is_wrong"), [(0, True), (1, False), (3, True)])
def test_lengths_of_lists_are_checked(size: int, is_wrong: bool) -> None:
    members = {"x": {"type": "list", "member": NUMBER, "min": 1, "max": 2}}
    assert bool(found(members, {"x": [1] * size})) is is_wrong


@pytest.mark.parametrize(
    ("kind", "value", "is_wrong"),
    [
        ("integer", 2**31 - 1, False), ("integer", 2**31, True), ("integer", -(2**31), False),
        ("integer", -(2**31) - 1, True), ("long", 2**63 - 1, False), ("long", 2**63, True),
    ],
)  # fmt: skip
def test_numbers_must_fit_their_bits(kind: str, value: int, is_wrong: bool) -> None:
    assert bool(found({"x": {"type": kind}}, {"x": value})) is is_wrong


@pytest.mark.parametrize(("value", "is_wrong"), [(0, True), (1, False), (10, False), (11, True)])
def test_ranges_are_checked(value: int, is_wrong: bool) -> None:
    assert bool(found({"x": {**NUMBER, "min": 1, "max": 10}}, {"x": value})) is is_wrong


def test_enums_are_checked_by_case_but_for_those_that_aws_takes_in_any() -> None:
    """B24."""
    register = service_model("batch").operation_model("RegisterJobDefinition").input_shape
    value: dict[str, Any] = {"jobDefinitionName": "d", "type": "Container"}
    assert [path for path, _ in problems(register, value)] == ["type"]
    for action, wrong in (("exit", []), ("RETRY", []), ("stop", ["[0].action"])):
        strategy = {"attempts": 2, "evaluateOnExit": [{"action": action}]}
        value = {"jobDefinitionName": "d", "type": "container", "retryStrategy": strategy}
        paths = [path for path, _ in problems(register, value)]
        assert paths == [f"retryStrategy.evaluateOnExit{path}" for path in wrong]


def test_patterns_are_checked() -> None:
    logs = service_model("logs").operation_model("GetLogEvents").input_shape
    assert not list(problems(logs, {"logGroupName": "/aws/x", "logStreamName": "a/b"}))
    wrong = {"logGroupName": "no spaces", "logStreamName": "a:b*"}
    assert [path for path, _ in problems(logs, wrong)] == ["logGroupName", "logStreamName"]


SERVED = {
    "batch": tuple(HANDLERS) + tuple(name for service, name in READS if service == "batch"),
    "logs": ("GetLogEvents", "FilterLogEvents", "DescribeLogGroups", "DescribeLogStreams"),
    "sts": ("GetCallerIdentity",),
}


def patterns_in(found: Any) -> set[str]:
    inner: list[Any] = {
        "structure": lambda: list(found.members.values()),
        "list": lambda: [found.member],
        "map": lambda: [found.key, found.value],
    }.get(found.type_name, list)()
    own = {found.metadata["pattern"]} if "pattern" in found.metadata else set()
    return own.union(*(patterns_in(shape) for shape in inner))


def test_every_pattern_of_a_served_operation_is_enforced() -> None:
    for service, names in SERVED.items():
        for name in names:
            shape = service_model(service).operation_model(name).input_shape
            assert all(_compile(p) is not None for p in patterns_in(shape)), name


def test_no_pattern_of_the_models_makes_the_check_fail() -> None:
    for service in SERVED:
        model = service_model(service)
        for name in model.shape_names:
            list(problems(model.shape_for(name), "text"))


def test_a_category_of_letters_is_understood() -> None:
    group = service_model("logs").operation_model("CreateLogGroup").input_shape
    good = {"logGroupName": "g", "tags": {"Straße 1": "x"}}
    assert not list(problems(group, good))
    assert list(problems(group, {"logGroupName": "g", "tags": {"a!b": "x"}}))


def test_half_a_surrogate_pair_is_a_problem_in_a_value_and_in_a_key() -> None:
    tags = {"tags": {"type": "map", "key": STRING, "value": STRING}}
    assert found(tags, {"tags": {"k": "\ud800"}})
    assert found(tags, {"tags": {"\udfff": "v"}})


def test_only_a_strict_check_reports_unknown_members() -> None:
    assert found({"x": STRING}, {"x": "a", "y": 1}) == {}
    assert list(found({"x": STRING}, {"x": "a", "y": 1}, strict=True)) == ["y"]


def test_cleaning_drops_nulls_and_unknown_members_at_every_depth() -> None:
    members = {
        "inner": {"type": "structure", "members": {"x": STRING}},
        "list": {"type": "list", "member": {"type": "structure", "members": {"x": STRING}}},
        "map": {"type": "map", "key": STRING, "value": STRING},
    }
    value: dict[str, Any] = {
        "inner": {"x": None, "y": 1},
        "list": [{"x": "a", "z": 2}, None],
        "map": {"k": None, "l": "v"},
        "other": 1,
    }
    assert clean(shape(**members), value) == {
        "inner": {},
        "list": [{"x": "a"}],
        "map": {"l": "v"},
    }


def test_cleaning_leaves_wrong_types_for_the_check_to_name() -> None:
    members = {"inner": {"type": "structure", "members": {"x": STRING}}}
    assert clean(shape(**members), {"inner": [1]}) == {"inner": [1]}
