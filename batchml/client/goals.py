"""Whether the queue that a run is to go to is there, and what to say where it is not."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from batchml.aws.naming import qualified
from batchml.errors import NoQueue

if TYPE_CHECKING:
    from batchml.client.place import Place

_FIRST_CHOICE = "default"


def check_queue(place: "Place", given: str, where: str = "") -> None:
    """Raise NoQueue for a queue that is not there: one call. `where` is the line that names it."""
    known = place.batch.queues()
    if place.queue(given) not in known:
        raise no_queue(place, given, known, where)


def no_queue(place: "Place", given: str, known: Iterable[str], where: str = "") -> NoQueue:
    """What to say of a queue that is not among those that are there, in the user's own names."""
    names = [each.removeprefix(qualified(place.env, "")) for each in known]
    name = given.removeprefix(qualified(place.env, ""))
    return NoQueue(name, names, _hint(place, name, names), where=where)


def _hint(place: "Place", name: str, names: list[str]) -> str:
    if name in place.settings.environment.queues:
        return f"batchml.toml describes it: batchml setup --env {place.env} makes it."
    if not names:
        return "Make one: batchml queue create."
    best = _FIRST_CHOICE if _FIRST_CHOICE in names else names[0]
    return f"--queue {best} runs it {'here' if place.settings.is_local else 'there'}."
