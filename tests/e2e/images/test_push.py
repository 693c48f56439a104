"""Images built by a real engine and pushed to a real registry, with ECR's API before it."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from batchml.errors import AccessError, ImageError, NotFound, ServiceUnreachable
from batchml.jobs.find import ImageSource
from batchml.jobs.images import build, pinned_recipe
from batchml.local.home import Home
from batchml.local.images import publish
from batchml.resources import shipped_folder
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import IMAGE, PROCESSOR, docker
from tests.support.image_rig import (
    HOSTS,
    OTHER,
    SMALL,
    Rig,
    failing,
    image_folder,
    recipe_of,
)
from tests.support.registry_rig import TOKEN, Answer, Registry

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


@pytest.mark.journey
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
    shipped = shipped_folder("images") / "python"
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
