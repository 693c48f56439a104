"""A teardown whose policy people have, also interrupted; the list of what it leaves."""

import copy
from typing import Any

import pytest

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.leftovers import Attachment, RecoveryPoint
from batchml.errors import AccessError, BatchmlError, ServiceUnreachable
from batchml.setup import apply
from batchml.setup.desired import state_after_teardown
from batchml.setup.leftovers import (
    LeftoverFacts,
    fetch_leftovers,
    leftover_lines,
    leftovers,
    leftovers_json,
)
from batchml.setup.plan import make_plan, refusals
from batchml.setup.sharing import CurrentState, WantedState
from tests.setup.test_setup_plan import (
    World,
    fails,
    made,
    moments,
    new,
    only_world,
    ready,
    world,
)
from tests.support.aws_world import Interrupted

__all__ = ["made", "new", "only_world", "ready", "world"]  # fixtures

SSO = "AWSReservedSSO_Training_0123456789abcdef"


def torn(world: World, *, detach: bool = False, delete_data: bool = False) -> Any:
    def planner(current: CurrentState) -> WantedState:
        return state_after_teardown(world.spec, current, delete_data=delete_data, detach=detach)

    return planner


def refused(world: World, *, detach: bool = False) -> list[str]:
    planner = torn(world, detach=detach)
    current = apply.read_state_for_plan(world.spec, world.tools(), planner)
    apply.discard_change_sets(current, world.tools())
    return refusals(planner(current), make_plan(planner(current), current), current)


def test_a_policy_that_people_have_stops_a_teardown_before_it_deletes_anything(
    ready: World,
) -> None:
    ready.account.attached = {"User": ["ann"], "Group": ["ml"]}
    before = ready.account.snapshot()
    (said,) = refused(ready)
    assert "attached to group ml, user ann." in said and "--detach-policy" in said
    assert ready.account.snapshot() == before
    assert "--detach-policy" in fails(ready, ready.teardown), "the cause, if it comes between"


def test_with_consent_it_is_detached_and_the_stack_deleted(ready: World) -> None:
    ready.account.attached = {"User": ["ann"], "Group": ["ml"], "Role": ["ci"]}
    assert refused(ready, detach=True) == []
    (step,) = [each for each in ready.plan(torn(ready, detach=True)) if "roles" in each.name]
    assert step.reasons[1] == "its policy is detached from group ml, role ci, user ann"
    said = ready.run(torn(ready, detach=True))
    assert "delete stack batchml-dev-roles: policy detached from user ann" in said
    assert not any(ready.account.attached.values()) and ready.status("roles") == "none"


def test_a_permission_set_keeps_its_policy_until_somebody_removes_it(ready: World) -> None:
    ready.account.attached = {"Role": [SSO], "User": ["ann"]}
    (said,) = refused(ready, detach=True)
    assert "permission set Training" in said and "Identity Center" in said and "ann" not in said
    (said,) = refused(ready)
    assert "user ann" in said and "--detach-policy" in said and "Identity Center" in said


def test_one_who_may_not_ask_goes_on(ready: World) -> None:
    ready.account.refusals["ListEntitiesForPolicy"] = [("AccessDenied", "you may not")]
    assert refused(ready) == []


def test_a_setup_asks_nobody_about_policies(ready: World) -> None:
    ready.account.calls.clear()
    assert ready.plan() == []
    assert "ListEntitiesForPolicy" not in ready.account.calls


PEOPLE = {"User": ["ann", "bob"], "Group": ["ml"], "Role": ["ci"]}
DETACHING = ["DetachGroupPolicy", "DetachRolePolicy", "DetachUserPolicy", "DetachUserPolicy"]


def detaching(world: World) -> tuple[dict[str, Any], Any, list[str]]:
    """A teardown with --detach-policy: AWS before it, its end, and its calls."""
    world.account.attached = copy.deepcopy(PEOPLE)
    before = world.account.save()
    world.account.calls.clear()
    world.run(torn(world, detach=True))
    return before, world.account.snapshot(), list(world.account.calls)


def test_a_teardown_killed_while_it_detaches_goes_on_when_it_is_typed_again(ready: World) -> None:
    before, end, _ = detaching(ready)
    ready.account.restore(before)
    found = moments(ready, lambda: ready.run(torn(ready, detach=True)))
    # The moments of every other call are those of a teardown, in test_setup_plan.
    while_detaching = [each for each in found if each[0].split()[1] in (*DETACHING, "DeleteStack")]
    assert len(while_detaching) >= len(DETACHING) + 2
    for moment, saved in while_detaching:
        ready.account.restore(saved)
        ready.run(torn(ready, detach=True))
        assert ready.account.snapshot() == end, moment


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_teardown_interrupted_at_each_call_about_the_policy_leaves_what_it_had_done(
    ready: World, when: str
) -> None:
    before, end, calls = detaching(ready)
    assert [each for each in calls if each.startswith("Detach")] == DETACHING
    places = [
        place for place, name in enumerate(calls, 1)
        if name == "ListEntitiesForPolicy" or name.startswith("Detach")
    ]  # fmt: skip
    assert len(places) == 2 + len(DETACHING), "it asks for the plan, and as it detaches"
    for place in places:
        ready.account.restore(before)
        ready.account.interrupt_at = (place, when)
        with pytest.raises(Interrupted):
            ready.run(torn(ready, detach=True))
        ready.account.interrupt_at = None
        had = sum(len(names) for names in ready.account.attached.values())
        done = [each for each in calls[: place - (when == "before")] if each.startswith("Detach")]
        assert had == len(DETACHING) - len(done), (place, when)
        assert ready.status("roles") == "CREATE_COMPLETE"
        ready.run(torn(ready, detach=True))
        assert ready.account.snapshot() == end, (place, when)


@pytest.mark.parametrize(
    ("code", "error"),
    [("AccessDenied", AccessError), ("Throttling", ServiceUnreachable)],
)
def test_a_detachment_that_aws_refuses_is_named_and_the_next_teardown_ends_it(
    ready: World, code: str, error: type[BatchmlError]
) -> None:
    before, end, _ = detaching(ready)
    for operation in sorted(set(DETACHING)):
        ready.account.restore(before)
        ready.account.refusals[operation] = [(code, "you may not, or not so often")]
        with pytest.raises(error, match=f"iam:{operation}"):
            ready.run(torn(ready, detach=True))
        assert ready.status("roles") == "CREATE_COMPLETE", "its policy is still in use"
        ready.run(torn(ready, detach=True))
        assert ready.account.snapshot() == end, operation


def test_one_who_may_never_ask_is_told_so_before_the_stack_is_deleted(ready: World) -> None:
    before, end, _ = detaching(ready)
    ready.account.restore(before)
    ready.account.refusals["ListEntitiesForPolicy"] = [("AccessDenied", "you may not")] * 2
    with pytest.raises(AccessError, match="iam:ListEntitiesForPolicy"):
        ready.run(torn(ready, detach=True))
    assert ready.account.snapshot()["attached"] == PEOPLE
    ready.run(torn(ready, detach=True))
    assert ready.account.snapshot() == end


def test_a_policy_detached_by_somebody_else_meanwhile_is_no_error(ready: World) -> None:
    before, end, calls = detaching(ready)
    ready.account.restore(before)
    asked = [0]

    def take_away(operation: str) -> None:
        asked[0] += operation == "ListEntitiesForPolicy"
        if asked[0] == calls.count("ListEntitiesForPolicy"):
            ready.account.attached = {}

    ready.account.after_call = take_away
    ready.run(torn(ready, detach=True))
    assert ready.account.snapshot() == end


@pytest.mark.parametrize(
    ("name", "permission_set"),
    [(SSO, "Training"), ("AWSReservedSSO_a_b_0f", "a_b"), ("ci", "")],
)
def test_a_role_of_a_permission_set_is_known_by_its_name(name: str, permission_set: str) -> None:
    assert Attachment("role", name).permission_set == permission_set


# --- what is left -------------------------------------------------------------------------------


def point(number: int) -> dict[str, Any]:
    return {
        "RecoveryPointArn": f"arn:aws:backup:us-east-1:123456789012:recovery-point:{number}",
        "BackupVaultName": "team-vault", "BackupSizeBytes": 2**30,
        "Status": "COMPLETED",
    }  # fmt: skip


def facts(world: World, before: CurrentState, kept: list[str]) -> LeftoverFacts:
    account: Any = world.account
    world.account.calls.clear()
    flags = " --region us-east-1"
    return fetch_leftovers(account, ComputeApi(account), "dev", before.stacks, kept, flags=flags)


def test_what_really_is_left_is_told_with_its_command(ready: World) -> None:
    ready.account.backups = [point(1), point(2), {**point(3), "Status": "DELETING"}]
    ready.account.repositories = ["other/app", "batchml/python"]
    before = apply.read_state(ready.spec, ready.tools())
    ready.run(torn(ready, delete_data=True))
    found = facts(ready, before, [])
    assert len(ready.account.calls) == 4
    lines = "\n".join(leftover_lines(leftovers(found)))
    assert "2 backups of the file system fs-0123456789abcdef0, 2.0 GiB" in lines
    assert "arn:aws:backup:us-east-1:123456789012:recovery-point:2 --region us-east-1" in lines
    assert "delete-repository --force --repository-name batchml/python --region us-east-1" in lines
    assert "other/app" not in lines and "KMS keys (3)" in lines and "data:" not in lines
    assert "batchml jobdef gc --env dev" in lines


def test_data_that_stays_is_told_and_no_backup_is_asked_for(ready: World) -> None:
    before = apply.read_state(ready.spec, ready.tools())
    found = facts(ready, before, ["batchml-dev-storage", "batchml-dev-network"])
    assert found.kept_stacks == ("batchml-dev-storage",)
    assert "ListRecoveryPointsByResource" not in ready.account.calls
    again = fetch_leftovers(
        ready.account, ComputeApi(ready.account), "dev", before.stacks,  # type: ignore[arg-type]
        ["batchml-dev-storage"], True,
    )  # fmt: skip
    assert again.file_system == "fs-0123456789abcdef0", "with --delete-file-system"
    (line,) = [each for each in leftovers(found) if each.what.startswith("data")]
    assert line.commands == ("batchml teardown --env dev --delete-data",)


def test_where_aws_may_not_be_asked_there_may_be_more(ready: World) -> None:
    before = apply.read_state(ready.spec, ready.tools())
    denied = ("AccessDeniedException", "you may not")
    for operation in ("ListRecoveryPointsByResource", "DescribeRepositories", "DescribeJobQueues"):
        ready.account.refusals[operation] = [denied]
    lines = leftover_lines(leftovers(facts(ready, before, [])))
    perhaps = [line for line in lines if line.startswith("  - perhaps")]
    assert len(perhaps) == 3 and "35 days" in perhaps[0]


def test_what_single_commands_made_is_named_first_and_long_lists_are_cut() -> None:
    points = tuple(RecoveryPoint(f"arn:{number}", "vault", 0) for number in range(9))
    found = list(leftovers(LeftoverFacts(
        "dev", file_system="fs-1", backups=points, by_commands=("queue night", "compute warm"),
    )))  # fmt: skip
    lines = leftover_lines(found)
    assert lines[2] == "      batchml queue delete night --env dev"
    assert "      and 6 more: teardown --json lists them" in lines
    assert len(leftovers_json(found)[2]["commands"]) == 9
