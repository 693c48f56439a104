"""The AMIs of hosts: whether AWS has a newer one, the age of the user's own, and the refresh.

AWS Batch does not patch hosts: a compute environment keeps the AMI that was the newest at its
creation, until an update requests the newest. Source: AWS Batch User Guide, "Updating the AMI ID";
AWS Batch API reference, Ec2Configuration (`batchImageStatus`) and ComputeResourceUpdate
(`updateToLatestImageVersion`, which AWS ignores for images that are named by their id).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.resources import neuron_image_of
from batchml.aws.ec2 import LaunchApi
from batchml.aws.naming import qualified
from batchml.aws.session import Session
from batchml.errors import BatchmlError, UsageError
from batchml.model.environment import Compute, Environment
from batchml.model.names import long_duration
from batchml.setup.doctor import AccountCheck, Finding

UPDATE_AVAILABLE, LATEST = "UPDATE_AVAILABLE", "LATEST"
JOB_MINUTES = 30  # for runs on replaced hosts to finish; AWS's default
MAX_JOB_MINUTES = 7200  # AWS Batch API reference, UpdatePolicy
OLD_DAYS = 90  # AWS publishes an image about twice a month

_BEST_FIT = "BEST_FIT"  # a compute environment with it cannot replace its hosts in place


class HostImage(Struct, frozen=True):
    """An AMI of a compute environment.

    `id`: of an AMI that batchml.toml names or batchml built; "" for AWS's own images. `status`: by
    AWS, of its own images; "" until a host has started.
    """

    type: str
    id: str = ""
    status: str = ""

    def describe(self) -> str:
        if self.id:
            return self.id
        words = {UPDATE_AVAILABLE: "a newer AMI is available", LATEST: "the newest AMI"}
        return words.get(self.status, self.status) or "unknown until a host has started"


def host_images(detail: Mapping[str, Any]) -> tuple[HostImage, ...]:
    """The images of a compute environment, by DescribeComputeEnvironments; none on `local`."""
    resources = detail.get("computeResources") or {}
    return tuple(
        HostImage(
            each.get("imageType", ""),
            each.get("imageIdOverride", ""),
            each.get("batchImageStatus", ""),
        )
        for each in resources.get("ec2Configuration") or ()
    )


def has_newer_image(detail: Mapping[str, Any]) -> bool:
    return any(each.status == UPDATE_AVAILABLE for each in host_images(detail))


def has_newest_images(detail: Mapping[str, Any]) -> bool:
    """Whether AWS says of every image that it is the newest; False where it does not say."""
    images = host_images(detail)
    return bool(images) and all(each.status == LATEST for each in images)


def refresh_command(name: str, env: str) -> str:
    return f"batchml compute update {name} --refresh --env {env}"


def newer_image_lines(details: Mapping[str, Mapping[str, Any]], env: str) -> Iterator[str]:
    """A line for each compute environment whose image is out of date. `details`: by short name."""
    for name, detail in sorted(details.items()):
        if has_newer_image(detail):
            yield f"{name}: AWS has a newer AMI. To use it: {refresh_command(name, env)}"


# --- refresh --------------------------------------------------------------------------------


def check_refresh(name: str, detail: Mapping[str, Any], *, is_local: bool) -> None:
    """Raise UsageError if a refresh would have no effect, or AWS would refuse it."""
    resources = detail.get("computeResources") or {}
    if is_local:
        raise UsageError("--refresh: local has no AMIs; its host is this machine.")
    if detail.get("type") == "UNMANAGED":
        raise UsageError(f"--refresh: {name} is unmanaged; AWS Batch does not start its hosts.")
    own = [each.id for each in host_images(detail) if each.id]
    if own and not neuron_image_of(detail):
        raise UsageError(
            f"--refresh: hosts of {name} start from your AMI {own[0]}, and AWS Batch updates only "
            'its own AMIs. Name another AMI in batchml.toml; with ami = "build", run batchml setup '
            "--rebuild-image."
        )
    if resources.get("allocationStrategy", _BEST_FIT) == _BEST_FIT:
        raise UsageError(
            f"--refresh: AWS Batch cannot replace the hosts of {name} in place, because its "
            f"allocation strategy is {_BEST_FIT}. Give it another name in batchml.toml and run "
            "batchml setup: the new one starts with the newest AMI."
        )
    if detail.get("status") in ("UPDATING", "CREATING", "DELETING"):
        raise UsageError(f"--refresh: {name} is {detail['status']}. Try again when it is VALID.")


def refresh_members(
    minutes: int, detail: Mapping[str, Any] | None = None, neuron_image: str = ""
) -> dict[str, Any]:
    """The members of UpdateComputeEnvironment that replace hosts, to get the newest AMI.

    `minutes`: the time that runs on the hosts have to finish. `neuron_image`: the id of AWS's
    newest AMI for Neuron chips, for a compute environment `detail` that has an older one: AWS Batch
    has no image type for it.
    """
    resources: dict[str, Any] = {"updateToLatestImageVersion": True}
    if detail is not None and neuron_image:
        found = detail["computeResources"]["ec2Configuration"]
        resources = {
            "ec2Configuration": [
                {"imageType": each["imageType"], "imageIdOverride": neuron_image} for each in found
            ]
        }
    return {
        "computeResources": resources,
        "updatePolicy": {"terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": minutes},
    }


def describe_refresh(name: str, detail: Mapping[str, Any], minutes: int) -> list[str]:
    """The effects of a refresh on a compute environment's hosts and runs."""
    images = ", ".join(f"{each.type}: {each.describe()}" for each in host_images(detail))
    running = (detail.get("computeResources") or {}).get("desiredvCpus", 0)
    if not running:
        return [f"{name} ({images}) has no hosts now. New hosts will have the newest AMI."]
    return [
        f"{name} ({images}): its hosts, with {running} vCPUs now, are replaced by hosts with the "
        "newest AMI.",
        f"Runs on them have {long_duration(minutes * 60)} to finish. Then AWS stops them as "
        "host-lost, and those with attempts left start again from their last checkpoint. Waiting "
        "runs wait for new hosts.",
    ]


# --- findings of doctor ---------------------------------------------------------------------


class ImageCheck(Struct, frozen=True):
    """The compute environments of an environment in AWS, by short name, and their own images.

    `dates`: when the AMIs that are named by their ids were made, in seconds since the epoch; `why`:
    the reason for not knowing them.
    """

    env: str
    environment: Environment
    now: float
    details: Mapping[str, Mapping[str, Any]] = {}
    dates: Mapping[str, float] = {}
    why: str = ""


def ask_images(session: Session, account: AccountCheck) -> ImageCheck:
    """Ask when the AMIs that are named by their ids were made: one call, if there are any."""
    known = account.compute if isinstance(account.compute, Mapping) else {}
    details = own_details(known, account.env)
    found = ImageCheck(account.env, account.environment, account.now, details)
    ids = sorted({each.id for detail in details.values() for each in host_images(detail)} - {""})
    try:
        return replace(found, dates=LaunchApi(session).image_dates(ids)) if ids else found
    except BatchmlError as error:
        return replace(found, why=str(error).splitlines()[0])


def own_details(details: Mapping[str, Mapping[str, Any]], env: str) -> dict[str, Mapping[str, Any]]:
    """The compute environments of an environment in AWS, by their short names."""
    prefix = qualified(env, "")
    return {
        name.removeprefix(prefix): each
        for name, each in sorted(details.items())
        if name.startswith(prefix)
    }


def check_images(check: ImageCheck) -> Iterator[Finding]:
    """Findings on the images of hosts, which AWS Batch never replaces by itself."""
    newest = []
    for name, detail in check.details.items():
        if has_newer_image(detail):
            text = f"AWS has a newer AMI than that of compute {name}"
            yield Finding("images", "warning", text, (refresh_command(name, check.env),))
        elif has_newest_images(detail):
            newest.append(name)
        for each in host_images(detail):
            if each.id:
                yield _check_own_image(check, name, each.id)
    if newest:
        text = f"compute {', '.join(newest)}: AWS's newest AMI"
        yield Finding("images", "ok", text)


def _check_own_image(check: ImageCheck, name: str, image: str) -> Finding:
    subject = f"the AMI {image} of compute {name}"
    if check.why:
        return Finding("images", "warning", f"the age of {subject} is unknown: {check.why}")
    if image not in check.dates:
        fix = "choose another ami in batchml.toml, and run batchml setup"
        text = f"{subject} no longer exists, so no host can start"
        return Finding("images", "problem", text, (fix,))
    days = int((check.now - check.dates[image]) / 86_400)
    text = f"{subject} is {days} day{'s'[: days != 1]} old"
    if days <= OLD_DAYS:
        return Finding("images", "ok", text)
    compute = check.environment.compute.get(re.sub(r"-r[0-9]+$", "", name), Compute())
    fix = f"batchml setup --rebuild-image --env {check.env}"
    if neuron_image_of(check.details[name]):
        fix = refresh_command(name, check.env)
    elif (compute.ami or check.environment.ami) != "build":
        fix = "build a newer AMI, name it as ami in batchml.toml, and run batchml setup"
    return Finding("images", "warning", f"{text} and lacks AWS's later patches", (fix,))
