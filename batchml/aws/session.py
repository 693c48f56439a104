"""The one door to the AWS SDK: clients for a region, a profile or an endpoint.

boto3's clients are botocore's; taken from botocore itself they come in two thirds of the time,
which a person feels with every command.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct

from batchml.aws.errors import no_credentials, signing, translated
from batchml.errors import AccessError, ServiceUnreachable

if TYPE_CHECKING:
    from batchml.aws.credentials_help import Caller

_MODELS = ("batch", "ecs", "logs", "sts")
_TRIES = 5  # of one call, where an answer was cut off
_SILENT_TRIES = 3  # of one call to this machine, within the limit, where there is no answer
_TIMEOUTS = ("ReadTimeoutError", "ConnectTimeoutError")


def is_cut_off(operation: Any, http: Any, parsed: Mapping[str, Any]) -> bool:
    """True for a success without anything in it: botocore takes an answer that ended early for one.

    An answer has at least one of its members, if only as an empty list.
    """
    shape = operation.output_shape
    return bool(
        http.status_code == 200
        and shape is not None
        and shape.members
        and not set(shape.members) & set(parsed)
    )


class Access(Struct, frozen=True):
    """How to reach a service. With an endpoint and keys, nothing else is looked for.

    With an endpoint, which is on this machine: `revive` is called when a connection fails, before
    the call is sent again, and returns the endpoint that serves now. `unanswered` says which
    process does not answer, and why. After `notice` seconds without an answer `tell` is called
    with it; after `limit` seconds the call fails with it.
    """

    region: str
    profile: str = ""
    endpoint: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    revive: Callable[[], str] | None = None
    unanswered: Callable[[], str] = str
    tell: Callable[[str], None] = lambda _: None
    notice: float = 5.0
    limit: float = 15.0


class Session:
    """Makes each client when it is first used."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._clients: dict[tuple[str, int, str], Any] = {}
        self._silence = _Silence(access)

    @property
    def is_local(self) -> bool:
        """True where the embedded server answers: it shows at once what it did, has no rate limit,
        and knows a call that is sent again."""
        return bool(self._access.endpoint)

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
        """The client of a service, which sends each call up to `attempts` times.

        `region` is for a service that answers for all regions in one: the Price List in us-east-1.
        """
        key = (service, attempts, region)
        if key not in self._clients:
            if self._access.endpoint:
                made = self._session.create_client(service, **self._arguments(attempts, region))
                # botocore asks here whether to send a call again, with the same invocation id.
                made.meta.events.register_first("needs-retry", self._after_failure)
                self._silence.watch(made)
            else:
                with signing(self._caller):
                    self._prepare_mfa()
                    made = self._session.create_client(service, **self._arguments(attempts, region))
                made.meta.events.register_first("before-call", self._before_call)
                made.meta.events.register_last("after-call", self._after_call)
            self._clients[key] = made
        return self._clients[key]

    def variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Keys, region and endpoint as the variables that `runtime/storage/credentials.py` reads.

        The keys are those of the moment in which they are asked for: what a profile gives for an
        hour is renewed. `environ` has the endpoints. Raises AccessError, when asked, without keys.
        """
        return _Variables(self, environ)

    def keys(self) -> tuple[str, str, str]:
        """Access key, secret key and session token, as they are now. Raises AccessError."""
        if self._access.endpoint:
            return self._access.access_key_id, self._access.secret_access_key, ""
        with signing(self._caller):
            self._prepare_mfa()
            credentials = self._session.get_credentials()
            if credentials is None:
                raise no_credentials(self._caller())
            found = credentials.get_frozen_credentials()
        return found.access_key, found.secret_key, found.token or ""

    @property
    def region(self) -> str:
        return self._access.region

    def _before_call(self, **_: Any) -> None:
        """Renew credentials here, where it is known that it is they that fail."""
        with signing(self._caller):
            credentials = self._session.get_credentials()
            if credentials is None:
                raise no_credentials(self._caller())
            credentials.get_frozen_credentials()

    def _after_call(self, parsed: Any, **_: Any) -> None:
        """Say who asked, for the words about a refusal."""
        if "Error" in parsed:
            parsed.setdefault("ResponseMetadata", {})["Caller"] = self._caller()

    def _caller(self) -> "Caller":
        from batchml.aws.credentials_help import Caller

        method, known = "", tuple[str, ...]()
        try:
            known = tuple(self._session.available_profiles)
            method = str(getattr(self._session.get_credentials(), "method", ""))
        except Exception:  # what is wrong with them is told already
            pass
        return Caller(self._access.profile, method, known)

    def _ask_for_mfa(self, prompt: str) -> str:
        """Ask on the terminal; where there is none, fail at once instead of waiting for nobody."""
        from batchml.aws.credentials_help import mfa_advice

        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise AccessError(mfa_advice(self._caller()), code="MFA")
        import getpass

        return getpass.getpass(prompt)

    def _prepare_mfa(self) -> None:
        """Sessions opened with an MFA code are the AWS CLI's too: asked for once, kept in its
        folder. Source: AWS CLI, customizations/assumerole.py."""
        from botocore.utils import JSONFileCache

        provider = self._session.get_component("credential_provider").get_provider("assume-role")
        provider.cache = JSONFileCache(os.path.expanduser("~/.aws/cli/cache"))
        provider._prompter = self._ask_for_mfa

    def _after_failure(
        self,
        caught_exception: Exception | None = None,
        request_dict: Any = None,
        response: Any = None,
        operation: Any = None,
        attempts: int = 1,
        **_: Any,
    ) -> float | None:
        """Seconds to wait before the call is sent again, or None to leave that to botocore.

        Raises ServiceUnreachable once the server has been silent for the limit.
        """
        if type(caught_exception).__name__ in _TIMEOUTS and attempts < _SILENT_TRIES:
            return 0.0  # the same call: a server that has carried it out gives its answer again
        if type(caught_exception).__name__ in _TIMEOUTS:
            raise ServiceUnreachable(
                f"{operation.name}: no answer within {self._access.limit:g} s. "
                f"{self._access.unanswered()}"
            ) from caught_exception
        if caught_exception is not None and self._access.revive is not None:
            path = urlsplit(request_dict["url"])._replace(scheme="", netloc="").geturl()
            request_dict["url"] = self._access.revive() + path
        if attempts < _TRIES and response is not None and is_cut_off(operation, *response):
            return 0.1
        return None

    def submitting_client(self) -> Any:
        """The Batch client for SubmitJob.

        SubmitJob has no client token: a call that AWS carried out but whose answer was lost, sent
        again, makes a second job. So it is sent once, except to the embedded server, which knows
        a call that is sent again and gives it the answer that it gave before.
        """
        return self.client("batch", attempts=5 if self._access.endpoint else 1)

    @cached_property
    def _session(self) -> Any:
        import botocore.loaders
        import botocore.session

        if not self._access.endpoint:
            return botocore.session.Session(profile=self._access.profile or None)
        # The user's profiles and defaults are for AWS, and one that is broken must not matter here.
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
            """Leaves out what an endpoint makes needless: 30 ms of a command.

            That is, looking through the folders of 400 services to find three, and reading
            the addresses of all of them in all regions.
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
        """ "adaptive" for calls that are sent again: once it is throttled, a client slows down.

        It is not given more attempts as well: without a network each command would be silent for a
        minute, and whoever follows a run goes on by itself.
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
            config["proxies"] = {}  # loopback
            config["connect_timeout"] = config["read_timeout"] = access.limit / _SILENT_TRIES
            arguments |= {
                "endpoint_url": access.endpoint,
                "aws_access_key_id": access.access_key_id,
                "aws_secret_access_key": access.secret_access_key,
            }
        return {**arguments, "config": Config(**config)}


class _Silence:
    """Reports a server on this machine that does not answer, once, and that it answers again."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._has_reported = False

    def watch(self, client: Any) -> None:
        events = client.meta.events
        events.register_last("before-call", self._begin)
        events.register_first("after-call", self._answered)
        events.register_first("after-call-error", self._failed)

    def _begin(self, context: dict[str, Any], **_: Any) -> None:
        timer = threading.Timer(self._access.notice, self._tell)
        timer.daemon = True
        context["batchml_timer"] = timer
        timer.start()

    def _tell(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._access.tell(self._access.unanswered())

    def _failed(self, context: dict[str, Any], **_: Any) -> None:
        timer = context.pop("batchml_timer", None)
        if timer is not None:
            timer.cancel()

    def _answered(self, context: dict[str, Any], **_: Any) -> None:
        self._failed(context)
        if self._has_reported:
            self._has_reported = False
            self._access.tell("The embedded AWS Batch answers again.")


class _Variables(Mapping[str, str]):
    """Variables whose keys are looked up each time they are asked for."""

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


# --- identity -------------------------------------------------------------------------------------
# Who we are for AWS, and which region we may use.
#
# Sources: STS API Reference, GetCallerIdentity; EC2 API Reference, DescribeRegions; IAM User Guide,
# "IAM identifiers".


_ARN = re.compile(r"arn:(?P<partition>aws[a-z-]*):(?:sts|iam)::(?P<account>\d{12}):(?P<what>.+)")

# Where a partition's global services are. A new region's partition is "aws" unless its name says.
_HOME_REGIONS = {"aws": "us-east-1", "aws-cn": "cn-north-1", "aws-us-gov": "us-gov-west-1"}


class Identity(Struct, frozen=True):
    """The answer of GetCallerIdentity, and the server's clock beside it."""

    account: str
    arn: str
    date: str = ""  # the answer's Date header

    @property
    def partition(self) -> str:
        match = _ARN.fullmatch(self.arn)
        return match["partition"] if match else "aws"

    @property
    def is_root(self) -> bool:
        return self.arn.endswith(":root")

    @property
    def user_name(self) -> str:
        """The name of an IAM user, or ""."""
        match = _ARN.fullmatch(self.arn)
        return match["what"].rpartition("/")[2] if match and ":user/" in self.arn else ""

    @property
    def role_name(self) -> str:
        """The name of the role that is assumed, or ""; its path is not in the ARN."""
        match = _ARN.fullmatch(self.arn)
        if not match or not match["what"].startswith("assumed-role/"):
            return ""
        return match["what"].split("/")[1]

    @property
    def role_arn(self) -> str:
        """The assumed role's ARN as it is for a role without a path, or ""."""
        if not self.role_name:
            return ""
        return f"arn:{self.partition}:iam::{self.account}:role/{self.role_name}"


def partition_of(region: str) -> str:
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def home_region(region: str) -> str:
    """The region of a partition that no account has to enable: "who am I" is asked there."""
    return _HOME_REGIONS[partition_of(region)]


def who_am_i(session: Session) -> Identity:
    """Raises AccessError, which says what is wrong with the credentials; ServiceUnreachable."""
    with translated("GetCallerIdentity"):
        found = session.client("sts").get_caller_identity()
        headers = found.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return Identity(found["Account"], found["Arn"], headers.get("date", ""))


def principal_arn(session: Session, identity: Identity) -> str:
    """The ARN whose policies can be simulated; "" for the root user and federated users.

    An assumed role's path is known to iam:GetRole alone (roles of SSO have one). Raises AccessError
    where that is not allowed.
    """
    if identity.user_name:
        return identity.arn
    if not identity.role_name:
        return ""
    with translated("GetRole"):
        found = session.client("iam").get_role(RoleName=identity.role_name)
        return str(found["Role"]["Arn"])


def region_status(home: Session, region: str) -> str:
    """AWS's word: "opt-in-not-required", "opted-in" or "not-opted-in"; "" where there is no such
    region. `home` is a session in a region that is always enabled."""
    with translated("DescribeRegions"):
        names = {"Name": "region-name", "Values": [region]}
        found = home.client("ec2").describe_regions(AllRegions=True, Filters=[names])["Regions"]
        return str(found[0]["OptInStatus"]) if found else ""


def has_service_role(session: Session) -> bool:
    """True when Batch's service-linked role is in the account.

    Source: AWS Batch User Guide, "Using service-linked roles".
    """
    from batchml.errors import ServiceError

    try:
        with translated("GetRole"):
            session.client("iam").get_role(RoleName="AWSServiceRoleForBatch")
    except ServiceError as error:
        if error.code == "NoSuchEntity":
            return False
        raise
    return True
