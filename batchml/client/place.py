"""Settings -> collaborators: one environment, ready to be used. Builds things when first needed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.session import Access, Session
from batchml.clock import Clock
from batchml.model.run import Run
from batchml.ops.history import History
from batchml.resources import shipped
from batchml.settings import Settings

if TYPE_CHECKING:
    from batchml.aws.logs import StreamReader
    from batchml.aws.pricing import Prices
    from batchml.local.home import Endpoint, Home
    from batchml.ops.watch import Pace

LOCAL_REGION = "us-east-1"


class Place:
    """One environment, ready to be used. `tell` is called with what takes long, in words."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        here: Path,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.here = here
        self.tell = tell
        self._has_reported_copy = False  # that the state folder is a copy
        self._session: Session | None = None

    def with_settings(self, settings: Settings) -> "Place":
        """Another place, with a session of its own."""
        return Place(settings, self.clock, self.here, self.tell)

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
    def option(self) -> str:
        """What a command that is shown has to name beside a run; begins with a space."""
        return "" if self.settings.is_local else f" --env {self.env}"

    @property
    def pace(self) -> "Pace":
        from batchml.ops.watch import LOCAL_PACE, Pace

        return LOCAL_PACE if self.settings.is_local else Pace()

    @property
    def history(self) -> History:
        return History(Path(self.settings.home.value) / "history.jsonl")

    @property
    def job_folders(self) -> list[Path]:
        return [self.here / "jobs", shipped("jobs")]

    @property
    def image_folders(self) -> list[Path]:
        return [self.here / "images", shipped("images")]

    def connect(self) -> Session:
        """The session, made at first use; on `local` the server is started if none runs."""
        if self._session is None:
            self._session = Session(self._access())
        return self._session

    def renew(self) -> None:
        """Have the next call read the credentials anew: the user may have signed in meanwhile."""
        self._session = None

    @property
    def batch(self) -> BatchApi:
        return BatchApi(self.connect())

    @property
    def prices(self) -> "Prices":
        from batchml.aws.pricing import Prices

        home = self.home
        home.prepare()
        return Prices(self.connect(), home.root / "prices.json", self.clock)

    def _access(self) -> Access:
        if not self.settings.is_local:
            environment = self.settings.environment
            return Access(environment.region, environment.profile)
        from batchml.local.silence import unanswered

        home = self.home
        endpoint = self.server()
        keys = home.keys()
        return Access(
            LOCAL_REGION,
            endpoint=endpoint.url,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            # It may be killed between two calls; its jobs go on, and so does the command.
            revive=lambda: self.server().url,
            unanswered=lambda: unanswered(home),
            tell=self.tell,
        )

    def server(self) -> "Endpoint":
        """The embedded server, started if none runs, with the endpoints of batchml.toml."""
        from batchml.local import control

        home, endpoints = self.home, self.settings.environment.endpoints
        if endpoints:
            from batchml.local.executors.choice import keep_endpoints

            keep_endpoints(home, endpoints)
        endpoint = control.ensure(home, self.clock, self.tell)
        if endpoint.read_only and not self._has_reported_copy:
            self._has_reported_copy = True
            self.tell(endpoint.read_only)
        return endpoint

    def held_back(self) -> str:
        """Why the embedded server cannot start programs now; empty while it can. It must run."""
        from batchml.aws.batch.resources import ComputeApi
        from batchml.model.run import CANNOT_START
        from batchml.runtime.storage.files import is_read_only

        root = self.home.root
        if is_read_only(str(root)):
            return f"{CANNOT_START}the file system of {root} is read-only"
        environments = ComputeApi(self.connect()).environments().values()
        reasons = (str(each.get("statusReason", "")) for each in environments)
        return next((reason for reason in reasons if reason.startswith(CANNOT_START)), "")

    def queue(self, given: str) -> str:
        """The name that a queue has in AWS."""
        from batchml.aws.naming import queue_name

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
