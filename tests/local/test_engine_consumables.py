"""Consumable resources: docs/behaviours.md B165-B174."""

from pathlib import Path
from typing import Any

import pytest

from batchml.local.server.protocol import ApiError
from tests.support.engine_world import World, children, consuming, indexes, order_of, world


def having(
    vcpus: int = 9, journal: Path | None = None, kind: str = "REPLENISHABLE", **totals: int
) -> World:
    """A world with these consumable resources."""
    w = world(vcpus, journal=journal)
    for name, total in totals.items():
        w.call(
            "CreateConsumableResource",
            consumableResourceName=name,
            totalQuantity=total,
            resourceType=kind,
        )
    return w


def submit(w: World, quantities: dict[str, int], **more: Any) -> str:
    return w.submit(consumableResourcePropertiesOverride=consuming(**quantities), **more)


def update(w: World, operation: str, quantity: int, name: str = "seat", **more: Any) -> int:
    answer = w.call(
        "UpdateConsumableResource",
        consumableResource=name,
        operation=operation,
        quantity=quantity,
        **more,
    )
    return int(answer["totalQuantity"])


# --- taking and giving back -------------------------------------------------------------------


def test_a_job_waits_until_there_is_enough_and_gives_back_what_it_took() -> None:
    """B165."""
    w = having(seat=3)
    first, second, third = (submit(w, {"seat": 2}) for _ in range(3))
    assert w.status(first, second, third) == ["STARTING", "RUNNABLE", "RUNNABLE"]
    assert w.state.in_use["seat"] == 2
    w.end(first)
    assert w.status(second, third) == ["STARTING", "RUNNABLE"]
    w.end(second, 1)
    w.end(third)
    assert w.state.in_use["seat"] == 0
    assert not w.state.lines


def test_those_behind_pass_a_job_that_waits_for_a_resource() -> None:
    """B166."""
    w = having(seat=1)
    submit(w, {"seat": 1})
    waits = submit(w, {"seat": 1})
    behind = w.submit()
    assert w.status(waits, behind) == ["RUNNABLE", "STARTING"]


def test_a_job_that_waits_for_a_resource_gets_its_place_in_line_back() -> None:
    """B166."""
    w = having(vcpus=1, seat=0)
    waits = submit(w, {"seat": 1})
    holder, behind = w.submit(), w.submit()
    assert w.status(waits, holder, behind) == ["RUNNABLE", "STARTING", "RUNNABLE"]
    update(w, "SET", 1)
    w.end(holder)
    assert w.active() == [waits]


def test_jobs_get_what_comes_back_in_their_order() -> None:
    """B166."""
    w = having(seat=2)
    holders = [submit(w, {"seat": 1}) for _ in range(2)]
    waiting = [submit(w, {"seat": 1}) for _ in range(4)]
    for holder in holders:
        w.end(holder)
    assert w.active() == waiting[:2]


def test_a_job_that_wants_too_much_holds_back_no_other_that_waits() -> None:
    """B166."""
    w = having(seat=3)
    holder = submit(w, {"seat": 3})
    never, large, small = (submit(w, {"seat": n}) for n in (5, 3, 1))
    assert order_of(w.state, "q") == [never, large, small]
    w.end(holder)
    assert w.status(never, large, small) == ["RUNNABLE", "STARTING", "RUNNABLE"]
    w.end(large)
    assert w.status(never, small) == ["RUNNABLE", "STARTING"]
    w.end(small)
    assert (w.status(never), w.reasons(never)) == (["RUNNABLE"], [""])
    assert update(w, "ADD", 2) == 5
    assert w.status(never) == ["STARTING"]


def test_all_of_several_resources_must_be_there() -> None:
    """B165."""
    w = having(seat=1, token=1)
    seat, token = submit(w, {"seat": 1}), submit(w, {"token": 1})
    both, same = submit(w, {"seat": 1, "token": 1}), submit(w, {"token": 1, "seat": 1})
    w.end(seat)
    assert w.status(both, same) == ["RUNNABLE"] * 2
    w.end(token)
    assert w.status(both, same) == ["STARTING", "RUNNABLE"]
    w.end(both)
    assert w.status(same) == ["STARTING"]
    w.end(same)
    assert dict(w.state.in_use) == {"seat": 0, "token": 0}


def test_a_resource_limits_how_many_of_an_array_run() -> None:
    """B167."""
    w = having(vcpus=64, seat=3)
    array = w.array(10, consumableResourcePropertiesOverride=consuming(seat=1))
    for index in range(10):
        assert w.counts(array).get("STARTING") == min(3, 10 - index)
        w.end(f"{array}:{index}")
    assert w.status(array) == ["SUCCEEDED"]


def test_a_retried_job_takes_its_share_again() -> None:
    """B168."""
    w = having(seat=1, kind="REPLENISHABLE")
    first = submit(w, {"seat": 1}, retryStrategy={"attempts": 2})
    second = submit(w, {"seat": 1})
    w.end(first, 1)
    assert w.status(first, second) == ["STARTING", "RUNNABLE"]
    assert w.state.in_use["seat"] == 1


def test_what_is_not_replenished_is_spent_by_each_attempt() -> None:
    """B168."""
    w = having(fuel=3, kind="NON_REPLENISHABLE")
    first = submit(w, {"fuel": 1}, retryStrategy={"attempts": 2})
    w.end(first, 1)
    w.end(first, 0)
    second = submit(w, {"fuel": 2})
    assert w.status(second) == ["RUNNABLE"]
    assert (w.state.consumables["fuel"].spent, w.state.in_use.get("fuel", 0)) == (2, 0)
    assert update(w, "ADD", 1, "fuel") == 4
    assert w.status(second) == ["STARTING"]
    w.end(second)
    assert w.state.consumables["fuel"].spent == 4


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_a_job_that_is_stopped_while_it_waits_for_a_resource_takes_none(how: str) -> None:
    """B12."""
    w = having(seat=1)
    holder, waits, behind = (submit(w, {"seat": 1}) for _ in range(3))
    getattr(w, how)(waits, "enough")
    assert (w.status(waits), w.reasons(waits)) == (["FAILED"], ["enough"])
    w.end(holder)
    assert w.status(behind) == ["STARTING"]


def test_a_job_that_lacks_a_resource_is_not_the_blocked_head_of_its_queue() -> None:
    w = having(vcpus=1, seat=0)
    submit(w, {"seat": 1}, vcpus=9)
    assert not w.state.blocked


# --- restarts ---------------------------------------------------------------------------------


def test_a_restart_keeps_the_quantities_that_jobs_hold_and_have_used_up(tmp_path: Path) -> None:
    """B169."""
    w = having(journal=tmp_path / "journal.db", seat=2)
    w.call("CreateConsumableResource", consumableResourceName="fuel", totalQuantity=5,
           resourceType="NON_REPLENISHABLE")  # fmt: skip
    held = submit(w, {"seat": 2, "fuel": 1})
    waits = [submit(w, {"seat": 1}) for _ in range(2)]
    before = indexes(w.state)
    w.restart()
    assert indexes(w.state) == before
    assert (w.state.in_use["seat"], w.state.consumables["fuel"].spent) == (2, 1)
    w.end(held)
    assert w.status(*waits) == ["STARTING"] * 2
    assert w.state.consumables["fuel"].spent == 1


# --- the resources themselves -----------------------------------------------------------------


def test_a_quantity_is_set_added_to_and_removed_from() -> None:
    """B170."""
    w = having(seat=3)
    assert [update(w, *change) for change in (("SET", 5), ("ADD", 2), ("REMOVE", 4))] == [5, 7, 3]
    job = submit(w, {"seat": 3})
    assert update(w, "SET", 1) == 1  # what is held stays held
    behind = submit(w, {"seat": 1})
    w.end(job)
    assert w.status(behind) == ["STARTING"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"operation": "REMOVE", "quantity": 2}, "would be -1"),
        ({"operation": "SET", "quantity": -1}, "0 or more"),
        ({"operation": "SET", "quantity": 2**63}, "would be"),
        ({"operation": "HALVE", "quantity": 1}, "SET, ADD or REMOVE"),
    )
    for params, text in wrong:
        assert text in w.refusal("UpdateConsumableResource", consumableResource="seat", **params)
    assert "not found" in w.refusal("UpdateConsumableResource", consumableResource="none")


def test_an_update_with_the_same_token_is_done_once(tmp_path: Path) -> None:
    """B170."""
    w = having(journal=tmp_path / "journal.db", seat=3)
    assert update(w, "ADD", 2, clientToken="t") == 5
    w.restart()
    assert update(w, "ADD", 2, clientToken="t") == 5
    assert update(w, "ADD", 2, clientToken="u") == 7
    w.now += 8 * 3600 * 1000
    assert update(w, "ADD", 2, clientToken="t") == 9
    assert update(w, "ADD", 3, clientToken="t") == 12  # AWS: the payload must be the same, too


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"consumableResourceName": "a b"}, "valid pattern"),
        ({"consumableResourceName": "seat"}, "already exists"),
        ({"consumableResourceName": "n", "resourceType": "OTHER"}, "resourceType"),
        ({"consumableResourceName": "n", "totalQuantity": -1}, "0 or more"),
    ],
)
def test_a_resource_that_makes_no_sense_is_refused(params: dict[str, Any], text: str) -> None:
    w = having(seat=1)
    assert text in w.refusal("CreateConsumableResource", **params)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"consumableResource": "none", "quantity": 1}, "not found"),
        ({"consumableResource": "seat", "quantity": 0}, "quantity of 1 or more"),
        ({"quantity": 1}, "needs a name"),
    ],
)
def test_a_job_asks_for_resources_that_exist(entry: dict[str, Any], text: str) -> None:
    """B171."""
    w = having(seat=1)
    asked = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
    override = {"consumableResourceList": [entry]}
    assert text in w.refusal("SubmitJob", **asked, consumableResourcePropertiesOverride=override)


def test_a_resource_is_deleted_once_no_unfinished_job_asks_for_it() -> None:
    """B172."""
    w = having(seat=1)
    running, waiting = submit(w, {"seat": 1}), submit(w, {"seat": 1})
    w.end(running)
    text = w.refusal("DeleteConsumableResource", consumableResource="seat")
    assert waiting in text
    w.end(waiting)
    w.call("DeleteConsumableResource", consumableResource="seat")
    w.call("DeleteConsumableResource", consumableResource="seat")
    assert "seat" not in w.state.consumables


def test_resources_are_described_and_listed(tmp_path: Path) -> None:
    """B173."""
    w = having(journal=tmp_path / "journal.db", seat=3, Token=1)
    w.call("CreateConsumableResource", consumableResourceName="fuel", totalQuantity=9,
           resourceType="NON_REPLENISHABLE", tags={"k": "v"})  # fmt: skip
    job = submit(w, {"seat": 2, "fuel": 4})
    arn = "arn:aws:batch:us-east-1:000000000000:consumable-resource/seat"
    shown = w.read("DescribeConsumableResource", consumableResource=arn)
    assert shown == {
        "consumableResourceName": "seat", "consumableResourceArn": arn, "totalQuantity": 3,
        "inUseQuantity": 2, "availableQuantity": 1, "resourceType": "REPLENISHABLE",
        "createdAt": w.now, "tags": {},
    }  # fmt: skip
    update(w, "SET", 1)
    assert w.read("DescribeConsumableResource", consumableResource="seat")["availableQuantity"] == 0
    w.end(job)
    fuel = w.read("DescribeConsumableResource", consumableResource="fuel")
    assert (fuel["inUseQuantity"], fuel["availableQuantity"], fuel["tags"]) == (4, 5, {"k": "v"})

    def names(**more: Any) -> list[str]:
        found = w.read("ListConsumableResources", **more)["consumableResources"]
        return [one["consumableResourceName"] for one in found]

    assert names() == ["Token", "fuel", "seat"]
    wanted = {"name": "CONSUMABLE_RESOURCE_NAME", "values": ["TOK*", "seat"]}
    assert names(filters=[wanted]) == ["Token", "seat"]
    with pytest.raises(
        ApiError, match="The allowed filters, each at most once, are CONSUMABLE_RESOURCE_NAME"
    ):
        names(filters=[{"name": "OTHER", "values": []}])
    first = w.read("ListConsumableResources", maxResults=2)
    token = first["nextToken"]
    assert names(nextToken=token) == ["seat"]
    with pytest.raises(ApiError, match="not found"):
        w.read("DescribeConsumableResource", consumableResource="none")


def test_unfinished_jobs_are_listed_by_the_resource_that_they_ask_for(tmp_path: Path) -> None:
    """B174."""
    w = having(journal=tmp_path / "journal.db", seat=2)
    over = submit(w, {"seat": 1})
    w.end(over)
    running, waiting = submit(w, {"seat": 2}), submit(w, {"seat": 1})
    array = w.array(2, consumableResourcePropertiesOverride=consuming(seat=1))
    w.submit()

    def listed(**more: Any) -> list[str]:
        found = w.read("ListJobsByConsumableResource", consumableResource="seat", **more)["jobs"]
        return [job["jobArn"].rpartition("/")[2] for job in found]

    assert listed() == [running, waiting, array]
    assert listed(filters=[{"name": "JOB_STATUS", "values": ["RUNNABLE"]}]) == [waiting]
    assert listed(filters=[{"name": "JOB_NAME", "values": ["JO*"]}]) == [running, waiting, array]
    assert listed(filters=[{"name": "JOB_NAME", "values": ["x"]}]) == []
    (shown,) = w.read("ListJobsByConsumableResource", consumableResource="seat", maxResults=1)[
        "jobs"
    ]
    assert (shown["quantity"], shown["jobStatus"]) == (2, "STARTING")
    asked = w.described(waiting)["consumableResourceProperties"]["consumableResourceList"]
    assert asked == [
        {
            "consumableResource": "arn:aws:batch:us-east-1:000000000000:consumable-resource/seat",
            "quantity": 1,
        }
    ]
    w.end(running)
    for child in children(array, 0):
        w.end(child)
    assert listed(filters=[{"name": "JOB_STATUS", "values": ["PENDING", "STARTING"]}]) == [
        waiting, array,
    ]  # fmt: skip


def test_a_job_that_waits_for_room_keeps_no_resource_from_one_of_another_queue() -> None:
    """B166."""
    w = having(vcpus=3, seat=1)
    w.queue("low", 0)
    holder, other = submit(w, {"seat": 1}), w.submit(queue="low")
    large = submit(w, {"seat": 1}, vcpus=3)
    small = submit(w, {"seat": 1}, queue="low")
    assert w.status(large, small) == ["RUNNABLE", "RUNNABLE"]
    w.end(holder)
    assert w.status(large, small) == ["RUNNABLE", "STARTING"]
    w.cancel(large)
    w.end(small)
    w.end(other)
    assert not w.state.jobs
