"""Environments of real uv, pip and venv, from packages that the tests make. No network."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control, disk, environments
from batchml.local.home import Home
from batchml.local.images import find, publish, uv_program
from batchml.model.outcome import MISSING_PACKAGE
from batchml.runtime.processes import descendants, send
from tests.process.test_processes import is_alive
from tests.support.local_server import client_for, processes_of, wait_for, wait_for_job

CLOCK = SystemClock()


def wheel(folder: Path, name: str, text: str) -> None:
    """A package of one module, as the smallest wheel that pip installs."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": text, f"{info}/METADATA": metadata, f"{info}/WHEEL": kind}
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, content)


# A source package brings its own build backend, which waits until a file appears.
_BACKEND = """
import os, shutil, time
def build_wheel(folder, config_settings=None, metadata_directory=None):
    open({marker!r}, "a").write("building\\n")
    while not os.path.exists({go!r}):
        time.sleep(0.02)
    shutil.copy({wheel!r}, folder)
    return os.path.basename({wheel!r})
"""


class Index:
    """The folder of packages, instead of an index; and the gate of its slow package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "index"
        self.hidden = folder / "hidden"
        self.marker = folder / "building"
        self.go = folder / "go"
        self.folder.mkdir()
        self.hidden.mkdir()
        wheel(self.folder, "quick", "answer = 42\n")
        self._slow()

    def _slow(self) -> None:
        wheel(self.hidden, "slow", "answer = 43\n")
        source = self.hidden / "slow-1.0"
        source.mkdir()
        (source / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "slow"\nversion = "1.0"\n'
        )
        (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
        (source / "backend.py").write_text(
            _BACKEND.format(
                marker=str(self.marker),
                go=str(self.go),
                wheel=str(self.hidden / "slow-1.0-py3-none-any.whl"),
            )
        )
        with tarfile.open(self.folder / "slow-1.0.tar.gz", "w:gz") as archive:
            archive.add(source, "slow-1.0")

    def builds(self) -> int:
        return len(self.marker.read_text().splitlines()) if self.marker.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.folder))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    return made


# --- the maker alone --------------------------------------------------------------------------


class Maker:
    """Makes one environment, as often as it is asked to."""

    def __init__(self, folder: Path, requirement: str, uv: str, name: str = "e") -> None:
        self.target = folder / "envs" / name
        self.requirements = folder / f"{name}.txt"
        self.requirements.write_text(f"# a comment\n\n{requirement}\n")
        self.uv = uv
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        program = environments.maker_command(sys.executable)
        process = subprocess.Popen(
            [*program, str(self.requirements), str(self.target), sys.executable, self.uv],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def make(self) -> list[str]:
        """Make it and return what was said; it must succeed."""
        process = self.start()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said.splitlines()

    def python(self, script: str) -> str:
        python = self.target / "bin" / "python"
        return subprocess.run(
            [python, "-I", "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()


@pytest.fixture
def makers() -> Iterator[list[Maker]]:
    """Whatever of them still runs at the end is killed."""
    made: list[Maker] = []
    yield made
    for process in (process for maker in made for process in maker.processes):
        if process.poll() is None:
            send([*descendants(process.pid), process.pid], signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.fixture(params=["uv", "pip"])
def uv(request: pytest.FixtureRequest) -> str:
    """The path of uv; empty for the tests' second round, in which pip makes the environments."""
    return uv_program() if request.param == "uv" else ""


@pytest.fixture
def quick(index: Index, tmp_path: Path, makers: list[Maker], uv: str) -> Maker:
    makers.append(Maker(tmp_path, "quick==1.0", uv))
    return makers[-1]


@pytest.fixture
def slow(index: Index, tmp_path: Path, makers: list[Maker], uv: str) -> Maker:
    makers.append(Maker(tmp_path, "slow", uv))
    return makers[-1]


def test_an_environment_is_made_once_and_is_there_at_once_the_next_time(quick: Maker) -> None:
    said = quick.make()
    assert said[0] == "creating it (once for these requirements)"
    assert ("installing 1 package" if not quick.uv else "finding quick") in "\n".join(said)
    assert said[-1].startswith("made in ")
    assert quick.python("import quick; print(quick.answer)") == "42"
    before = (quick.target / "pyvenv.cfg").stat().st_mtime_ns
    assert (quick.target / "bin" / "pip").exists(), "a job may call it"
    assert quick.make() == []
    assert (quick.target / "pyvenv.cfg").stat().st_mtime_ns == before


def test_an_environment_that_was_moved_is_made_anew_where_it_is(quick: Maker) -> None:
    """Its scripts name the path at which it was made."""
    quick.make()
    target = quick.target.with_name("elsewhere")
    quick.target.rename(target)
    assert not environments.is_complete(str(target))
    quick.target = target
    assert quick.make()[0] == "creating it (once for these requirements)"
    first = (target / "bin" / "pip").read_text().partition("\n")[0]
    assert first.startswith(f"#!{target}/bin/python")
    assert quick.make() == []


def test_an_environment_without_requirements_needs_no_pip(
    tmp_path: Path, makers: Any, uv: str
) -> None:
    maker = Maker(tmp_path, "", uv)
    makers.append(maker)
    maker.make()
    assert maker.python("print(1)") == "1"
    assert not (maker.target / "bin" / "pip").exists()


def test_two_at_once_are_one_installation(index: Index, slow: Maker) -> None:
    first = slow.start()
    wait_for(index.builds, "it is built")
    second = slow.start()
    assert second.stdout is not None
    assert second.stdout.readline().startswith("waiting for another run")
    index.go.touch()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert index.builds() == 1
    assert slow.python("import slow; print(slow.answer)") == "43"


def test_one_that_was_killed_halfway_is_made_afresh_but_not_beside_an_orphan(
    index: Index, slow: Maker
) -> None:
    victim = slow.start()
    wait_for(index.builds, "it is built")
    orphans = descendants(victim.pid)
    victim.kill()
    victim.wait(10)
    try:
        second = slow.start()
        assert second.stdout is not None
        assert second.stdout.readline().startswith("waiting for another run")
        assert all(is_alive(pid) for pid in orphans)
        (slow.target / "half-made").touch()
    finally:
        send(orphans, signal.SIGKILL)
    index.go.touch()
    rest, _ = second.communicate(timeout=60)
    assert second.returncode == 0, rest
    assert rest.startswith("creating it")
    assert slow.python("import slow; print(slow.answer)") == "43"
    assert not (slow.target / "half-made").exists()


def test_a_requirement_that_fails_is_one_clear_line(
    index: Index, tmp_path: Path, makers: list[Maker], uv: str
) -> None:
    maker = Maker(tmp_path, "quick==2.0", uv)
    makers.append(maker)
    process = maker.start()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = said.splitlines()[-1]
    assert last == (
        "Because there is no version of quick==2.0 and you require quick==2.0."
        if uv
        else "Could not find a version that satisfies the requirement quick==2.0 (from versions: "
        "1.0)"
    )
    missing = re.search(MISSING_PACKAGE, last)
    assert missing is not None and missing[1] == "quick==2.0"
    assert "pip makes it" not in said, "pip would fail, too"
    assert not (maker.target / ".complete").exists()


def test_two_environments_share_what_they_have_in_common(
    index: Index, tmp_path: Path, makers: list[Maker]
) -> None:
    wheel(index.folder, "other", "answer = 44\n")
    first, second = (
        Maker(tmp_path, text, uv_program(), name)
        for text, name in (("quick", "a"), ("quick\nother", "b"))
    )
    makers.extend((first, second))
    first.make()
    said = second.make()
    assert ", of which " in said[-1] and said[-1].endswith("are new on the disk")
    module = "import os, quick; print(os.stat(quick.__file__).st_ino)"
    assert first.python(module) == second.python(module)
    assert second.python("import other; print(other.answer)") == "44"


def test_what_only_an_old_environment_had_is_freed_and_can_be_made_again(
    index: Index, tmp_path: Path, makers: list[Maker]
) -> None:
    wheel(index.folder, "other", "answer = 44\n")
    home = Home(tmp_path)
    kept, old = (
        Maker(tmp_path, text, uv_program(), name)
        for text, name in (("quick", "a"), ("quick\nother", "b"))
    )
    makers.extend((kept, old))
    kept.make()
    old.make()
    os.utime(old.target / environments.COMPLETE, (0, 0))
    before = disk.measure(home).environments
    freed = disk.free(home, disk.find_waste(home, CLOCK.now() - 1000), uv_program())
    assert [each.path for each in freed.environments] == [old.target]
    assert [each.name for each in freed.packages] == ["other"]
    assert disk.measure(home).environments == before - freed.size
    assert kept.python("import quick; print(quick.answer)") == "42"
    old.make()
    assert old.python("import other, quick; print(other.answer, quick.answer)") == "44 42"


def test_pip_makes_what_uv_cannot(
    index: Index, tmp_path: Path, makers: list[Maker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_USE_PEP517", "1")
    maker = Maker(tmp_path, "quick", uv_program())
    makers.append(maker)
    said = maker.make()
    assert "pip makes it, because uv has no counterpart of pip's setting use-pep517" in said
    assert maker.python("import quick; print(quick.answer)") == "42"


def test_a_damaged_cache_is_emptied_and_the_environment_is_made(
    index: Index, tmp_path: Path, makers: list[Maker]
) -> None:
    first, second = (Maker(tmp_path, "quick", uv_program(), name) for name in ("a", "b"))
    makers.extend((first, second))
    first.make()
    for package in (tmp_path / "envs" / environments.CACHE / "archive-v0").iterdir():
        shutil.rmtree(package)
    assert "the cache of packages is damaged and is emptied" in second.make()
    assert second.python("import quick; print(quick.answer)") == "42"


# --- through the server -----------------------------------------------------------------------


@pytest.fixture
def batch(index: Index, home: Home) -> Iterator[Any]:
    """The server starts after `index`, and so pip knows where to look."""
    endpoint = control.ensure_server(home, CLOCK)
    yield client_for(home, endpoint, "batch")
    index.go.touch()
    control.stop_server(home, CLOCK)
    for attempt in home.attempts.iterdir():
        while left := processes_of(home, attempt.name):
            send(left, signal.SIGKILL)


def submit(batch: Any, home: Home, requirement: str, *command: str) -> str:
    source = home.root.parent / "picture"
    source.mkdir(exist_ok=True)
    (source / "requirements.txt").write_text(requirement + "\n")
    batch.register_job_definition(
        jobDefinitionName="d",
        type="container",
        containerProperties={
            "image": publish(home.images, source),
            "command": list(command),
            "resourceRequirements": [
                {"type": "VCPU", "value": "1"},
                {"type": "MEMORY", "value": "64"},
            ],
        },
    )
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition="d")
    return str(made["jobId"])


def test_an_environment_that_cannot_be_made_is_an_image_that_cannot_be_pulled(
    batch: Any, home: Home
) -> None:
    job = wait_for_job(batch, submit(batch, home, "no-such-package", "true"))
    assert (job["status"], job["statusReason"]) == ("FAILED", "Task failed to start")
    assert job["container"]["reason"].startswith(
        "CannotPullContainerError: Because no-such-package was not found in "
    )
    assert "exitCode" not in job["container"]
    assert len(job["attempts"]) == 1


def test_a_job_runs_in_its_environment_and_shows_how_far_that_is_meanwhile(
    batch: Any, home: Home, index: Index
) -> None:
    script = "import slow, sys; sys.exit(slow.answer)"
    job_id = submit(batch, home, "slow", "python", "-c", script)

    def shown() -> str:
        found = batch.describe_jobs(jobs=[job_id])["jobs"][0]
        assert found["status"] in ("RUNNABLE", "STARTING")
        return str(found.get("statusReason", ""))

    wait_for(lambda: shown().endswith(": building slow"), "progress is seen")
    wait_for(index.builds, "it is built")
    assert shown().startswith("Making the environment picture-")
    index.go.touch()
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 43)
    assert job["statusReason"] == "Essential container in task exited"


def test_a_job_can_be_terminated_while_its_environment_is_made(
    batch: Any, home: Home, index: Index
) -> None:
    job_id = submit(batch, home, "slow", "true")
    wait_for(index.builds, "it is built")
    (attempt,) = home.attempts.iterdir()
    assert processes_of(home, attempt.name)
    batch.terminate_job(jobId=job_id, reason="changed my mind")
    job = wait_for_job(batch, job_id, limit=15)
    assert (job["status"], job["statusReason"]) == ("FAILED", "changed my mind")
    assert processes_of(home, attempt.name) == []
    assert not list(home.envs.glob("*/.complete"))


def test_a_server_killed_while_an_environment_is_made_goes_on_with_it(
    batch: Any, home: Home, index: Index
) -> None:
    job_id = submit(batch, home, "slow", "python", "-c", "import slow")
    wait_for(index.builds, "it is built")
    pid = home.holder()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not home.is_held(), "the killed server is gone")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")

    def reason() -> str:
        return str(batch.describe_jobs(jobs=[job_id])["jobs"][0].get("statusReason", ""))

    wait_for(lambda: reason().startswith("Making the environment picture-"), "it is made")
    index.go.touch()
    assert wait_for_job(batch, job_id)["status"] == "SUCCEEDED"
    assert index.builds() == 1


# --- images -----------------------------------------------------------------------------------


def test_the_tag_of_an_image_changes_with_what_decides_its_environment(tmp_path: Path) -> None:
    images = tmp_path / "home" / "images"
    source = tmp_path / "picture"
    source.mkdir()
    (source / "requirements.txt").write_text("quick==1.0\n")
    first = publish(images, source)
    (source / "notes.txt").write_text("for nobody\n")
    assert publish(images, source) == first
    (source / "Dockerfile").write_text("FROM scratch\n")
    assert publish(images, source) != first, "what is built from it is another image"
    (source / "Dockerfile").unlink()
    (source / "requirements.txt").write_text("quick==1.1\n")
    second = publish(images, source)
    (source / ".python-version").write_text("3.99\n")
    third = publish(images, source)
    assert len({first, second, third}) == 3
    found = find(images, first)
    assert found is not None
    assert found.requirements.read_text() == "quick==1.0\n"
    assert found.python() == sys.executable
    wanting = find(images, third)
    assert wanting is not None and wanting.python() is None
    assert find(images, first[:-1] + "x") is None
    assert find(images, "python:3.11") is None
    assert find(images, "batchml/../../etc:0123456789ab") is None


def test_publishing_makes_a_private_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    """It may be what makes the state folder, before any server has."""
    home = Home(tmp_path / "home")
    source = tmp_path / "picture"
    source.mkdir()
    reference = publish(home.images, source)  # an image that needs nothing
    assert publish(home.images, source) == reference
    assert [entry.name for entry in home.images.iterdir()] == [
        reference.removeprefix("batchml/").replace(":", "-")
    ]
    assert home.root.stat().st_mode & 0o077 == 0
    home.prepare()


def test_an_image_for_a_python_that_is_not_here_fails_and_says_so(batch: Any, home: Home) -> None:
    source = home.root.parent / "picture"
    source.mkdir()
    (source / ".python-version").write_text("3.99\n")
    job = wait_for_job(batch, submit(batch, home, "quick", "true"))
    assert job["status"] == "FAILED"
    assert job["container"]["reason"].startswith(
        "CannotPullContainerError: the image picture needs Python 3.99, and no python3.99"
    )
