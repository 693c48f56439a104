"""Fixtures: a state folder, a real server in a process of its own, and clients for it."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader, Loader
from hypothesis import settings

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.executors import cgroup
from batchml.local.home import Home, ServerEndpoint
from tests.support.browser import Browser, browser
from tests.support.cli import Cli
from tests.support.executor_rig import Rig, need_engine
from tests.support.forked import BATCHML, Asked, run_forked
from tests.support.leftovers import end_with
from tests.support.local_server import client_for
from tests.support.worlds import Worlds, make_pytorch, open_worlds

# A busy machine is no mistake. CI tries the same examples each time, people's runs new ones.
settings.register_profile("suite", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("suite")

# A session of botocore reads a service's description once, and looks once through four hundred
# folders for the names of all; ours, of all tests, do each once. They are files of its package,
# which all clients of a session share as it is.
_load_file = JSONFileLoader.load_file


@cache
def _load_once(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


def _load(loader: JSONFileLoader, path: str) -> Any:
    ours = path.startswith(f"{Loader.BUILTIN_DATA_PATH}{os.sep}")
    return _load_once(path) if ours else _load_file(loader, path)


JSONFileLoader.load_file = _load

_list_services = Loader.list_available_services
_listed: dict[tuple[str, ...], list[str]] = {}


def _list_once(loader: Loader, type_name: str) -> list[str]:
    key = (type_name, *loader.search_paths)
    if key not in _listed:
        _listed[key] = _list_services(loader, type_name)
    return _listed[key]


Loader.list_available_services = _list_once

# A shell makes what it runs behind it deaf to Ctrl-C, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders of which `make test` runs only the tests that are marked as journeys.
_FULL = {"e2e", "process", "torture"}


_TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker of pytest-xdist begin with other tests. In a fresh clone, the first to come
    to a file compiles it, which takes a third of a minute for all, and the others need not.
    """
    gc.disable()  # until all tests are collected
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and [Path(each).resolve() for each in config.args] == [_TESTS]:
        rooms = sorted(path for path in _TESTS.iterdir() if any(path.rglob("test_*.py")))
        rooms += sorted(_TESTS.glob("test_*.py"))
        sizes = [sum(file.stat().st_size for file in path.rglob("*.py")) for path in rooms]
        begin = sum(sizes) * int(worker) / int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = sum(end <= begin for end in accumulate(sizes))
        config.args[:] = map(str, rooms[first:] + rooms[:first])


def pytest_collection_finish() -> None:
    """Of half a million objects that collecting makes, nothing is garbage: do not search them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, as each worker has to, and mark those that only `make check` runs."""
    items.sort(key=lambda item: item.path)
    for item in items:
        rooms = item.path.relative_to(_TESTS).parts
        if not _FULL.isdisjoint(rooms) and item.get_closest_marker("journey") is None:
            item.add_marker("full")


@pytest.fixture(scope="session", autouse=True)
def no_leftovers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers and attempts end with the tests, also if these are killed."""
    end_with(os.getpid(), tmp_path_factory.getbasetemp())


def _make_common(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of all tests of a session, whichever worker of pytest-xdist they run in."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own in the session's
        folder = folder.parent
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    return folder / name


@pytest.fixture(scope="session")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers of a session find what they copy into jobs: a hundred files, each of which
    they would write and sync in every state folder.
    """
    return _make_common(tmp_path_factory, "runtimes")


@contextmanager
def _fresh_home(folder: Path, runtimes: Path) -> Iterator[Home]:
    """A state folder; whatever server holds it at the end is killed."""
    made = Home(folder / "home")
    made.prepare()
    made.runtimes.symlink_to(runtimes)
    yield made
    pid = made.holder()
    if pid is not None and made.is_held():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory, runtimes: Path) -> Iterator[Home]:
    """The state folder of a file's tests that are marked `shared_home`."""
    with _fresh_home(tmp_path_factory.mktemp("shared"), runtimes) as made:
        yield made


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, runtimes: Path) -> Iterator[Home]:
    """A fresh state folder, or the file's, if the test is marked `shared_home`."""
    if request.node.get_closest_marker("shared_home") is not None:
        yield request.getfixturevalue("shared_home")
    else:
        with _fresh_home(tmp_path, runtimes) as made:
            yield made


@pytest.fixture
def server(home: Home) -> ServerEndpoint:
    """A running embedded AWS Batch. A command starts it, because that is a fork (`forge.py`)."""
    if not home.is_held():
        environ = {**os.environ, "BATCHML_HOME": str(home.root)}
        run_forked(BATCHML, Asked("batchml", ("local", "start"), home.root, environ))
    return control.ensure_server(home, SystemClock())


@pytest.fixture
def client(home: Home, server: ServerEndpoint) -> Callable[[str], Any]:
    return lambda service: client_for(home, server, service)


@pytest.fixture
def batch(client: Callable[[str], Any]) -> Any:
    return client("batch")


@pytest.fixture
def logs(client: Callable[[str], Any]) -> Any:
    return client("logs")


@pytest.fixture
def cli(
    request: pytest.FixtureRequest, tmp_path: Path, home: Home, environments: Path
) -> Iterator[Cli]:
    if request.node.get_closest_marker("own_envs") is None and not home.envs.exists():
        home.envs.symlink_to(environments)
    folder = tmp_path / "work"
    folder.mkdir()
    yield Cli(folder, home)


@pytest.fixture(scope="session")
def session_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of a session."""
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def chromium(session_browser: Browser) -> Iterator[Browser]:
    """The browser, without pages that would ask for dashboards of earlier tests again and again."""
    yield session_browser
    session_browser.close_pages()


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the jobs' virtual environments. Each environment is made once in a session,
    whichever worker of pytest-xdist needs it first, or once for all sessions if BATCHML_TEST_ENVS
    names a folder.

    The state folders of tests with `cli` have a link to it, unless they are marked `own_envs`.
    """
    kept = os.environ.get("BATCHML_TEST_ENVS")
    if kept:
        return Path(kept)
    return _make_common(tmp_path_factory, "envs")


@pytest.fixture(scope="session")
def pytorch(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has PyTorch, as jobs have it."""
    home = Home(tmp_path_factory.mktemp("home"))
    home.prepare()
    home.envs.symlink_to(environments)
    return make_pytorch(home)


@pytest.fixture(scope="session")
def worlds(pytorch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Programs of many ranks, without a launcher: it imports the framework once in a session."""
    with open_worlds(pytorch, tmp_path_factory.mktemp("worlds")) as opened:
        yield opened


@pytest.fixture
def rig(home: Home) -> Iterator[Rig]:
    """Attempts in containers of this machine's Docker engine, in which nothing may be left."""
    need_engine()
    made = Rig("docker", home)
    yield made
    made.close()
    assert made.containers() == [], "nothing is left in the engine"


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[cgroup.Groups]:
    """Control groups of a folder of the test's own; skipped where none may be made."""
    found = cgroup.find(tmp_path.name)
    if not found:
        pytest.skip("control groups may not be written here")
    yield found
    cgroup.kill(list(found.values()))
    assert cgroup.remove(list(found.values()), 10)
