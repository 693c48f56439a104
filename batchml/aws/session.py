"""Sessions with AWS: credentials, clients for a region, the caller's identity.

No other module imports the AWS SDK, except `batch/direct` for its exceptions. botocore makes the
clients, not boto3: it makes the same clients in two thirds of the time. What everyday commands ask
the embedded AWS Batch is sent without botocore.

Sources: STS API Reference, GetCallerIdentity; EC2 API Reference, DescribeRegions; IAM User Guide,
"IAM identifiers".
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from batchml.aws.batch.direct import OPERATIONS, DirectClient, Endpoint, Waiting
from batchml.aws.credentials_help import AwsCaller, explain_mfa
from batchml.aws.errors import call, no_credentials, translate_credential_errors
from batchml.errors import AccessError, ServiceError, ServiceUnreachable

_MODELS = ("batch", "ecs", "logs", "sts")
_RECORDING = "BATCHML_RECORDING"
_TRIES = 5  # of a call whose answer was cut off
_SILENT_TRIES = 3  # of a call that the embedded server does not answer, all within `limit`
_METADATA_WAIT = 0.3  # seconds; on EC2 the metadata service answers within milliseconds
_TIMEOUTS = ("ReadTimeoutError", "ConnectTimeoutError")


def accepts_connections(url: str, seconds: float) -> bool:
    """Whether a server accepts connections at the host and port of a URL, within a time."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), seconds).close()
    except (OSError, ValueError):
        return False
    return True


def has_metadata_service(url: str) -> bool:
    return accepts_connections(url, _METADATA_WAIT)


def is_truncated(operation: Any, http: Any, parsed: Mapping[str, Any]) -> bool:
    """Whether an answer was cut off: botocore reads it as a success without members.

    A complete answer has at least one of its members, if only as an empty list.
    """
    shape = operation.output_shape
    return bool(
        http.status_code == 200
        and shape is not None
        and shape.members
        and not set(shape.members) & set(parsed)
    )


class Access(Struct, frozen=True):
    """How to reach AWS, or at `endpoint` the embedded AWS Batch of this machine.

    The fields after the keys are used only with an endpoint. `restart` is called when a connection
    fails, before the call is sent again: it starts the server if none runs, and returns its
    endpoint. `describe_silence` returns a message that names the process that does not answer, and
    the reason. After `notice` seconds without an answer `tell` is called with this message, and
    after `limit` seconds the call fails with it.
    """

    region: str
    profile: str = ""
    endpoint: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    restart: Callable[[], str] | None = None
    describe_silence: Callable[[], str] = str
    tell: Callable[[str], None] = lambda _: None
    notice: float = 5.0
    limit: float = 15.0


class Session:
    """Credentials and clients. Each client is made at its first use."""

    def __init__(
        self, access: Access, has_metadata: Callable[[str], bool] = has_metadata_service
    ) -> None:
        """`has_metadata`: whether the metadata service of EC2 answers at a URL."""
        self._access = access
        self._has_metadata = has_metadata
        self._clients: dict[tuple[str, int, str], Any] = {}
        self._silence = _Silence(access)
        self._has_providers = False  # whether botocore's sources of credentials are prepared

    @property
    def is_local(self) -> bool:
        """Whether the embedded server answers.

        Its answers are always up to date, it has no rate limit, and it recognizes a call that is
        sent again.
        """
        return bool(self._access.endpoint)

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
        """Return the client of a service, which sends each call up to `attempts` times.

        `region` is for services that answer for all regions in one, such as the Price List.
        """
        key = (service, attempts, region)
        if key not in self._clients:
            is_recorded = bool(os.environ.get(_RECORDING))
            if self._access.endpoint and service in OPERATIONS and not is_recorded:
                self._clients[key] = self._direct_client(service, attempts, region)
            else:
                self._clients[key] = self._sdk_client(service, attempts, region)
        return self._clients[key]

    def _direct_client(self, service: str, attempts: int, region: str) -> DirectClient:
        access, silence = self._access, self._silence
        return DirectClient(
            Endpoint(
                access.endpoint, region or access.region, service,
                access.access_key_id, access.secret_access_key,
            ),
            attempts,
            Waiting(access.limit / _SILENT_TRIES, access.notice, silence.tell, silence.answered),
            self._after_failure,
            lambda: self._sdk_client(service, attempts, region),
        )  # fmt: skip

    def _sdk_client(self, service: str, attempts: int, region: str) -> Any:
        if self._access.endpoint:
            client = self._session.create_client(service, **self._arguments(attempts, region))
            # botocore calls this to decide whether to send a call again, with the same
            # invocation id.
            client.meta.events.register_first("needs-retry", self._after_failure)
            self._silence.watch(client)
        else:
            with translate_credential_errors(self._caller):
                self._prepare_providers()
                arguments = self._arguments(attempts, region)
                client = self._session.create_client(service, **arguments)
            client.meta.events.register_first("before-call", self._before_call)
            client.meta.events.register_last("after-call", self._after_call)
        self._record(client)
        return client

    def _record(self, client: Any) -> None:
        """Record the calls if the user wants that. Raises UsageError if the file is unusable."""
        path = os.environ.get(_RECORDING)
        if path:
            from batchml.aws.recording import CallRecorder

            CallRecorder(path, self.is_local).watch(client)

    def variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Keys, region and endpoints as the variables that `runtime/storage/credentials.py` reads.

        The keys are read at each access, because temporary keys are renewed. The endpoints come
        from `environ`. An access raises AccessError if there are no keys.
        """
        return _Variables(self, environ)

    def keys(self) -> tuple[str, str, str]:
        """The current access key, secret key and session token. Raises AccessError."""
        if self._access.endpoint:
            return self._access.access_key_id, self._access.secret_access_key, ""
        with translate_credential_errors(self._caller):
            self._prepare_providers()
            credentials = self._session.get_credentials()
            if credentials is None:
                raise no_credentials(self._caller())
            found = credentials.get_frozen_credentials()
        return found.access_key, found.secret_key, found.token or ""

    def has_credentials(self) -> bool:
        """Whether there are credentials, which may have expired. It sends no call to AWS.

        Raises AccessError for a source that is incomplete or wrong.
        """
        if self._access.endpoint:
            return True
        with translate_credential_errors(self._caller):
            self._prepare_providers()
            return self._session.get_credentials() is not None

    @property
    def region(self) -> str:
        return self._access.region

    def _before_call(self, **_: Any) -> None:
        """Renew the credentials first, so that their failures are not taken for the call's."""
        with translate_credential_errors(self._caller):
            credentials = self._session.get_credentials()
            if credentials is None:
                raise no_credentials(self._caller())
            credentials.get_frozen_credentials()

    def _after_call(self, parsed: Any, **_: Any) -> None:
        """Add the caller to a refusal, for `errors.translate`."""
        if "Error" in parsed:
            parsed.setdefault("ResponseMetadata", {})["Caller"] = self._caller()

    def _caller(self) -> AwsCaller:
        method, known = "", tuple[str, ...]()
        try:
            known = tuple(self._session.available_profiles)
            method = str(getattr(self._session.get_credentials(), "method", ""))
        except Exception:  # the caller reports the failure of the credentials
            pass
        return AwsCaller(self._access.profile, method, known, self._access.region)

    def _ask_for_mfa(self, prompt: str) -> str:
        """Ask for an MFA code on the terminal. Without a terminal, raise AccessError."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise AccessError(explain_mfa(self._caller()), code="MFA")
        import getpass

        return getpass.getpass(prompt)

    def _prepare_providers(self) -> None:
        """Share MFA sessions with the AWS CLI, and do not wait for a metadata service.

        Sessions that need an MFA code are kept in the cache folder of the AWS CLI. Source: AWS CLI,
        customizations/assumerole.py. botocore waits two seconds for the metadata service of EC2,
        at each call, on machines that have none.
        """
        from botocore.utils import JSONFileCache

        if self._has_providers:
            return
        providers = self._session.get_component("credential_provider")
        assuming, metadata = map(providers.get_provider, ("assume-role", "iam-role"))
        assuming.cache = JSONFileCache(os.path.expanduser("~/.aws/cli/cache"))
        assuming._prompter = self._ask_for_mfa
        fetcher, load, known = metadata._role_fetcher, metadata.load, list[bool]()

        def load_if_present() -> Any:
            if not (known or fetcher._disabled):
                known.append(self._has_metadata(fetcher._base_url))
            return load() if fetcher._disabled or known[0] else None

        metadata.load = load_if_present
        self._has_providers = True

    def _after_failure(
        self,
        caught_exception: Exception | None = None,
        request_dict: Any = None,
        response: Any = None,
        operation: Any = None,
        attempts: int = 1,
        **_: Any,
    ) -> float | None:
        """Return the seconds until the call is sent again; None lets botocore decide.

        Raises ServiceUnreachable if the server has not answered within the limit.
        """
        if type(caught_exception).__name__ in _TIMEOUTS and attempts < _SILENT_TRIES:
            return 0.0  # if the server has carried out the call, it repeats its answer
        if type(caught_exception).__name__ in _TIMEOUTS:
            raise ServiceUnreachable(
                f"{operation.name}: no answer within {self._access.limit:g} s. "
                f"{self._access.describe_silence()}"
            ) from caught_exception
        if caught_exception is not None and self._access.restart is not None:
            path = urlsplit(request_dict["url"])._replace(scheme="", netloc="").geturl()
            request_dict["url"] = self._access.restart() + path
        if attempts < _TRIES and response is not None and is_truncated(operation, *response):
            return 0.1
        return None

    def submitting_client(self) -> Any:
        """Return the client for SubmitJob, which sends a call to AWS only once.

        SubmitJob has no client token: if an answer is lost and the call is sent again, AWS creates
        a second job. The embedded server recognizes such a call and repeats its answer.
        """
        return self.client("batch", attempts=5 if self._access.endpoint else 1)

    @cached_property
    def _session(self) -> Any:
        import botocore.loaders
        import botocore.session

        if not self._access.endpoint:
            return botocore.session.Session(profile=self._access.profile or None)
        # Do not read the user's AWS profiles and defaults: they may be wrong.
        nothing = (None, None, None, None)
        session = botocore.session.Session(
            session_vars={
                "profile": nothing,
                "config_file": (None, None, os.devnull, None),
                "credentials_file": (None, None, os.devnull, None),
                "defaults_mode": (None, None, "legacy", None),
            }
        )

        class KnownModels(botocore.loaders.Loader):  # type: ignore[misc]
            """Saves 30 ms: the endpoint and the services are known.

            It neither searches the folders of 400 services nor reads the addresses of all services
            in all regions.
            """

            def list_available_services(self, type_name: str) -> list[str]:
                return list(_MODELS)

            def load_data_with_path(self, name: str) -> tuple[Any, str]:
                if name == "endpoints":
                    return {"version": 3, "partitions": []}, ""
                found: tuple[Any, str] = super().load_data_with_path(name)
                return found

        session.register_component("data_loader", KnownModels())
        return session

    def _mode(self, attempts: int) -> str:
        """The retry mode. "adaptive" clients slow down once they are throttled.

        They have no more attempts than others: with more, a command without a network would be
        silent for a minute. Commands that follow a run have their own retries.
        """
        return "standard" if self._access.endpoint or attempts == 1 else "adaptive"

    def _arguments(self, attempts: int, region: str) -> Mapping[str, Any]:
        from botocore.config import Config

        access = self._access
        config: dict[str, Any] = {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"mode": self._mode(attempts), "total_max_attempts": attempts},
        }
        arguments: dict[str, Any] = {"region_name": region or access.region or None}
        if access.endpoint:
            config["proxies"] = {}  # none for the loopback interface
            config["connect_timeout"] = config["read_timeout"] = access.limit / _SILENT_TRIES
            arguments |= {
                "endpoint_url": access.endpoint,
                "aws_access_key_id": access.access_key_id,
                "aws_secret_access_key": access.secret_access_key,
            }
        return {**arguments, "config": Config(**config)}


class _Silence:
    """Reports once that the embedded server does not answer, and when it answers again.

    One thread waits for all calls, and ends when there are none: a thread for each call would take
    a tenth of its time.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._has_reported = False
        self._lock = threading.Condition()
        self._calls: dict[int, float] = {}  # id of a call's context -> when it began, monotonic
        self._is_watched = False

    def watch(self, client: Any) -> None:
        events = client.meta.events
        events.register_last("before-call", self._begin)
        events.register_first("after-call", self._note_answer)
        events.register_first("after-call-error", self._end)

    def _begin(self, context: dict[str, Any], **_: Any) -> None:
        with self._lock:
            self._calls[id(context)] = time.monotonic()
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with self._lock:
            while self._calls:
                left = min(self._calls.values()) + self._access.notice - time.monotonic()
                if left > 0:
                    self._lock.wait(left)
                else:
                    self.tell()
                    self._calls.clear()
            self._is_watched = False

    def tell(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._access.tell(self._access.describe_silence())

    def _end(self, context: dict[str, Any], **_: Any) -> None:
        with self._lock:
            self._calls.pop(id(context), None)

    def _note_answer(self, context: dict[str, Any], **_: Any) -> None:
        self._end(context)
        self.answered()

    def answered(self) -> None:
        if self._has_reported:
            self._has_reported = False
            self._access.tell("The embedded AWS Batch answers again.")


class _Variables(Mapping[str, str]):
    """The result of `Session.variables`."""

    _KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    _ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

    def __init__(self, session: Session, environ: Mapping[str, str]) -> None:
        self._session = session
        self._fixed = {name: environ[name] for name in self._ENDPOINTS if environ.get(name)}
        self._fixed["AWS_REGION"] = session.region
        self._fixed["AWS_EC2_METADATA_DISABLED"] = "true"

    def __getitem__(self, name: str) -> str:
        if name in self._KEYS:
            return self._session.keys()[self._KEYS.index(name)]
        return self._fixed[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._KEYS, *self._fixed))

    def __len__(self) -> int:
        return len(self._KEYS) + len(self._fixed)


# --- Identity -------------------------------------------------------------------------------------


_ARN = r"arn:(?P<partition>aws[a-z-]*):(?:sts|iam)::(?P<account>\d{12}):(?P<what>.+)"

# In each partition, a region that is enabled in every account.
_HOME_REGIONS = {"aws": "us-east-1", "aws-cn": "cn-north-1", "aws-us-gov": "us-gov-west-1"}


class CallerIdentity(Struct, frozen=True):
    """The answer of GetCallerIdentity, with the server's time."""

    account: str
    arn: str
    date: str = ""  # the answer's Date header

    @property
    def partition(self) -> str:
        match = re.fullmatch(_ARN, self.arn)
        return match["partition"] if match else "aws"

    @property
    def is_root(self) -> bool:
        return self.arn.endswith(":root")

    @property
    def user_name(self) -> str:
        """The name of an IAM user, or ""."""
        match = re.fullmatch(_ARN, self.arn)
        return match["what"].rpartition("/")[2] if match and ":user/" in self.arn else ""

    @property
    def role_name(self) -> str:
        """The name of the assumed role, without its path; or ""."""
        match = re.fullmatch(_ARN, self.arn)
        if not match or not match["what"].startswith("assumed-role/"):
            return ""
        return match["what"].split("/")[1]

    @property
    def role_arn(self) -> str:
        """The assumed role's ARN, if it has no path; or ""."""
        if not self.role_name:
            return ""
        return f"arn:{self.partition}:iam::{self.account}:role/{self.role_name}"


def partition_of(region: str) -> str:
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def known_regions(service: str) -> list[str]:
    """The regions in which the installed botocore knows this service. No call is made."""
    from botocore.session import Session as BotocoreSession

    session = BotocoreSession()
    partitions = session.get_available_partitions()
    return [
        region for each in partitions for region in session.get_available_regions(service, each)
    ]


def home_region(region: str) -> str:
    """A region of the same partition that every account has enabled, for calls about accounts."""
    return _HOME_REGIONS[partition_of(region)]


def get_caller_identity(session: Session) -> CallerIdentity:
    """Ask AWS who signs the requests. Raises AccessError with help, or ServiceUnreachable."""
    answer = call(session.client("sts"), "GetCallerIdentity")
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return CallerIdentity(answer["Account"], answer["Arn"], headers.get("date", ""))


def principal_arn(session: Session, identity: CallerIdentity) -> str:
    """The ARN for SimulatePrincipalPolicy; "" for the root user and federated users.

    Only iam:GetRole returns the path of an assumed role; roles of SSO have a path. Raises
    AccessError if GetRole is not allowed.
    """
    if identity.user_name:
        return identity.arn
    if not identity.role_name:
        return ""
    answer = call(session.client("iam"), "GetRole", RoleName=identity.role_name)
    return str(answer["Role"]["Arn"])


def region_status(home: Session, region: str) -> str:
    """Return "opt-in-not-required", "opted-in" or "not-opted-in"; "" for an unknown region.

    `home` is a session in a region that is always enabled.
    """
    request = {"AllRegions": True, "Filters": [{"Name": "region-name", "Values": [region]}]}
    found = call(home.client("ec2"), "DescribeRegions", **request)["Regions"]
    return str(found[0]["OptInStatus"]) if found else ""


def has_service_role(session: Session) -> bool:
    """Whether the account has AWS Batch's service-linked role.

    Source: AWS Batch User Guide, "Using service-linked roles".
    """
    try:
        call(session.client("iam"), "GetRole", RoleName="AWSServiceRoleForBatch")
    except ServiceError as error:
        if error.code == "NoSuchEntity":
            return False
        raise
    return True
