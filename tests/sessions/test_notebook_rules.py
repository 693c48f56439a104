"""Notebooks: when one is idle, what nobody may see, and how its program ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import (
    BatchmlError,
    ExecUnavailable,
    HeldRunEnded,
    NotRunning,
    ServiceUnreachable,
    UsageError,
)
from batchml.model.group import HELD_TAG
from batchml.model.job import Resources
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.options import SubmitOptions
from batchml.runtime.nodes.link.address import free_port
from batchml.runtime.sessions import notebook
from batchml.runtime.sessions.notebook import JupyterState, NotebookActivity, shows_use
from batchml.sessions.exec.target import ExecResult, ExecTarget
from batchml.sessions.forward.listener import PortForward
from batchml.sessions.notebook import (
    PROGRAM,
    NotebookAddress,
    NotebookLimits,
    check_image,
    check_is_notebook,
    check_reachable,
    describe_earlier,
    fetch_address,
    find_notebook,
    keep_forwarding,
    match_notebook,
    notebook_job,
    notebook_records,
    notebook_resources,
    parse_address,
    redirect_page,
    sole_notebook,
    unfinished_notebooks,
)
from tests.support.fakes import FakeClock

ROOT = str(Path(__file__).parent.parent.parent)

# What is not JupyterLab answers as it does, and does what its settings file's folder says.
FAKE = """
import json, os, signal, sys, http.server
folder = os.environ["JUPYTER_RUNTIME_DIR"]
asked = {}
class Config:
    def __getattr__(self, name):
        return asked.setdefault(name, type("Section", (), {})())
    __setattr__ = None
exec(open(sys.argv[1].partition("=")[2]).read(), {"get_config": Config})
port, token = asked["ServerApp"].port, asked["IdentityProvider"].token
mode = os.environ["MODE"]
print("my token is", token, flush=True)
if mode == "dies":
    print("ImportError: no such thing", flush=True)
    sys.exit(3)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.headers["Authorization"] == f"token {token}"
        kernels = [{"execution_state": "busy" if mode == "busy" else "idle", "last_activity": "t"}]
        found = kernels if self.path == "/api/kernels" else []
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
try:
    server = http.server.HTTPServer(("127.0.0.1", port), Answer)
except OSError:  # another test has it
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
with open(f"{folder}/jpserver-{os.getpid()}.json", "w") as file:
    json.dump({"port": server.server_port}, file)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if mode == "shut":
    server.handle_request(), server.handle_request()
    sys.exit(0)
server.serve_forever()
"""


class Running:
    """The notebook's program with a JupyterLab that is none."""

    def __init__(self, folder: Path, mode: str, **environ: str) -> None:
        modules = folder / "modules"
        modules.mkdir(exist_ok=True)
        if mode != "missing":
            (modules / "jupyterlab.py").write_text(FAKE)
        (folder / "workspace").mkdir(exist_ok=True)
        self.environ = {
            "PATH": os.environ["PATH"], "MODE": mode, "PYTHONPATH": f"{ROOT}:{modules}",
            "BATCHML_STOP_FILE": str(folder / "stop"), "BATCHML_METRICS": str(folder / "metrics"),
            "BATCHML_WORKSPACE": str(folder / "workspace"), **environ,
        }  # fmt: skip
        code = (
            "from batchml.runtime.sessions import notebook as n; import os, sys; n._TICK = 0.02; "
        )
        code += "sys.exit(n.main(sys.argv[1:], os.environ))"
        self._command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            self._command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def where(self) -> dict[str, object]:
        words = [*self._command, "where", "20"]
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=30)
        return self.process.returncode, out


@pytest.mark.parametrize(
    ("mode", "environ", "code", "words"),
    [
        ("missing", {}, 78, "batchml: this image has no JupyterLab. Add the lines"),
        ("dies", {}, 3, "JupyterLab ended with code 3; its last output is above."),
        ("shut", {}, 0, "JupyterLab was shut down from its own menu."),
        ("idle", {"BATCHML_IDLE": "0.1", "BATCHML_RATE": "1.006"}, 0,
         "this notebook was idle for 0 s and is ended. It ran "),
    ],
)  # fmt: skip
def test_what_ends_a_notebook_is_its_exit_code_and_its_last_words(
    tmp_path: Path, mode: str, environ: dict[str, str], code: int, words: str
) -> None:
    ended, said = Running(tmp_path, mode, **environ).end()
    assert (ended, words in said.splitlines()[-1]) == (code, True), said
    if mode == "dies":
        assert "ImportError: no such thing" in said
    if mode == "idle":
        cost = re.search(r"It ran (\d+) s, about ([0-9.]+) USD at 1\.006 USD an hour\.", said)
        assert cost, said
        assert float(cost[2]) == pytest.approx(int(cost[1]) * 1.006 / 3600, abs=0.0006)
    if mode != "missing":
        assert "my token is [token]" in said


@pytest.mark.parametrize(("how", "code"), [("stop file", 0), ("SIGTERM", 143)])
def test_a_kernel_that_computes_keeps_it_until_it_is_told_to_end(
    tmp_path: Path, how: str, code: int
) -> None:
    running = Running(tmp_path, "busy", BATCHML_IDLE="0.01")
    address = running.where()
    assert address["root"] == str(tmp_path / "workspace")
    command_line = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
    environment = Path(f"/proc/{running.process.pid}/environ").read_bytes()
    token = str(address["token"])
    assert token.encode() not in command_line + environment
    secret = [path for path in tmp_path.rglob("*") if path.is_file()]
    secret = [path for path in secret if token in path.read_text("utf-8", "replace")]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in secret} == {0o700}
    if how == "stop file":
        (tmp_path / "stop").touch()
    else:
        running.process.send_signal(signal.SIGTERM)
    ended, said = running.end()
    assert (ended, token in said) == (code, False)


QUIET = JupyterState(0, ("t1", "t2"), 5.0)


@pytest.mark.parametrize(
    ("look", "before", "used"),
    [
        (QUIET, None, True),  # it has just begun
        (QUIET, QUIET, False),
        (QUIET._replace(busy=1), QUIET._replace(busy=1), True),
        (QUIET, QUIET._replace(busy=1), False),  # what it computed has ended
        (QUIET._replace(activity=("t1", "t3")), QUIET, True),
        (QUIET._replace(activity=("t1",)), QUIET, True),  # somebody shut one down
        (QUIET._replace(saved=6.0), QUIET, True),
    ],
)
def test_use_is_what_somebody_did_and_what_computes(
    look: JupyterState, before: JupyterState | None, used: bool
) -> None:
    assert shows_use(look, before) is used


def test_a_server_that_does_not_answer_is_not_used_but_a_shell_is(tmp_path: Path) -> None:
    from batchml.runtime.exec.presence import hold_presence

    environ = {"BATCHML_METRICS": str(tmp_path / "metrics")}
    use = NotebookActivity()
    assert use.is_used(QUIET, environ)
    assert not use.is_used(None, environ)
    with hold_presence(environ):
        assert use.is_used(None, environ)
        assert use.is_used(QUIET, environ)
    assert not use.is_used(QUIET, environ)


def test_without_a_workspace_its_files_are_the_runs_outputs(tmp_path: Path) -> None:
    environ = {"BATCHML_WORKSPACE": str(tmp_path / "none"), "BATCHML_OUTPUT_DIR": str(tmp_path)}
    assert notebook.choose_root(environ) == str(tmp_path)


def test_the_settings_ask_nobody_outside_and_note_what_is_saved(tmp_path: Path) -> None:
    text = notebook.render_settings(
        notebook.jupyter_settings("/w s", 8123, "sec'ret"), str(tmp_path / "s")
    )
    sections: dict[str, object] = {}

    class Config:
        def __getattr__(self, name: str) -> object:
            return sections.setdefault(name, type(name, (), {})())

    exec(textwrap.dedent(text), {"get_config": Config})
    found = {name: vars(each) for name, each in sections.items()}
    assert found["ServerApp"]["ip"] == "127.0.0.1"
    assert found["ServerApp"]["root_dir"] == "/w s"
    assert found["IdentityProvider"] == {"token": "sec'ret"}
    assert found["LabApp"]["news_url"] is None
    found["ContentsManager"]["pre_save_hook"](model={}, path="x")
    assert (tmp_path / "s").exists()


def test_the_page_is_told_not_to_ask_about_news(tmp_path: Path) -> None:
    """Where JupyterLab looks for it: labconfig/ of a folder of JUPYTER_CONFIG_PATH."""
    folder = Path(notebook.write_defaults(str(tmp_path)))
    found = json.loads((folder / "labconfig" / "default_setting_overrides.json").read_bytes())
    assert found["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


def test_the_port_that_people_expect_is_taken_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hold_presence = listener.getsockname()[1]
        assert free_port("127.0.0.1", hold_presence) != hold_presence
    assert free_port("127.0.0.1", hold_presence) == hold_presence


# --- the client -----------------------------------------------------------------------------------


def test_an_address_is_read_from_whatever_a_terminal_put_around_it() -> None:
    address = parse_address(
        b'\r\nStarting session\r\n{"port": 5, "token": "t", "root": "/w"}\r\n\r\nbye'
    )
    assert address == NotebookAddress(5, "t", "/w")
    assert "t'" not in repr(address) and "token" not in repr(address)
    with pytest.raises(BatchmlError, match="could not be read"):
        parse_address(b"nothing\n{}\n")


def test_a_notebook_gets_what_hosts_have_and_no_folder_travels() -> None:
    assert (notebook_resources().vcpus, notebook_resources().memory) == (2, "7 GiB")
    two = notebook_resources(gpus=2)
    assert (two.vcpus, two.memory, two.gpus) == (8, "28 GiB", 2)
    given = notebook_resources(gpus=1, vcpus=3, memory="9 GiB")
    assert (given.vcpus, given.memory) == (3, "9 GiB")
    spec = notebook_job(None, two)
    assert (spec.image, spec.code) == ("notebook", False)


def test_on_this_machine_it_takes_half_unless_it_is_told_how_much() -> None:
    small = NotebookLimits(vcpus=1, memory_mib=3900)
    assert notebook_resources(limits=small) == Resources(vcpus=1, memory="3900 MiB")
    assert notebook_resources(vcpus=2, memory="6 GiB", limits=small) == Resources(
        vcpus=2, memory="6 GiB"
    )
    assert (
        notebook_resources(limits=NotebookLimits(vcpus=32, memory_mib=99_999))
        == notebook_resources()
    )


@pytest.mark.parametrize(
    ("asked", "is_it"),
    [
        ({}, True),
        ({"vcpus": 2, "memory": "7 GiB", "gpus": 0, "queue": "cpu", "image": "notebook"}, True),
        ({"gpus": 1}, False),
        ({"memory": "8 GiB"}, False),
        ({"image": "mine"}, False),
        ({"name": "other"}, False),
        ({"tags": {"a": "b"}}, False),
    ],
)
def test_a_notebook_that_runs_is_gone_back_to_where_it_is_what_is_asked_for(
    asked: SubmitOptions, is_it: bool
) -> None:
    record = Record(
        job_id="id", name="mine", queue="cpu", vcpus=2, memory_mib=7168, spec={"image": "notebook"}
    )
    assert (match_notebook([RUN], asked, [record]) == RUN) is is_it


def test_only_notebooks_are_come_back_to(tmp_path: Path) -> None:
    context = Context(
        load_settings({"BATCHML_HOME": str(tmp_path)}, tmp_path, None), FakeClock(), tmp_path
    )
    run = Run("id", "x", "q", JobStatus.RUNNING, tags={HELD_TAG: "notebook"})
    check_is_notebook(context, run, "x")
    with pytest.raises(UsageError, match=r"x is not a notebook.*batchml shell x"):
        check_is_notebook(context, msgspec.structs.replace(run, tags={HELD_TAG: "alloc"}), "x")


def test_the_newest_notebooks_of_the_history() -> None:
    tags = {HELD_TAG: "notebook"}
    old, new = Record(job_id="a", at=1, tags=tags), Record(job_id="b", at=2, tags=tags)
    others = [Record(job_id="c", at=3), Record(at=4, tags=tags)]
    assert notebook_records([old, *others, new]) == [new, old]


def test_the_page_that_a_browser_is_sent_through_leads_on() -> None:
    assert b'location.replace("http://127.0.0.1:1/lab?token=a&b")' in redirect_page(
        "http://127.0.0.1:1/lab?token=a&b", "JupyterLab"
    )


# --- the tunnel, and notebooks that were left -----------------------------------------------------

RUN = Run("id", "mine", "q", JobStatus.RUNNING, tags={HELD_TAG: "notebook"})


class FakeExec:
    """Into a run of which each look tells the next of what is scripted."""

    def __init__(self, runs: list[Run], answers: list[ExecResult | BatchmlError]) -> None:
        self.runs, self.answers = runs, answers
        self.forwards: list[tuple[int, int | None]] = []

    def describe(self, job_ids: list[str]) -> dict[str, Run]:
        return {job_ids[0]: self.runs.pop(0)}

    def ask(self, _place: Context, _target: ExecTarget, command: tuple[str, ...]) -> ExecResult:
        assert command[:4] == (*PROGRAM, "where")
        answer = self.answers.pop(0)
        if isinstance(answer, BatchmlError):
            raise answer
        return answer

    def open(
        self, _place: Context, _target: ExecTarget, port: int, local: int | None
    ) -> PortForward:
        self.forwards.append((port, local))
        if len(self.forwards) == 1:
            raise ServiceUnreachable("asleep")
        return Quiet(port, local or 1, lambda: "mine has ended")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeExec:
    found = FakeExec([], [])
    monkeypatch.setattr(Context, "describe", found.describe)
    monkeypatch.setattr("batchml.sessions.notebook.capture_output", found.ask)
    monkeypatch.setattr("batchml.sessions.notebook.open_port_forward", found.open)
    return found


def place_in(folder: Path) -> Context:
    folder.chmod(0o700)
    return Context(load_settings({"BATCHML_HOME": str(folder)}, folder, None), FakeClock(), folder)


class Quiet(PortForward):
    """Whose end is known at once."""

    def wait(self) -> str:
        return self._end_reason()


def test_a_forward_that_was_cut_is_reopened_on_its_port(fake: FakeExec, tmp_path: Path) -> None:
    fake.runs += [RUN, RUN, msgspec.structs.replace(RUN, status=JobStatus.SUCCEEDED)]
    told: list[str] = []
    first = Quiet(8000, 8001, lambda: "the session was ended")
    place = place_in(tmp_path)
    why = keep_forwarding(place, ExecTarget(RUN), NotebookAddress(8000, "t"), first, told.append)
    assert why == "mine has ended"
    assert fake.forwards == [(8000, 8001)] * 2
    assert told == ["The connection was cut, and is opened again. (the session was ended)"]
    assert isinstance(place.clock, FakeClock) and place.clock.naps == [1.0]


def test_jupyterlab_is_asked_for_until_it_answers(fake: FakeExec, tmp_path: Path) -> None:
    fake.answers += [
        ExecResult(75, b""),
        ExecResult(0, b'{"port": 5, "token": "t", "root": "/w"}'),
    ]
    assert fetch_address(place_in(tmp_path), ExecTarget(RUN)) == NotebookAddress(5, "t", "/w")
    fake.answers += [ExecResult(75, b"")] * 8
    with pytest.raises(BatchmlError, match="JupyterLab of mine does not answer"):
        fetch_address(place_in(tmp_path), ExecTarget(RUN))


def test_one_that_ends_before_it_answers_has_its_exit_code(fake: FakeExec, tmp_path: Path) -> None:
    fake.answers.append(NotRunning("mine has ended: app-error.", over=True))
    fake.runs.append(msgspec.structs.replace(RUN, status=JobStatus.FAILED, exit_code=78))
    with pytest.raises(HeldRunEnded, match="exit code 78") as failed:
        fetch_address(place_in(tmp_path), ExecTarget(RUN))
    assert failed.value.exit_code == 78


def test_the_one_that_runs_is_meant_before_those_that_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, tags = place_in(tmp_path), {HELD_TAG: "notebook"}
    with pytest.raises(UsageError, match="none of your notebooks runs"):
        sole_notebook(place)
    runs = [
        msgspec.structs.replace(RUN, job_id=job_id, status=status)
        for job_id, status in zip(
            "abcd", ("RUNNABLE", "SUCCEEDED", "RUNNING", "RUNNING"), strict=True
        )
        for status in [JobStatus(status)]
    ]
    records = [
        Record(
            key=run.job_id * 17, job_id=run.job_id, name="mine", at=9 - at, env="local", tags=tags
        )
        for at, run in enumerate(runs)
    ]
    place.history.path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    told = {run.job_id: run for run in runs}
    monkeypatch.setattr(Context, "describe", lambda _, ids: {each: told[each] for each in ids})
    assert [run.job_id for run in unfinished_notebooks(place)] == ["c", "d", "a"]
    assert find_notebook(place, "mine").job_id == "c"
    with pytest.raises(UsageError, match="batchml notebook c --end"):
        sole_notebook(place)
    with pytest.raises(UsageError, match="Your notebook that is RUNNING: batchml notebook c"):
        check_is_notebook(place, msgspec.structs.replace(RUN, tags={}), "@last")
    del told["c"], told["a"]
    monkeypatch.setattr(Context, "describe", lambda _, ids: {i: told[i] for i in ids if i in told})
    assert sole_notebook(place).job_id == "d"


def test_the_next_notebook_tells_of_those_that_were_left(fake: FakeExec, tmp_path: Path) -> None:
    place, tags = place_in(tmp_path), {HELD_TAG: "notebook"}
    assert describe_earlier(place) == []
    left = Record(key="k" * 17, job_id="left", name="notebook", at=1, env="local", tags=tags)
    place.history.path.write_bytes(msgspec.json.encode(left) + b"\n")
    fake.runs += [msgspec.structs.replace(RUN, job_id="left")] * 2  # it, and what it cost
    (words,) = describe_earlier(place)
    assert words.startswith("Your notebook left is RUNNING.")
    assert words.endswith("To return to it instead: batchml notebook left")
    ended = msgspec.structs.replace(RUN, job_id="left", status=JobStatus.SUCCEEDED)
    fake.runs += [ended, ended]
    (words,) = describe_earlier(place)
    assert words.startswith("Your notebook left has ended since you left it.")
    assert describe_earlier(place) == []  # it is told once, and nobody is asked again
    given_up = msgspec.structs.replace(left, key="g" * 17, job_id="given-up")
    place.history.path.write_bytes(msgspec.json.encode(given_up) + b"\n")
    cancelled = msgspec.structs.replace(ended, job_id="given-up", is_cancelled=True)
    fake.runs += [cancelled, cancelled]
    assert describe_earlier(place) == []
    assert fake.runs == []


def test_in_aws_the_way_to_it_is_looked_for_before_it_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "us-east-1"\n')
    context = Context(load_settings({}, tmp_path, "dev"), FakeClock(), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BatchmlError, match="session-manager-plugin"):
        check_reachable(context, {"containerProperties": {"enableExecuteCommand": True}})
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text("#!/bin/sh\necho 1.2.700.0\n")
    plugin.chmod(0o755)
    check_reachable(context, {"containerProperties": {"enableExecuteCommand": True}})
    with pytest.raises(ExecUnavailable, match="batchml setup --env dev"):
        check_reachable(context, {"containerProperties": {}})
    with pytest.raises(UsageError, match="was not built by batchml"):
        check_image(context, "jupyter/minimal-notebook:2026")


def test_flags_of_a_new_one_are_refused_for_one_that_runs() -> None:
    from batchml.sessions.commands.notebook import _check_flags, _read_idle

    _check_flags(None, ["--gpus"])
    with pytest.raises(UsageError, match="--gpus, --idle: @last runs already"):
        _check_flags("@last", ["--gpus", "--idle"])
    assert (_read_idle(None), _read_idle("never"), _read_idle("30m")) == (3600.0, None, 1800.0)
    with pytest.raises(UsageError, match="--gpus: --end ends the notebook that runs"):
        _check_flags(None, ["--gpus"], end=True)
    with pytest.raises(UsageError, match="would end at once"):
        _read_idle("0s")
