"""What only containers do. What they have in common with processes: test_executors.py."""

import contextlib
import os
import shutil
import signal
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.batch.events import AttemptStarted
from batchml.local.batch.state import Job, Nodes
from batchml.local.executors.choice import ExecutorChoice, Permits, read_choice
from batchml.local.executors.container_spec import container_name
from batchml.local.executors.record import find_processes, mark_of
from batchml.local.executors.supervisor import RUNNER_LOST
from batchml.local.executors.sweeper import remove_unowned
from batchml.local.home import Home, ServerEndpoint
from batchml.local.images import publish
from batchml.runtime.processes import descendants, send
from batchml.runtime.protocol.log_marks import parse_mark
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import (
    IMAGE,
    PROCESSOR,
    Rig,
    attempt_of,
    docker,
    job_of,
    need_engine,
)
from tests.support.local_server import client_for, define, identity_of, wait_for, wait_for_job

COUNT = "i=0; while [ $i -lt 20 ]; do i=$((i+1)); echo $i; sleep 0.05; done; exit 6"
COUNTED = [b"%d" % number for number in range(1, 21)]


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


# --- what the engine is asked for, seen from inside ---------------------------------------------


def test_user_shared_memory_ulimits_tmpfs_and_read_only_root(rig: Rig) -> None:
    script = (
        "id -u; id -g; df -k --output=size /dev/shm | tail -1; ulimit -n; "
        "df -k --output=size /scratch | tail -1; touch /there 2>/dev/null || echo read-only"
    )
    done = rig.run(
        sh(script), user="1234:99", readonlyRootFilesystem=True,
        ulimits=[{"name": "nofile", "softLimit": 77, "hardLimit": 88}],
        linuxParameters={
            "sharedMemorySize": 96, "tmpfs": [{"containerPath": "/scratch", "size": 3}],
        },
    )  # fmt: skip
    assert done.text.split() == ["1234", "99", str(96 * 1024), "77", str(3 * 1024), "read-only"]


def test_any_user_of_a_container_can_write_where_outputs_go(rig: Rig) -> None:
    names = "OUTPUT_DIR CHECKPOINT_DIR WORKSPACE DATA_DIR"
    script = f'for name in {names}; do eval "echo x > \\$BATCHML_$name/f" || exit 1; done'
    assert rig.run(sh(script), user="1234:99").exit.code == 0


def test_an_image_can_set_owners_and_cannot_make_devices(rig: Rig) -> None:
    script = "touch /f && chown 5:6 /f && stat -c %u:%g /f; mknod /d c 1 3 2>/dev/null || echo no"
    assert rig.run(sh(script)).text.split() == ["5:6", "no"]


def test_no_new_privileges_are_to_be_had(rig: Rig) -> None:
    assert rig.run(sh("grep NoNewPrivs /proc/self/status")).text.split()[1] == "1"


def test_4_mib_are_enough_to_be_started(rig: Rig) -> None:
    assert rig.run(["true"], memory=4).exit.code in (0, 137)


def test_privileged_needs_the_servers_leave_and_then_the_engines(rig: Rig) -> None:
    done = rig.run(["true"], privileged=True)
    assert "--allow-privileged" in done.exit.start_failure
    rig.permits = Permits(privileged=True)
    done = rig.run(["true"], privileged=True)
    refused = "CannotStartContainerError: Error response from daemon: "
    assert done.exit.code == 0 or done.exit.start_failure.startswith(refused)


def test_gpus_that_the_engine_does_not_offer_are_its_own_error(rig: Rig) -> None:
    if "nvidia" in docker("info", "--format", "{{json .Runtimes}}").stdout:
        pytest.skip("this engine has GPUs")
    job = job_of(["true"])
    done = rig.outcome(rig.start_job(job, attempt_of(job, gpus=("GPU-1",))))
    assert done.exit.start_failure.startswith("CannotStartContainerError: Error response from")
    assert "nvidia" in done.exit.start_failure


# --- mounts -------------------------------------------------------------------------------------


def mounting(source: str | None, **point: Any) -> dict[str, Any]:
    host = {} if source is None else {"host": {"sourcePath": source}}
    return {
        "volumes": [{"name": "v", **host}],
        "mountPoints": [{"sourceVolume": "v", "containerPath": "/v", **point}],
    }


def test_a_folder_is_mounted_if_the_server_allows_it_and_made_if_it_is_missing(
    rig: Rig, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    rig.permits = Permits(paths=(str(allowed),))
    done = rig.run(sh("echo seen > /v/file"), **mounting(f"{allowed}/new/deep"))
    assert done.exit.code == 0
    assert (allowed / "new" / "deep" / "file").read_text() == "seen\n"
    done = rig.run(
        sh("cat /v/file; echo x > /v/file"), **mounting(f"{allowed}/new/deep", readOnly=True)
    )
    assert done.exit.code != 0
    assert b"seen" in done.lines
    assert (allowed / "new" / "deep" / "file").read_text() == "seen\n"


@pytest.mark.parametrize("path", ["outside", "allowed/../outside", "allowed/link", "allowed-not"])
def test_a_folder_that_is_not_allowed_is_neither_mounted_nor_made(
    rig: Rig, tmp_path: Path, path: str
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(tmp_path / "outside")
    rig.permits = Permits(paths=(str(allowed),))
    done = rig.run(["true"], **mounting(f"{tmp_path}/{path}"))
    assert done.exit.start_failure.startswith("CannotCreateContainerError: ")
    assert "--allow-path" in done.exit.start_failure
    assert not (tmp_path / "outside").exists()


def test_the_engine_itself_cannot_be_mounted(rig: Rig) -> None:
    done = rig.run(["true"], **mounting("/var/run/docker.sock"))
    assert "may not be mounted" in done.exit.start_failure


def test_a_volume_without_a_folder_goes_with_the_attempt(rig: Rig) -> None:
    before = docker("volume", "ls", "-q").stdout
    assert rig.run(sh("echo x > /v/f && cat /v/f"), **mounting(None)).lines == [b"x"]
    assert docker("volume", "ls", "-q").stdout == before


def test_efs_is_a_folder_of_the_state_folder(rig: Rig) -> None:
    efs = {"name": "v", "efsVolumeConfiguration": {"fileSystemId": "fs-12", "rootDirectory": "/a"}}
    points = [{"sourceVolume": "v", "containerPath": "/v"}]
    done = rig.run(sh("echo x > /v/f"), volumes=[efs], mountPoints=points, user="77:77")
    assert done.exit.code == 0
    assert (rig.home.volumes / "fs-12" / "a" / "f").read_text() == "x\n"


# --- images -------------------------------------------------------------------------------------


def with_image(image: str, command: list[str], **job: Any) -> Job:
    made = job_of(command, **job)
    return replace(made, spec=replace(made.spec, container={**made.container, "image": image}))


def test_an_image_that_cannot_be_fetched_says_so_in_aws_words(rig: Rig) -> None:
    done = rig.outcome(rig.start_job(with_image("nosuch.invalid/none:1", ["true"])))
    assert done.exit.start_failure.startswith(
        "CannotPullContainerError: Error response from daemon: "
    )
    assert (done.exit.code, done.started_at) == (None, None)


def test_a_name_that_is_none_is_no_image_either(rig: Rig) -> None:
    done = rig.outcome(rig.start_job(with_image("Not An Image", ["true"])))
    assert done.exit.start_failure.startswith("CannotPullContainerError: ")


def test_an_image_of_ours_that_is_not_known_here_says_how_to_build_it(rig: Rig) -> None:
    name = f"batchml/python:{uuid.uuid4().hex[:12]}"
    done = rig.outcome(rig.start_job(with_image(name, ["true"])))
    assert done.exit.start_failure.startswith("CannotPullContainerError: ")
    assert f"docker build -t {name}-{PROCESSOR} " in done.exit.start_failure
    assert len(done.exit.start_failure) <= 255


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """An image's folder of our own kind, with a name that no one else has."""
    folder = tmp_path / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "requirements.txt").write_text(f"# {folder.name}\n")
    (folder / "Dockerfile").write_text(
        f"FROM {IMAGE}\nCOPY requirements.txt batchml* /opt/batchml/batchml/\n"
        "ENV PYTHONPATH=/opt/batchml\nUSER 1000:1000\n"
        'ENTRYPOINT ["python3", "-m", "batchml.runtime.run"]\n'
    )
    return folder


@pytest.fixture
def published(rig: Rig, image_folder: Path) -> Iterator[str]:
    name = publish(rig.home.images, image_folder)
    yield name
    docker("image", "rm", "-f", f"{name}-{PROCESSOR}")


def test_a_published_image_is_built_when_it_is_first_wanted(rig: Rig, published: str) -> None:
    task = rig.start_job(with_image(published, sh("id -u; exit 3")))
    other = rig.start_job(with_image(published, sh("exit 4")))
    done = rig.outcome(task, 200)
    assert done.exit.code == 3
    *lines, last = done.text.splitlines()
    assert (lines, parse_mark(last)) == (["1000"], ("end", {"code": "3", "lines": "1"}))
    assert rig.outcome(other, 200).exit.code == 4
    notes = [*rig.notes(task), *rig.notes(other)]
    assert any(note.startswith(f"building the image {published}") for note in notes)


def test_an_image_that_cannot_be_built_says_why(rig: Rig, image_folder: Path) -> None:
    (image_folder / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo the reason; exit 9\n")
    name = publish(rig.home.images, image_folder)
    done = rig.outcome(rig.start_job(with_image(name, ["true"])), 200)
    assert done.exit.start_failure.startswith("CannotPullContainerError: ")
    assert "the reason" in done.exit.start_failure


def test_a_stop_ends_the_wait_for_an_image(rig: Rig, image_folder: Path) -> None:
    (image_folder / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN sleep 100\n")
    name = publish(rig.home.images, image_folder)
    task = rig.start_job(with_image(name, ["true"]))
    rig.until(lambda: any("sleep 100" in note for note in rig.notes(task)))
    rig.executor.stop(task)
    assert "stopped" in rig.outcome(task, 20).exit.start_failure


def test_code_runs_in_an_image_that_has_no_runtime(rig: Rig, tmp_path: Path) -> None:
    rig.home.code.mkdir()
    archive = rig.home.code / "abc.tar.gz"
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.path.basename(__file__), os.getuid())")
    with tarfile.open(archive, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.add(script, "train.py")
    archive.chmod(0o600)
    done = rig.run(
        sh("cd /tmp && exec python3 $OLDPWD/train.py"), env={"BATCHML_CODE": str(archive)},
        user="0",
    )  # fmt: skip
    assert done.exit.code == 0, done.text
    *lines, last = done.text.splitlines()
    assert (lines, parse_mark(last)) == (["train.py 0"], ("end", {"code": "0", "lines": "1"}))


@pytest.fixture
def bare_image() -> Iterator[str]:
    """An image without Python."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(
        ["docker", "build", "-q", "-t", name, "-"], text=True, capture_output=True,
        input=f"FROM {IMAGE}\nRUN rm -f /usr/local/bin/python* /usr/bin/python*\n",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    yield name
    docker("image", "rm", "-f", name)


@pytest.mark.parametrize("init", [True, False])
def test_an_image_without_python_that_needs_the_runtime_says_why(
    rig: Rig, bare_image: str, init: bool
) -> None:
    rig.home.code.mkdir()
    archive = rig.home.code / "abc.tar.gz"
    archive.write_bytes(b"")
    job = with_image(bare_image, ["true"], env={"BATCHML_CODE": str(archive)}, init=init)
    done = rig.outcome(rig.start_job(job))
    assert done.exit.code is None
    assert f"CannotStartContainerError: {bare_image} has no python3." in done.exit.start_failure
    assert len(done.exit.start_failure) <= 255


def test_the_runtime_as_the_first_process_passes_a_stop_on_and_leaves_nothing(
    rig: Rig, published: str
) -> None:
    """Without an init process: it reaps orphans, and the exit code is the program's own."""
    script = (
        "(sleep 0.1 &); trap 'exit 9' TERM; sleep 0.4; "
        "grep -l '^State:.Z' /proc/[0-9]*/status; echo ready; while :; do sleep 0.05; done"
    )
    task = rig.start_job(with_image(published, sh(script), init=False))
    rig.until(lambda: b"ready" in rig.lines(task), 200)
    assert rig.lines(task) == [b"ready"], "no zombies"
    rig.executor.stop(task)
    assert rig.outcome(task, 20).exit.code == 9


def test_a_program_that_is_the_first_process_and_does_not_listen_is_killed(rig: Rig) -> None:
    """As on AWS without initProcessEnabled: the kernel keeps TERM from such a process."""
    task = rig.start(["sleep", "60"], init=False, env={"BATCHML_GRACE": "1"})
    rig.until(lambda: rig.started(task))
    rig.executor.stop(task)
    assert rig.outcome(task, 20).exit.code == 137


# --- what others do to a container --------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"), [("stop", 143), ("kill", 137), ("rm -f", 137), ("restart", 143)]
)
def test_a_container_that_is_ended_by_hand_ends_its_attempt(
    rig: Rig, command: str, code: int
) -> None:
    task = rig.start(["sleep", "60"])
    rig.until(lambda: rig.started(task))
    docker(*command.split(), container_name(rig.identity.id, task))
    done = rig.outcome(task, 30)
    assert done.exit.code == code or done.exit.lost


def test_a_paused_container_can_be_stopped(rig: Rig) -> None:
    task = rig.start(["sleep", "60"], env={"BATCHML_GRACE": "1"})
    rig.until(lambda: rig.started(task))
    docker("pause", container_name(rig.identity.id, task))
    rig.executor.stop(task)
    assert rig.outcome(task, 30).exit.code in (137, 143)


def test_a_program_that_closes_its_output_goes_on(rig: Rig) -> None:
    task = rig.start(["sh", "-c", "echo last; exec >&- 2>&-; sleep 1; exit 8"])
    done = rig.outcome(task)
    assert (done.exit.code, done.lines) == (8, [b"last"])


# --- runners and engines that die ---------------------------------------------------------------


def test_a_runner_may_be_killed_at_any_moment(rig: Rig) -> None:
    """Whatever it was about: the attempt runs once, ends once, and no line is lost or doubled."""
    rig.outcome(rig.start(["true"]))
    for moment in range(0, 14, 2):
        task = rig.start(sh(COUNT), env={"BATCHML_GRACE": "1"})
        rig.wait(moment * 0.05)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(rig.runner(task), signal.SIGKILL)
        done = rig.outcome(task)
        assert (done.exit.code, done.lines) == (6, COUNTED), moment


def test_a_container_that_has_used_up_its_runners_ends_before_its_attempt(rig: Rig) -> None:
    task = rig.start(["sleep", "60"])
    rig.until(lambda: rig.started(task))
    killed: set[int] = set()
    while len(killed) < 4:
        rig.until(lambda: rig.runner(task) not in killed)
        killed.add(rig.runner(task))
        os.kill(rig.runner(task), signal.SIGKILL)
    done = rig.outcome(task)
    assert done.exit.lost == RUNNER_LOST
    assert rig.containers() == []


def test_an_attempt_stays_what_it_is_when_the_executor_is_another(rig: Rig) -> None:
    container = rig.start(sh(COUNT))
    orphan = rig.start(sh(COUNT))
    rig.until_line(container, b"2")
    rig.until_line(orphan, b"2")
    rig.executor.close()
    os.kill(rig.runner(orphan), signal.SIGKILL)
    rig.kind = "process"
    rig.reopen()
    process = rig.start(["sh", "-c", "echo process; sleep 2; exit 7"])
    rig.until_line(process, b"process")
    rig.kind = "docker"
    rig.restart()
    for task in (container, orphan):
        done = rig.outcome(task)
        assert (done.exit.code, done.lines) == (6, COUNTED)
    assert (rig.outcome(process).exit.code, rig.outcome(process).lines) == (7, [b"process"])


def test_a_process_whose_runner_is_killed_is_lost_also_when_containers_are_chosen(rig: Rig) -> None:
    rig.kind = "process"
    rig.restart()
    task = rig.start(["sleep", "60"])
    rig.until(lambda: rig.started(task))
    rig.executor.close()
    os.kill(rig.runner(task), signal.SIGKILL)
    rig.kind = "docker"
    rig.reopen()
    assert rig.outcome(task).exit.lost == RUNNER_LOST
    assert find_processes(mark_of(rig.identity.id, task)) == []


def test_binary_output_of_both_streams_is_whole_after_its_runner_was_killed(rig: Rig) -> None:
    script = (
        "import os, time\n"
        "for n in range(60):\n"
        "    os.write(1 + n % 2, b'%d \\xff\\0\\xfe' % n + b'y' * 20_000 + b'\\n')\n"
        "    time.sleep(0.03)\n"
        "os.write(1, b'no end')"
    )
    task = rig.start(["python3", "-c", script])
    rig.until(lambda: len(rig.lines(task)) > 5)
    os.kill(rig.runner(task), signal.SIGKILL)
    done = rig.outcome(task)
    expected = [b"%d \xff\0\xfe" % n + b"y" * 20_000 for n in range(60)]
    assert sorted(done.lines) == sorted([*expected, b"no end"])
    for stream in (0, 1):
        mine = [line for line in done.lines if line in expected[stream::2]]
        assert mine == expected[stream::2]


def test_without_an_engine_an_attempt_ends_soon_and_says_so(rig: Rig, tmp_path: Path) -> None:
    rig.change = lambda spec: spec.update(engine=f"unix://{tmp_path}/none.sock", patience=0.5)
    done = rig.run(["true"])
    assert done.exit.start_failure.startswith("DockerTimeoutError: Could not transition to created")
    assert "does not answer" in done.exit.start_failure


class PrivateEngine:
    """A Docker engine of the test's own, in a network of its own, to be killed at will."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self.flags = flags
        self.containerd = self._spawn(
            "containerd", "--address", f"{folder}/containerd.sock",
            "--root", f"{folder}/croot", "--state", f"{folder}/cstate",
        )  # fmt: skip
        wait_for((folder / "containerd.sock").exists, "containerd", 30)
        self.dockerd: subprocess.Popen[bytes] | None = None

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> None:
        (self.folder / "pid").unlink(missing_ok=True)
        self.dockerd = self._spawn(
            "unshare", "-n", "dockerd", "-H", self.address, "--iptables=false",
            "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec",
            "--pidfile", f"{self.folder}/pid", "--containerd", f"{self.folder}/containerd.sock",
            *self.flags,
        )  # fmt: skip
        wait_for(lambda: self.docker("info").returncode == 0, "the private engine", 60)

    def kill(self) -> None:
        assert self.dockerd is not None
        self.dockerd.kill()
        self.dockerd.wait()

    def end(self) -> None:
        """Nothing of it lives on, and nothing of it stays mounted."""
        for process in filter(None, (self.dockerd, self.containerd)):
            process.kill()
            process.wait()
        helpers = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
                   if f"{self.folder}/".encode() in read(path)]  # fmt: skip
        send([*descendants(*helpers), *helpers], signal.SIGKILL)
        for line in reversed(read(Path("/proc/mounts")).decode().splitlines()):
            mounted = line.split()[1]
            if mounted.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", mounted], check=False)

    def docker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return docker("-H", self.address, *arguments)

    def load(self, name: str) -> None:
        """An image of a shell and two programs."""
        root = self.folder / "root"
        for program in ("sh", "sleep", "true"):
            path = shutil.which(program)
            assert path is not None
            listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout.split()
            for file in (path, *(word for word in listed if word.startswith("/"))):
                target = root / file.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(os.path.realpath(file), target)
        with tarfile.open(self.folder / "root.tar", "w") as tar:
            tar.add(root, ".")
        made = self.docker("import", str(self.folder / "root.tar"), name)
        assert made.returncode == 0, made.stderr


@pytest.fixture
def private(rig: Rig, request: pytest.FixtureRequest) -> Iterator[PrivateEngine]:
    if not (shutil.which("dockerd") and shutil.which("containerd")) or os.geteuid() != 0:
        pytest.skip("an engine of one's own needs dockerd and root")
    folder = Path("/tmp") / f"engine-{uuid.uuid4().hex[:8]}"  # a socket's path must be short
    folder.mkdir()
    engine = PrivateEngine(folder, *request.param)
    try:
        engine.start()
        engine.load("tiny:1")

        def change(spec: dict[str, Any]) -> None:
            spec["engine"] = engine.address
            spec["config"]["HostConfig"]["NetworkMode"] = "none"
            spec["config"]["Image"] = "tiny:1"

        rig.change = change
        yield engine
    finally:
        engine.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("private", [("--live-restore",)], indirect=True)
def test_an_engine_that_is_killed_and_keeps_containers_costs_nothing(
    rig: Rig, private: PrivateEngine
) -> None:
    task = rig.start(sh(COUNT))
    rig.until_line(task, b"3")
    private.kill()
    private.start()
    done = rig.outcome(task)
    assert (done.exit.code, done.lines) == (6, COUNTED)


@pytest.mark.parametrize("private", [()], indirect=True)
def test_an_engine_that_ends_its_containers_is_a_lost_host(
    rig: Rig, private: PrivateEngine
) -> None:
    task = rig.start(sh("echo begun; sleep 100"))
    rig.until_line(task, b"begun")
    private.kill()
    private.start()
    done = rig.outcome(task)
    assert done.exit.code is None
    assert done.exit.lost.startswith("Host EC2 ")
    assert done.lines == [b"begun"]


def without_a_witness(rig: Rig, task: str, work: Callable[[], None]) -> None:
    """Something happens while neither server nor runner are there."""
    rig.executor.close()
    os.kill(rig.runner(task), signal.SIGKILL)
    work()
    rig.reopen()


def restart(engine: PrivateEngine) -> None:
    engine.kill()
    engine.start()


@pytest.mark.parametrize("private", [()], indirect=True)
def test_an_engine_that_ended_its_containers_while_nobody_looked_is_a_lost_host(
    rig: Rig, private: PrivateEngine
) -> None:
    cut_off = rig.start(sh("echo begun; sleep 100"))
    rig.until_line(cut_off, b"begun")
    without_a_witness(rig, cut_off, lambda: restart(private))
    assert rig.outcome(cut_off).exit.lost.endswith("the Docker engine was restarted, which ended "
                                                   "the container.")  # fmt: skip
    own = rig.start(sh("echo begun; sleep 1; kill -9 $$"))
    rig.until_line(own, b"begun")
    ended = ["inspect", "-f", "{{.State.Status}}", container_name(rig.identity.id, own)]
    without_a_witness(
        rig, own, lambda: wait_for(lambda: "exited" in private.docker(*ended).stdout, "it ends")
    )
    assert (rig.outcome(own).exit.code, rig.outcome(own).exit.lost) == (137, "")


@pytest.mark.parametrize("private", [("--live-restore",)], indirect=True)
def test_an_engine_that_keeps_containers_leaves_them_their_own_code(
    rig: Rig, private: PrivateEngine
) -> None:
    task = rig.start(sh("echo begun; sleep 3; kill -9 $$"))
    rig.until_line(task, b"begun")
    without_a_witness(rig, task, lambda: restart(private))
    assert (rig.outcome(task).exit.code, rig.outcome(task).exit.lost) == (137, "")


@pytest.mark.parametrize("private", [()], indirect=True)
def test_an_engine_that_does_not_come_back_is_not_waited_for_for_ever(
    rig: Rig, private: PrivateEngine
) -> None:
    tag = f"4{uuid.uuid4().int % 10**8:08d}"
    change = rig.change

    def impatient(spec: dict[str, Any]) -> None:
        change(spec)
        spec["gone"] = 1.0

    rig.change = impatient
    task = rig.start(["sleep", tag])
    rig.until(lambda: rig.started(task))
    private.kill()
    done = rig.outcome(task)
    assert done.exit.lost.startswith("Host EC2 ")
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if tag.encode() in read(p)]
    assert alive == [], "it is ended without the engine"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# --- nodes --------------------------------------------------------------------------------------

LISTEN = (
    "import socket; s = socket.create_server(('', 7000)); print('listening', flush=True); "
    "print(s.accept()[0].recv(9).decode())"
)
CALL = "import socket; socket.create_connection(('node-0', 7000), 20).sendall(b'hello')"


def test_the_nodes_of_a_job_reach_each_other_by_name_and_by_address(rig: Rig) -> None:
    parent = job_of(["true"])
    nodes = [
        Job(id=f"{parent.id}#{n}", sequence=n, node=n,
            spec=replace(parent.spec, nodes=Nodes(2, 0),
                         container={**parent.container, "command": ["python3", "-c", script]}))
        for n, script in enumerate((LISTEN, CALL))
    ]  # fmt: skip
    main = rig.start_job(nodes[0])
    rig.until_line(main, b"listening")
    started = next(e for e in rig.events if isinstance(e, AttemptStarted) and e.task_id == main)
    assert started.address.count(".") == 3
    child = rig.start_job(nodes[1], attempt_of(nodes[1], main_address=started.address))
    assert rig.outcome(child).exit.code == 0
    assert rig.outcome(main).lines == [b"listening", b"hello"]
    mine = f"label=batchml.home={rig.identity.id}"
    assert docker("network", "ls", "-q", "--filter", mine).stdout == ""


# --- what is left over --------------------------------------------------------------------------


def test_what_no_attempt_owns_is_swept_and_what_one_owns_is_not(rig: Rig) -> None:
    task = rig.start(["sleep", "3"])
    rig.until(lambda: rig.started(task))
    label = f"batchml.home={rig.identity.id}"
    orphan = docker("run", "-d", "--label", label, "--label", "batchml.task=gone", IMAGE, "sleep",
                    "90").stdout.strip()  # fmt: skip
    other = docker("run", "-d", "--label", "batchml.home=another", "--label", "batchml.task=x",
                   IMAGE, "sleep", "90").stdout.strip()  # fmt: skip
    docker("network", "create", "--label", label, f"batchml-test-{orphan[:8]}")
    rig.finish(remove_unowned(rig.home, rig.identity.id, lambda: {task}))
    left = docker("ps", "-a", "-q", "--no-trunc").stdout.split()
    assert orphan not in left
    assert other in left
    docker("rm", "-f", other)
    assert docker("network", "ls", "-q", "--filter", f"label={label}").stdout == ""
    assert rig.outcome(task).exit.code == 0


# --- the whole way ------------------------------------------------------------------------------


@pytest.fixture
def docker_server(home: Home) -> ServerEndpoint:
    need_engine()
    return control.start_server(home, SystemClock(), options=["--executor", "docker"])


@pytest.mark.journey
def test_a_job_by_boto3_runs_in_a_container_of_its_image(
    home: Home, docker_server: ServerEndpoint
) -> None:
    batch = client_for(home, docker_server, "batch")
    logs = client_for(home, docker_server, "logs")
    container = {"image": IMAGE, "linuxParameters": {"sharedMemorySize": 70}}
    definition = define(
        batch, sh("cat /etc/os-release; df -k /dev/shm; exit 3"), container=container
    )
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 3)
    events = logs.get_log_events(
        logGroupName="/aws/batch/job", logStreamName=job["container"]["logStreamName"],
        startFromHead=True,
    )["events"]  # fmt: skip
    text = "\n".join(event["message"] for event in events)
    assert "Debian GNU/Linux" in text
    assert str(70 * 1024) in text


def test_the_first_runner_is_there_before_the_first_job(docker_server: ServerEndpoint) -> None:
    def kinds() -> list[bool]:
        lines = map(process_line, descendants(docker_server.pid))
        return [b'"kind": "container"' in line for line in lines if b"executors.runner" in line]

    wait_for(lambda: kinds() == [True], "a runner for containers")


def process_line(pid: int) -> bytes:
    return read(Path(f"/proc/{pid}/cmdline"))


def test_a_container_is_told_of_nothing_that_it_cannot_reach(
    home: Home, docker_server: ServerEndpoint
) -> None:
    batch = client_for(home, docker_server, "batch")
    logs = client_for(home, docker_server, "logs")
    role = {"jobRoleArn": "arn:aws:iam::123456789012:role/job"}
    definition = define(batch, ["env"], container={"image": IMAGE, **role})
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    job = wait_for_job(batch, job_id)
    events = logs.get_log_events(
        logGroupName="/aws/batch/job", logStreamName=job["container"]["logStreamName"],
        startFromHead=True,
    )["events"]  # fmt: skip
    seen = dict(event["message"].partition("=")[::2] for event in events)
    assert seen["AWS_BATCH_JOB_ID"] == job_id
    assert not [name for name in seen if "ENDPOINT" in name or "ACCESS_KEY" in name]
    assert not [name for name, value in seen.items() if "127.0.0.1" in value]
    assert not [name for name, value in seen.items() if str(home.root) in value]


def test_what_docker_left_behind_is_swept_when_it_is_not_chosen_any_more(
    home: Home, docker_server: ServerEndpoint
) -> None:
    batch = client_for(home, docker_server, "batch")
    definition = define(batch, sh("sleep 3; exit 5"), container={"image": IMAGE})
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    wait_for_job(batch, job_id, "RUNNING")
    label = f"batchml.home={identity_of(home)}"
    orphan = docker("run", "-d", "--label", label, "--label", "batchml.task=gone", IMAGE, "sleep",
                    "90").stdout.strip()  # fmt: skip
    control.stop_server(home, SystemClock())
    batch = client_for(
        home, control.start_server(home, SystemClock(), options=["--executor", "process"]), "batch"
    )
    everything = ["ps", "-a", "-q", "--no-trunc"]
    wait_for(lambda: orphan not in docker(*everything).stdout, "it is swept")
    assert wait_for_job(batch, job_id)["container"]["exitCode"] == 5
    control.stop_server(home, SystemClock())
    control.ensure_server(home, SystemClock())
    assert read_choice(home) == ExecutorChoice("process", had_docker=True)


@pytest.mark.journey
def test_an_image_that_is_missing_is_the_jobs_reason(
    home: Home, docker_server: ServerEndpoint
) -> None:
    batch = client_for(home, docker_server, "batch")
    definition = define(batch, ["true"], container={"image": "nosuch.invalid/none:1"})
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    job = wait_for_job(batch, job_id)
    assert job["statusReason"] == "Task failed to start"
    assert job["container"]["reason"].startswith("CannotPullContainerError: ")
    assert "exitCode" not in job["container"]


def test_the_choice_of_an_executor_is_kept_and_jobs_survive_the_server(
    home: Home, docker_server: ServerEndpoint
) -> None:
    batch = client_for(home, docker_server, "batch")
    definition = define(batch, sh("sleep 2; exit 5"), container={"image": IMAGE})
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    wait_for_job(batch, job_id, "RUNNING")
    os.kill(docker_server.pid, signal.SIGKILL)
    wait_for(lambda: not home.is_held(), "the end of the server")
    batch = client_for(home, control.ensure_server(home, SystemClock()), "batch")
    assert wait_for_job(batch, job_id)["container"]["exitCode"] == 5
    again = batch.submit_job(jobName="k", jobQueue="default", jobDefinition=definition)["jobId"]
    assert wait_for_job(batch, again)["container"]["exitCode"] == 5


def test_a_run_by_the_command_line_builds_its_image_and_keeps_its_output(cli: Cli) -> None:
    need_engine()
    shown = cli("local", "start", "--executor", "docker")
    assert shown.code == 0, shown.err
    write_job(
        cli.folder, "small",
        'image = "python"\ncommand = ["python", "train.py"]\n'
        '[resources]\nvcpus = 1\nmemory = "256 MiB"\n',
        train__py="import os, sys\n"
        "open(os.environ['BATCHML_OUTPUT_DIR'] + '/model', 'w').write('weights')\n"
        "print('user', os.getuid(), sys.prefix)\n",
    )  # fmt: skip
    shown = cli("submit", "--wait", "small", timeout=300)
    assert shown.code == 0, shown.err + shown.out
    assert "user 1000 /opt/venv" in shown.out
    outputs = list(cli.home.runs.glob("*/output/model"))
    assert [path.read_text() for path in outputs] == ["weights"]
    cli("local", "reset", "--yes")
    mine = f"label=batchml.home={identity_of(cli.home)}"
    assert docker("ps", "-a", "-q", "--filter", mine).stdout == ""


@pytest.mark.parametrize("then", ["docker", "process"])
def test_a_reset_ends_containers(
    home: Home, cli: Cli, docker_server: ServerEndpoint, then: str
) -> None:
    batch = client_for(home, docker_server, "batch")
    definition = define(batch, ["sleep", "100"], container={"image": IMAGE})
    job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)["jobId"]
    wait_for_job(batch, job_id, "RUNNING")
    control.stop_server(home, SystemClock())
    control.start_server(home, SystemClock(), options=["--executor", then])
    assert cli("local", "reset", "--yes").code == 0
    mine = f"label=batchml.home={identity_of(home)}"
    assert docker("ps", "-a", "-q", "--filter", mine).stdout == ""
