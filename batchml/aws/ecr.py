"""Build images with the Docker engine, and push them to Amazon ECR.

Each image has a repository `batchml/NAME`. The engine is used through its API, so neither the
program `docker` nor a password in `~/.docker` is needed.

Source: Amazon ECR API reference; Amazon ECR User Guide, "Lifecycle policies", "Image tag
mutability", "Private registry authentication".
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

from batchml.aws.credentials_help import allow_statement, explain_denial, parse_denial
from batchml.aws.errors import call, read_entries
from batchml.aws.session import Session
from batchml.errors import (
    AccessError,
    BatchmlError,
    ImageError,
    InputNotFound,
    NoImageEngine,
    ServiceError,
    ServiceUnreachable,
    TagTaken,
)
from batchml.model.image import Recipe

KEEP = 50  # images in a repository
_PREFIX = "batchml/"

# The permissions for a push: ECR User Guide, "Required permissions for pushing an image"; and to
# read the processor of an image that was pushed before.
PUSH_ACTIONS = (
    "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload",
    "ecr:GetDownloadUrlForLayer", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
)  # fmt: skip


class Repository(Struct, frozen=True):
    """A repository of ECR."""

    name: str  # batchml/NAME
    uri: str  # REGISTRY/batchml/NAME
    arn: str
    is_immutable: bool
    scans: bool  # whether ECR scans images at a push


class PushedImage(Struct, frozen=True):
    """An image in a repository of ECR."""

    repository: str
    tag: str
    digest: str
    size: int  # bytes, compressed
    pushed_at: float = 0.0  # seconds since the epoch


class RegistryLogin(Struct, frozen=True):
    """The user and password with which the Docker engine pushes to ECR. They are not stored."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"RegistryLogin({self.user!r}, ...)"


# --- Requests -------------------------------------------------------------------------------------


def repository_name(image: str) -> str:
    return _PREFIX + image


def create_repository(
    image: str, env: str, tags: Mapping[str, str], kms_key: str = ""
) -> dict[str, Any]:
    """The CreateRepository request. `kms_key` is the ARN of a key; without it, AWS's key is used.

    The key cannot be changed later.
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


def lifecycle_policy(repository: str) -> dict[str, Any]:
    """The PutLifecyclePolicy request: keep the newest images, and untagged images a day."""
    policy = {"rules": [
        _rule(1, "Images without a tag", "untagged",
              countType="sinceImagePushed", countUnit="days", countNumber=1),
        _rule(2, f"All but the newest {KEEP}", "any",
              countType="imageCountMoreThan", countNumber=KEEP),
    ]}  # fmt: skip
    return {"repositoryName": repository, "lifecyclePolicyText": json.dumps(policy)}


def _rule(priority: int, text: str, status: str, **selection: str | int) -> dict[str, Any]:
    return {
        "rulePriority": priority,
        "description": text,
        "selection": {"tagStatus": status, **selection},
        "action": {"type": "expire"},
    }


def repair_requests(repository: Repository) -> list[tuple[str, dict[str, Any]]]:
    """The operations, with requests, that give an existing repository the settings of ours."""
    found: list[tuple[str, dict[str, Any]]] = []
    name = {"repositoryName": repository.name}
    if not repository.is_immutable:
        found.append(("PutImageTagMutability", {**name, "imageTagMutability": "IMMUTABLE"}))
    if not repository.scans:
        scan = {"imageScanningConfiguration": {"scanOnPush": True}}
        found.append(("PutImageScanningConfiguration", {**name, **scan}))
    return found


def explain_push_denial(text: str, arn: str) -> AccessError:
    """Explain a refused push to the repository `arn`, with the policy statement that allows it.

    The statement has all permissions of a push, not only the first one that is missing.
    """
    denial = parse_denial(text)
    if denial is not None and denial.explicit:
        return AccessError(explain_denial("Push", denial), code="AccessDenied")
    allowed = allow_statement(PUSH_ACTIONS, [arn])
    whose = "a policy of yours"
    if denial is not None and denial.policy.startswith("resource-based"):
        del allowed["Resource"]
        allowed["Principal"] = {"AWS": denial.who or "*"}
        whose = f"the policy of the repository {arn}"
    return AccessError(
        f"{text}\nAdd this statement to {whose}: {json.dumps(allowed)}", code="AccessDenied"
    )


# --- ECR ------------------------------------------------------------------------------------------


class Ecr:
    """ECR's calls, with our types. Each raises AccessError, ServiceError or ServiceUnreachable."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def ensure(
        self, image: str, env: str, tags: Mapping[str, str] | None = None, kms_key: str = ""
    ) -> tuple[Repository, bool]:
        """Create an image's repository or correct its settings. Return it and whether it is new."""
        name = repository_name(image)
        found = self.repository(image)
        is_new = found is None
        if found is None:
            try:
                self._call("CreateRepository", create_repository(image, env, tags or {}, kms_key))
            except ServiceError as error:
                if error.code != "RepositoryAlreadyExistsException":  # another client was faster
                    raise
            found = self.repository(image)
            if found is None:
                raise ServiceError("CreateRepository", "RepositoryNotFound", f"{name} is gone", 0)
        for operation, request in repair_requests(found):
            self._call(operation, request)
        if not self._has_lifecycle(name):
            self._call("PutLifecyclePolicy", lifecycle_policy(name))
        return found, is_new

    def repository(self, image: str) -> Repository | None:
        """The repository of an image, or None."""
        name = repository_name(image)
        try:
            answer = self._call("DescribeRepositories", {"repositoryNames": [name]})
        except ServiceError as error:
            if error.code == "RepositoryNotFoundException":
                return None
            raise
        return _to_repository(answer["repositories"][0])

    def find(self, image: str, tag: str) -> PushedImage | None:
        """The image with this tag, or None."""
        name = repository_name(image)
        request = {"repositoryName": name, "imageIds": [{"imageTag": tag}]}
        try:
            answer = self._call("DescribeImages", request)
        except ServiceError as error:
            if error.code in ("ImageNotFoundException", "RepositoryNotFoundException"):
                return None
            raise
        return next((_to_pushed(detail, tag) for detail in answer["imageDetails"]), None)

    def list_images(self, image: str) -> list[PushedImage]:
        """The tagged images in the repository of an image, the newest first."""
        request = {
            "repositoryName": repository_name(image),
            "filter": {"tagStatus": "TAGGED"},
        }
        found: list[PushedImage] = []
        try:
            for detail in read_entries(self._client, "DescribeImages", "imageDetails", **request):
                found += [_to_pushed(detail, tag) for tag in detail["imageTags"]]
        except ServiceError as error:
            if error.code != "RepositoryNotFoundException":
                raise
        return sorted(found, key=lambda one: (-one.pushed_at, one.tag))

    def list_repositories(self) -> list[Repository]:
        """The repositories `batchml/*` of this account and region."""
        entries = read_entries(self._client, "DescribeRepositories", "repositories")
        return [each for each in map(_to_repository, entries) if each.name.startswith(_PREFIX)]

    def login(self) -> RegistryLogin:
        """Get a password that is valid for 12 hours."""
        answer = self._call("GetAuthorizationToken", {})
        token = answer["authorizationData"][0]["authorizationToken"]
        user, _, password = base64.b64decode(token).decode().partition(":")
        return RegistryLogin(user, password)

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
        return call(self._client, operation, **request)


def image_not_pushed(reference: str, command: str) -> InputNotFound:
    """The error for an image that `command` must push to ECR first."""
    return InputNotFound("Image", reference, (), f"It is not in ECR. Push it: {command}")


def _to_repository(found: Mapping[str, Any]) -> Repository:
    scanning = found.get("imageScanningConfiguration") or {}
    return Repository(
        name=found["repositoryName"],
        uri=found["repositoryUri"],
        arn=found["repositoryArn"],
        is_immutable=found.get("imageTagMutability") == "IMMUTABLE",
        scans=bool(scanning.get("scanOnPush")),
    )


def _to_pushed(detail: Mapping[str, Any], tag: str) -> PushedImage:
    at = detail.get("imagePushedAt")
    return PushedImage(
        repository=detail["repositoryName"],
        tag=tag,
        digest=detail["imageDigest"],
        size=int(detail.get("imageSizeInBytes", 0)),
        pushed_at=at.timestamp() if at is not None else 0.0,
    )


# --- The Docker engine ----------------------------------------------------------------------------


# Called as `notify(text, is_step)`: show each step in its own line; other texts change often.
NotifyBuild = Callable[[str, bool], None]

SILENCE = 900.0  # seconds without an answer, while a registry stores a layer
_LAST_LINES = 15
# The engine's words for a layer of the cache that someone removed while the image was built.
_LAYER_GONE = 'unable to find image "sha256:'
_LONGEST_STEP = 100

_NO_ENGINE = (
    "No Docker engine answers{why}, and it is needed to build and push images. Install an engine "
    "(https://docs.docker.com/engine/install) and start it; `docker info` must work for you. "
    "For an engine on another machine, set DOCKER_HOST."
)
_NO_RIGHT = (
    "You are not allowed to use the Docker engine of this machine{why}. Add yourself to its group "
    "(sudo usermod -aG docker $USER) and log in again, or use a rootless engine with DOCKER_HOST."
)
_FULL = (
    "The Docker engine's disk is full: {text}. `docker system df` shows what takes the space. "
    "Free some with `docker image prune` and `docker builder prune`, then repeat the command."
)


_OTHER_BASE = (
    "{reference} was built for {built}, not for {wanted}: its base image {base} in the Docker "
    "engine is for {built}, or the Dockerfile names a platform. Fetch the base image for {wanted}, "
    "then repeat the command: docker pull --platform linux/{wanted} {base}"
)
_NO_EMULATION = (
    "{reference} cannot be built{where}: this Docker engine cannot run programs for {wanted}. "
    "Install an emulator (docker run --privileged --rm tonistiigi/binfmt --install {wanted}), use "
    "Docker Desktop, which includes one, or build on a machine with that processor."
)


class EngineImage(Struct, frozen=True):
    """An image in the Docker engine."""

    reference: str
    id: str
    size: int  # bytes, unpacked
    processor: str = ""  # `amd64`, `arm64`; "" in lists, where the engine does not tell it


class ImageEngine:
    """The engine of DOCKER_HOST, or this machine's.

    Every method raises ImageError if the engine refuses, NoImageEngine if none answers.
    """

    def __init__(self) -> None:
        self._api_client: Any = None

    @property
    def _api(self) -> Any:
        if self._api_client is None:
            import docker

            where = docker.utils.kwargs_from_env()
            self._api_client = docker.APIClient(version="auto", timeout=SILENCE, **where)
        return self._api_client

    def processor(self) -> str:
        """The processor of the engine's machine: `amd64`, `arm64`."""
        with _engine():
            return str(self._api.version()["Arch"])

    def find(self, reference: str) -> EngineImage | None:
        """The image with this name in the engine, or None."""
        with _engine():
            import docker

            try:
                found = self._api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return None
            return EngineImage(
                reference, found["Id"], int(found["Size"]), str(found.get("Architecture", ""))
            )

    def processors_in_registry(self, reference: str, login: RegistryLogin) -> frozenset[str]:
        """The processors for which an image in a registry is made; one call of the engine.

        The engine reads the image index, or the manifest and the image's configuration.
        Source: Docker Engine API, "Get image information from the registry".
        """
        auth = {"username": login.user, "password": login.password}
        with _engine():
            found = self._api.inspect_distribution(reference, auth_config=auth)
        platforms = found.get("Platforms") or ()
        return frozenset(str(each.get("architecture", "")) for each in platforms) - {"", "unknown"}

    def list_images(self) -> list[EngineImage]:
        """The images `batchml/*` in the engine."""
        with _engine():
            found = self._api.images(filters={"reference": "batchml/*"})
        return [
            EngineImage(reference, image["Id"], int(image["Size"]))
            for image in found
            for reference in image.get("RepoTags") or ()
        ]

    def remove(self, name: str) -> None:
        """Remove the engine's images of this name. Layers that others use stay."""
        with _engine():
            for each in self.list_images():
                if each.reference.startswith(f"{_PREFIX}{name}:"):
                    self._api.remove_image(each.reference, force=True)

    def build(self, recipe: Recipe, notify: NotifyBuild) -> EngineImage:
        """Build an image for its processor. The engine names it only after the last step.

        An engine's builder may take a step of another processor from its cache, or a step that
        someone removes; then the image is built again without the cache. Raises ImageError with the
        step that failed and the last lines of its output, and for an image that is still for
        another processor.
        """
        for nocache in (False, True):
            output = BuildOutput()
            try:
                found = self._build(recipe, notify, output, nocache=nocache)
            except ImageError as error:
                if nocache or _LAYER_GONE not in str(error):
                    raise
                continue
            if found.processor == recipe.processor:
                return found
            with _engine():
                self._api.remove_image(recipe.reference)  # removes only this name of the image
        raise ImageError(
            _OTHER_BASE.format(
                reference=recipe.reference, built=found.processor, wanted=recipe.processor,
                base=output.base,
            )
        )  # fmt: skip

    def _build(
        self, recipe: Recipe, notify: NotifyBuild, output: "BuildOutput", *, nocache: bool
    ) -> EngineImage:
        with _engine(), io.BytesIO(_context(recipe)) as context:
            stream = self._api.build(
                fileobj=context, custom_context=True, tag=recipe.reference, rm=True, forcerm=True,
                decode=True, buildargs=dict(recipe.args), platform=f"linux/{recipe.processor}",
                nocache=nocache,
            )  # fmt: skip
            for entry in stream:
                if "error" in entry:
                    raise output.failure(recipe, str(entry["error"]).strip())
                for line, is_step in output.read(str(entry.get("stream", ""))):
                    notify(f"building {recipe.reference}: {line}", is_step)
        found = self.find(recipe.reference)
        if found is None:
            raise output.failure(recipe, "the engine's answer ended early")
        return found

    def push(
        self, recipe: Recipe, uri: str, arn: str, login: RegistryLogin, notify: NotifyBuild
    ) -> str:
        """Push an image to the repository `uri` (REGISTRY/NAME). Return its digest.

        `arn` is the ARN of the repository. After a failure, the registry keeps the layers that were
        sent, and the next push sends only the other layers. Raises TagTaken, AccessError,
        ServiceUnreachable, ImageError.
        """
        target = f"{uri}:{recipe.tag}"
        auth = {"username": login.user, "password": login.password}
        output = PushOutput(f"pushing {recipe.reference} to {uri.partition('/')[0]}")
        digest = ""
        with _engine():
            self._api.tag(recipe.reference, uri, recipe.tag)
            try:
                for entry in self._api.push(
                    uri, tag=recipe.tag, stream=True, decode=True, auth_config=auth
                ):
                    if "error" in entry:
                        raise to_push_error(str(entry["error"]).strip(), target, arn)
                    digest = (entry.get("aux") or {}).get("Digest", digest)
                    is_step = output.read(entry)
                    if is_step is not None:
                        notify(str(output), is_step)
            finally:
                self._api.remove_image(target)  # removes only this name of the image
        if not digest:
            raise to_push_error("the engine's answer ended early", target, arn)
        return digest


def _context(recipe: Recipe) -> bytes:
    """The build context as a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in recipe.files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if name in recipe.programs else 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


# --- The engine's output --------------------------------------------------------------------------


_COLOURS = r"\x1b\[[0-9;]*[A-Za-z]"


class BuildOutput:
    """Reads the output of a build; keeps the current step and its last lines."""

    def __init__(self) -> None:
        self.step = ""
        self.base = ""  # the image of the first FROM
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    def read(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield each line to show, and whether it begins a step."""
        for line in filter(None, map(str.strip, re.sub(_COLOURS, "", text).splitlines())):
            if line.startswith("Step "):
                self.step = _short(" ".join(line.split()))
                words = self.step.partition(" : ")[2].split()
                if not self.base and words[:1] == ["FROM"]:
                    self.base = next(word for word in [*words[1:], ""] if word[:2] != "--")
                self._lines.clear()
                yield self.step, True
            elif not line.startswith(("--->", "Removing intermediate")):
                self._lines.append(line)
                yield line, False

    def failure(self, recipe: Recipe, error: str) -> ImageError:
        reference, text = recipe.reference, (error + "".join(self._lines)).lower()
        if "no space left on device" in text:
            return ImageError(_FULL.format(text=error))
        output = "".join(f"\n  {line}" for line in self._lines)
        where = f" at {self.step!r}" if self.step else ""
        if "exec format error" in text:
            return ImageError(
                _NO_EMULATION.format(reference=reference, where=where, wanted=recipe.processor)
            )
        return ImageError(f"{reference} cannot be built: it failed{where}: {error}{output}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_STEP else f"{text[: _LONGEST_STEP - 3]}..."


class PushOutput:
    """Reads the output of a push; counts layers and bytes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._layers: set[str] = set()
        self._existing: set[str] = set()  # were in the registry before the push
        self._done: set[str] = set()
        self._bytes: dict[str, tuple[int, int]] = {}  # by layer: sent, total

    def read(self, entry: Mapping[str, Any]) -> bool | None:
        """Return whether a layer is finished; None if the text has not changed."""
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
            if status != "Pushed":
                self._existing.add(layer)
            self._done.add(layer)
            return True
        return None

    def __str__(self) -> str:
        existing = f", {len(self._existing)} already there" if self._existing else ""
        text = f"{self._title}: {len(self._done)} of {len(self._layers)} layers{existing}"
        if self._bytes:
            sent, total = (
                sum(numbers) / 1e6 for numbers in zip(*self._bytes.values(), strict=True)
            )
            text += f" ({sent:.0f} of {total:.0f} MB)"
        return text


def to_push_error(text: str, target: str, arn: str) -> BatchmlError:
    """The error that explains a failed push to the user. `arn` is the ARN of the repository."""
    low = text.lower()
    if any(word in low for word in ("unauthorized", "no basic auth", "authentication required",
                                    "authorization token has expired")):  # fmt: skip
        return AccessError(
            f"{target} was not pushed: the registry refuses the login of ECR ({text}). A login is "
            "valid for 12 hours and for this account's registry: check the machine's clock and "
            "`aws sts get-caller-identity`, then push again."
        )
    if "not authorized to perform" in low or low.startswith("denied"):
        return explain_push_denial(f"Pushing {target} is not allowed: {text}", arn)
    if "immutable" in low:
        return TagTaken(f"{target}: {text}")
    if "no space left on device" in low:
        return ImageError(_FULL.format(text=text))
    busy = "toomanyrequests" in low or "rate exceeded" in low
    why = "the registry is too busy" if busy else "the connection ended"
    return ServiceUnreachable(
        f"{target} was not pushed, {why}: {text}. Push again: only the missing layers are sent."
    )


@contextmanager
def _engine() -> Iterator[None]:
    """Turn exceptions of the engine's client into ImageError."""
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
        text = _NO_RIGHT if isinstance(why, PermissionError) else _NO_ENGINE
        raise NoImageEngine(text.format(why=f" ({why})")) from error


def _innermost(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error
