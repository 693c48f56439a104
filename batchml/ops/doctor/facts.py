"""What `doctor` has found out, before anything is said about it."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.capacity import Reservations
from batchml.aws.iam import Quota, Verdict
from batchml.aws.session import Identity
from batchml.model.environment import Environment


class Failed(Struct, frozen=True):
    """A question that got no answer, and why. `is_access`: credentials or permissions."""

    text: str
    is_access: bool = False


class Config(Struct, frozen=True):
    """`path` is None where there is no batchml.toml; `mistakes` are those of the file."""

    path: str | None = None
    mistakes: tuple[str, ...] = ()
    env: str = ""


class Engine(Struct, frozen=True):
    """A Docker engine, as it answered. Empty `trouble` means that it did."""

    address: str
    trouble: Literal["", "missing", "permission", "silent", "unchecked"] = ""
    text: str = ""
    version: str = ""
    api: str = ""
    group: str = ""  # that may use the socket
    root: str = ""  # the folder of its images, if it is on this machine


class Machine(Struct, frozen=True):
    """This machine. Sizes are bytes."""

    home: str
    home_trouble: str = ""
    home_free: int = 0
    server_trouble: str = ""  # of the embedded server, if it runs
    engine: Engine | None = None
    images_free: int | None = None  # None: not known
    wants_docker: bool = False  # the local environment runs containers
    has_venv: bool = True
    python: str = ""
    has_plugin: bool = True  # session-manager-plugin


class Account(Struct, frozen=True):
    """What AWS answered. None: not asked, for an answer before it had failed or made it needless.

    `now` is this machine's time of day when `identity` was asked for, in seconds since 1970.
    """

    env: str
    environment: Environment
    now: float = 0.0
    identity: Identity | Failed | None = None
    region: str | Failed | None = None  # AWS's word for whether it is enabled
    verdicts: tuple[Verdict, ...] | Failed | None = None
    probes: Mapping[str, Failed | None] = {}
    quotas: Mapping[str, Quota] | Failed | None = None
    compute: Mapping[str, Mapping[str, Any]] | Failed | None = None
    queues: Mapping[str, Mapping[str, Any]] | Failed | None = None
    reservations: Reservations = Reservations()
    vpcs: int | Failed | None = None
    addresses: int | Failed | None = None
    has_service_role: bool | Failed | None = None

    @property
    def is_set_up(self) -> bool:
        """True when a queue of the environment is there."""
        if not isinstance(self.queues, Mapping):
            return False
        return any(name.startswith(f"batchml-{self.env}-") for name in self.queues)

    @property
    def flags(self) -> str:
        """What makes the AWS CLI ask the same account and region."""
        profile = f" --profile {self.environment.profile}" if self.environment.profile else ""
        return f" --region {self.environment.region}{profile}"
