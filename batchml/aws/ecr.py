"""Amazon ECR: one repository `batchml/NAME` for each image, and what is in it.

Requests are pure values. Source: Amazon ECR API reference; Amazon ECR User Guide, "Lifecycle
policies", "Image tag mutability", "Private registry authentication".
"""

import base64
import io
import json
import re
import tarfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from batchml.aws.credentials_help import explain_denial, in_one_line, parse_denial, statement
from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import (
    AccessError,
    BatchmlError,
    ImageError,
    NotFound,
    ServiceError,
    ServiceUnreachable,
)
from batchml.model.image import Recipe

KEEP = 50  # images of a repository; definitions that are in use name them by digest
_PREFIX = "batchml/"

# What pushing needs on a repository: ECR User Guide, "Required permissions for pushing an image".
PUSH_ACTIONS = (
    "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload",
    "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
)  # fmt: skip


class Repository(Struct, frozen=True):
    name: str  # with its prefix
    uri: str  # REGISTRY/batchml/NAME
    arn: str
    is_immutable: bool
    scans: bool


class Pushed(Struct, frozen=True):
    """An image in a repository. `size` in bytes, as it is pulled; `pushed_at` in s since 1970."""

    repository: str
    tag: str
    digest: str
    size: int
    pushed_at: float = 0.0


class Login(Struct, frozen=True):
    """What the Docker engine is given with a push, and nothing keeps."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.user!r}, ...)"


# --- requests, pure -----------------------------------------------------------------------------


def repository_name(image: str) -> str:
    return _PREFIX + image


def create_repository(
    image: str, env: str, tags: Mapping[str, str], kms_key: str = ""
) -> dict[str, Any]:
    """CreateRepository. Without `kms_key` (an ARN) the key is AWS's own for ECR.

    Encryption cannot be changed later.
    """
    all_tags = {**tags, "batchml:env": env, "batchml:name": image}
    key = {"kmsKey": kms_key} if kms_key else {}
    return {
        "repositoryName": repository_name(image),
        "imageTagMutability": "IMMUTABLE",
        "imageScanningConfiguration": {"scanOnPush": True},
        "encryptionConfiguration": {"encryptionType": "KMS", **key},
        "tags": [{"Key": name, "Value": value} for name, value in sorted(all_tags.items())],
    }


def lifecycle_policy(repository: str, keep: int = KEEP) -> dict[str, Any]:
    """PutLifecyclePolicy: the newest `keep` images stay, what a broken push left goes in a day."""
    policy = {"rules": [
        _rule(1, "What has no tag", "untagged",
              countType="sinceImagePushed", countUnit="days", countNumber=1),
        _rule(2, f"All but the newest {keep}", "any",
              countType="imageCountMoreThan", countNumber=keep),
    ]}  # fmt: skip
    return {"repositoryName": repository, "lifecyclePolicyText": json.dumps(policy)}


def _rule(priority: int, text: str, status: str, **selection: str | int) -> dict[str, Any]:
    return {
        "rulePriority": priority,
        "description": text,
        "selection": {"tagStatus": status, **selection},
        "action": {"type": "expire"},
    }


def repairs(repository: Repository) -> list[tuple[str, dict[str, Any]]]:
    """The operations that bring a repository that someone else made to what ours are."""
    found: list[tuple[str, dict[str, Any]]] = []
    name = {"repositoryName": repository.name}
    if not repository.is_immutable:
        found.append(("PutImageTagMutability", {**name, "imageTagMutability": "IMMUTABLE"}))
    if not repository.scans:
        scan = {"imageScanningConfiguration": {"scanOnPush": True}}
        found.append(("PutImageScanningConfiguration", {**name, **scan}))
    return found


def denied(text: str, arn: str) -> AccessError:
    """What to say when a push to the repository `arn` is refused: the statement that allows it.

    All that a push needs, not only what it lacked first.
    """
    denial = parse_denial(text)
    if denial is not None and denial.explicit:
        return AccessError(explain_denial("Push", denial), code="AccessDenied")
    allowed = statement(PUSH_ACTIONS, [arn])
    whose = "a policy of yours"
    if denial is not None and denial.policy.startswith("resource-based"):
        del allowed["Resource"]
        allowed["Principal"] = {"AWS": denial.who or "*"}
        whose = f"the policy of the repository {arn}"
    return AccessError(
        f"{text}\nAdd this statement to {whose}: {in_one_line(allowed)}", code="AccessDenied"
    )


# --- the service --------------------------------------------------------------------------------


class Ecr:
    def __init__(self, session: Session) -> None:
        self._session = session

    def ensure(
        self, image: str, env: str, tags: Mapping[str, str] | None = None, kms_key: str = ""
    ) -> tuple[Repository, bool]:
        """The image's repository, and whether it was made now. Each step may have been done before.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        name = repository_name(image)
        found = self.repository(image)
        made = found is None
        if found is None:
            try:
                self._call("CreateRepository", create_repository(image, env, tags or {}, kms_key))
            except ServiceError as error:
                if error.code != "RepositoryAlreadyExistsException":  # someone was faster
                    raise
            found = self.repository(image)
            if found is None:
                raise ServiceError("CreateRepository", "RepositoryNotFound", f"{name} is gone", 0)
        for operation, request in repairs(found):
            self._call(operation, request)
        if not self._has_lifecycle(name):
            self._call("PutLifecyclePolicy", lifecycle_policy(name))
        return found, made

    def repository(self, image: str) -> Repository | None:
        name = repository_name(image)
        try:
            answer = self._call("DescribeRepositories", {"repositoryNames": [name]})
        except ServiceError as error:
            if error.code == "RepositoryNotFoundException":
                return None
            raise
        with translated("DescribeRepositories"):
            return _to_repository(answer["repositories"][0])

    def find(self, image: str, tag: str) -> Pushed | None:
        """The image of this tag, or None."""
        name = repository_name(image)
        request = {"repositoryName": name, "imageIds": [{"imageTag": tag}]}
        try:
            answer = self._call("DescribeImages", request)
        except ServiceError as error:
            if error.code in ("ImageNotFoundException", "RepositoryNotFoundException"):
                return None
            raise
        with translated("DescribeImages"):
            return next((_to_pushed(detail, tag) for detail in answer["imageDetails"]), None)

    def pushed(self, image: str) -> list[Pushed]:
        """The images of a repository that have tags, newest first."""
        name = repository_name(image)
        request = {"repositoryName": name, "filter": {"tagStatus": "TAGGED"}}
        found: list[Pushed] = []
        try:
            with translated("DescribeImages"):
                pages = self._client.get_paginator("describe_images").paginate(**request)
                for page in pages:
                    for detail in page["imageDetails"]:
                        found += [_to_pushed(detail, tag) for tag in detail["imageTags"]]
        except ServiceError as error:
            if error.code != "RepositoryNotFoundException":
                raise
        return sorted(found, key=lambda one: (-one.pushed_at, one.tag))

    def repositories(self) -> list[Repository]:
        """All of ours in this account and region."""
        with translated("DescribeRepositories"):
            pages = self._client.get_paginator("describe_repositories").paginate()
            every = [_to_repository(one) for page in pages for one in page["repositories"]]
        return [one for one in every if one.name.startswith(_PREFIX)]

    def login(self) -> Login:
        """A password for 12 hours; it is kept nowhere."""
        answer = self._call("GetAuthorizationToken", {})
        with translated("GetAuthorizationToken"):
            token = answer["authorizationData"][0]["authorizationToken"]
        user, _, password = base64.b64decode(token).decode().partition(":")
        return Login(user, password)

    def _has_lifecycle(self, name: str) -> bool:
        try:
            self._call("GetLifecyclePolicy", {"repositoryName": name})
        except ServiceError as error:
            if error.code == "LifecyclePolicyNotFoundException":
                return False
            raise
        return True

    @property
    def _client(self) -> Any:
        return self._session.client("ecr")

    def _call(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        method = re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()
        with translated(operation):
            answer: dict[str, Any] = getattr(self._client, method)(**request)
            return answer


def not_pushed(reference: str, command: str) -> NotFound:
    return NotFound("Image", reference, (), f"It is not in ECR. Put it there: {command}")


def _to_repository(found: Mapping[str, Any]) -> Repository:
    scanning = found.get("imageScanningConfiguration") or {}
    return Repository(
        name=found["repositoryName"],
        uri=found["repositoryUri"],
        arn=found["repositoryArn"],
        is_immutable=found.get("imageTagMutability") == "IMMUTABLE",
        scans=bool(scanning.get("scanOnPush")),
    )


def _to_pushed(detail: Mapping[str, Any], tag: str) -> Pushed:
    at = detail.get("imagePushedAt")
    return Pushed(
        repository=detail["repositoryName"],
        tag=tag,
        digest=detail["imageDigest"],
        size=int(detail.get("imageSizeInBytes", 0)),
        pushed_at=at.timestamp() if at is not None else 0.0,
    )


# --- pushing to a registry ------------------------------------------------------------------------
# The Docker engine, seen from the client: build an image, push it to a registry.
#
# The engine is asked through its API: no program `docker`, and no password in `~/.docker`.


# `tell(text, is_step)`: a step is worth a line of its own, the rest comes many times a second.
Tell = Callable[[str, bool], None]

SILENCE = 900.0  # seconds that the engine may say nothing while a registry takes a layer in
_LAST_LINES = 15
_LONGEST_STEP = 100

_NO_ENGINE = (
    "Images are built and pushed by a Docker engine, and none answers{why}. Install one "
    "(https://docs.docker.com/engine/install) and start it; `docker info` must work for you. "
    "DOCKER_HOST names one elsewhere."
)
_NO_RIGHT = (
    "The Docker engine is there and you may not use it{why}. Add yourself to its group "
    "(sudo usermod -aG docker $USER) and log in again, or use a rootless one with DOCKER_HOST."
)
_FULL = (
    "The Docker engine's disk is full: {text}. See what takes the room with `docker system df`, "
    "make some with `docker image prune` and `docker builder prune`, then do this again."
)


class TagTaken(ImageError):
    """The tag is in the repository by now, and is never overwritten: someone else was faster."""


class EngineImage(Struct, frozen=True):
    reference: str
    id: str
    size: int  # bytes, unpacked


class Engine:
    """The engine that DOCKER_HOST names, or this machine's.

    Every method raises ImageError when no engine answers or it refuses.
    """

    def __init__(self) -> None:
        self._made: Any = None

    @property
    def _api(self) -> Any:
        if self._made is None:
            import docker

            where = docker.utils.kwargs_from_env()
            self._made = docker.APIClient(version="auto", timeout=SILENCE, **where)
        return self._made

    def find(self, reference: str) -> EngineImage | None:
        with _engine():
            import docker

            try:
                found = self._api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return None
            return EngineImage(reference, found["Id"], int(found["Size"]))

    def ours(self) -> list[EngineImage]:
        """All images named `batchml/...`."""
        with _engine():
            found = self._api.images(filters={"reference": "batchml/*"})
        return [
            EngineImage(reference, image["Id"], int(image["Size"]))
            for image in found
            for reference in image.get("RepoTags") or ()
        ]

    def build(self, recipe: Recipe, tell: Tell) -> EngineImage:
        """Build the image. Nothing has its name unless it was built to its end.

        Raises ImageError with the step that failed and the last lines of its output.
        """
        told = BuildOutput()
        with _engine(), io.BytesIO(_context(recipe)) as context:
            stream = self._api.build(
                fileobj=context, custom_context=True, tag=recipe.reference, rm=True, forcerm=True,
                decode=True, buildargs=dict(recipe.args),
            )  # fmt: skip
            for entry in stream:
                if "error" in entry:
                    raise told.failure(recipe.reference, str(entry["error"]).strip())
                for line, is_step in told.read(str(entry.get("stream", ""))):
                    tell(f"building {recipe.reference}: {line}", is_step)
        found = self.find(recipe.reference)
        if found is None:
            raise told.failure(recipe.reference, "the engine's answer ended early")
        return found

    def push(self, recipe: Recipe, uri: str, arn: str, login: Login, tell: Tell) -> str:
        """Push the image to REGISTRY/NAME; its digest.

        The registry has the image whole or not at all; layers that it took stay there for the
        next try. Raises TagTaken, AccessError, ServiceUnreachable, ImageError.
        """
        target = f"{uri}:{recipe.tag}"
        auth = {"username": login.user, "password": login.password}
        told = PushOutput(f"pushing {recipe.reference} to {uri.partition('/')[0]}")
        digest = ""
        with _engine():
            self._api.tag(recipe.reference, uri, recipe.tag)
            try:
                for entry in self._api.push(
                    uri, tag=recipe.tag, stream=True, decode=True, auth_config=auth
                ):
                    if "error" in entry:
                        raise refusal(str(entry["error"]).strip(), target, arn)
                    digest = (entry.get("aux") or {}).get("Digest", digest)
                    is_step = told.read(entry)
                    if is_step is not None:
                        tell(str(told), is_step)
            finally:
                self._api.remove_image(target)  # the name alone: the image has another
        if not digest:
            raise refusal("the engine's answer ended early", target, arn)
        return digest


def _context(recipe: Recipe) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in recipe.files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if name in recipe.programs else 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


# --- what the engine says -----------------------------------------------------------------------


_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # a builder's own, which no pipe wants


class BuildOutput:
    """The steps of a build as they come, and the output of the last."""

    def __init__(self) -> None:
        self.step = ""
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    def read(self, text: str) -> Iterator[tuple[str, bool]]:
        """Each line worth showing, and whether it begins a step."""
        for line in filter(None, map(str.strip, _COLOURS.sub("", text).splitlines())):
            if line.startswith("Step "):
                self.step = _short(" ".join(line.split()))
                self._lines.clear()
                yield self.step, True
            elif not line.startswith(("--->", "Removing intermediate")):
                self._lines.append(line)
                yield line, False

    def failure(self, reference: str, error: str) -> ImageError:
        if "no space left on device" in (error + "".join(self._lines)).lower():
            return ImageError(_FULL.format(text=error))
        output = "".join(f"\n  {line}" for line in self._lines)
        where = f" at {self.step!r}" if self.step else ""
        return ImageError(f"{reference} cannot be built: it failed{where}: {error}{output}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_STEP else f"{text[: _LONGEST_STEP - 3]}..."


class PushOutput:
    """How many layers are in the registry."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._layers: set[str] = set()
        self._there: set[str] = set()
        self._done: set[str] = set()
        self._bytes: dict[str, tuple[int, int]] = {}

    def read(self, entry: Mapping[str, Any]) -> bool | None:
        """None when the entry changes nothing to be shown; else whether a layer is finished."""
        layer, status = str(entry.get("id", "")), str(entry.get("status", ""))
        if not layer or layer in self._done:
            return None
        if status in ("Preparing", "Waiting"):
            self._layers.add(layer)
            return None
        if status == "Pushing":
            detail = entry.get("progressDetail") or {}
            if detail.get("total"):
                self._bytes[layer] = (int(detail.get("current", 0)), int(detail["total"]))
            return False
        if status == "Pushed" or status == "Layer already exists" or status.startswith("Mounted"):
            self._layers.add(layer)
            (self._done if status == "Pushed" else self._there).add(layer)
            self._done.add(layer)
            return True
        return None

    def __str__(self) -> str:
        there = f", {len(self._there)} were there" if self._there else ""
        text = f"{self._what}: {len(self._done)} of {len(self._layers)} layers{there}"
        if self._bytes:
            sent, total = (
                sum(numbers) / 1e6 for numbers in zip(*self._bytes.values(), strict=True)
            )
            text += f" ({sent:.0f} of {total:.0f} MB)"
        return text


def refusal(text: str, target: str, arn: str) -> BatchmlError:
    """What a push that a registry or the network ended means to a user. Pure."""
    low = text.lower()
    if any(word in low for word in ("unauthorized", "no basic auth", "authentication required",
                                    "authorization token has expired")):  # fmt: skip
        return AccessError(
            f"The registry refuses the login that ECR gave ({text}), {target} is not pushed. It is "
            "good for 12 hours and this account's registry: check the machine's clock and "
            "`aws sts get-caller-identity`, then push again."
        )
    if "not authorized to perform" in low or low.startswith("denied"):
        return denied(f"Pushing {target} is not allowed: {text}", arn)
    if "immutable" in low:
        return TagTaken(f"{target}: {text}")
    if "no space left on device" in low:
        return ImageError(_FULL.format(text=text))
    busy = "toomanyrequests" in low or "rate exceeded" in low
    why = "the registry is too busy" if busy else "the connection ended"
    return ServiceUnreachable(
        f"{target} is not pushed, {why}: {text}. Nothing is half-done: pushing again goes on "
        "with the layers that are missing."
    )


@contextmanager
def _engine() -> Iterator[None]:
    """Turn what the engine's client raises into errors of ours."""
    import docker

    try:
        yield
    except docker.errors.APIError as error:
        text = str(error.explanation or error).strip()
        if "no space left on device" in text.lower():
            raise ImageError(_FULL.format(text=text)) from error
        raise ImageError(f"The Docker engine refused: {text}") from error
    except (docker.errors.DockerException, OSError) as error:
        why = _innermost(error)
        advice = _NO_RIGHT if isinstance(why, PermissionError) else _NO_ENGINE
        raise ImageError(advice.format(why=f" ({why})")) from error


def _innermost(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error
