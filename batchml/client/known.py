"""What submissions need to know of an environment in AWS, asked for once an hour, not every time.

The outputs of its stacks and the digests of its images change seldom; reading them takes five calls
and half a second. They are kept in the state folder by what they depend on: who asks, and what
`batchml.toml` says. A refused call drops them, so that the next submission reads them anew.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from batchml.aws.naming import PLATFORM_STACKS, stack_name

if TYPE_CHECKING:
    from batchml.client.place import Place

HOUR = 3600.0
_ASKED_AS = (
    "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_CLOUDFORMATION",
    "AWS_ENDPOINT_URL_ECR", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


class Facts(Struct, frozen=True):
    """Outputs of the stacks, and `batchml/NAME:TAG` -> the reference with the digest."""

    of: str  # what they depend on
    at: float  # seconds since the epoch
    outputs: dict[str, str] = {}
    images: dict[str, str] = {}


class Known:
    """The facts of one environment, in one file of the state folder."""

    def __init__(self, place: "Place", environ: Mapping[str, str]) -> None:
        self._place = place
        self._of = _identity(place, environ)
        self._path = _path(place)
        self._facts = self._read()
        self._is_new = False

    def outputs(self) -> dict[str, str]:
        """The outputs of the environment's stacks, all in one mapping."""
        if not self._facts.outputs:
            self._learn(outputs=read_outputs(self._place))
        return self._facts.outputs

    def image(self, reference: str, ask: Callable[[], str]) -> str:
        """The reference with its digest of `batchml/NAME:TAG`."""
        if reference not in self._facts.images:
            self._learn(images={**self._facts.images, reference: ask()})
        return self._facts.images[reference]

    def save(self) -> None:
        """Keep what was asked for. The state folder exists; one that cannot be written costs time
        only."""
        if self._is_new:
            from batchml.runtime.storage.files import write_atomically

            with suppress(OSError):
                write_atomically(str(self._path), msgspec.json.encode(self._facts))

    def _learn(self, **found: dict[str, str]) -> None:
        self._facts = msgspec.structs.replace(self._facts, **found)
        # An environment that is being set up is not known yet.
        self._is_new = "BucketName" in self._facts.outputs and "JobRoleArn" in self._facts.outputs

    def _read(self) -> Facts:
        now = self._place.clock.now()
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=Facts)
        except (OSError, msgspec.DecodeError):
            return Facts(self._of, now)
        fresh = kept.of == self._of and 0 <= now - kept.at < HOUR
        return kept if fresh else Facts(self._of, now)


def read_outputs(place: "Place") -> dict[str, str]:
    """The outputs of the stacks that jobs depend on, as they are now."""
    from batchml.aws.cloudformation import Stacks

    stacks = Stacks(place.connect())
    found: dict[str, str] = {}
    for stack in PLATFORM_STACKS:
        found |= stacks.outputs(stack_name(place.env, stack))
    return found


def forget(place: "Place") -> None:
    """Drop what is kept of an environment: it is changed."""
    with suppress(OSError):  # it is a kept answer, no more; without a state folder there is none
        _path(place).unlink()


def _path(place: "Place") -> Path:
    return Path(place.settings.home.value) / f"known-{place.env}.json"


def _identity(place: "Place", environ: Mapping[str, str]) -> str:
    told = [
        place.env,
        msgspec.to_builtins(place.settings.environment),
        [environ.get(name, "") for name in _ASKED_AS],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def open_known(place: "Place") -> Known:
    return Known(place, os.environ)
