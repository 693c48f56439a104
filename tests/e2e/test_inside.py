"""`shell` and `forward`, as a user at a terminal has them: processes, containers, nodes."""

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.local import control
from batchml.local.exec import find_attempt
from batchml.local.home import Home, ServerEndpoint
from batchml.sessions.exec.backends import capture_output, open_port_forward
from batchml.sessions.exec.target import find_target
from batchml.sessions.forward.local import connect_by_exec
from tests.sessions.test_forward import talk_to
from tests.support.cli import Cli
from tests.support.executor_rig import IMAGE, need_engine
from tests.support.local_server import client_for, define, wait_for, wait_for_job

LIMIT = 30.0
SERVE = "cd /tmp && exec python3 -m http.server {port} --bind 127.0.0.1"


class Terminal:
    """A person at a terminal of 33 lines and 77 columns, with a command."""

    def __init__(self, words: list[str], environ: dict[str, str], folder: Path) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, {**environ, "TERM": "xterm", "SHELL": "/bin/bash"})
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def begin(self, text: str) -> None:
        """Type what starts a program, and wait until the terminal is its."""
        before = os.tcgetpgrp(self._file)
        self.type(text)
        wait_for(lambda: os.tcgetpgrp(self._file) != before, f"{text!r} has the terminal")

    def see(self, text: str) -> str:
        """What is shown up to this text, which is waited for."""
        end = time.monotonic() + LIMIT
        while text.encode() not in self._seen:
            assert time.monotonic() < end and self._more(end), (text, self._seen)
        before, found, self._seen = self._seen.partition(text.encode())
        return (before + found).decode()

    def end(self) -> tuple[int, str]:
        """The exit code, and the rest of what is shown."""
        while self._more(time.monotonic() + LIMIT):
            pass
        _, status = wait_for(
            lambda: (ended := os.waitpid(self.pid, os.WNOHANG))[0] and ended,
            f"an end: {self._seen!r}",
        )
        os.close(self._file)
        return os.waitstatus_to_exitcode(status), self._seen.decode()

    def _more(self, end: float) -> bool:
        ready, _, _ = select.select([self._file], [], [], max(0.0, end - time.monotonic()))
        try:
            data = os.read(self._file, 4096) if ready else b""
        except OSError:  # Linux says so at the end
            data = b""
        self._seen += data
        return bool(data)


@pytest.fixture
def start(home: Home, server: ServerEndpoint) -> Callable[..., str]:
    """Start a run and give its id once its program is there."""
    batch = client_for(home, server, "batch")

    def start(script: str, **more: Any) -> str:
        made = define(batch, ["sh", "-c", script], **more)
        job_id = batch.submit_job(jobName="train", jobQueue="default", jobDefinition=made)["jobId"]
        wait_for_job(batch, job_id, "RUNNING")
        return str(job_id)

    return start


@pytest.fixture
def context(home: Home, tmp_path: Path) -> Context:
    environ = {"BATCHML_HOME": str(home.root)}
    return Context(load_settings(environ, tmp_path, None), SystemClock(), tmp_path)


@pytest.fixture
def sit(cli: Cli) -> Iterator[Callable[..., Terminal]]:
    sat: list[Terminal] = []

    def sit(*words: str) -> Terminal:
        sat.append(Terminal(cli.command(*words), cli.environ, cli.folder))
        return sat[-1]

    yield sit
    for each in sat:
        try:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


# --- processes ----------------------------------------------------------------------------------


def test_a_shell_has_job_control_a_size_and_the_code_of_its_end(
    cli: Cli, start: Callable[..., str], sit: Callable[..., Terminal], home: Home
) -> None:
    job_id = start("sleep 300", container={"environment": [{"name": "INNER", "value": "yes"}]})
    shell = sit("shell", job_id)
    shell.type("echo $INNER $BATCHML_RUN $(stty size) =$((1+1))\n")
    assert f"yes {job_id} 33 77" in shell.see("=2")
    shell.type("PS1=; echo $PWD =$((1+2))\n")
    assert str(home.attempts) in shell.see("=3\r\n")
    shell.begin("sleep 300\n")
    shell.type("\x03")
    shell.type("echo code=$?\n")
    shell.see("code=130")
    shell.begin("sleep 300\n")
    shell.type("\x1a")
    shell.see("Stopped")
    # Its own death is the shell's business; the run's and the server's are not.
    os.kill(home.holder() or 0, signal.SIGKILL)
    shell.begin("fg\n")
    shell.type("\x03")
    shell.type("echo alive=$((2+2)); exit 9\n")
    shell.see("alive=4")
    assert shell.end()[0] == 9


def test_a_run_that_ends_ends_the_shell_and_leaves_the_terminal_as_it_was(
    cli: Cli,
    start: Callable[..., str],
    sit: Callable[..., Terminal],
    home: Home,
    server: ServerEndpoint,
) -> None:
    job_id = start("sleep 300")
    words = " ".join(cli.command("shell", job_id))
    shell = Terminal(["sh", "-c", f"{words}; echo code=$?; stty -a"], cli.environ, cli.folder)
    shell.see("$ " if os.geteuid() else "# ")
    shell.type("trap '' HUP TERM; stty -echo -icanon; echo in=$((1+1))\n")
    shell.see("in=2")
    client_for(home, server, "batch").terminate_job(jobId=job_id, reason="by a test")
    assert "train has ended: cancelled, exit code 143." in shell.see("code=75")
    _, rest = shell.end()
    assert " icanon" in rest and " echo " in rest


@pytest.mark.journey
def test_input_output_and_code_pass_and_a_killed_client_leaves_nothing(
    cli: Cli, start: Callable[..., str], context: Context
) -> None:
    job_id = start("sleep 300")
    data = bytes(range(256)) * 2000
    words = cli.command("shell", job_id, "--", "sh", "-c", "cat; echo oh >&2; exit 7")
    done = subprocess.run(words, input=data, capture_output=True, env=cli.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, data, b"oh\n")

    mark = f"SAT={job_id}"
    script = f"trap '' HUP TERM; {mark} setsid sleep 300 & {mark} sleep 300"
    client = cli.watch("shell", job_id, "--", "sh", "-c", script)
    wait_for(lambda: len(having(mark)) == 2, "both run inside")
    target = find_target(context, job_id)
    counted = "from batchml.runtime.exec.presence import count; import os; print(count(os.environ))"
    python = ("python3", "-c", counted)
    assert capture_output(context, target, ("true",)).code == 0
    root = Path(__file__).parents[2]
    told = capture_output(context, target, ("env", f"PYTHONPATH={root}", *python))
    assert int(told.out) == 2, "the one that asks, and the one that sits"
    client.kill()
    client.communicate()
    wait_for(lambda: not having(mark), "nothing is left inside")
    assert find_target(context, job_id).run.job_id == job_id, "the run goes on"


def having(mark: str) -> list[int]:
    """Processes with a variable, that are more than a shell's words."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_port_of_a_process_is_this_machines_and_of_a_node_leads_into_its_network(
    cli: Cli, start: Callable[..., str], context: Context, home: Home, server: ServerEndpoint
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job_id = start(SERVE.format(port=port))
    wait_for(lambda: answers(port), "it serves")
    with open_port_forward(context, find_target(context, job_id), port) as tunnel:
        assert tunnel.is_direct and tunnel.local_port == port
    forward = cli.watch("forward", job_id, str(port), "--local-port", str(free()))
    assert forward.stdout is not None
    url = forward.stdout.readline().strip()
    assert urllib.request.urlopen(url).status == 200
    sitting = find_attempt(home, batch_task(client_for(home, server, "batch"), job_id))
    assert sitting is not None
    os.kill(sitting.runner, signal.SIGKILL)  # it has no time to tell anybody
    _, err = forward.communicate(timeout=LIMIT)
    assert "train has ended: host-lost" in err and forward.returncode == 0


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_each_node_is_reached_by_its_number(
    context: Context, home: Home, server: ServerEndpoint
) -> None:
    batch = client_for(home, server, "batch")
    script = f"echo $AWS_BATCH_JOB_NODE_INDEX > index; {SERVE.replace('cd /tmp && ', '')}"
    container = {
        "image": "any", "command": ["sh", "-c", script.format(port=8123)],
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"},
        ],
    }  # fmt: skip
    made = batch.register_job_definition(
        jobDefinitionName="nodes", type="multinode",
        nodeProperties={
            "numNodes": 2, "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
        },
    )["jobDefinitionArn"]  # fmt: skip
    job_id = batch.submit_job(jobName="train", jobQueue="default", jobDefinition=made)["jobId"]
    wait_for_job(batch, job_id, "RUNNING")
    wait_for_job(batch, f"{job_id}#1", "RUNNING")
    for node in (0, 1):
        target = find_target(context, job_id, node)
        asked = capture_output(context, target, ("sh", "-c", "cat index; ls -i /proc/self/ns/net"))
        assert asked.out.decode().split()[0] == str(node)
        if not is_in_namespace(home):
            continue
        with open_port_forward(context, target, 8123) as tunnel:
            assert not tunnel.is_direct
            said = wait_for(partial(fetched, tunnel.local_port, "index"), "it serves")
            assert said.endswith(b"%d\n" % node)


def fetched(port: int, name: str) -> bytes:
    """Nothing until the program listens: the forward resets a connection that it cannot make."""
    try:
        return talk_to(port, b"GET /%s HTTP/1.0\r\n\r\n" % name.encode())
    except ConnectionResetError:
        return b""


def is_in_namespace(home: Home) -> bool:
    return '"subnet":"1' in home.network.read_text().replace(" ", "")


# --- containers ---------------------------------------------------------------------------------


def test_a_container_is_entered_and_its_loopback_reached(
    cli: Cli, home: Home, context: Context, sit: Callable[..., Terminal]
) -> None:
    need_engine()
    endpoint = control.start_server(home, SystemClock(), options=["--executor", "docker"])
    batch = client_for(home, endpoint, "batch")
    # Else a shell would be the first process, and deaf to a stop until the grace is over.
    container = {
        "image": IMAGE, "user": "1234:99", "linuxParameters": {"initProcessEnabled": True},
    }  # fmt: skip
    made = define(batch, ["sh", "-c", SERVE.format(port=8123)], container=container)
    job_id = batch.submit_job(jobName="train", jobQueue="default", jobDefinition=made)["jobId"]
    wait_for_job(batch, job_id, "RUNNING", limit=60)
    target = find_target(context, job_id)
    asked = capture_output(
        context, target, ("sh", "-c", "id -u; pwd; echo $AWS_BATCH_JOB_ID; exit 3")
    )
    assert asked.out.decode().split() == ["1234", "/tmp", job_id] and asked.code == 3
    data = bytes(range(256)) * 2000
    words = cli.command("shell", job_id, "--", "sh", "-c", "cat; echo oh >&2; exit 7")
    done = subprocess.run(words, input=data, capture_output=True, env=cli.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, data, b"oh\n")

    shell = sit("shell", job_id)
    shell.type("echo $(stty size) =$((1+1)); sleep 300\n")
    assert "33 77" in shell.see("=2")
    seen = ("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    wait_for(lambda: b"sleep 300" in capture_output(context, target, seen).out, "the program runs")
    os.kill(shell.pid, signal.SIGKILL)
    shell.end()
    wait_for(
        lambda: b"bash" not in capture_output(context, target, seen).out, "nothing is left inside"
    )

    sitting = find_attempt(home, batch_task(batch, job_id))
    assert sitting is not None
    with open_port_forward(context, target, 8123) as tunnel:
        assert urllib.request.urlopen(tunnel.url).status == 200
    with connect_by_exec(sitting, 8123)() as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert sock.recv(15).startswith(b"HTTP/1.0 200")
    with pytest.raises(ConnectionRefusedError):
        connect_by_exec(sitting, 8124)()

    command = cli.watch("shell", job_id, "--", "sh", "-c", "echo in; sleep 300")
    assert command.stdout is not None and command.stdout.readline() == "in\n"
    command.send_signal(signal.SIGINT)  # which nobody inside hears of by itself
    assert command.wait(LIMIT) == 130
    shell = sit("shell", job_id)
    shell.type("echo in=$((1+1))\n")
    shell.see("in=2")
    batch.terminate_job(jobId=job_id, reason="by a test")
    code, rest = shell.end()
    assert code == 75 and "train has ended: cancelled" in rest


def batch_task(batch: Any, job_id: str) -> str:
    container = batch.describe_jobs(jobs=[job_id])["jobs"][0]["container"]
    return str(container["taskArn"].rpartition("/")[2])
