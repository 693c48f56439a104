"""Into runs in AWS: real requests that botocore's models judge, a real program for the plugin, and
our program inside beside a process that stands for the container.
"""

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws import exec as ecs_exec
from batchml.aws.exec import (
    EcsTask,
    SsmSession,
    check_exec,
    parse_task,
    parse_task_arn,
    parse_version,
    plugin_arguments,
)
from batchml.aws.session import Session
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import AccessError, ExecUnavailable, NotRunning, ServiceUnreachable
from batchml.model.run import JobStatus
from batchml.sessions.exec.backends import capture_output, open_port_forward, run_inside
from batchml.sessions.exec.session_manager import MarkedOutput, install_command
from batchml.sessions.exec.target import find_target
from batchml.sessions.forward.aws import PluginForward, free_port
from batchml.workspace import remote
from tests.sessions.test_forward import echo_server, talk_to
from tests.support.fakes import FakeClock
from tests.support.local_server import wait_for
from tests.support.wire import Refusal, Wire, keys  # noqa: F401

FAKE = Path(__file__).parents[1] / "support" / "plugin_fake.py"
JOB = "11111111-2222-4333-8444-555555555555"
CLUSTER = "AWSBatch-batchml-dev-gpu-2c5d"
ARN = f"arn:aws:ecs:us-east-1:123456789012:task/{CLUSTER}/0123456789abcdef"
TASK = {
    "taskArn": ARN,
    "enableExecuteCommand": True,
    "containers": [
        {"name": "aws-guardduty-agent-x", "runtimeId": "guard-1"},
        {
            "name": "default",
            "runtimeId": "0123-456",
            "managedAgents": [{"name": "ExecuteCommandAgent", "lastStatus": "RUNNING"}],
        },
    ],
}
CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
profile = "team"
[env.dev.compute.gpu]
max_vcpus = 8
instance_types = ["g5.xlarge"]
[env.dev.queues.default]
compute = ["gpu"]
"""


def detail(status: str = "RUNNING", **more: Any) -> dict[str, Any]:
    return {
        "jobId": JOB, "jobName": "train", "jobQueue": "q", "status": status, "startedAt": 1,
        "jobDefinition": "d:1", "container": {"taskArn": ARN}, **more,
    }  # fmt: skip


def session_of(answer: str) -> dict[str, Any]:
    url = "wss://ssmmessages.example/" + base64.urlsafe_b64encode(answer.encode()).decode()
    return {"SessionId": "s-1", "StreamUrl": url, "TokenValue": "very-secret"}


def executed(params: dict[str, Any]) -> dict[str, Any]:
    found = session_of(params["command"])
    return {
        "session": {name[0].lower() + name[1:]: value for name, value in found.items()},
        "taskArn": ARN, "containerName": params["container"], "clusterArn": "c",
    }  # fmt: skip


class Aws:
    """A place in AWS, and what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.wire = Wire(
            {
                "DescribeJobs": {"jobs": [detail()]},
                "DescribeTasks": {"tasks": [TASK]},
                "ExecuteCommand": executed,
                "StartSession": lambda params: session_of("forward"),
                "TerminateSession": {"SessionId": "s-1"},
            }
        )
        session = self.wire.session(profile="")

        class Wired(Context):
            def connect(self) -> Session:
                return session

        (folder / "batchml.toml").write_text(CONFIG)
        environ = {"BATCHML_HOME": str(folder / "home")}
        self.place = Wired(load_settings(environ, folder, None), FakeClock(), folder)

    def target(self) -> Any:
        return find_target(self.place, JOB)

    def check(self) -> None:
        assert self.wire.wrong == []


@pytest.fixture
def aws(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: None,  # noqa: F811
) -> Iterator[Aws]:
    programs = tmp_path / "bin"
    programs.mkdir()
    plugin = programs / "session-manager-plugin"
    plugin.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    plugin.chmod(0o755)
    for name in ("python3", "python"):
        (programs / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parents[2]))
    container = {
        "PATH": os.environ["PATH"], "AWS_BATCH_JOB_ID": JOB, "INNER": "1",
        "BATCHML_METRICS": str(tmp_path / "metrics"), "PYTHONPATH": str(FAKE.parents[2]),
    }  # fmt: skip
    made = Aws(tmp_path)
    with subprocess.Popen(["sleep", "300"], env=container, cwd=tmp_path) as program:
        monkeypatch.setenv("FAKE_ROOT", str(program.pid))
        yield made
        program.kill()
    made.check()


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Our standard input, with these bytes and then its end."""
    before = os.dup(0)

    def give(data: bytes) -> None:
        read, write = os.pipe()
        os.dup2(read, 0)
        os.close(read)

        def feed() -> None:
            with os.fdopen(write, "wb") as file:
                file.write(data)

        threading.Thread(target=feed, daemon=True).start()

    yield give
    os.dup2(before, 0)
    os.close(before)


# --- a command ------------------------------------------------------------------------------------


def test_a_command_has_the_programs_variables_and_every_byte_and_its_code(
    aws: Aws, capfd: pytest.CaptureFixture[str], give: Callable[[bytes], None], tmp_path: Path
) -> None:
    given = bytes(range(256)) * 40 + b"\r\n~batchml~no frame\n"
    give(given)
    script = 'echo "$INNER $PWD"; cat > got; echo oh >&2; exit 7'
    code = run_inside(aws.place, aws.target(), ("sh", "-c", script), tty=False)
    out, err = capfd.readouterr()
    assert (code, out, err) == (7, f"1 {tmp_path}\n", "oh\n")
    assert (tmp_path / "got").read_bytes() == given
    (asked,) = [params for name, params in aws.wire.calls if name == "ExecuteCommand"]
    assert asked["container"] == "default" and asked["cluster"] == CLUSTER
    assert set(asked["command"]) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=. "
    ), "nobody who splits it needs to know of quotes"


def test_what_a_program_asks_inside_is_the_output_alone(aws: Aws) -> None:
    asked = capture_output(
        aws.place, aws.target(), ("sh", "-c", "printf 'a\\r\\nb'; echo no >&2; exit 3")
    )
    assert (asked.code, asked.out) == (3, b"a\r\nb")
    with pytest.raises(ServiceUnreachable, match="sleep did not end within"):
        capture_output(aws.place, aws.target(), ("sleep", "60"), limit=0.2)


def test_a_command_that_is_not_there_has_a_shells_code(
    aws: Aws, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(aws.place, aws.target(), ("no-such",), tty=False) == 127
    assert "'no-such': this run has no such command" in capfd.readouterr().err


def test_the_session_is_no_word_of_a_process_and_older_plugins_get_it_as_one() -> None:
    opened = SsmSession(session_of("x"), {"Target": "ecs:a_b_c"}, "us-east-1", "https://ecs")
    words, variables = plugin_arguments("/p", opened, "team", "1.2.707.0\n")
    assert "very-secret" not in " ".join(words) and "very-secret" in str(variables)
    assert words[2:5] == ["us-east-1", "StartSession", "team"] and words[6] == "https://ecs"
    for old in ("1.2.497.0", "1.1", "nightly"):
        words, variables = plugin_arguments("/p", opened, "", old)
        assert "very-secret" in words[1] and variables == {}
    assert "very-secret" not in repr(opened)
    assert parse_version("1.2.3") == (1, 2, 3, 0) and parse_version("") == (0, 0, 0, 0)


# --- what stands in the way -----------------------------------------------------------------------


def test_without_the_plugin_nothing_is_started_and_the_line_that_installs_it_is_said(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = aws.target()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExecUnavailable, match="not installed on this machine; nothing was started"):
        run_inside(aws.place, target, ("ls",), tty=False)
    assert aws.wire.operations == ["DescribeJobs"]
    lines = [
        install_command("Linux", "x86_64", "deb"), install_command("Linux", "aarch64", "deb"),
        install_command("Linux", "aarch64", "rpm"), install_command("Darwin", "arm64"),
    ]  # fmt: skip
    assert "ubuntu_64bit/session-manager-plugin.deb" in lines[0] and "dpkg -i" in lines[0]
    assert "ubuntu_arm64" in lines[1] and "dnf install" in lines[2] and "brew" in lines[3]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("TargetNotConnectedException", "not connected to Session Manager"),
        ("InvalidParameterException", "not enabled when the run was submitted"),
        ("ClusterNotFoundException", "compute environment was deleted"),
    ],
)
def test_each_refusal_of_ecs_exec_is_a_sentence(aws: Aws, code: str, words: str) -> None:
    aws.wire.script["ExecuteCommand"] = Refusal(code, "in AWS's words", 400)
    with pytest.raises(ExecUnavailable, match=words) as caught:
        run_inside(aws.place, aws.target(), ("ls",), tty=False)
    assert "in AWS's words" in str(caught.value)


def test_an_agent_that_is_not_ready_is_waited_for_while_the_run_is_young(aws: Aws) -> None:
    agent = {"name": "ExecuteCommandAgent", "lastStatus": "PENDING"}
    container = {"name": "default", "runtimeId": "0123-456", "managedAgents": [agent]}
    starting = {**TASK, "containers": [container]}
    young = detail(startedAt=int(aws.place.clock.now() * 1000))
    nameless = {**young, "container": {}}
    jobs, tasks = iter([young, nameless]), iter([starting, starting])
    aws.wire.script["DescribeJobs"] = lambda _: {"jobs": [next(jobs, young)]}
    aws.wire.script["DescribeTasks"] = lambda _: {"tasks": [next(tasks, TASK)]}
    assert capture_output(aws.place, aws.target(), ("true",)).code == 0
    target = aws.target()
    aws.wire.script["ExecuteCommand"] = Refusal("TargetNotConnectedException", "not yet", 400)
    with pytest.raises(ExecUnavailable, match="not yet"):
        capture_output(aws.place, target, ("true",))
    tried = aws.wire.operations.count("ExecuteCommand")
    assert tried > 10
    with pytest.raises(ExecUnavailable, match="not yet"):  # it is old now
        capture_output(aws.place, target, ("true",))
    assert aws.wire.operations.count("ExecuteCommand") == tried + 1


def test_who_may_not_is_told_the_statement_that_is_missing(aws: Aws) -> None:
    denied = (
        "User: arn:aws:iam::123456789012:user/me is not authorized to perform: ecs:ExecuteCommand "
        f"on resource: {ARN} because no identity-based policy allows"
    )
    aws.wire.script["ExecuteCommand"] = Refusal("AccessDeniedException", denied, 400)
    with pytest.raises(AccessError, match=r"ecs:ExecuteCommand"):
        run_inside(aws.place, aws.target(), ("ls",), tty=False)


def test_what_describe_tasks_tells_is_said_before_anything_is_tried() -> None:
    task = parse_task_arn(ARN)
    assert (task.cluster, task.id, task.region) == (CLUSTER, "0123456789abcdef", "us-east-1")
    found = parse_task(task, {"tasks": [TASK]})
    assert found.target == f"ecs:{CLUSTER}_0123456789abcdef_0123-456"
    check_exec(found)
    for changed, words in (
        ({"is_enabled": False}, "submitted without ECS Exec"),
        ({"agent": "STOPPED", "why": "no role"}, r"has stopped \(no role\)"),
        ({"agent": "PENDING"}, "is starting in the run"),
        ({"runtime_id": ""}, "has not started"),
    ):
        with pytest.raises(ExecUnavailable, match=words):
            check_exec(_changed(found, **changed))
    gone: tuple[dict[str, Any], ...] = ({"tasks": []}, {"tasks": [{"containers": []}]}, {})
    for answer in gone:
        with pytest.raises(ExecUnavailable, match="no longer knows the run's task"):
            parse_task(task, answer)
    with pytest.raises(ExecUnavailable):
        parse_task_arn("arn:aws:ecs:us-east-1:1:cluster/x")


def _changed(task: EcsTask, **more: Any) -> EcsTask:
    return replace(task, **more)


def test_a_run_that_ends_while_somebody_is_in_it(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = aws.target()
    answers = iter([detail()])
    over = detail("FAILED", container={"taskArn": ARN, "exitCode": 3})
    aws.wire.script["DescribeJobs"] = lambda _: {"jobs": [next(answers, over)]}
    monkeypatch.setenv("FAKE_CUT", "1")
    with pytest.raises(NotRunning, match="train has ended: app-error, exit code 3") as caught:
        run_inside(aws.place, target, ("sleep", "60"), tty=False)
    assert caught.value.exit_code == 75


def test_a_session_that_breaks_off_while_the_run_goes_on_is_no_exit_code(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.place.clock.sleep(0)
    monkeypatch.setenv("FAKE_CUT", "1")
    with pytest.raises(ExecUnavailable, match=r"needs batchml\.runtime\.exec in the run's image"):
        capture_output(aws.place, aws.target(), ("true",))


def test_an_image_without_our_runtime_has_a_plain_shell(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_NO_RUNTIME", "1")
    words = ("sh", "-c", "echo \"a  'b'\"; exit 5")
    assert run_inside(aws.place, aws.target(), words, tty=False) == 5
    out, err = capfd.readouterr()
    assert out == "a  'b'\n" and "ECS Exec's plain shell" in err
    with pytest.raises(ExecUnavailable, match=r"batchml\.runtime\.exec"):
        capture_output(aws.place, aws.target(), ("true",))


def test_marks_are_found_however_the_output_is_cut() -> None:
    text = b"\r\nStarting\r\nm1 begin\r\nhello\r\nm1 ends here\r\nworld\r\n\r\nm1 end 12\r\nbye"
    for size in (1, 2, 7, 1000):
        marks, out = MarkedOutput("m1"), b""
        for at in range(0, len(text), size):
            out += marks.feed(text[at : at + size])
        assert (out, marks.code) == (b"hello\nm1 ends here\nworld\n", 12), size


# --- a port ---------------------------------------------------------------------------------------


def test_a_forward_whose_session_ends_is_opened_again_on_the_same_port() -> None:
    opened = SsmSession(session_of("x"), {}, "us-east-1", "https://ssm")
    starts: list[int] = []
    with echo_server() as port:
        local = free_port(port, None)
        parameters = {"portNumber": [str(port)], "localPortNumber": [str(local)]}
        opened = replace(opened, target={"Target": "ecs:a_b_c", "Parameters": parameters})

        def start() -> tuple[list[str], dict[str, str]]:
            starts.append(1)
            words, variables = plugin_arguments(str(FAKE), opened, "", "1.2.707.0")
            first = {"FAKE_ONE": "1"} if len(starts) == 1 else {}
            return [sys.executable, *words], {**variables, **first}

        with PluginForward(port, local, start, lambda: "", pause=0.01):

            def talks() -> bool:
                try:
                    return talk_to(local, b"ping") == b"ping"
                except OSError:
                    return False

            assert not talks(), "the first session ends with its first connection"
            wait_for(talks, "there is another")
            assert len(starts) == 2


def test_a_plugin_that_opens_no_port_is_quoted() -> None:
    words = [sys.executable, "-c", "print('no such session')"]
    with pytest.raises(ExecUnavailable, match="Its output: no such session"):
        PluginForward(1, 2, lambda: (words, {}), lambda: "")
    with pytest.raises(ExecUnavailable, match="cannot be run"):
        PluginForward(1, 2, lambda: (["/no/such"], {}), lambda: "")


def test_a_forward_is_the_plugins(aws: Aws) -> None:
    with echo_server() as port, open_port_forward(aws.place, aws.target(), port) as tunnel:
        assert tunnel.local_port != port, "the other is taken on this machine"
        assert talk_to(tunnel.local_port, b"ping") == b"ping"
        assert tunnel.url == f"http://127.0.0.1:{tunnel.local_port}"
    (asked,) = [params for name, params in aws.wire.calls if name == "StartSession"]
    assert asked["DocumentName"] == ecs_exec.FORWARD
    assert asked["Target"] == f"ecs:{CLUSTER}_0123456789abcdef_0123-456"
    assert asked["Parameters"]["portNumber"] == [str(port)]


def test_a_run_lists_the_workspace_by_the_same_way(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batchml workspace ls` asks a run that is there before it begins one."""
    (tmp_path / "efs/sets").mkdir(parents=True)
    for name in ("a.txt", "größe"):
        (tmp_path / "efs/sets" / name).write_text("one")
    monkeypatch.setattr(remote, "MOUNT", str(tmp_path / "efs"))
    run = replace(aws.target().run, status=JobStatus.RUNNING)
    monkeypatch.setattr(remote, "running_runs", lambda place: [run])
    found = remote.list_in_running_run(aws.place, "sets")
    assert found is not None and [each.path for each in found] == ["sets/a.txt", "sets/größe"]
    assert remote.list_in_running_run(aws.place, "none") is None
