"""Commands that the dashboard runs beside itself."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchml.dashboard.acting.tools import Tools, start_notebook
from batchml.dashboard.app import PageQuery
from batchml.dashboard.server.workers import Workers
from batchml.errors import BatchmlError, UsageError

STAYS = """
import json, os, sys, time
print(json.dumps({"pid": os.getpid(), "words": sys.argv[1:]}, indent=2), flush=True)
time.sleep(600)
"""
SLOW = """
import pathlib, sys, time
if "slow" in sys.argv:
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""
FAILS = """
import json
print(json.dumps({"error": "Run 'x' does not exist.", "exitCode": 1}, indent=2))
raise SystemExit(1)
"""


def rig(folder: Path, script: str, patience: float = 60.0) -> Tools:
    return Tools(folder, ("--env", "dev"), program=(sys.executable, "-c", script),
                 patience=patience)  # fmt: skip


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def test_a_command_stays_is_found_again_and_ends_with_the_dashboard(tmp_path: Path) -> None:
    tools = rig(tmp_path, STAYS)
    first = tools.open(*tools.with_options("tensorboard", "a"))
    assert first["words"] == ["tensorboard", "a", "--env", "dev", "--json"]
    assert tools.open(*tools.with_options("tensorboard", "a")) == first
    other = tools.open(*tools.with_options("tensorboard", "b"))
    assert other["pid"] != first["pid"] and is_alive(first["pid"])
    tools.close()
    assert not is_alive(first["pid"]) and not is_alive(other["pid"])


def test_a_command_that_starts_slowly_holds_up_no_other(tmp_path: Path) -> None:
    tools = rig(tmp_path, SLOW + STAYS)
    slow = Workers(1).submit(lambda: tools.open("slow"))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert tools.open("quick")["words"] == ["quick"] and not slow.done()
    (tmp_path / "go").touch()
    assert slow.result(60)["words"] == ["slow"]
    tools.close()


def test_the_image_of_a_notebook_is_no_path(tmp_path: Path) -> None:
    query = PageQuery("/act/notebook", body={"options": {"image": "../../other"}})
    with pytest.raises(UsageError, match="give the name of an image"):
        start_notebook(rig(tmp_path, FAILS), query)


def test_a_command_ends_when_the_dashboard_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path;"
        "from batchml.dashboard.acting.tools import Tools;"
        "tools = Tools(Path('.'), program=(sys.executable, '-c', sys.argv[1]));"
        "print(tools.open('x')['pid'], flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, STAYS], stdout=subprocess.PIPE, text=True
    ) as dashboard:
        assert dashboard.stdout is not None
        pid = int(dashboard.stdout.readline())
        assert is_alive(pid)
        dashboard.kill()
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_the_message_of_a_command_that_fails_is_the_error(tmp_path: Path) -> None:
    tools = rig(tmp_path, FAILS)
    with pytest.raises(BatchmlError, match="does not exist"):
        tools.open("tensorboard", "x")
    with pytest.raises(BatchmlError, match="does not exist"):
        tools.ask("shell", "x")


def test_a_command_that_never_answers_is_ended(tmp_path: Path) -> None:
    tools = rig(tmp_path, "import time; time.sleep(600)", patience=0.2)
    with pytest.raises(BatchmlError, match="did not start"):
        tools.open("tensorboard", "x")
    with pytest.raises(BatchmlError, match="has not answered"):
        tools.ask("shell", "x")
