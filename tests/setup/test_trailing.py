"""AWS Batch answers before it acts, describes late, and has no tokens: what `setup` makes of it."""

from typing import Any

import pytest

from batchml.errors import ServiceError, SetupFailed
from batchml.setup.apply import perform
from batchml.setup.sharing import Action, CurrentState, PlanStep, ResourceKind, WantedState
from batchml.setup.steps import settle
from batchml.setup.tools import SetupTools
from tests.support.fakes import FakeClock

TAGS = {"batchml:env": "dev"}
REQUEST: dict[str, Any] = {
    "computeEnvironmentName": "gpu",
    "computeResources": {
        "allocationStrategy": "BEST_FIT_PROGRESSIVE", "instanceTypes": ["g5"], "maxvCpus": 64,
    },
    "tags": TAGS,
}  # fmt: skip


class Late:
    """AWS Batch with one compute environment, which is described as `answers` say, one a look."""

    def __init__(self, answers: list[dict[str, Any] | None]) -> None:
        self.answers = answers
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, str] = {}

    def environment(self, name: str) -> dict[str, Any] | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def _take(self, operation: str, request: dict[str, Any]) -> None:
        self.sent.append((operation, request))
        if operation in self.refusals:
            raise ServiceError(operation, "ClientException", self.refusals.pop(operation), 400)

    def create_environment(self, request: dict[str, Any]) -> None:
        self._take("create", request)

    def update_environment(self, request: dict[str, Any]) -> None:
        self._take("update", request)

    def delete_environment(self, name: str) -> None:
        self._take("delete", {"computeEnvironment": name})

    def is_still_related(self, error: ServiceError) -> bool:
        return "being modified" in error.message


def described(status: str = "VALID", **more: Any) -> dict[str, Any]:
    resources = {**REQUEST["computeResources"], **more.pop("resources", {})}
    found = {"state": "ENABLED", "status": status, "tags": TAGS, "computeResources": resources}
    return {"computeEnvironmentArn": "arn", **found, **more}


def take(
    action: Action, api: Late, there: dict[str, Any] | None = None, how: str = ""
) -> tuple[CurrentState, FakeClock]:
    """Take one step about the compute environment; what is known then, and the clock."""
    clock, none = FakeClock(), WantedState()
    tools = SetupTools(none, api, none, clock)  # type: ignore[arg-type]
    current = CurrentState(environments={"gpu": there} if there else {})
    run = perform(
        PlanStep(action, ResourceKind.ENVIRONMENT, "gpu", how=how),
        WantedState(environments={"gpu": REQUEST}),
        current,
        tools,
    )
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value, clock


def test_what_was_before_an_update_is_not_taken_for_what_came_of_it() -> None:
    before, after = described(resources={"maxvCpus": 8}), described()
    current, _ = take(Action.UPDATE, Late([before, before, described("UPDATING"), after]), before)
    assert current.environments["gpu"] == after


def test_an_environment_that_was_invalid_is_given_time_to_be_seen_updating() -> None:
    before = described("INVALID", statusReason="no such profile")
    current, _ = take(Action.UPDATE, Late([before, described("UPDATING"), described()]), before)
    assert current.environments["gpu"]["status"] == "VALID"


@pytest.mark.parametrize("seen", [[], ["UPDATING"]])
def test_one_that_stays_invalid_is_a_failure(seen: list[str]) -> None:
    before = described("INVALID", statusReason="no such instance profile")
    with pytest.raises(SetupFailed, match="no such instance profile"):
        take(Action.UPDATE, Late([*map(described, seen), before]), before)


def test_what_aws_never_describes_as_asked_is_not_waited_for_for_ever() -> None:
    other = described(resources={"maxvCpus": 8})
    current, clock = take(Action.UPDATE, Late([other]), other)
    assert current.environments["gpu"] == other
    assert 30 < sum(clock.naps) < 60


def test_an_environment_whose_creation_had_a_lost_answer_is_made() -> None:
    """The SDK sends the call again, and AWS refuses it, since the first was carried out."""
    api = Late([described("CREATING"), described()])
    api.refusals["create"] = "Object already exists"
    current, _ = take(Action.CREATE, api)
    assert current.environments["gpu"]["status"] == "VALID"


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (described(tags={"batchml:env": "other"}), "Object already exists"),
        (None, "Object already exists"),
        (described(), "Instance role is required."),
    ],
)
def test_any_other_refusal_of_a_creation_is_an_error(
    there: dict[str, Any] | None, message: str
) -> None:
    api = Late([there])
    api.refusals["create"] = message
    with pytest.raises(ServiceError, match=message):
        take(Action.CREATE, api)


def test_jobs_are_given_time_where_instances_are_replaced_and_there_alone() -> None:
    for resources, replaces in (({"maxvCpus": 8}, False), ({"instanceTypes": ["g6"]}, True)):
        api = Late([described()])
        take(Action.UPDATE, api, described(resources=resources))
        ((_, request),) = api.sent
        assert set(request["computeResources"]) == set(resources)
        assert ("updatePolicy" in request) is replaces


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ([described(), described(state="DISABLED"), None], ["update", "delete"]),
        # Interrupted while it was made: AWS takes no change before that is over.
        ([described("CREATING"), described(), described(state="DISABLED"), None],
         ["update", "delete"]),
        ([described("INVALID", state="DISABLED"), described("DELETING"), None], ["delete"]),
        ([described("DELETING"), None], []),
    ],
)  # fmt: skip
def test_a_deletion_goes_in_the_order_that_aws_asks_for(
    answers: list[dict[str, Any] | None], calls: list[str]
) -> None:
    api = Late(list(answers))
    current, _ = take(Action.DELETE, api, described())
    assert [operation for operation, _ in api.sent] == calls
    assert current.environments == {}


def test_a_description_that_trails_makes_a_deletion_ask_again() -> None:
    # It is read at once after an update, and once more before the update is repeated.
    off = described(state="DISABLED")
    api = Late([described(), described(), described(), off, off, None])
    api.refusals["delete"] = "Cannot delete, resource is being modified."
    take(Action.DELETE, api, described())
    assert [name for name, _ in api.sent] == ["update", "update", "delete", "delete"]


def test_runs_on_what_was_replaced_get_the_time_that_an_update_would_give() -> None:
    full = described(state="DISABLED", resources={"desiredvCpus": 8})
    empty = described(state="DISABLED", resources={"desiredvCpus": 0})
    api = Late([full, full, empty, None])
    take(Action.DELETE, api, full, how="drain")
    assert len(api.answers) == 1 and [name for name, _ in api.sent] == ["delete"]

    api = Late([*[full] * 300, None])
    _, clock = take(Action.DELETE, api, full)
    assert clock.naps[:1] == [0.5] and api.sent[0][0] == "delete"

    waiting = Late([full])
    waiting.delete_environment = lambda name: waiting.answers.append(None)  # type: ignore[method-assign]
    _, clock = take(Action.DELETE, waiting, full, how="drain")
    assert 1800 <= sum(clock.naps) < 1830


def test_a_single_update_is_waited_for_until_it_is_described() -> None:
    old, new = described(), described(resources={"maxvCpus": 128})
    api, clock = Late([old, old, new]), FakeClock()
    tools = SetupTools(None, api, None, clock)  # type: ignore[arg-type]
    asked = {"computeEnvironment": "gpu", "computeResources": {"maxvCpus": 128}}
    said: list[str] = []
    assert settle(asked, tools, said.append) == new
    assert said == ["not updated yet"]
