"""Spares: processes that are ready for the next start of a node's ranks, with a small torch."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.runtime.nodes.supervisor.spares import RankStart, Spares, idle_of, start_rank
from batchml.runtime.processes import SPARE, WAITING_SPARE, descendants, read
from batchml.runtime.processors import SITE
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from tests.process.test_processes import is_alive
from tests.process.test_supervisors import Nodes
from tests.support.local_server import wait_for

# Imports what the real one imports, of what the code of spares needs.
TORCH = """
import ast, json, os
if "DEVICE" in os.environ: device = os.open(os.environ["DEVICE"], os.O_RDWR)
if "PLUGIN" in os.environ: import plugin
try: import optional
except ImportError: pass
"""
# Prints all that a program may see of its process, except for what differs from start to start.
LOOK = """
import importlib.util, os, resource, signal, sys, threading
importlib.util.find_spec("torch")
import torch
def look():
    own = lambda name: open(f"/proc/self/{name}").read()
    fds = sorted((int(fd), os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
                 for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
    handlers = [str(signal.getsignal(n)).partition(" at ")[0] for n in range(1, 32)]
    spec = globals().get("__spec__")
    return [
        sys.argv, sys.orig_argv, sys.path, tuple(sys.flags), sys.executable, __name__, __file__,
        spec and spec.name, type(__loader__).__name__, sorted(globals()), sorted(sys.modules),
        [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path],
        sorted(k for k in os.environ.items() if k[0] not in ("BATCHML_SPARES", "MASTER_PORT")),
        own("cmdline").split(chr(0)), own("comm"), own("oom_score_adj"), os.getcwd(), fds,
        handlers, os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(),
        "supervisor" if b"nodes.torchrun" in open(f"/proc/{os.getppid()}/cmdline", "rb").read()
        else "another parent", os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0),
        [resource.getrlimit(n) for n in range(10)], threading.active_count(), sys.stdin.isatty(),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ]
"""
RANK = """
    if generation == 1: say("pid", os.getpid()); time.sleep(600)
    if generation == 2:
        say("pid", os.getpid())
        names = {}
        for name in ("BATCHML_STACKS", "BATCHML_METRICS"):
            names[os.path.dirname(os.environ[name])] = name
        for each in map(str, look()):
            for found, name in names.items(): each = each.replace(found, name)
            say(each)
        raise RuntimeError("as it is")
"""


PLENTY = (1 << 40).__int__


class Ranks:
    """Ranks of a program without a supervisor, and their spares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "library" / "torch").mkdir(parents=True)
        (folder / "library" / "torch" / "__init__.py").write_text(TORCH)
        (folder / "program").mkdir()

    def begin(self, program: str, python: str = sys.executable, **environ: str) -> RankStart:
        path = self.folder / "program" / "rank.py"
        path.write_text(program)
        given = {
            "PYTHONPATH": os.pathsep.join([SITE, str(self.folder / "library")]),
            "BATCHML_STACKS": str(self.folder / "stacks"), "BATCHML_SPARES": "1", **environ,
        }  # fmt: skip
        words = [python, "-u", str(path)]
        start = RankStart(words, {"PATH": os.environ["PATH"], **given}, errors_apart=False)
        self.processes.append(start_rank(start))
        assert self.line(self.processes[0]) == "go"
        return start

    def line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().decode().rstrip()

    def spares(
        self, start: RankStart, idle: Callable[[], float], memory: Callable[[], int] = PLENTY
    ) -> Spares:
        found = Spares(str(self.folder), 60.0, True, memory, idle)
        found.begin([start], 100.0)
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def name_of(pid: int) -> str:
    return read(f"/proc/{pid}/comm").strip()


def spare_of(supervisor: int) -> int:
    waiting = (p for p in descendants(supervisor) if name_of(p) == WAITING_SPARE)
    return next(waiting, 0)


def log_of_a_restart(nodes: Nodes, setting: str) -> list[str]:
    """The log of a program that is killed once, then fails by itself, and ends well at last."""
    shutil.rmtree(nodes.folder / "checkpoints", ignore_errors=True)
    (nodes.folder / "torch").mkdir(exist_ok=True)
    (nodes.folder / "torch" / "__init__.py").write_text(TORCH)
    nodes.start(
        LaunchPlan(TORCHRUN, processes=1), f"{LOOK}\nif __name__ == '__main__':{RANK}", count=1,
        BATCHML_SPARES=setting, BATCHML_GANG_LIMITS='{"end_grace": 0.3, "spares": 0}',
        PYTHONPATH=os.pathsep.join([str(nodes.folder), os.getcwd()]),
    )  # fmt: skip
    first = int(nodes.until_said("pid ").split()[1])
    supervisor = nodes.supervisor(0)
    spare = wait_for(lambda: spare_of(supervisor), "a spare waits") if setting == "1" else 0
    os.kill(first, signal.SIGKILL)
    assert nodes.ended() == [0], nodes.said()
    second = [int(line.split()[1]) for line in nodes.said() if line.startswith("pid ")][1]
    assert not spare or second == spare, "the spare runs the program"
    return [line for line in nodes.said() if not line.startswith(("pid ", "::batchml "))]


def test_a_program_sees_no_difference_when_a_spare_runs_it(nodes: Nodes) -> None:
    """Its log is the same, with all that it can see of its process, and its traceback."""
    plain, spared = log_of_a_restart(nodes, ""), log_of_a_restart(nodes, "1")
    assert spared == plain
    assert any("RuntimeError: as it is" in line for line in plain)


@pytest.mark.parametrize(("ends", "code"), [("", 0), ("stop", 143), ("kill", 75)])
def test_a_spare_is_ended_with_its_run(nodes: Nodes, ends: str, code: int) -> None:
    """Also when the run is stopped, and when its supervisor is killed."""
    (nodes.folder / "torch.py").write_text(TORCH)
    nodes.start(
        LaunchPlan(TORCHRUN, processes=1), "import torch\nsay('go')\nuntil(sys.argv[0] + '.go')",
        count=1, BATCHML_SPARES="1", BATCHML_GANG_LIMITS='{"spares": 0}',
        PYTHONPATH=os.pathsep.join([str(nodes.folder), os.getcwd()]),
    )  # fmt: skip
    nodes.until_said("go")
    supervisor = nodes.supervisor(0)
    spare = wait_for(lambda: spare_of(supervisor), "a spare waits")
    if ends == "kill":
        os.kill(supervisor, signal.SIGKILL)
    elif ends == "stop":
        nodes.processes[0].terminate()
    else:
        (nodes.folder / "rank.py.go").touch()
    assert nodes.ended() == [code]
    assert nodes.end()["code"] == str(code)
    assert not is_alive(spare)


def is_ready(ranks: Ranks, spares: Spares, at: float = 200.0) -> bool:
    """Whether a spare waits for its start. It may take a while to be ready, or to end."""
    spares.tick(at, [ranks.processes[0].pid])
    spares.tick(at + 10, [ranks.processes[0].pid])
    [pid] = spares.pids or {0}  # none, if the rank runs another program than was started
    assert not pid or name_of(pid).startswith(SPARE), "it has its name from the beginning"
    wait_for(lambda: not is_alive(pid) or name_of(pid) == WAITING_SPARE, "it waits or has ended")
    spares.tick(at + 20, [ranks.processes[0].pid])
    return bool(spares.pids)


GO = "\nimport torch, time\nprint('go')\ntime.sleep(600)\n"
HOOK = "import sys\nclass Hook: find_spec = lambda *_: None\nsys.meta_path.append(Hook())"
IDLE = iter(range(0, 100_000, 100)).__next__  # more and more seconds


@pytest.mark.parametrize(
    ("program", "environ", "has_spare"),
    [
        ("", {}, True),
        ("import numpy", {}, True),
        ("import argparse, json, hashlib, logging", {}, True),
        ("import other", {}, False),
        ("import sys; sys.modules['numpy'] = None", {}, False),
        ("import warnings; warnings.simplefilter('ignore')", {}, False),
        (HOOK, {}, False),
        ("import sys; sys.path.append('/')", {}, False),
        ("", {"OPTIONAL": "1"}, False),
        ("import os; os.environ['OMP_NUM_THREADS'] = '7'", {}, False),
        ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", {},
         len(os.sched_getaffinity(0)) == 1),
        ("import sys; sys.path.insert(0, sys.path[0] + '/vendor')", {}, False),
        ("", {"PLUGIN": "1"}, False),
        ("", {"DEVICE": "/dev/ptmx"}, False),
        ("", {"DEVICE": "/dev/null"}, True),
    ],
    ids=["plain", "numpy first", "standard library first", "another package first",
         "replaces a module", "filters warnings", "has an import hook", "appends a folder",
         "has a module that torch lacks", "sets a variable", "chooses processors",
         "has its own torch", "hides a module", "opens a device", "opens /dev/null"],
)  # fmt: skip
def test_a_program_whose_torch_would_see_a_difference_has_no_spare(
    ranks: Ranks, program: str, environ: dict[str, str], has_spare: bool
) -> None:
    (ranks.folder / "library" / "numpy.py").write_text("")
    (ranks.folder / "library" / "plugin.py").write_text("")
    (ranks.folder / "library" / "other.py").write_text("")
    (ranks.folder / "program" / "vendor").mkdir()
    (ranks.folder / "program" / "vendor" / "torch.py").write_text("")
    if "PLUGIN" in environ:
        (ranks.folder / "program" / "plugin.py").write_text("")
    if "OPTIONAL" in environ:
        (ranks.folder / "program" / "optional").mkdir()
    spares = ranks.spares(ranks.begin(program + GO, **environ), IDLE)
    assert is_ready(ranks, spares) == has_spare
    spares.end()


def test_only_a_program_that_has_imported_torch_has_a_spare(ranks: Ranks) -> None:
    program = "import importlib.util as u, time\nprint('go' if u.find_spec('torch') else '')\n"
    spares = ranks.spares(ranks.begin(program + "time.sleep(600)"), IDLE)
    spares.tick(200.0, [ranks.processes[0].pid])
    spares.tick(210.0, [ranks.processes[0].pid])
    assert not spares.pids


def test_a_spare_waits_for_its_time_an_idle_processor_and_memory(ranks: Ranks) -> None:
    left, idled = 0, 0.0
    start = ranks.begin(GO)
    spares = ranks.spares(start, lambda: idled, lambda: left)

    def after(at: float, idle: float, memory: int = 1 << 40) -> bool:
        nonlocal left, idled
        left, idled = memory, idle
        spares.tick(at, [ranks.processes[0].pid])
        return bool(spares.pids)

    assert not after(159.0, 1000.0), "too early"
    assert not after(160.0, 2000.0)
    assert not after(166.0, 2005.0), "a part of a processor was idle"
    assert not after(172.0, 2100.0, memory=800 << 20), "too little memory"
    assert not after(172.0, 2011.0 - 0.1)
    assert after(178.0, 2020.0)
    assert spares.take(start._replace(environ={**start.environ, "RANK": "1"})) is None
    assert not after(179.0, 0.0, memory=100 << 20), "memory gets short"
    assert not after(190.0, 9999.0), "not again for these ranks"


def test_a_spare_is_taken_once_and_a_lost_one_never(ranks: Ranks) -> None:
    start = ranks.begin(GO)
    spares = ranks.spares(start, IDLE)
    assert is_ready(ranks, spares)
    [pid] = spares.pids
    taken = spares.take(start)
    assert taken is not None and taken.pid == pid
    ranks.processes.append(taken)
    assert ranks.line(taken) == "go"
    assert spares.take(start) is None
    spares.begin([start], 100.0)
    assert is_ready(ranks, spares)
    [pid] = spares.pids
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "it is dead")
    assert spares.take(start) is None
    spares.end()


@pytest.mark.parametrize(
    "wrapper",
    ["#!/bin/sh\necho >> {0}.ran\nexec {1} \"$@\"\n",
     "#!/bin/bash\necho >> {0}.ran\nexec -a $0 {1} \"$@\"\n",
     "#!{1} -I\nimport os, sys; open('{0}.ran', 'a').write('1')\nos.execv('{1}', sys.argv)\n"],
    ids=["shell", "shell with the same words", "Python"],
)  # fmt: skip
def test_the_preparations_of_a_wrapper_are_not_made_beside_a_rank(
    ranks: Ranks, wrapper: str
) -> None:
    path = ranks.folder / "python"
    path.write_text(wrapper.format(path, sys.executable))
    path.chmod(0o755)
    spares = ranks.spares(ranks.begin(GO, python=str(path)), IDLE)
    assert os.path.exists(ranks.folder / f"torch-{ranks.processes[0].pid}"), "it imports torch"
    before = path.with_name("python.ran").read_text()
    assert not is_ready(ranks, spares)
    assert path.with_name("python.ran").read_text() == before


def test_a_program_that_starts_itself_again_does_so_as_a_spare(ranks: Ranks) -> None:
    """It has no sign of the spare, so the second process of the spare is not one."""
    again = (
        "import os, sys\nif os.environ.get('AGAIN') is None:\n"
        "    os.environ['AGAIN'] = '1'; os.execv(sys.executable, [sys.executable, '-u', *sys.argv])"
    )
    start = ranks.begin(again + GO)
    spares = ranks.spares(start, IDLE)
    assert is_ready(ranks, spares)
    taken = spares.take(start)
    assert taken is not None
    ranks.processes.append(taken)
    assert ranks.line(taken) == "go"


def test_a_rank_that_was_a_spare_ends_with_the_code_of_its_program(ranks: Ranks) -> None:
    """Also where its files have gone meanwhile, such as on a full disk."""
    start = ranks.begin("import sys, os.path\n" + GO + "sys.exit(3)\n")
    path = Path(start.command[-1])
    spares = ranks.spares(start, IDLE)
    assert is_ready(ranks, spares)
    path.write_text("import sys, torch\nprint('go')\nsys.exit(3)\n")
    for name in ("stacks", "spare-order", f"torch-{ranks.processes[0].pid}"):
        (ranks.folder / name).unlink()
    (ranks.folder / "stacks").mkdir()
    (ranks.folder / f"torch-{next(iter(spares.pids))}.tmp").mkdir()
    taken = spares.take(start)
    assert taken is not None
    ranks.processes.append(taken)
    assert ranks.line(taken) == "go"
    assert taken.wait() == 3


def test_a_spare_whose_supervisor_never_starts_it_does_not_succeed(ranks: Ranks) -> None:
    spares = ranks.spares(ranks.begin(GO), IDLE)
    spares.tick(200.0, [ranks.processes[0].pid])
    spares.tick(210.0, [ranks.processes[0].pid])
    [spare] = spares._spares.values()
    spare._channel.close()
    assert spare.process.wait() == 1
    spares.end()


def test_spares_that_others_have_killed_are_counted(ranks: Ranks) -> None:
    start = ranks.begin(GO)
    spares = ranks.spares(start, IDLE)
    assert is_ready(ranks, spares)
    spares.end()
    assert spares.count_killed() == 0, "we have ended it"
    for at in (300.0, 500.0):
        spares.begin([start], at - 60)
        assert is_ready(ranks, spares, at)
        [pid] = spares.pids
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid), "it is dead")  # noqa: B023
        if at == 300.0:
            spares.tick(at + 30, [ranks.processes[0].pid])  # ends it first
    assert spares.count_killed() == 2
    assert not spares.pids


def test_the_watch_of_a_rank_never_raises(ranks: Ranks) -> None:
    ranks.begin(
        "import sys\nfor each in list(sys.meta_path): each.find_spec('torch', None)\n"
        "watch = sys.meta_path.pop(0)\nassert 'Watch' in type(watch).__name__\n"
        "def _find_and_load_unlocked(): return inner()\n"
        "def inner(): return watch.find_spec('torch')\n"
        "assert _find_and_load_unlocked() is None\nprint('go')"
    )


def test_a_rank_without_spares_has_nothing_of_them(ranks: Ranks) -> None:
    ranks.begin(
        "import sys\nassert 'Watch' not in str(sys.meta_path), sys.meta_path" + GO,
        BATCHML_SPARES="0",
    )
    assert not list(ranks.folder.glob("torch-*"))


def test_a_rank_runs_as_before_where_our_module_cannot_be_imported(ranks: Ranks) -> None:
    site = ranks.folder / "site"
    shutil.copytree(SITE, site)
    (site / "batchml_torch.py").write_text("raise SyntaxError('of a later Python')")
    (ranks.folder / "library" / "sitecustomize.py").write_text("import sys; sys.is_theirs = True")
    path = os.pathsep.join([str(site), str(ranks.folder / "library")])
    ranks.begin("import sys; assert sys.is_theirs" + GO, PYTHONPATH=path)
    assert (ranks.folder / "stacks").exists()


def test_only_the_processors_that_a_node_may_use_count_as_idle() -> None:
    lines = [
        "cpu  9 9 9 9000 9 9",
        "cpu0 1 2 3 400 50 6",
        "cpu1 1 1 1 7000 1 1",
        "cpu10 1 1 1 1 1 1",
    ]
    assert idle_of("\n".join([*lines, "intr 1 2 3", ""]), {0}) * os.sysconf("SC_CLK_TCK") == 450
    assert idle_of("", {0}) == 0
