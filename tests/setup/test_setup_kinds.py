"""What `setup` takes for its own, by kind, and what the single commands say they did."""

from typing import Any

import pytest

from batchml.model.environment import LOCAL, Compute, Environment, Queue
from batchml.setup.apply import read_state
from batchml.setup.commands.shared import describe_change
from batchml.setup.desired import SetupSpec
from batchml.setup.tools import SetupTools
from tests.support.fakes import FakeClock

BY_HAND = {"batchml:env": LOCAL, "batchml:source": "command"}


class Api:
    """A queue `gpu` and a compute environment `day`, both made by single commands."""

    def queues(self) -> dict[str, Any]:
        order = [{"order": 1, "computeEnvironment": "gpu"}]
        return {"gpu": {"tags": BY_HAND, "computeEnvironmentOrder": order}}

    def environments(self) -> dict[str, Any]:
        return {"day": {"tags": BY_HAND}, "gpu": {"tags": BY_HAND}}

    def policies(self) -> dict[str, Any]:
        return {}


def test_what_was_made_by_hand_is_not_setups_for_a_name_of_another_kind() -> None:
    described = Environment(compute={"gpu": Compute()}, queues={"day": Queue()})
    spec = SetupSpec(LOCAL, described, {}, lambda _: {})
    tools = SetupTools(None, Api(), None, FakeClock())  # type: ignore[arg-type]
    current = read_state(spec, tools)
    assert not current.queues
    assert list(current.environments) == ["gpu"]  # which is described: it is made as it should be
    assert current.foreign_users == {"gpu": ("gpu",)}


@pytest.mark.parametrize(
    ("kind", "request_", "words"),
    [
        ("job queue", {"state": "DISABLED"}, "accepts no new runs"),
        ("job queue", {"state": "ENABLED", "priority": 1}, "enabled"),
        ("compute environment", {"state": "DISABLED"}, "no new run starts there"),
        ("job queue", {"priority": 1}, "changed"),
    ],
)
def test_an_update_says_what_it_means(kind: str, request_: dict[str, Any], words: str) -> None:
    assert words in describe_change(kind, request_)
