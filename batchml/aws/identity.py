"""Who we are for AWS, and which region we may use.

Sources: STS API Reference, GetCallerIdentity; EC2 API Reference, DescribeRegions; IAM User Guide,
"IAM identifiers".
"""

import re

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.session import Session

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
