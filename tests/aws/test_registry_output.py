"""What the Docker engine says, and what becomes of it. Its words are those of engine 20.10."""

from typing import Any

import pytest

from batchml.aws.ecr import BuildOutput, ImageEngine, PushOutput, to_push_error
from batchml.errors import AccessError, BatchmlError, ImageError, ServiceUnreachable, TagTaken
from batchml.model.image import Recipe

RECIPE = Recipe("x", "cpu", ())
ARN = "arn:aws:ecr:us-east-1:123456789012:repository/batchml/x"


def push_of(*entries: dict[str, Any]) -> tuple[list[bool | None], str]:
    told = PushOutput("pushing")
    return [told.read(entry) for entry in entries], str(told)


def layer(name: str, status: str, current: int = 0, total: int = 0) -> dict[str, Any]:
    detail = {"current": current, "total": total} if total else {}
    return {"id": name, "status": status, "progressDetail": detail}


class Builder:
    """The engine's client: builds fail with these errors, one after the other."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.cached: list[bool] = []

    def build(self, *, nocache: bool, **_: Any) -> list[dict[str, str]]:
        self.cached.append(not nocache)
        return [{"error": self.errors.pop(0)}] if self.errors else []

    def inspect_image(self, reference: str) -> dict[str, Any]:
        return {"Id": "sha256:1", "Size": 1, "Architecture": "amd64"}


def engine_of(builder: Builder) -> ImageEngine:
    engine = ImageEngine()
    engine._api_client = builder
    return engine


def test_a_layer_that_someone_removes_meanwhile_is_built_again() -> None:
    gone = 'unable to find image "sha256:62829d08b63c"'
    builder = Builder(gone)
    built = engine_of(builder).build(RECIPE.built_for("amd64"), lambda *_: None)
    assert (built.processor, builder.cached) == ("amd64", [True, False])
    for errors in ([gone, gone], ["COPY failed"]):
        failing = Builder(*errors)
        with pytest.raises(ImageError, match=errors[-1].split('"')[0]):
            engine_of(failing).build(RECIPE.built_for("amd64"), lambda *_: None)
        assert len(failing.cached) == len(errors)


def test_layers_are_counted_as_they_come() -> None:
    found, text = push_of(
        {"status": "The push refers to repository [127.0.0.1:1/x]"},
        layer("a", "Preparing"), layer("b", "Preparing"), layer("c", "Waiting"),
        layer("a", "Layer already exists"), layer("a", "Layer already exists"),
        layer("b", "Pushing", 1_000_000, 3_000_000), layer("b", "Pushed"),
        {"status": "t: digest: sha256:0 size: 1"},
    )  # fmt: skip
    assert found == [None, None, None, None, True, None, False, True, None]
    assert text == "pushing: 2 of 3 layers, 1 already there (1 of 3 MB)"


def test_a_layer_from_another_repository_was_there() -> None:
    text = push_of(layer("a", "Mounted from batchml/y"))[1]
    assert text == "pushing: 1 of 1 layers, 1 already there"


def test_the_last_lines_are_those_of_the_failing_step() -> None:
    told = BuildOutput()
    for text in ("Step 1/2 : RUN a\n", "old\n", " ---> Running in 1\n", "Step 2/2 : RUN b\n"):
        list(told.read(text))
    list(told.read("".join(f"line {number}\n" for number in range(100))))
    lines = str(told.failure(RECIPE, "it ended")).splitlines()
    assert "Step 2/2 : RUN b" in lines[0]
    assert lines[1:] == [f"  line {number}" for number in range(85, 100)]


def test_a_long_step_is_cut() -> None:
    told = BuildOutput()
    ((step, _),) = told.read(f"Step 1/1 : RUN {'x' * 1000}\n")
    assert len(step) == 100
    assert step.endswith("...")


@pytest.mark.parametrize("where", ["error", "output"])
def test_a_full_disk_is_named_so(where: str) -> None:
    words = "write /var/lib/docker/tmp/x: no space left on device"
    told = BuildOutput()
    list(told.read(f"{words}\n" if where == "output" else "fine\n"))
    text = str(told.failure(RECIPE, words if where == "error" else "non-zero code: 1"))
    assert "disk is full" in text
    assert "docker system df" in text


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        ("denied: User: arn:aws:iam::1:user/me is not authorized to perform: ecr:PutImage on "
         f"resource: {ARN} because no identity-based policy allows the ecr:PutImage action",
         AccessError, '"ecr:InitiateLayerUpload"'),
        ("denied: User: arn:aws:iam::1:user/me is not authorized to perform: ecr:PutImage on "
         f"resource: {ARN} because no resource-based policy allows the ecr:PutImage action",
         AccessError, '"Principal": {"AWS": "arn:aws:iam::1:user/me"}'),
        ("denied: User: arn:aws:iam::1:user/me is not authorized to perform: ecr:PutImage on "
         f"resource: {ARN} with an explicit deny in an identity-based policy",
         AccessError, "explicit deny"),
        ("denied: requested access to the resource is denied", AccessError, ARN),
        ("no basic auth credentials", AccessError, "refuses the login"),
        ("unauthorized: authentication required", AccessError, "refuses the login"),
        ("denied: Your authorization token has expired. Reauthenticate and try again.",
         AccessError, "refuses the login"),
        ("tag invalid: The image tag 't' already exists in the 'x' repository and cannot be "
         "overwritten because the repository is immutable.", TagTaken, "immutable"),
        ("toomanyrequests: Rate exceeded", ServiceUnreachable, "too busy"),
        ("write tcp 10.0.0.1:1->10.0.0.2:443: write: broken pipe", ServiceUnreachable, "ended"),
        ("EOF", ServiceUnreachable, "only the missing layers"),
        ("open /var/lib/docker/x: no space left on device", ImageError, "disk is full"),
    ],
)  # fmt: skip
def test_what_ends_a_push_is_told_in_our_words(
    words: str, kind: type[BatchmlError], told: str
) -> None:
    found = to_push_error(words, "host/batchml/x:t", ARN)
    assert type(found) is kind
    assert told in str(found)


def test_colours_of_a_builder_are_left_out() -> None:
    output = BuildOutput()
    assert list(output.read("\x1b[91mERROR: no\x1b[0m\n")) == [("ERROR: no", False)]
