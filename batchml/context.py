"""One environment, ready to use: its settings, AWS clients, clock, history and poll intervals.

Clients and history are made at their first use.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from batchml.aws.batch.jobs import JobApi
from batchml.aws.naming import (
    PLATFORM_STACKS,
    STACK_OUTPUTS,
    qualified,
    queue_name,
    stack_name,
    unknown_output,
)
from batchml.aws.session import Access, Session
from batchml.clock import Clock
from batchml.config.project import PROJECT_VARIABLE, choose_project, find_project_folder
from batchml.config.settings import Settings
from batchml.errors import UsageError
from batchml.history import History, IndexNotice
from batchml.model.environment import DEFAULT_QUEUE, choose_queue
from batchml.model.run import CANNOT_START, Run
from batchml.resources import shipped_folder
from batchml.runtime.storage.files import is_read_only, write_atomically

if TYPE_CHECKING:
    from batchml.aws.logs import StreamReader
    from batchml.aws.pricing.prices import PriceSource
    from batchml.local.home import Home, ServerEndpoint

LOCAL_REGION = "us-east-1"
LOCAL_QUEUE = "default"  # with which the embedded server starts; all projects share it

Notify = Callable[[str], None]  # gets messages for the user


class PollIntervals(Struct, frozen=True):
    """How often AWS Batch is asked about runs, and how long batchml waits for answers, in seconds.

    A log without an end mark counts as complete if its run ended at least `quiet` ago, and two
    reads at least `settle` apart returned no new lines.
    """

    shortest: float = 2.0  # the first interval; it grows by half while nothing changes
    longest: float = 15.0
    longest_log: float = 4.0  # between two polls of the log of a running job
    quiet: float = 10.0
    settle: float = 2.0
    # How long after the end of a run to wait for lines that its log's end mark counts.
    end_mark_wait: float = 30.0
    # How long a job may be unknown after its submission, or the service unreachable at first.
    startup_limit: float = 60.0
    # How long the service may be unreachable after its first answer, or the user signed out.
    outage_limit: float = 900.0
    # How long the log may be unreachable after the run has ended.
    log_outage_limit: float = 300.0
    # How long an attempt runs without a log stream until this is reported.
    stream_report_after: float = 120.0
    # The most calls a second, or None for no limit: DescribeJobs, whose limit all users of an
    # account share, and GetLogEvents, of which AWS allows 10 for an account in a region.
    describe_rate: float | None = 1.0
    log_rate: float | None = 8.0


LOCAL_INTERVALS = PollIntervals(
    shortest=0.05,
    longest=0.5,
    longest_log=0.5,
    quiet=0.0,
    settle=0.0,
    end_mark_wait=0.0,
    startup_limit=20.0,
    log_outage_limit=20.0,
    describe_rate=None,
    log_rate=None,
)


def backoff(pace: PollIntervals) -> Iterator[float]:
    """Yield the seconds between polls: `shortest`, then half as much again, up to `longest`."""
    delay = pace.shortest
    while True:
        yield delay
        delay = min(delay * 1.5, pace.longest)


class Context:
    """One environment, ready to use. `folder` is the user's folder, with `jobs/` and `images/`.

    `tell` gets messages for the user about steps that take long. `why_offline`: why AWS is not
    called; "" if it is. Without AWS the environment counts as new, and placeholders stand for the
    values that AWS would return.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        folder: Path,
        tell: Notify = lambda _: None,
        *,
        why_offline: str = "",
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.folder = folder
        self.tell = tell
        self.why_offline = why_offline
        self._has_reported_copy = False  # that the server only reads, on a copied state folder
        self._home: Home | None = None
        self._session: Session | None = None
        self._history: History | None = None
        self._project: str | None = None
        self._queues: list[str] = []  # of `local`, as they were read last
        self._queues_read = 0.0  # when that was, on the monotonic clock

    def without_aws(self, why: str) -> "Context":
        """Return a context that does not call AWS. `why`: the beginning of a sentence."""
        return Context(self.settings, self.clock, self.folder, self.tell, why_offline=why)

    @property
    def is_offline(self) -> bool:
        return bool(self.why_offline)

    def with_settings(self, settings: Settings) -> "Context":
        """Return a context with these settings and a session of its own."""
        return Context(settings, self.clock, self.folder, self.tell)

    @property
    def home(self) -> "Home":
        from batchml.local.home import Home

        if self._home is None:
            self._home = Home(Path(self.settings.home.value))
        self._home.check_owner()
        return self._home

    @property
    def env(self) -> str:
        return self.settings.env.value

    @property
    def env_option(self) -> str:
        """The option of a command that is shown to the user: ` --env NAME`; "" on `local`."""
        return "" if self.settings.is_local else f" --env {self.env}"

    @property
    def project(self) -> str:
        """The identity of the project; "" for a program that belongs to none.

        Raises UsageError if --project or the variable names no project, or several.
        """
        if self._project is None:
            given = self.settings.project
            self._project = given.value
            if given.source in ("--project", PROJECT_VARIABLE):
                own = self.settings.own_project
                known = [own, *self.history.projects()]
                self._project = choose_project(
                    given.value, known, given.source, own, self._find_folder
                )
        return self._project

    def _find_folder(self, project: str) -> str:
        """The folder of a project, from the runs that were submitted there; "" if unknown."""
        own = (each for each in self.history.newest_first() if each.project == project)
        return find_project_folder(project, (each.folder for each in own if each.folder))

    @property
    def project_option(self) -> str:
        """The option of a command that is shown to the user; "" for the folder's own project."""
        is_own = self.project == self.settings.own_project
        return "" if is_own else f" --project {self.project}"

    @property
    def pace(self) -> PollIntervals:
        return LOCAL_INTERVALS if self.settings.is_local else PollIntervals()

    @property
    def history(self) -> History:
        path = Path(self.settings.home.value) / "history.jsonl"
        if self._history is None or self._history.path != path:
            # It remembers what it has read.
            self._history = History(path, IndexNotice(self.clock, self.tell))
        return self._history

    @property
    def job_folders(self) -> list[Path]:
        return [self.folder / "jobs", shipped_folder("jobs")]

    @property
    def image_folders(self) -> list[Path]:
        return [self.folder / "images", shipped_folder("images")]

    def connect(self) -> Session:
        """Return the session. On `local` the first call starts the server if none runs.

        Raises UsageError if AWS must not be called.
        """
        if self.is_offline:
            raise UsageError(
                f"This needs AWS's answer about {self.env}: repeat the command without --offline."
            )
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
    def prices(self) -> "PriceSource":
        if self.is_offline:
            from batchml.aws.pricing.listed import ListedPrices

            return ListedPrices()
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
            # If the server is killed between two calls, its jobs and the command continue.
            restart=lambda: self.server().url,
            describe_silence=lambda: describe_silence(home),
            tell=self.tell,
        )

    def server(self) -> "ServerEndpoint":
        """Return the embedded server with the endpoints of batchml.toml; start it if none runs."""
        from batchml.local import control

        home, endpoints = self.home, self.settings.environment.endpoints
        if endpoints:
            from batchml.local.executors.choice import save_endpoints

            save_endpoints(home, endpoints)
        endpoint = control.ensure_server(home, self.clock, self.tell)
        if endpoint.read_only and not self._has_reported_copy:
            self._has_reported_copy = True
            self.tell(endpoint.read_only)
        return endpoint

    def check_system(self) -> None:
        """Raise LocalServerError if the environment is `local` and this system is not Linux."""
        if self.settings.is_local:
            from batchml.local import control

            control.check_system()

    def find_start_obstacle(self) -> str:
        """Return why the running embedded server cannot start programs now; "" if it can."""
        from batchml.aws.batch.resources import ComputeApi

        root = self.home.root
        if is_read_only(str(root)):
            return f"{CANNOT_START}the file system of {root} is read-only"
        environments = ComputeApi(self.connect()).environments().values()
        reasons = (str(each.get("statusReason", "")) for each in environments)
        return next((reason for reason in reasons if reason.startswith(CANNOT_START)), "")

    def choose_queue(self, given: str, gpus: int | Literal["auto"], neurons: int = 0) -> str:
        """The queue of a run, as batchml.toml names it: `given`, or the default for its chips."""
        if given or self.settings.is_local:  # here all hosts are this machine
            return given or DEFAULT_QUEUE
        return choose_queue(self.settings.environment, gpus, neurons)

    def queue(self, given: str) -> str:
        """Return the name that a queue of `batchml.toml` has in AWS; other names are unchanged.

        On `local` the server is asked: it may have a queue of the project by that name, or one that
        all projects share, such as `default` and those that other programs made.
        """
        settings = self.settings
        if not settings.is_local:
            return queue_name(self.env, settings.environment, given)
        if not given or (given == LOCAL_QUEUE and settings.config is None):
            return given
        own = self.qualified(given)
        if own not in self._queues and given not in self._queues:  # it may have been made meanwhile
            self._read_queues()
        is_described = given in settings.environment.queues and given not in self._queues
        return own if own in self._queues or is_described else given

    def queues(self) -> list[str]:
        """The names that all job queues have in AWS, the highest priority first: those that were
        read before, on `local`, or one call.
        """
        if not self.settings.is_local:
            return self.batch.queues()
        if not self._queues:
            self._read_queues()
        return self._queues

    def _read_queues(self) -> None:
        self._queues_read = self.clock.monotonic()
        self._queues = self.batch.queues()

    def forget_queues(self, age: float = 0.0) -> None:
        """Let the next call read the queues again, unless they were read less than `age` seconds
        ago: some may have been made or deleted.
        """
        if self.clock.monotonic() - self._queues_read >= age:
            self._queues = []

    def qualified(self, name: str) -> str:
        """The name in AWS of a resource that batchml makes; see `naming.qualified`."""
        return qualified(self.env, name, self.project if self.settings.is_local else "")

    def bare(self, name: str) -> str:
        """The name in batchml.toml of a resource in AWS; other names are unchanged."""
        return name.removeprefix(self.qualified(""))

    def resource_label(self, name: str) -> str:
        """The name of a queue or compute environment for people: on `local` without the project."""
        return self.bare(name) if self.settings.is_local else name

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return self.batch.describe(job_ids)

    def outputs(self, job_id: str) -> Path | None:
        """The folder of a run's outputs if it is on this machine."""
        folder = self.home.runs / job_id / "output"
        return folder if self.settings.is_local and folder.is_dir() else None

    def open_log(self, run: Run, stream: str) -> "StreamReader":
        from batchml.aws.logs import StreamReader

        return StreamReader(self.connect, run.log_group, stream)


# --- The cache of an environment in AWS -----------------------------------------------------------
# Submissions need an environment's stack outputs and image digests, which seldom change. Reading
# them takes five calls and half a second. So they are kept in the state folder for an hour, with a
# hash of the user and of the environment's settings. If AWS refuses a call, the file is deleted and
# the next submission reads them again.


_MAX_AGE = 3600.0  # seconds
_IDENTITY_VARIABLES = (
    "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_CLOUDFORMATION",
    "AWS_ENDPOINT_URL_ECR", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


class EnvironmentFacts(Struct, frozen=True):
    """The content of the file: stack outputs, references with digests by `batchml/NAME:TAG`, and
    the instance types of queues that batchml.toml does not describe.
    """

    of: str  # a hash of the user and of the settings
    at: float  # seconds since the epoch
    outputs: dict[str, str] = {}
    images: dict[str, str] = {}
    types: dict[str, tuple[str, ...]] = {}


class EnvironmentCache:
    """The cache of one environment: a file in the state folder."""

    def __init__(self, context: "Context", environ: Mapping[str, str]) -> None:
        self._context = context
        self._identity = _identity(context, environ)
        self._path = _path(context)
        self._facts = self._read()
        self._must_save = False

    def outputs(self) -> dict[str, str]:
        """The outputs of the environment's stacks, in one mapping; placeholders without AWS."""
        if self._context.is_offline:
            return {
                key: unknown_output(stack, key)
                for stack in PLATFORM_STACKS
                for key in STACK_OUTPUTS[stack]
            }
        if not self._facts.outputs:
            self._learn(outputs=read_stack_outputs(self._context))
        return self._facts.outputs

    def image(self, reference: str, ask: Callable[[], str]) -> str:
        """The reference with digest of `batchml/NAME:TAG`; `ask` returns it if it is not cached.

        Without AWS a placeholder stands for the registry, and there is no digest.
        """
        if self._context.is_offline:
            return f"{unknown_output('ecr', 'Registry')}/{reference}"
        if reference not in self._facts.images:
            self._learn(images={**self._facts.images, reference: ask()})
        return self._facts.images[reference]

    def types(self, queue: str, ask: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """The instance types of a queue's hosts; `ask` returns them if they are not cached."""
        if queue not in self._facts.types:
            self._learn(types={**self._facts.types, queue: ask()})
        return self._facts.types[queue]

    def save(self) -> None:
        """Write the file if its content has changed."""
        if self._must_save:
            with suppress(OSError):  # without the file, the next submission only takes longer
                write_atomically(str(self._path), msgspec.json.encode(self._facts))

    def _learn(self, **found: Mapping[str, str | tuple[str, ...]]) -> None:
        self._facts = msgspec.structs.replace(self._facts, **found)
        # An environment that is being set up is not cached.
        self._must_save = {"BucketName", "JobRoleArn"} <= {*self._facts.outputs}

    def _read(self) -> EnvironmentFacts:
        now = self._context.clock.now()
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=EnvironmentFacts)
        except (OSError, msgspec.DecodeError):
            return EnvironmentFacts(self._identity, now)
        fresh = kept.of == self._identity and 0 <= now - kept.at < _MAX_AGE
        return kept if fresh else EnvironmentFacts(self._identity, now)


def read_stack_outputs(context: "Context") -> dict[str, str]:
    """Read the present outputs of the stacks that jobs depend on."""
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


def current_folder() -> Path:
    """The current folder. Raises UsageError if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("The current folder does not exist any more: cd to another.") from None


def _path(context: "Context") -> Path:
    return Path(context.settings.home.value) / f"known-{context.env}.json"


def _identity(context: "Context", environ: Mapping[str, str]) -> str:
    identity = [
        context.env,
        msgspec.to_builtins(context.settings.environment),
        [environ.get(name, "") for name in _IDENTITY_VARIABLES],
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def open_cache(context: "Context") -> EnvironmentCache:
    return EnvironmentCache(context, os.environ)
