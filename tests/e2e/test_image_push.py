"""Images built by a real engine and pushed to a real registry, with ECR's API before it."""

import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.ecr import Ecr, ImageEngine
from batchml.errors import AccessError, ImageError, NotFound, ServiceUnreachable
from batchml.jobs.find import ImageSource
from batchml.jobs.images import ImageRow, PushTarget, build, pinned_recipe, push
from batchml.local.home import Home, ServerEndpoint
from batchml.local.images import publish
from batchml.model.image import Recipe
from tests.support.aws_http import served
from tests.support.aws_world import Account
from tests.support.cli import Cli, Shown, write_job
from tests.support.executor_rig import IMAGE, PROCESSOR, docker, need_engine
from tests.support.fakes import FakeClock, FastClock
from tests.support.registry_rig import TOKEN, Answer, Refused, Registry, need_registry

OTHER = "amd64" if PROCESSOR == "arm64" else "arm64"
HOSTS = {"amd64": "m7i.large", "arm64": "m7g.large"}
SMALL = (
    "FROM scratch\nCOPY requirements.txt /one\nCOPY batchml /opt/batchml/batchml\n"
    'ENTRYPOINT ["python", "-m", "batchml.runtime.run"]\n'
)


class Rig:
    """One image's folder, an engine, a registry, and all that was told."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.registry = registry
        self.folder = folder
        self.engine = ImageEngine()
        self.clock = FakeClock()
        self.told: list[str] = []
        self.steps: list[str] = []

    def tell(self, text: str, is_step: bool) -> None:
        (self.steps if is_step else self.told).append(text)

    @property
    def target(self) -> PushTarget:
        return PushTarget(Ecr(self.registry.session()), "dev", {"team": "vision"})

    def push(self, processor: str = PROCESSOR) -> ImageRow:
        recipe = recipe_of(self.folder, processor)
        return push(self.engine, self.target, recipe, self.tell, self.clock)

    def build(self, processor: str = PROCESSOR) -> ImageRow:
        return build(self.engine, recipe_of(self.folder, processor), self.tell)

    @property
    def repository(self) -> str:
        return f"batchml/{self.folder.name}"

    def there(self, processor: str = PROCESSOR) -> tuple[str, int] | None:
        """What the registry itself has."""
        return self.registry.manifest(self.repository, recipe_of(self.folder, processor).tag)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    need_registry()
    folder = tmp_path / "registry"
    folder.mkdir()
    made = Registry(folder)
    yield made
    made.close()
    assert made.wrong == []


def image_folder(below: Path, dockerfile: str = SMALL) -> Path:
    """An image that no other test has."""
    folder = below / "images" / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(f"# {folder.name}\n")
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def recipe_of(folder: Path, processor: str = PROCESSOR) -> Recipe:
    return ImageSource(folder).recipe().built_for(processor)


@pytest.fixture
def rig(tmp_path: Path, registry: Registry) -> Iterator[Rig]:
    need_engine()
    made = Rig(image_folder(tmp_path), registry)
    yield made
    names = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert [name for name in names if name.startswith(registry.host)] == [], "no name is left"
    for name in names:
        if name.startswith(f"{made.repository}:"):
            docker("image", "rm", "-f", name)


def failing(rig: Rig, method: str, part: str, answer: Answer, times: int = 10**6) -> None:
    """Let the registry answer so to requests whose path has `part` in it."""
    left = [times]

    def fault(asked: str, path: str) -> Answer | None:
        if asked == method and part in path and left[0] > 0:
            left[0] -= 1
            return answer
        return None

    rig.registry.fault = fault


# --- build --------------------------------------------------------------------------------------


def test_an_image_is_built_once(rig: Rig) -> None:
    first = rig.build()
    assert (first.built, first.pushed, first.digest) == (True, False, None)
    assert [step.partition(": ")[2].partition(" : ")[0] for step in rig.steps] == [
        "Step 1/4", "Step 2/4", "Step 3/4", "Step 4/4",
    ]  # fmt: skip
    made = docker("image", "inspect", "--format", "{{.Id}}", first.reference).stdout
    rig.steps.clear()
    second = rig.build()
    assert (second.built, second.size, rig.steps) == (False, first.size, [])
    assert docker("image", "inspect", "--format", "{{.Id}}", first.reference).stdout == made


def test_a_build_that_fails_says_which_step_and_why(rig: Rig) -> None:
    script = "echo first; echo the reason; exit 9"
    (rig.folder / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo earlier\nRUN {script}\n")
    with pytest.raises(ImageError) as failed:
        rig.build()
    text = str(failed.value)
    assert f"Step 3/3 : RUN {script}" in text
    assert "non-zero code: 9" in text
    assert text.endswith("\n  first\n  the reason")
    assert "earlier" not in text
    assert rig.engine.find(recipe_of(rig.folder).reference) is None


def test_a_dockerfile_that_is_none_is_the_engines_word(rig: Rig) -> None:
    (rig.folder / "Dockerfile").write_text("NONSENSE\n")
    with pytest.raises(ImageError, match=r"(?i)unknown instruction"):
        rig.build()


def test_the_server_builds_the_same_image(rig: Rig, home: Home) -> None:
    """What the embedded server would build, byte for byte: one tag, one image."""
    built = rig.build().reference
    assert f"{publish(home.images, rig.folder)}-{PROCESSOR}" == built
    wanted = recipe_of(rig.folder)
    kept = home.images / f"{wanted.name}-{wanted.content}"
    files = {str(path.relative_to(kept)): path.read_bytes()
             for path in kept.rglob("*") if path.is_file()}  # fmt: skip
    assert files == dict(wanted.files)


# --- push ---------------------------------------------------------------------------------------


def test_the_digest_is_the_registrys_and_a_second_push_pushes_nothing(rig: Rig) -> None:
    first = rig.push()
    there = rig.there()
    assert there is not None
    assert (first.digest, first.size) == there
    assert first.reference == f"{rig.registry.host}/{rig.repository}@{there[0]}"
    assert (first.built, first.pushed) == (True, True)
    assert "2 of 2 layers" in rig.steps[-1]
    rig.registry.requests.clear()
    rig.steps.clear()
    second = rig.push()
    assert (second.reference, second.size) == (first.reference, first.size)
    assert (second.built, second.pushed) == (False, False)
    assert rig.registry.writes() == [], "its processor was read, and nothing was sent"
    assert rig.steps == []


def test_what_was_pushed_can_be_pulled_by_its_reference(rig: Rig) -> None:
    import docker as engine

    shown = rig.push()
    docker("image", "rm", "-f", recipe_of(rig.folder).reference)
    api = engine.APIClient(version="auto")
    api.pull(shown.reference, auth_config={"username": "AWS", "password": TOKEN})
    try:
        assert api.inspect_image(shown.reference)["RepoDigests"] == [shown.reference]
    finally:
        api.remove_image(shown.reference, force=True)


def test_the_repository_is_made_as_the_rules_want_it(rig: Rig) -> None:
    rig.push()
    made = rig.registry.repositories[rig.repository]
    assert made["imageTagMutability"] == "IMMUTABLE"
    assert made["imageScanningConfiguration"] == {"scanOnPush": True}
    assert made["encryptionConfiguration"] == {"encryptionType": "KMS"}
    (request,) = [asked for name, asked in rig.registry.calls if name == "CreateRepository"]
    tags = {tag["Key"]: tag["Value"] for tag in request["tags"]}
    assert request["imageTagMutability"] == "IMMUTABLE", "from its first moment on"
    assert tags == {"batchml:env": "dev", "batchml:name": rig.folder.name, "team": "vision"}
    rules = json.loads(rig.registry.lifecycles[rig.repository])["rules"]
    assert [rule["selection"]["tagStatus"] for rule in rules] == ["untagged", "any"]


def test_a_push_that_breaks_off_is_tried_again_and_goes_on(rig: Rig) -> None:
    failing(rig, "PUT", "/manifests/", Answer(0), times=1)
    shown = rig.push()
    assert rig.clock.naps == [5.0]
    assert rig.there() is not None and shown.pushed
    assert "2 already there" in rig.steps[-1]
    assert any("Trying again in 5 s" in step for step in rig.steps)


def test_a_push_that_stays_broken_leaves_nothing_half_done(rig: Rig) -> None:
    failing(rig, "PUT", "/manifests/", Answer(0))
    with pytest.raises(ServiceUnreachable, match="Push again: only the missing layers are sent"):
        rig.push()
    assert rig.clock.naps == [5.0, 10.0, 20.0]
    assert rig.there() is None
    assert rig.target.ecr.find(rig.folder.name, recipe_of(rig.folder).tag) is None
    rig.registry.fault = lambda method, path: None
    rig.registry.requests.clear()
    assert rig.push().pushed
    assert rig.registry.writes() == ["PUT"], "the manifest alone: every layer was there"


def test_an_interrupted_push_goes_on_from_there(rig: Rig) -> None:
    tell = rig.tell

    def interrupt(text: str, is_step: bool) -> None:
        if is_step and "of 2 layers" in text:
            raise KeyboardInterrupt
        tell(text, is_step)

    rig.tell = interrupt  # type: ignore[method-assign]
    failing(rig, "PUT", "/manifests/", Answer(0))
    with pytest.raises(KeyboardInterrupt):
        rig.push()
    assert rig.there() is None
    rig.tell = tell  # type: ignore[method-assign]
    rig.registry.fault = lambda method, path: None
    shown = rig.push()
    assert (shown.built, shown.pushed) == (False, True)
    assert rig.there() is not None


def test_a_busy_registry_is_waited_for(rig: Rig) -> None:
    failing(rig, "POST", "/blobs/uploads/", Answer(429, "TOOMANYREQUESTS", "Rate exceeded"), 2)
    assert rig.push().pushed
    assert rig.clock.naps, "the engine gives up at once, and we do not"
    assert any("too busy" in step for step in rig.steps)


def test_a_push_that_is_not_allowed_says_what_to_allow(rig: Rig) -> None:
    who = "arn:aws:sts::123456789012:assumed-role/dev/me"
    arn = f"arn:aws:ecr:us-east-1:123456789012:repository/{rig.repository}"
    words = (
        f"User: {who} is not authorized to perform: ecr:InitiateLayerUpload on resource: {arn} "
        "because no identity-based policy allows the ecr:InitiateLayerUpload action"
    )
    failing(rig, "POST", "/blobs/uploads/", Answer(403, "DENIED", words))
    with pytest.raises(AccessError) as failed:
        rig.push()
    text = str(failed.value)
    assert words in text
    statement = json.loads(text[text.rindex('{"Effect"') :])
    assert statement["Resource"] == [arn]
    assert {"ecr:InitiateLayerUpload", "ecr:PutImage"} <= set(statement["Action"])
    assert rig.clock.naps == []


def test_a_login_that_is_refused_is_said_so(rig: Rig) -> None:
    rig.registry.token = "another"
    with pytest.raises(AccessError, match="refuses the login of ECR") as failed:
        rig.push()
    assert "another" not in str(failed.value)
    assert rig.clock.naps == []


def test_someone_who_was_faster_is_no_mistake(rig: Rig) -> None:
    words = (
        "The image tag 'x' already exists in the 'y' repository and cannot be overwritten because "
        "the repository is immutable."
    )
    failing(rig, "PUT", "/manifests/", Answer(400, "TAG_INVALID", words, after=True))
    shown = rig.push()
    there = rig.there()
    assert there is not None
    assert shown.digest == there[0]


def test_pinned_names_what_was_pushed_or_how_to_push_it(rig: Rig) -> None:
    session = rig.registry.session()
    with pytest.raises(NotFound, match=f"batchml image push {rig.folder.name}$"):
        pinned_recipe(session, recipe_of(rig.folder), rig.folder.name)
    shown = rig.push()
    assert pinned_recipe(session, recipe_of(rig.folder), rig.folder.name) == shown.reference
    (rig.folder / "requirements.txt").write_text("# another\n")
    with pytest.raises(NotFound):
        pinned_recipe(session, recipe_of(rig.folder), rig.folder.name)


# --- processors ---------------------------------------------------------------------------------


def processor_in_engine(reference: str) -> str:
    return docker("image", "inspect", "--format", "{{.Architecture}}", reference).stdout.strip()


def test_each_processor_has_an_image_and_a_tag_of_its_own(rig: Rig) -> None:
    rows = [rig.push(processor) for processor in (PROCESSOR, OTHER)]
    assert [row.tag.rpartition("-")[2] for row in rows] == [PROCESSOR, OTHER]
    assert [row.pushed for row in rows] == [True, True]
    assert rows[0].digest != rows[1].digest
    for row, processor in zip(rows, (PROCESSOR, OTHER), strict=True):
        assert processor_in_engine(f"{rig.repository}:{row.tag}") == processor
        assert rig.registry.configuration(rig.repository, row.tag)["architecture"] == processor
        assert not rig.push(processor).pushed, "it is there"
    session = rig.registry.session()
    pinned = [
        pinned_recipe(session, recipe_of(rig.folder, each), "x") for each in (PROCESSOR, OTHER)
    ]
    assert pinned == [row.reference for row in rows]


def test_an_image_of_another_processor_in_the_engine_is_built_again(rig: Rig) -> None:
    wrong = rig.build(OTHER)
    wanted = recipe_of(rig.folder).reference
    docker("image", "tag", wrong.reference, wanted)
    assert processor_in_engine(wanted) == OTHER
    assert rig.build().built
    assert processor_in_engine(wanted) == PROCESSOR


@pytest.mark.parametrize("form", ["image", "index"])
def test_an_image_of_another_processor_in_ecr_is_refused(rig: Rig, form: str) -> None:
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    rig.registry.put_copy(rig.repository, other.tag, tag, [OTHER] if form == "index" else [])
    rig.registry.requests.clear()
    with pytest.raises(ImageError) as refused:
        rig.push()
    text = str(refused.value)
    assert f"{rig.repository}:{tag} in ECR is an image for {OTHER}, not for {PROCESSOR}" in text
    assert (
        f"batch-delete-image --repository-name {rig.repository} --image-ids imageTag={tag}" in text
    )
    assert rig.registry.writes() == []


def test_an_image_index_with_the_processor_is_there(rig: Rig) -> None:
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    rig.registry.put_copy(rig.repository, other.tag, tag, [OTHER, PROCESSOR])
    assert not rig.push().pushed


def test_someone_elses_image_of_another_processor_is_refused(rig: Rig) -> None:
    """Another client was faster, and its image has the tag but not the processor."""
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    words = "The image tag already exists: the repository is immutable."

    def fault(method: str, path: str) -> Answer | None:
        if method != "PUT" or not path.endswith(tag):
            return None
        rig.registry.put_copy(rig.repository, other.tag, tag)
        return Answer(400, "TAG_INVALID", words)

    rig.registry.fault = fault
    with pytest.raises(ImageError, match=f"is an image for {OTHER}"):
        rig.push()


@contextmanager
def base_of_other_processor(rig: Rig, folder: Path) -> Iterator[str]:
    """A base image in the engine, with a shell that this machine cannot run."""
    name = f"batchml-test/{rig.folder.name}:1"
    made = folder / "base"
    made.mkdir()
    header = bytes.fromhex("7f454c460201010000000000000000000200")
    machine = {"amd64": b"\x3e\x00", "arm64": b"\xb7\x00"}[OTHER]
    (made / "sh").write_bytes(header + machine + bytes(44))
    (made / "sh").chmod(0o755)
    (made / "Dockerfile").write_text("FROM scratch\nCOPY sh /bin/sh\n")
    built = docker("build", "--no-cache", "--platform", f"linux/{OTHER}", "-t", name, str(made))
    assert built.returncode == 0, built.stdout + built.stderr
    try:
        assert processor_in_engine(name) == OTHER
        yield name
    finally:
        docker("image", "rm", "-f", name)


def test_a_base_image_of_another_processor_gives_no_image(rig: Rig, tmp_path: Path) -> None:
    with base_of_other_processor(rig, tmp_path) as base:
        (rig.folder / "Dockerfile").write_text(f"FROM {base}\nCOPY requirements.txt /one\n")
        with pytest.raises(ImageError) as failed:
            rig.push()
    # Newer engines look for the base image of this processor in the registry.
    is_old = f"was built for {OTHER}, not for {PROCESSOR}" in str(failed.value)
    assert is_old or base in str(failed.value)
    assert not is_old or f"docker pull --platform linux/{PROCESSOR} {base}" in str(failed.value)
    assert rig.engine.find(recipe_of(rig.folder).reference) is None
    assert rig.there() is None


def test_an_engine_without_emulation_says_how_to_get_it(rig: Rig, tmp_path: Path) -> None:
    with base_of_other_processor(rig, tmp_path) as base:
        (rig.folder / "Dockerfile").write_text(f"FROM {base}\nRUN true\n")
        with pytest.raises(ImageError) as failed:
            rig.build(OTHER)
    assert str(failed.value).count("\n") == 0
    assert "at 'Step 2/2 : RUN true'" in str(failed.value)
    assert f"docker run --privileged --rm tonistiigi/binfmt --install {OTHER}" in str(failed.value)
    assert "Docker Desktop" in str(failed.value)


# --- as a user does it --------------------------------------------------------------------------


def config(*processors: str) -> str:
    """A batchml.toml with one queue for each processor."""
    lines = ["[env.dev]", 'region = "us-east-1"']
    for each in processors:
        lines += [f"[env.dev.compute.{each}]", f'instance_types = ["{HOSTS[each]}"]',
                  "max_vcpus = 4", f"[env.dev.queues.{each}]", f'compute = ["{each}"]']  # fmt: skip
    return "\n".join(lines) + "\n"


class Away:
    """The command line in an environment whose ECR is the registry's."""

    def __init__(self, cli: Cli, registry: Registry) -> None:
        self.cli = cli
        (cli.folder / "batchml.toml").write_text(config(PROCESSOR))
        cli.environ |= {
            "AWS_ENDPOINT_URL_ECR": registry.url, "AWS_ACCESS_KEY_ID": "AKIDTEST",
            "AWS_SECRET_ACCESS_KEY": "s", "HOME": str(cli.folder.parent), "NO_PROXY": "127.0.0.1",
        }  # fmt: skip


def test_the_commands_push_list_and_keep_no_password(cli: Cli, rig: Rig, tmp_path: Path) -> None:
    Away(cli, rig.registry)
    os.rename(rig.folder.parent, cli.folder / "images")
    rig.folder = cli.folder / "images" / rig.folder.name
    name = rig.folder.name
    built = cli("image", "build", name, "--env", "dev", "--json")
    assert built.code == 0, built.err
    assert "Step 4/4" in built.err
    shown = cli("image", "build", "--push", name, "--env", "dev", "--json")
    assert shown.code == 0, shown.err
    (one,) = shown.json
    there = rig.there()
    assert there is not None
    recipe = recipe_of(rig.folder)
    assert one == {
        "name": name, "flavor": "cpu", "tag": recipe.tag,
        "reference": f"{rig.registry.host}/{rig.repository}@{there[0]}", "digest": there[0],
        "size": there[1], "built": False, "pushed": True,
    }  # fmt: skip
    assert "2 of 2 layers" in shown.err
    again = cli("image", "push", name, "--env", "dev")
    assert (again.code, again.out) == (0, f"{one['reference']}  was there\n")
    alone = cli("image", "push", name, "--env", "dev", DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert (alone.code, alone.out) == (0, again.out)
    assert "was not checked: no Docker engine" in alone.err
    listed = {each["tag"]: each for each in cli("image", "list", "--env", "dev", "--json").json}
    assert listed[recipe.tag] == {**one, "built": True}
    assert TOKEN not in shown.err + again.err
    assert not (tmp_path / ".docker").exists()
    for path in tmp_path.rglob("*"):
        if path.is_file() and "registry" not in path.parts:
            assert TOKEN.encode() not in path.read_bytes(), path


def test_an_environment_with_both_processors_gets_an_image_of_each(cli: Cli, rig: Rig) -> None:
    Away(cli, rig.registry)
    (cli.folder / "batchml.toml").write_text(config(PROCESSOR, OTHER))
    os.rename(rig.folder.parent, cli.folder / "images")
    rig.folder = cli.folder / "images" / rig.folder.name
    name = rig.folder.name
    shown = cli("image", "push", name, "--env", "dev", "--json")
    assert shown.code == 0, shown.err
    assert sorted(row["tag"].rpartition("-")[2] for row in shown.json) == ["amd64", "arm64"]
    assert rig.there(PROCESSOR) is not None and rig.there(OTHER) is not None
    table = cli("image", "list", name, "--env", "dev").out.splitlines()[1:]
    assert [line.split()[1].rpartition("-")[2] for line in table] == ["amd64", "arm64"]


def test_ctrl_c_leaves_nothing_half_done(cli: Cli, rig: Rig) -> None:
    Away(cli, rig.registry)
    os.rename(rig.folder.parent, cli.folder / "images")
    rig.folder = cli.folder / "images" / rig.folder.name
    held, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> Answer | None:
        if method != "PUT" or "/manifests/" not in path:
            return None
        held.set()
        go_on.wait(30)
        return Answer(0)

    rig.registry.fault = hold
    pushing = cli.watch("image", "push", rig.folder.name, "--env", "dev")
    assert held.wait(60)
    pushing.send_signal(signal.SIGINT)
    out, err = pushing.communicate(timeout=30)
    go_on.set()
    assert (pushing.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    assert "Repeat the command to continue" in err
    assert rig.there() is None
    rig.registry.fault = lambda method, path: None
    assert cli("image", "push", rig.folder.name, "--env", "dev").code == 0
    assert rig.there() is not None


def test_on_local_the_job_runs_in_the_image_that_was_built(cli: Cli, rig: Rig) -> None:
    folder = cli.folder / "images" / rig.folder.name
    folder.parent.mkdir()
    os.rename(rig.folder, folder)
    real = SMALL.replace("python", "python3").replace("scratch", IMAGE)
    real += "ENV PYTHONPATH=/opt/batchml\nWORKDIR /tmp\nUSER 1000:1000\n"
    (folder / "Dockerfile").write_text(real)
    built = cli("image", "build", folder.name, "--json")
    assert built.code == 0, built.err
    (one,) = built.json
    assert (one["built"], one["tag"]) == (True, recipe_of(folder).tag)
    job = f'image = "{folder.name}"\ncommand = ["python3", "-c", "print(40 + 2)"]\n'
    write_job(cli.folder, "mine", job)
    assert cli("local", "start", "--executor", "docker").code == 0
    ran = cli("submit", "--wait", "mine")
    assert ran.code == 0, ran.err
    assert "42" in ran.out
    (log,) = cli.home.attempts.glob("*/log")
    assert f"image={one['reference']}".removesuffix(f"-{PROCESSOR}") in log.read_text()
    assert "building" not in ran.out + ran.err
    pushed = cli("image", "push", folder.name)
    assert pushed.code == 0
    assert "`local` needs no push" in pushed.err


def test_without_an_engine_the_command_says_what_to_do(cli: Cli, tmp_path: Path) -> None:
    image_folder(cli.folder)
    nowhere = f"unix://{tmp_path}/none.sock"
    shown = cli("image", "build", "python", DOCKER_HOST=nowhere)
    assert (shown.code, shown.out) == (1, "")
    assert "docs.docker.com/engine/install" in shown.err
    listed = cli("image", "list", "--json", DOCKER_HOST=nowhere)
    assert listed.code == 0
    assert {one["name"] for one in listed.json} >= {"python", "pytorch", "mxnet"}


def test_every_mistake_is_told_before_anything_is_built(cli: Cli) -> None:
    shown = cli(
        "image",
        "build",
        "python",
        "--flavor",
        "cude",
        "--base",
        "debian",
        "--build-arg",
        "BASE=a:1",
    )
    assert shown.code == 78
    assert "3 mistakes" in shown.err
    assert "Did you mean 'cuda'?" in shown.err
    shown = cli("image", "build", "pythn")
    assert shown.code == 78
    assert "Did you mean 'python'?" in shown.err


@pytest.mark.slow
def test_a_base_without_python_and_with_another_user_will_do(rig: Rig, tmp_path: Path) -> None:
    """As Ubuntu's and NVIDIA's are. apt-get fetches Debian's Python: needs its packages."""
    made = tmp_path / "base"
    made.mkdir()
    (made / "Dockerfile").write_text(
        f"FROM {IMAGE}\n"
        "RUN apt-get purge -q -y --auto-remove '^python3.*' '^libpython3.*' && "
        "rm -f /usr/local/bin/python* && useradd --uid 1000 --user-group ubuntu && "
        "! python3 --version\n"
        "ENV NVIDIA_VISIBLE_DEVICES=all "
        "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/cuda/lib64\n"
        "USER ubuntu\n"
    )
    base = f"batchml-test/bare:{rig.folder.name}"
    built = docker("build", "-t", base, str(made))
    assert built.returncode == 0, built.stdout + built.stderr
    shipped = Path(__file__).parent.parent.parent / "images" / "python"
    wanted = ImageSource(shipped).recipe(base=base).built_for(PROCESSOR)
    try:
        build(rig.engine, wanted, rig.tell)
        variables = inside(wanted.reference, "env")
        lines = dict(line.split("=", 1) for line in variables if "=" in line)
        assert lines["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert lines["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
        assert lines["PATH"].startswith("/opt/venv/bin:/usr/local/nvidia/bin:")
        assert lines["LD_LIBRARY_PATH"] == (
            "/usr/local/nvidia/lib64:/usr/local/nvidia/lib:/usr/local/cuda/lib64"
        )
        assert inside(wanted.reference, "id -u; id -g; id -un; touch ~/x && pwd")[:4] == [
            "1000", "1000", "batchml", "/job",
        ]  # fmt: skip
    finally:
        docker("image", "rm", "-f", wanted.reference, base)


def inside(image: str, script: str) -> list[str]:
    ran: Any = docker("run", "--rm", image, "sh", "-c", script)
    assert ran.returncode == 0, ran.stderr
    return list(ran.stdout.splitlines())


# --- setup --push -------------------------------------------------------------------------------


AWS_FILE = f"""
[env.dev]
region = "us-east-1"
jobs = ["small"]
[env.dev.storage]
workspace = "none"
[env.dev.compute.cpu]
instance_types = ["{HOSTS[PROCESSOR]}"]
max_vcpus = 4
[env.dev.queues.default]
compute = ["cpu"]
"""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[tuple[Account, str]]:
    (tmp_path / "account").mkdir()
    made = Account(tmp_path / "account", FastClock())
    with served(made) as url:
        yield made, url
    made.close()


@pytest.fixture
def setup(
    rig: Rig, cli: Cli, server: ServerEndpoint, account: tuple[Account, str]
) -> Callable[..., Shown]:
    """`setup --env dev` in a folder with the job `small`, which has an image of its own."""
    keys = cli.home.keys()
    environ = {
        "AWS_ENDPOINT_URL": account[1],
        "AWS_ENDPOINT_URL_BATCH": server.url,
        "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": server.url,
        "AWS_ENDPOINT_URL_ECR": rig.registry.url,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "HOME": str(cli.folder),
        "BATCHML_HOME": str(cli.folder / "client"),
    }
    (cli.folder / "batchml.toml").write_text(AWS_FILE)
    (rig.folder.parent).rename(cli.folder / "images")
    rig.folder = cli.folder / "images" / rig.folder.name
    write_job(cli.folder, "small", f'image = "{rig.folder.name}"\ncommand = ["true"]\n')
    return lambda *words, **more: cli("setup", "--env", "dev", *words, **(environ | more))


def test_setup_pushes_the_images_of_the_folders_jobs_and_registers_them(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    plan = setup("--push", "--plan")
    assert (plan.code, f"Images to push: {rig.repository}:" in plan.out) == (2, True), plan.err
    assert "job definition of small: not yet." in plan.out
    assert not rig.registry.writes() and not account[0].stacks

    made = setup("--push", "--yes")
    assert made.code == 0, made.out + made.err
    there = rig.there()
    assert there is not None and f"@{there[0]}" in made.err
    assert made.err.index("pushed ") < made.err.index("create stack batchml-dev-network")
    assert "create job definition small-" in made.err, "the image is there when jobs are registered"
    assert made.out.endswith("is ready. Next:\n  batchml submit --env dev --wait small\n")

    writes = rig.registry.writes()
    again = setup("--push", "--yes")
    assert (again.code, "ECR has the images of the jobs." in again.out) == (0, True), again.err
    assert "Nothing to do." in again.out and rig.registry.writes() == writes


def test_without_push_the_next_step_is_image_push(rig: Rig, setup: Callable[..., Shown]) -> None:
    made = setup("--yes")
    assert made.code == 0, made.out + made.err
    first, second = made.out.splitlines()[-2:]
    assert first.startswith(f"  batchml image push --env dev {rig.folder.name}")
    assert second == "  batchml submit --env dev --wait small"
    assert not rig.registry.writes()
    # Later the image alone is missing.
    pushed = setup("--push", "--yes")
    assert pushed.code == 0 and rig.there() is not None, pushed.err


def test_a_missing_engine_is_told_before_anything_is_made(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    none = setup("--push", "--yes", DOCKER_HOST="unix:///nowhere.sock")
    assert none.code == 1
    assert "Nothing was made, because --push cannot build" in none.err
    assert "Without --push, setup needs no Docker engine" in none.err
    assert not account[0].stacks and not none.out


def test_a_push_that_is_denied_leaves_no_environment(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    denied = Refused("AccessDeniedException", "User: arn:aws:iam::1:user/a is not authorized")
    rig.registry.refuse = lambda operation: denied if operation == "CreateRepository" else None
    done = setup("--push", "--yes")
    assert (done.code, "CreateRepository" in done.err) == (77, True), done.err
    assert "Nothing else was made, because setup pushes images first." in done.err
    assert not account[0].stacks
    rig.registry.refuse = lambda operation: None
    assert setup("--push", "--yes").code == 0
