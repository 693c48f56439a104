"""CloudFormation where moto's is otherwise than AWS's: templates, stacks and change sets.

Importing this and `moto_resources` patches moto, in the process of `moto_aws.py` only.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from moto.cloudformation import models as stacks
from moto.cloudformation import parsing
from moto.cloudformation import responses as stack_responses
from moto.cloudformation.exceptions import AlreadyExistsException, ValidationError

from tests.support.moto_resources import DELETIONS, OWN, Json, Unmodelled, patch

# --- CloudFormation: templates ----------------------------------------------------------------


@patch(stacks, "yaml_tag_constructor")
def read_condition_tag(before: Any, loader: Any, tag: Any, node: Any) -> Any:
    """`!Condition NAME`. User Guide, "Condition functions": its full form has no `Fn::`."""
    return {"Condition": node.value} if tag == "!Condition" else before(loader, tag, node)


@patch(parsing, "clean_json")
def evaluate(before: Any, value: Any, resources: Any) -> Any:
    """AWS::NoValue removes the element of a list: User Guide, "Pseudo parameters reference"."""
    if isinstance(value, list):
        cleaned = [parsing.clean_json(each, resources) for each in value]
        return [each for each in cleaned if each is not None]
    return before(value, resources)


@patch(stacks.Stack, "parameter_list")
def list_parameters(_: Any, stack: Any) -> list[Json]:
    """DescribeStacks returns what was given, or the default: a list is a text with commas."""
    slots = stack.template_dict.get("Parameters", {})
    given = {key: slot.get("Default", "") for key, slot in slots.items()} | stack.parameters
    return [{"ParameterKey": k, "ParameterValue": str(v)} for k, v in given.items() if k in slots]


@patch(parsing, "resource_class_from_type")
def find_class(before: Any, kind: str) -> Any:
    return OWN.get(kind) or (before(kind) if kind in parsing.get_model_map() else Unmodelled)


# --- CloudFormation: operations on stacks -----------------------------------------------------

_RETAINED = ("Retain", "RetainExceptOnCreate")


def _active(template: Json, conditions: Mapping[str, bool]) -> dict[str, Json]:
    return {
        name: each
        for name, each in template.get("Resources", {}).items()
        if each.get("Condition") is None or conditions[each["Condition"]]
    }


def _map_like(resources: Any, template: Json, parameters: Json) -> Any:
    """The resources that a template and parameters ask for; none is made."""
    made = parsing.ResourceMap(
        resources.stack_id, resources["AWS::StackName"], parameters, resources.tags,
        resources._region_name, resources._account_id, template, resources.cross_stack_resources,
    )  # fmt: skip
    made.load()
    return made


@patch(parsing.ResourceMap, "update")
def update_resources(_: Any, self: Any, template: Json, parameters: Json | None = None) -> None:
    """Resources whose condition changes come and go; a resource whose deletion policy retains it
    stays in the account. User Guide, "Update behaviors of stack resources", "DeletionPolicy"."""
    old = _active(self._template, self.lazy_condition_map)
    wanted = self.input_parameters if parameters is None else parameters
    new_map = _map_like(self, template, wanted)
    new = _active(template, new_map.lazy_condition_map)
    changed = {
        key for key in new_map.resolved_parameters
        if new_map.resolved_parameters[key] != self.resolved_parameters.get(key)
    }  # fmt: skip
    gone = [name for name in old if name not in new]
    _delete_in_turns(self, [n for n in gone if old[n].get("DeletionPolicy") not in _RETAINED], old)
    for name in gone:
        self._parsed_resources.pop(name, None)
    self._template, self.input_parameters = template, wanted
    self._resource_json_map = template["Resources"]
    self._parsed_resources.update(new_map.resolved_parameters)
    self.resolved_parameters = new_map.resolved_parameters
    self.load_conditions()
    for name, each in new.items():
        if name not in old:
            self[name]
        elif each != old[name] or changed & set(parsing.get_references_from_template(each)):
            made = parsing.parse_and_update_resource(
                name, each, self, self._account_id, self._region_name
            )
            self._parsed_resources[name] = made or self._parsed_resources[name]


@patch(parsing.ResourceMap, "delete")
def delete_resources(_: Any, self: Any) -> None:
    there = _active(self._template, self.lazy_condition_map)
    names = [name for name in there if there[name].get("DeletionPolicy") not in _RETAINED]
    _delete_in_turns(self, names, there)


def _delete_in_turns(self: Any, names: list[str], described: Mapping[str, Json]) -> None:
    """What others use is deleted after them: tried again until nothing more can be deleted."""
    left, error = list(reversed(names)), None
    while left:
        stuck: list[str] = []
        for name in left:
            made = self._parsed_resources.get(name)
            try:
                delete = DELETIONS.get(described[name]["Type"])
                if made is not None and delete is not None:
                    delete(self._account_id, self._region_name, made)
                elif made is not None:
                    self._delete_resource(made, described[name])
            except Exception as problem:
                stuck, error = [*stuck, name], problem
            else:
                self._parsed_resources.pop(name, None)
        if len(stuck) == len(left):
            raise FailedResource(stuck[0], described[stuck[0]]["Type"], error)
        left = stuck


class FailedResource(Exception):
    def __init__(self, name: str, kind: str, error: Any) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name, self.kind = name, kind


@patch(parsing, "parse_and_create_resource")
def create_resource(before: Any, name: str, template: Json, *more: Any, **others: Any) -> Any:
    try:
        return before(name, template, *more, **others)
    except FailedResource:
        raise
    except Exception as error:
        raise FailedResource(name, template["Type"], error) from error


@patch(stacks.Stack, "create_resources")
def create_stack_resources(before: Any, self: Any) -> None:
    """A resource that fails rolls the stack back. User Guide, "Stack status codes"."""
    try:
        before(self)
    except FailedResource as error:
        _add_event(self, error, "CREATE_FAILED")
        self._add_stack_event("ROLLBACK_IN_PROGRESS", str(error))
        self.resource_map.delete()
        self.status = "ROLLBACK_COMPLETE"
        self._add_stack_event(self.status)


@patch(stacks.Stack, "delete")
def delete_stack(before: Any, self: Any) -> None:
    try:
        before(self)
    except FailedResource as error:
        _add_event(self, error, "DELETE_FAILED")
        self.status = "DELETE_FAILED"
        self._add_stack_event(self.status, str(error))


def _add_event(stack: Any, error: FailedResource, status: str) -> None:
    event = stacks.Event(
        stack.stack_id, stack.name, error.name, error.name, error.kind, status, str(error), None
    )
    stack.events.append(event)


@patch(stacks.CloudFormationBackend, "delete_stack")
def delete_unprotected(before: Any, self: Any, name: str) -> None:
    """API reference, DeleteStack: a protected stack is refused, a failed deletion keeps it."""
    try:
        stack = self.get_stack(name)
    except ValidationError:
        return
    if stack.status == "DELETE_COMPLETE":
        return
    if stack.enable_termination_protection:
        raise ValidationError(
            message=f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
        )
    before(self, stack.stack_id)
    if stack.status == "DELETE_FAILED":
        self.stacks[stack.stack_id] = self.deleted_stacks.pop(stack.stack_id)


@patch(stack_responses.CloudFormationResponse, "_validate_different_update")
def accept_same_content(_: Any, *__: Any) -> None:
    """A change set without changes is made, and has failed. API reference, CreateChangeSet."""


@patch(stacks.CloudFormationBackend, "create_change_set")
def create_change_set(before: Any, self: Any, **request: Any) -> Any:
    """Tags count as a change, too, and a name is used once a stack."""
    name, stack = request["change_set_name"], self.get_stack(request["stack_name"])
    for each in self.change_sets.values():
        if (each.change_set_name, each.stack_name) == (name, stack.name):
            raise AlreadyExistsException(f"ChangeSet {name} already exists")
    made, stack_id = before(self, **request)
    change_set = self.change_sets[made]
    if change_set.status == "FAILED" and stack.tags != request["tags"]:
        change_set.status, change_set.execution_status = "CREATE_COMPLETE", "AVAILABLE"
        change_set.status_reason = None
    return made, stack_id


@patch(stacks.ChangeSet, "diff")
def diff(_: Any, self: Any) -> list[Any]:
    """What comes, changes and goes, conditions included. API reference, ResourceChange."""
    resources = self.stack.resource_map
    old = _active(resources._template, resources.lazy_condition_map)
    new_map = _map_like(resources, self.template_dict, self.parameters)
    new = _active(self.template_dict, new_map.lazy_condition_map)
    values = new_map.resolved_parameters
    changed = {key for key in values if values[key] != resources.resolved_parameters.get(key)}
    references = parsing.get_references_from_template
    kinds = {
        "Add": [name for name in new if name not in old],
        "Modify": [
            name for name in new
            if name in old and (new[name] != old[name] or changed & set(references(new[name])))
        ],
        "Remove": [name for name in old if name not in new],
    }  # fmt: skip
    types = {name: each["Type"] for name, each in (old | new).items()}
    return [
        SimpleNamespace(
            type="Resource",
            resource_change=SimpleNamespace(
                action=kind, logical_resource_id=name, resource_type=types[name],
                replacement="False" if kind == "Modify" else None,
            ),
        )
        for kind, names in kinds.items() for name in names
    ]  # fmt: skip


@patch(stacks.CloudFormationBackend, "execute_change_set")
def execute_change_set(_: Any, self: Any, change_set_name: str, **__: Any) -> None:
    """The stack gets parameters and tags of its change set, which is gone then."""
    change_set = self.change_sets.pop(change_set_name)
    stack = self.stacks[change_set.stack_id]
    tags, parameters = change_set.tags or {}, change_set.parameters
    stack.update(change_set.template, change_set.role_arn, parameters=parameters, tags=tags)
    change_set.execution_status = "EXECUTE_COMPLETE"
