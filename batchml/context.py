"""One environment, ready to be used: its settings, AWS clients, clock and history, made at first
use.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from batchml.aws.batch.jobs import JobApi
from batchml.aws.naming import PLATFORM_STACKS, queue_name, stack_name
from batchml.aws.session import Access, Session
from batchml.clock import Clock
from batchml.config.settings import Settings
from batchml.history import History
from batchml.model.polling import LOCAL_INTERVALS, PollIntervals
from batchml.model.run import CANNOT_START, Run
from batchml.resources import shipped_folder
from batchml.runtime.storage.files import is_read_only, write_atomically

if TYPE_CHECKING:
    from batchml.aws.logs import StreamReader
    from batchml.aws.pricing.cache import Prices
    from batchml.local.home import Home, ServerEndpoint

LOCAL_REGION = "us-east-1"

Notify = Callable[[str], None]  # gets messages for the user


class Context:
    """One environment, ready to be used. `tell` gets messages about steps that take long."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        folder: Path,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.folder = folder
        self.tell = tell
        self._has_reported_copy = False  # whether the user was told that the state folder is a copy
        self._session: Session | None = None

    def with_settings(self, settings: Settings) -> "Context":
        """Another context with these settings and a session of its own."""
        return Context(settings, self.clock, self.folder, self.tell)

    @property
    def home(self) -> "Home":
        from batchml.local.home import Home

        home = Home(Path(self.settings.home.value))
        home.check_owner()
        return home

    @property
    def env(self) -> str:
        return self.settings.env.value

    @property
    def env_option(self) -> str:
        """The `--env` option for a command that is shown to the user; begins with a space."""
        return "" if self.settings.is_local else f" --env {self.env}"

    @property
    def pace(self) -> "PollIntervals":
        return LOCAL_INTERVALS if self.settings.is_local else PollIntervals()

    @property
    def history(self) -> History:
        return History(Path(self.settings.home.value) / "history.jsonl")

    @property
    def job_folders(self) -> list[Path]:
        return [self.folder / "jobs", shipped_folder("jobs")]

    @property
    def image_folders(self) -> list[Path]:
        return [self.folder / "images", shipped_folder("images")]

    def connect(self) -> Session:
        """The session, made at first use; on `local` the server is started if none runs."""
        if self._session is None:
            self._session = Session(self._access())
        return self._session

    def renew(self) -> None:
        """Let the next call read the credentials again: the user may have signed in meanwhile."""
        self._session = None

    @property
    def batch(self) -> JobApi:
        return JobApi(self.connect())

    @property
    def prices(self) -> "Prices":

        from batchml.aws.pricing.cache import Prices

        home = self.home
        home.prepare()
        return Prices(self.connect(), home.root / "prices.json", self.clock)

    def _access(self) -> Access:
        if not self.settings.is_local:
            environment = self.settings.environment
            return Access(environment.region, environment.profile)
        from batchml.local.control import describe_silence

        home = self.home
        endpoint = self.server()
        keys = home.keys()
        return Access(
            LOCAL_REGION,
            endpoint=endpoint.url,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            # The server may be killed between two calls; its jobs and the command go on.
            restart=lambda: self.server().url,
            describe_silence=lambda: describe_silence(home),
            tell=self.tell,
        )

    def server(self) -> "ServerEndpoint":
        """The embedded server, started if none runs, with the endpoints of batchml.toml."""
        from batchml.local import control

        home, endpoints = self.home, self.settings.environment.endpoints
        if endpoints:
            from batchml.local.executors.choice import keep_endpoints

            keep_endpoints(home, endpoints)
        endpoint = control.ensure_server(home, self.clock, self.tell)
        if endpoint.read_only and not self._has_reported_copy:
            self._has_reported_copy = True
            self.tell(endpoint.read_only)
        return endpoint

    def find_start_obstacle(self) -> str:
        """Why the embedded server cannot start programs now; empty while it can. It must run."""

        from batchml.aws.batch.resources import ComputeApi

        root = self.home.root
        if is_read_only(str(root)):
            return f"{CANNOT_START}the file system of {root} is read-only"
        environments = ComputeApi(self.connect()).environments().values()
        reasons = (str(each.get("statusReason", "")) for each in environments)
        return next((reason for reason in reasons if reason.startswith(CANNOT_START)), "")

    def queue(self, given: str) -> str:
        """The name of a queue in AWS."""

        return queue_name(self.env, self.settings.environment, given)

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return self.batch.describe(job_ids)

    def outputs(self, job_id: str) -> Path | None:
        """The folder of a run's outputs, if it lies on this machine."""
        folder = self.home.runs / job_id / "output"
        return folder if self.settings.is_local and folder.is_dir() else None

    def open_log(self, run: Run, stream: str) -> "StreamReader":

        from batchml.aws.logs import StreamReader

        return StreamReader(self.connect, run.log_group, stream)


# --- The cache of an environment in AWS -----------------------------------------------------------
# What submissions need to know of an environment in AWS, read once an hour.
#
# The outputs of its stacks and the digests of its images change seldom; reading them takes five
# calls and half a second. They are kept in the state folder by what they depend on: who asks, and
# what `batchml.toml` says. A refused call drops them, so that the next submission reads them anew.


HOUR = 3600.0
_ASKED_AS = (
    "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_CLOUDFORMATION",
    "AWS_ENDPOINT_URL_ECR", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


class EnvironmentFacts(Struct, frozen=True):
    """Outputs of the stacks, and `batchml/NAME:TAG` -> the image reference with its digest."""

    of: str  # a hash of the user and of the settings
    at: float  # seconds since the epoch
    outputs: dict[str, str] = {}
    images: dict[str, str] = {}


class EnvironmentCache:
    """The facts of one environment, in one file of the state folder."""

    def __init__(self, context: "Context", environ: Mapping[str, str]) -> None:
        self._context = context
        self._of = _identity(context, environ)
        self._path = _path(context)
        self._facts = self._read()
        self._is_new = False

    def outputs(self) -> dict[str, str]:
        """The outputs of the environment's stacks, in one mapping."""
        if not self._facts.outputs:
            self._learn(outputs=read_stack_outputs(self._context))
        return self._facts.outputs

    def image(self, reference: str, ask: Callable[[], str]) -> str:
        """The reference, with its digest, of `batchml/NAME:TAG`."""
        if reference not in self._facts.images:
            self._learn(images={**self._facts.images, reference: ask()})
        return self._facts.images[reference]

    def save(self) -> None:
        """Write the cache into the state folder; a file that cannot be written costs only time."""
        if self._is_new:
            with suppress(OSError):
                write_atomically(str(self._path), msgspec.json.encode(self._facts))

    def _learn(self, **found: dict[str, str]) -> None:
        self._facts = msgspec.structs.replace(self._facts, **found)
        # An environment that is being set up is not cached.
        self._is_new = "BucketName" in self._facts.outputs and "JobRoleArn" in self._facts.outputs

    def _read(self) -> EnvironmentFacts:
        now = self._context.clock.now()
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=EnvironmentFacts)
        except (OSError, msgspec.DecodeError):
            return EnvironmentFacts(self._of, now)
        fresh = kept.of == self._of and 0 <= now - kept.at < HOUR
        return kept if fresh else EnvironmentFacts(self._of, now)


def read_stack_outputs(context: "Context") -> dict[str, str]:
    """The outputs of the stacks that jobs depend on, as they are now."""
    from batchml.aws.cloudformation import Stacks

    stacks = Stacks(context.connect())
    found: dict[str, str] = {}
    for stack in PLATFORM_STACKS:
        found |= stacks.outputs(stack_name(context.env, stack))
    return found


def drop_cache(context: "Context") -> None:
    """Delete the cache of an environment that has changed."""
    with suppress(OSError):  # it is only a cache; without a state folder there is none
        _path(context).unlink()


def _path(context: "Context") -> Path:
    return Path(context.settings.home.value) / f"known-{context.env}.json"


def _identity(context: "Context", environ: Mapping[str, str]) -> str:
    told = [
        context.env,
        msgspec.to_builtins(context.settings.environment),
        [environ.get(name, "") for name in _ASKED_AS],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def open_cache(context: "Context") -> EnvironmentCache:
    return EnvironmentCache(context, os.environ)
