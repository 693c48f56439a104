"""The images as containers. Needs a Docker engine and the base image that the Dockerfiles name."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from batchml.jobs.find import ImageSource
from batchml.runtime.protocol.log_marks import parse_mark
from tests.e2e.test_training import LIMIT, check_training, real_mnist
from tests.support.cli import Cli
from tests.support.executor_rig import IMAGE as BASE
from tests.support.executor_rig import PROCESSOR, docker, need_engine

ROOT = Path(__file__).parent.parent.parent
TAG = "batchml-test/python"


def fill(context: Path, name: str) -> None:
    """Put into a folder what an image's Dockerfile asks for, but for wheels."""
    for file in ("Dockerfile", "requirements.txt"):
        shutil.copy(ROOT / "images" / name / file, context)
    shutil.copytree(
        ROOT / "batchml" / "runtime", context / "batchml" / "runtime",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    shutil.copy(ROOT / "batchml" / "__init__.py", context / "batchml")


def engine_name(name: str) -> str:
    """The name in the Docker engine of an image below images/."""
    return ImageSource(ROOT / "images" / name).recipe().built_for(PROCESSOR).reference


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`images/python`, built from the context that its Dockerfile asks for."""
    need_engine()
    context = tmp_path_factory.mktemp("context")
    fill(context, "python")
    built = docker("build", "-t", TAG, str(context))
    assert built.returncode == 0, built.stderr
    yield TAG
    docker("image", "rm", "-f", TAG)


def test_every_image_names_the_same_base_and_has_what_a_process_needs() -> None:
    folders = sorted(path.parent for path in (ROOT / "images").glob("*/Dockerfile"))
    assert {folder.name for folder in folders} == {
        "controller",
        "mxnet",
        "nlp",
        "notebook",
        "python",
        "pytorch",
        "ray",
        "tensorboard",
    }
    for folder in folders:
        assert f"ARG BASE={BASE}\n" in (folder / "Dockerfile").read_text("utf-8")
        for line in (folder / "requirements.txt").read_text("utf-8").splitlines():
            wanted = line.partition("#")[0].strip()
            is_pinned = re.fullmatch(r"[\w-]+(\[[\w,]+\])?==[\w.]+", wanted)
            assert not wanted or is_pinned, f"{folder}: {line}"


def test_a_container_of_the_image_runs_a_command_as_a_plain_user(image: str) -> None:
    script = "id -u; python -c 'import sys; print(sys.prefix)'; exit 5"
    ran = docker("run", "--rm", "-e", "AWS_BATCH_JOB_ID=j", image, "sh", "-c", script)
    assert ran.returncode == 5
    *lines, last = ran.stdout.splitlines()
    assert lines == ["1000", "/opt/venv"]
    assert parse_mark(last) == ("end", {"code": "5", "lines": "2"})


def test_a_container_of_the_image_passes_the_stop_signal_on(image: str) -> None:
    script = "trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
    name = f"batchml-test-{os.getpid()}"
    running = subprocess.Popen(
        ["docker", "run", "--rm", "--name", name, image, "bash", "-c", script],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    assert docker("stop", "--time", "20", name).returncode == 0
    assert "saved" in running.stdout.read()
    assert running.wait(timeout=30) == 3


def build(name: str, context: Path) -> str:
    """The tag of an image with a framework, which is the one that a job finds it by.

    Its packages come from a folder of wheels, fetched outside: a container does not trust a
    certificate authority that only this machine knows.
    """
    fill(context, name)
    download = [sys.executable, "-m", "pip", "download", "--quiet"]
    where = ["--dest", str(context / "wheels"), "--requirement", str(context / "requirements.txt")]
    subprocess.run([*download, *where], check=True)
    tag = engine_name(name)
    built = docker("build", "--build-arg", "PIP_ARGS=--no-index", "-t", tag, str(context))
    assert built.returncode == 0, built.stdout + built.stderr
    return tag


@pytest.fixture(scope="module")
def builds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The images that tests here ask for, built at the same time: each takes a minute of one CPU.

    Before anything trains, not beside it.
    """
    need_engine()
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {call.params["framework"] for call in calls if call and "framework" in call.params}
    tags = {name: engine_name(name) for name in sorted(asked)}
    there = {tag for tag in tags.values() if docker("image", "inspect", tag).returncode == 0}
    with ThreadPoolExecutor() as pool:
        made = {name: pool.submit(build, name, tmp_path_factory.mktemp(name)) for name in tags}
    yield made
    for tag in tags.values():
        if tag not in there:
            docker("image", "rm", "-f", tag)


@pytest.fixture
def framework(request: pytest.FixtureRequest, builds: dict[str, Future[str]]) -> str:
    """An image with a framework, under the name that a job finds it by."""
    name = str(request.param)
    builds[name].result()
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "job", "output"),
    [("pytorch", "lenet", "lenet.pt"), ("mxnet", "lenet-mxnet", "mnist-0001.params")],
    indirect=["framework"],
)
def test_lenet_trains_in_a_container(cli: Cli, framework: str, job: str, output: str) -> None:
    data = real_mnist().get("BATCHML_DATA_DIR")
    if data:  # as a user would put it there for containers
        shutil.copytree(Path(data) / "mnist", cli.home.root / "data" / "mnist")
    started = cli("local", "start", "--executor", "docker")
    assert started.code == 0, started.err
    # Two threads wait for each other where the machine has anything else to do.
    shown = cli("submit", "--wait", "--vcpus", "1", job, timeout=LIMIT)
    check_training(shown)
    assert f"image=batchml/{framework}:" in "".join(map(Path.read_text, logs_of(cli)))
    (model,) = cli.home.runs.glob(f"*/output/{output}")
    assert model.stat().st_size > 100_000


@pytest.mark.slow
def test_the_image_of_controllers_has_what_a_controller_imports(tmp_path: Path) -> None:
    """It comes as far as asking S3 for its sweep."""
    need_engine()
    context = tmp_path / "context"
    for name, content in ImageSource(ROOT / "images" / "controller").recipe().files:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_bytes(content)
    download = [sys.executable, "-m", "pip", "download", "--quiet"]
    where = ["--dest", str(context / "wheels"), "--requirement", str(context / "requirements.txt")]
    subprocess.run([*download, *where], check=True)
    tag = "batchml-test/controller"
    built = docker("build", "--build-arg", "PIP_ARGS=--no-index", "-t", tag, str(context))
    assert built.returncode == 0, built.stdout + built.stderr
    key = "2abcdefghijklmnop"
    try:
        ran = docker(
            "run", "--rm", "--network", "none", "-e", "AWS_ACCESS_KEY_ID=a",
            "-e", "AWS_SECRET_ACCESS_KEY=b", tag, "python", "-m", "batchml", "sweeps", "attend",
            key, "--env", "dev", "--store", f"s3://bucket/runs/{key}", "--region", "us-east-1",
        )  # fmt: skip
    finally:
        docker("image", "rm", "-f", tag)
    assert ran.returncode == 74
    assert "spec.json" in ran.stdout + ran.stderr


def logs_of(cli: Cli) -> Iterator[Path]:
    return cli.home.attempts.glob("*/log")
