"""What a sweep comes to before it is started: `sweep check`."""

import json
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.running import needs_controller
from batchml.client.sweeping.waves import first_requests
from batchml.model.run import MAX_ARRAY
from batchml.sweep.forecast import Forecast, forecast, lines
from batchml.sweep.shape import Shape, Shaped, countable


class Checked(Struct, frozen=True):
    """A sweep, what it comes to, and the requests that would begin it."""

    frozen: Frozen
    shaped: Shaped
    forecast: Forecast
    requests: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        """The requests first: they are long, and what people look for is in sight at the end."""
        frozen, found = self.frozen, []
        for name, request in self.requests.items():
            found += [f"{name}:", *json.dumps(request, indent=2).split("\n")]
        return [
            *found,
            f"Sweep {frozen.name} of job {frozen.job_spec.name}, in {frozen.env}: "
            f"nothing was sent.",
            *lines(self.forecast),
            *(["Free: it runs on this machine, without a usd_per_hour."] if frozen.is_free else []),
            f"How it runs: {self.shaped.why}.",
            *self._attention(),
        ]

    def _attention(self) -> list[str]:
        """Whether somebody has to stay."""
        if self.shaped.shape is Shape.WAVES:
            return ["It needs this terminal until its end; or --detach, and a run attends to it."]
        if needs_controller(self.frozen):
            return ["What stops it early, and runs that confirm, need this terminal, or --detach."]
        return []

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.frozen.name,
            "env": self.frozen.env,
            "shape": self.shaped.shape.value,
            "why": self.shaped.why,
            "forecast": msgspec.to_builtins(self.forecast),
            "requests": self.requests,
        }


def check(frozen: Frozen) -> Checked:
    """What a sweep comes to; nothing is sent."""
    found = forecast(frozen.spec, frozen.job_spec, hourly=frozen.hourly)
    if frozen.is_free:
        found = replace(found, cost=0.0)
    shaped = frozen.shaped
    return Checked(frozen, shaped, found, first_requests(frozen, _first_size(frozen, shaped)))


def _first_size(frozen: Frozen, shaped: Shaped) -> int:
    """Children of the first wave."""
    many = countable(frozen.spec)
    if shaped.shape is Shape.WAVES:
        width = frozen.spec.limits.parallel
        return width if many is None else min(width, many)
    return min(many or 1, MAX_ARRAY)
