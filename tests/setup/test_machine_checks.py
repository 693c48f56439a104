"""doctor on this machine: what is looked at, and what is said of it."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.errors import LocalServerError
from batchml.local.disk import DiskUse
from batchml.local.home import Home
from batchml.setup.doctor import ConfigCheck, EngineCheck, Finding, MachineCheck
from batchml.setup.machine import (
    GIB,
    check_config,
    check_machine,
    check_plugin,
    examine_machine,
    find_engine,
)

ENGINE = EngineCheck(
    "unix:///var/run/docker.sock", version="28.2.2", api="1.50", root="/var/lib/docker"
)
WELL = MachineCheck(
    home="/home/me/state", home_free=100 * GIB, engine=ENGINE, images_free=100 * GIB,
    python="3.11", uv="/bin/uv",
)  # fmt: skip


def bad(machine: MachineCheck) -> list[Finding]:
    return [each for each in check_machine(machine) if each.mark != "ok"]


def test_a_healthy_machine_has_no_problem() -> None:
    assert bad(WELL) == []
    assert [each.check for each in check_machine(WELL)] == [
        "state", "disk", "docker", "disk", "python", "uv",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "mark", "words", "fix"),
    [
        ({"home_trouble": "others can read it"}, "problem", "others can read it", "BATCHML_HOME"),
        ({"home_free": GIB // 2}, "problem", "0.5 GiB are free", "local clean --all"),
        ({"home_free": 2 * GIB}, "warning", "2.0 GiB are free", "local clean --all"),
        ({"images_free": 3 * GIB}, "warning", "3.0 GiB are free for images", "docker system prune"),
        ({"uv": ""}, "warning", "uv is missing", "-m pip install uv"),
        ({"uv_cache": "/other"}, "warning", "its own copy of PyTorch", "unset UV_CACHE_DIR"),
        ({"uv": "", "has_pip": False}, "problem", "virtual environments", "apt-get install"),
        ({"has_venv": False}, "problem", "virtual environments", "apt-get install python3.11-venv"),
        ({"engine": replace(ENGINE, trouble="missing")}, "warning", "no Docker engine", "start"),
        ({"engine": replace(ENGINE, trouble="permission", group="moby")}, "warning", "may not use",
         "sudo usermod -aG moby $USER"),
        ({"engine": replace(ENGINE, trouble="silent", text="timed out")}, "warning", "timed out",
         "restart docker"),
        ({"engine": replace(ENGINE, trouble="unchecked", address="ssh://h")}, "warning", "ssh://h",
         "docker version"),
        ({"engine": replace(ENGINE, version="19.03", api="1.40")}, "warning", "too old",
         "install a newer version"),
    ],
)  # fmt: skip
def test_each_trouble_is_one_finding_with_its_fix(
    change: dict[str, Any], mark: str, words: str, fix: str
) -> None:
    (found,) = bad(replace(WELL, **change))
    assert found.mark == mark
    assert words in found.text
    assert fix in found.fix[0]


def test_the_space_that_the_state_folder_takes_is_told() -> None:
    use = DiskUse(environments=1024**3, runs=2048, jobs=0, code=0, free=100 * GIB)
    text = next(
        each.text for each in check_machine(replace(WELL, disk=use)) if "disk" in each.check
    )
    assert text.endswith(
        "it takes: environments 1.0 GiB, runs 2.0 KiB, jobs and logs 0 B, code 0 B"
    )


def test_a_python_without_ensurepip_will_do_where_there_is_uv() -> None:
    assert bad(replace(WELL, has_pip=False)) == []


def test_an_engine_is_a_problem_where_jobs_need_it() -> None:
    gone = replace(WELL, engine=replace(ENGINE, trouble="missing"), wants_docker=True)
    assert [each.mark for each in bad(gone)] == ["problem"]


def test_the_oldest_engine_that_will_do() -> None:
    for api, fine in (("1.41", True), ("1.9", False), ("1.100", True), ("2.0", True)):
        assert (bad(replace(WELL, engine=replace(ENGINE, api=api))) == []) == fine


def test_the_plugin_is_never_more_than_a_warning() -> None:
    (found,) = check_plugin(replace(WELL, has_plugin=False))
    assert (found.mark, len(found.fix)) == ("warning", 1)
    assert [each.mark for each in check_plugin(WELL)] == ["ok"]


def test_mistakes_of_the_file_are_lines_of_their_own() -> None:
    (found,) = check_config(ConfigCheck("/x/batchml.toml", ("a: b", "c: d"), ""))
    assert (found.mark, found.text, found.fix) == (
        "problem", "/x/batchml.toml: 2 mistakes", ("a: b", "c: d"),
    )  # fmt: skip
    assert [each.mark for each in check_config(ConfigCheck())] == ["ok"]


# --- looking -------------------------------------------------------------------------------------


class FakeEngine:
    """Answers on a socket as the Docker engine does, or as something else."""

    def __init__(self, path: Path, answers: dict[str, bytes]) -> None:
        self.path, self._answers = path, answers
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                while request := connection.recv(65536):
                    body = self._answers[request.split()[1].decode()]
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + body)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One whose name is short enough for a socket."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_an_engine_tells_its_version_and_where_its_images_are(folder: Path) -> None:
    version = json.dumps({"Version": "20.10.24", "ApiVersion": "1.41"}).encode()
    info = json.dumps({"DockerRootDir": str(folder)}).encode()
    engine = FakeEngine(folder / "s", {"/version": version, "/info": info})
    try:
        found = find_engine(f"unix://{folder}/s")
    finally:
        engine.close()
    assert found == EngineCheck(
        f"unix://{folder}/s", version="20.10.24", api="1.41", root=str(folder)
    )


@pytest.mark.parametrize("answer", [b"[]", b"no JSON"])
def test_what_is_no_engine_is_silent_to_us(folder: Path, answer: bytes) -> None:
    engine = FakeEngine(folder / "s", {"/version": answer, "/info": answer})
    try:
        assert find_engine(f"unix://{folder}/s").trouble == "silent"
    finally:
        engine.close()


def test_a_socket_that_is_missing_or_nobody_listens_on_is_no_engine(folder: Path) -> None:
    assert find_engine(f"unix://{folder}/none").trouble == "missing"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "left"))
    left.close()
    assert find_engine(f"unix://{folder}/left").trouble == "missing"
    assert find_engine("ssh://me@host").trouble == "unchecked"


def test_a_socket_that_is_not_ours_names_its_group(folder: Path) -> None:
    """As another user, in a process of its own: root may use any."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be someone else")
    import grp
    import subprocess
    import sys

    engine = FakeEngine(folder / "s", {})
    group = grp.getgrall()[-1]
    os.chown(folder / "s", 0, group.gr_gid)
    (folder / "s").chmod(0o660)
    folder.chmod(0o755)
    program = (
        "import grp, os, sys; from batchml.setup.machine import find_engine;"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "found = find_engine(sys.argv[1]); print(found.trouble, found.group)"
    )
    try:
        shown = subprocess.run(
            [sys.executable, "-c", program, f"unix://{folder}/s"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        engine.close()
    assert shown.stdout.split() == ["permission", group.gr_name], shown.stderr


def test_the_state_folder_is_looked_at_before_it_is_there(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LocalServerError("others own it")

    environ = {"DOCKER_HOST": f"unix://{tmp_path}/none", "PATH": str(tmp_path)}
    found = examine_machine(environ, Home(tmp_path / "a" / "b"), lambda: None, wants_docker=False)
    assert (found.home, found.home_trouble) == (str(tmp_path / "a" / "b"), "")
    assert found.home_free > 0
    assert found.has_venv
    assert not found.has_plugin
    assert not (tmp_path / "a").exists()
    assert (
        examine_machine(environ, Home(tmp_path), refuse, wants_docker=False).home_trouble
        == "others own it"
    )
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text("#!/bin/sh\n")
    plugin.chmod(0o755)
    assert examine_machine(environ, Home(tmp_path), lambda: None, wants_docker=False).has_plugin
