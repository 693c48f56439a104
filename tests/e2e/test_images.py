"""The images as containers. Needs a Docker engine and the base image that the Dockerfiles name."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.lines import parse_mark

ROOT = Path(__file__).parent.parent.parent
BASE = "python:3.11-slim-bookworm"
TAG = "batchml-test/python"


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`images/python`, built from the context that its Dockerfile asks for."""
    missing = "docker is not installed" if shutil.which("docker") is None else ""
    if not missing and docker("image", "inspect", BASE).returncode != 0:
        missing = f"no Docker engine, or it has no {BASE}"
    if missing and os.environ.get("BATCHML_REQUIRE_DOCKER"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    context = tmp_path_factory.mktemp("context")
    for name in ("Dockerfile", "requirements.txt"):
        shutil.copy(ROOT / "images" / "python" / name, context)
    shutil.copytree(ROOT / "batchml" / "runtime", context / "batchml" / "runtime")
    shutil.copy(ROOT / "batchml" / "__init__.py", context / "batchml")
    built = docker("build", "-t", TAG, str(context))
    assert built.returncode == 0, built.stderr
    yield TAG
    docker("image", "rm", "-f", TAG)


def test_every_image_names_the_same_base_and_has_what_a_process_needs() -> None:
    folders = sorted(path.parent for path in (ROOT / "images").glob("*/Dockerfile"))
    assert {folder.name for folder in folders} == {"mxnet", "python", "pytorch"}
    for folder in folders:
        assert f"ARG BASE={BASE}\n" in (folder / "Dockerfile").read_text("utf-8")
        for line in (folder / "requirements.txt").read_text("utf-8").splitlines():
            wanted = line.partition("#")[0].strip()
            assert not wanted or re.fullmatch(r"[\w-]+==[\w.]+", wanted), f"{folder}: {line}"


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
