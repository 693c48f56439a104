"""Templates as plain dicts, and the questions that rules ask of them.

`!Ref X` is read as `{"Ref": "X"}` and `!Sub`, `!If` and the others as `{"Fn::Sub": ...}`, the long
forms that JSON templates have.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "cfn").glob("*.yaml"))

Template = dict[str, Any]
Resource = dict[str, Any]

_NO_VALUE = {"Ref": "AWS::NoValue"}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML with CloudFormation's tags, by the parser in C where there is one."""


def _intrinsic(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _intrinsic)


def parse(text: str) -> Template:
    """A template from its YAML."""
    made = yaml.load(text, Loader=_Loader)
    assert isinstance(made, dict)
    return made


def load(path: Path) -> Template:
    return parse(path.read_text("utf-8"))


def resources(template: Template, *types: str) -> Iterator[tuple[str, Resource, dict[str, Any]]]:
    """(logical id, resource, its properties) of each resource of one of `types`, or of any."""
    for name, resource in template.get("Resources", {}).items():
        if not types or resource["Type"] in types:
            yield name, resource, resource.get("Properties", {})


def branches(value: Any) -> list[Any]:
    """What a value may be: both sides of an Fn::If, without AWS::NoValue."""
    if isinstance(value, dict) and list(value) == ["Fn::If"]:
        return [each for side in value["Fn::If"][1:] for each in branches(side)]
    return [] if value == _NO_VALUE else [value]


def items(value: Any) -> list[Any]:
    """The elements of a list, or one that is not in a list, with both sides of every Fn::If."""
    found = []
    for each in branches(value):
        if isinstance(each, list):
            found += [inner for element in each for inner in items(element)]
        elif each is not None:
            found.append(each)
    return found


def text(value: Any) -> str:
    """A value as text, with `${X}` for what is known only when the stack is made."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, inner),) = value.items()
        if key == "Ref":
            return f"${{{inner}}}"
        if key == "Fn::GetAtt":
            return f"${{{'.'.join(inner)}}}"
        if key == "Fn::Sub":
            return str(inner if isinstance(inner, str) else inner[0])
        if key == "Fn::Join":
            return str(inner[0]).join(map(text, inner[1]))
    return str(value)


def texts(value: Any) -> list[str]:
    return [text(each) for each in items(value)]


def policies(resource: Resource) -> Iterator[dict[str, Any]]:
    """The identity policies that a resource says or attaches."""
    properties = resource.get("Properties", {})
    for policy in items(properties.get("Policies")):
        yield policy["PolicyDocument"]
    if resource["Type"] in (
        "AWS::IAM::ManagedPolicy", "AWS::IAM::Policy", "AWS::IAM::RolePolicy",
    ):  # fmt: skip
        yield properties["PolicyDocument"]


def statements(document: Any) -> list[dict[str, Any]]:
    return items(document.get("Statement")) if isinstance(document, dict) else []


def identity_statements(template: Template) -> Iterator[tuple[str, dict[str, Any]]]:
    """(logical id, statement) of every policy that says what someone may do."""
    for name, resource, _ in resources(template):
        for document in policies(resource):
            for statement in statements(document):
                yield name, statement


def resource_statements(template: Template) -> Iterator[tuple[str, dict[str, Any]]]:
    """(logical id, statement) of every policy that says who may use a resource."""
    for name, _, properties in resources(template):
        kind = template["Resources"][name]["Type"]
        if kind in ("AWS::S3::BucketPolicy", "AWS::KMS::Key", "AWS::EFS::FileSystem"):
            for key in ("PolicyDocument", "KeyPolicy", "FileSystemPolicy"):
                for statement in statements(properties.get(key)):
                    yield name, statement


def group_rules(template: Template, way: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rules of security groups, within a group or on their own."""
    for name, _, properties in resources(template, "AWS::EC2::SecurityGroup"):
        for rule in items(properties.get(f"SecurityGroup{way}")):
            yield name, rule
    for name, _, properties in resources(template, f"AWS::EC2::SecurityGroup{way}"):
        yield name, properties


def strings(value: Any) -> Iterator[str]:
    """Every string anywhere in a value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value
