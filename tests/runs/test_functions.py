"""Python functions as runs: what is sent, what cannot be, and how a result is read."""

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchml.client import Client
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError, RunFailed, UsageError
from batchml.handles import MapHandle
from batchml.model.run import Attempt, JobStatus, Record, Run
from batchml.runs.functions.packing import pack_function
from batchml.runs.functions.results import ItemResult, in_order, read_result
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.function import RAISED, RESULT, RETURNED, FunctionCall, ResultHeader
from tests.support.fakes import FakeClock

LOCK = threading.Lock()


def import_file(folder: Path, name: str, text: str) -> ModuleType:
    """Write a module of the user into a folder, and import it."""
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    yield import_file(tmp_path, "users_module", "def double(x):\n    return 2 * x\n")
    del sys.modules["users_module"]


def closure_over(value: object) -> Callable[[], object]:
    return lambda: value


def mistakes_of(function: Callable[..., Any], *items: tuple[Any, ...], folder: Path) -> list[str]:
    with pytest.raises(ConfigError, match="nothing was sent") as refused:
        pack_function(function, items or [()], folder)
    return list(refused.value.mistakes)


# --- What is sent ---------------------------------------------------------------------------------


def test_a_function_of_a_module_is_sent_by_name(module: ModuleType, tmp_path: Path) -> None:
    packed = pack_function(module.double, [(3,)], tmp_path)
    assert packed.modules == ("users_module.py",)
    assert not packed.call.by_value
    assert packed.run_name == "double"
    assert pickle.loads(packed.files[".batchml-function/arguments.pickle"]) == (3,)


def test_a_lambda_is_sent_with_its_code_and_its_values(tmp_path: Path) -> None:
    packed = pack_function(closure_over(7), [()], tmp_path)
    assert packed.call.by_value and packed.run_name == "lambda"
    assert pickle.loads(packed.files[".batchml-function/function.pickle"])() == 7


def test_each_item_has_its_place_among_the_arguments(module: ModuleType, tmp_path: Path) -> None:
    packed = pack_function(module.double, [("a",), ("bcd" * 100,), ("e",)], tmp_path)
    data = packed.files[".batchml-function/arguments.pickle"]
    call = FunctionCall.read(packed.files[".batchml-function/call.json"])
    found = [pickle.loads(data[call.position(index) :]) for index in range(3)]
    assert found == [("a",), ("bcd" * 100,), ("e",)]


def test_folders_of_the_search_path_are_sent_that_lie_in_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path / "src")
    assert pack_function(len, [("a",)], tmp_path).call.search == ["src"]


def test_the_same_call_makes_the_same_code(module: ModuleType, tmp_path: Path) -> None:
    first, again = (pack_function(module.double, [(1,), (2,)], tmp_path) for _ in range(2))
    assert first == again


# --- What cannot be sent --------------------------------------------------------------------------


def test_the_closure_variable_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(closure_over(LOCK), folder=tmp_path)
    assert mistake.startswith(
        "the closure variable 'value' (lock) of the function closure_over.<lambda> cannot be sent: "
        "cannot pickle '_thread.lock' object."
    )


def test_the_place_inside_an_argument_is_named(module: ModuleType, tmp_path: Path) -> None:
    (mistake,) = mistakes_of(module.double, ({"a": [1, LOCK]},), folder=tmp_path)
    assert mistake.startswith("element 1 (lock) of the key 'a' of argument 1 of double cannot be")


def test_every_item_that_cannot_be_sent_is_named(module: ModuleType, tmp_path: Path) -> None:
    found = mistakes_of(module.double, (1,), (LOCK,), (2,), (LOCK,), folder=tmp_path)
    assert [each.split(" cannot")[0] for each in found] == [
        "item 1 (lock) of double", "item 3 (lock) of double"
    ]  # fmt: skip


def test_arguments_that_a_function_does_not_take_are_refused(tmp_path: Path) -> None:
    def cube(x: int, *, power: int = 3) -> int:
        return x * power

    (missing,) = mistakes_of(cube, folder=tmp_path)
    assert missing.startswith("missing a required argument: 'x': its arguments are (x: int")
    (many,) = mistakes_of(cube, (1, 2), folder=tmp_path)
    assert many.startswith("too many positional arguments")
    (of_partial,) = mistakes_of(partial(cube, power=2), folder=tmp_path)
    assert "missing a required argument: 'x'" in of_partial
    pack_function(partial(cube, 2), [()], tmp_path)

    @wraps(cube)
    def with_x(*args: int) -> int:  # it takes other arguments than the function that it wraps
        return len(args) + cube(3)

    pack_function(with_x, [()], tmp_path)


def test_the_argument_of_a_partial_is_named(module: ModuleType, tmp_path: Path) -> None:
    (mistake,) = mistakes_of(partial(module.double, x=LOCK), folder=tmp_path)
    assert "the partial's argument 'x' (lock) of the function double" in mistake


def test_a_module_outside_the_folder_is_named(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    (mistake,) = mistakes_of(module.double, (1,), folder=tmp_path / "sent")
    assert f"users_module, {tmp_path / 'users_module.py'}, which is neither below" in mistake


def test_a_module_that_an_ignore_file_excludes_is_named(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / ".batchmlignore").write_text("users_*.py\n")
    with pytest.raises(ConfigError, match=r"users_module.py: an ignore file excludes it"):
        client_in(tmp_path).plan(module.double, 1)


def test_an_argument_that_is_too_large_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        pack_function(print, [("a", "b" * 5000)], tmp_path, limit=1000)
    (mistake,) = refused.value.mistakes
    assert mistake.startswith("argument 2: 5.0 KiB; at most 1000 B are sent with a run")


# --- Submitting -----------------------------------------------------------------------------------


def client_in(folder: Path) -> Client:
    return Client("local", folder, environ={"BATCHML_HOME": str(folder / "home")})


def test_a_function_is_a_command_and_takes_the_options_of_submit(
    module: ModuleType, tmp_path: Path
) -> None:
    request = client_in(tmp_path).plan(module.double, 3, vcpus=2, tags={"a": "b"})["SubmitJob"]
    assert request["tags"]["batchml:function"] == "double" and request["tags"]["a"] == "b"
    assert request["jobName"].startswith("double")
    command = request["containerOverrides"]["command"]
    assert command == ["python3", "-m", "batchml.runtime.function", "double"]


def test_options_that_contradict_a_function_are_refused(module: ModuleType, tmp_path: Path) -> None:
    client = client_in(tmp_path)
    with pytest.raises(UsageError, match="command: a function is what the run calls"):
        client.submit(module.double, 1, command=["true"])
    with pytest.raises(UsageError, match="array: map makes an array"):
        client.map(module.double, [1, 2], array=3)
    with pytest.raises(UsageError, match="map: 10,001 items"):
        client.map(module.double, range(10_001))
    with pytest.raises(UsageError, match="map: 'double' is not a function"):
        client.map("double", [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 arguments after the job"):
        client.submit("lenet", 1, 2)  # type: ignore[call-overload]
    assert not (tmp_path / "home").exists()


def test_map_of_nothing_sends_nothing(module: ModuleType, tmp_path: Path) -> None:
    nothing = client_in(tmp_path).map(module.double, [])
    assert (nothing.result(), list(nothing.results()), len(nothing)) == ([], [], 0)
    assert list(nothing) == [] and isinstance(nothing, MapHandle)
    assert not (tmp_path / "home").exists()


# --- Results --------------------------------------------------------------------------------------


def context_in(folder: Path) -> Context:
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "local")
    return Context(settings, FakeClock(), folder)


def ended(status: JobStatus, exit_code: int = 0, attempts: int = 1, reason: str = "") -> FoundRun:
    run = Run(
        "j-1", "train", "default", status, exit_code=exit_code, attempts=(Attempt(),) * attempts,
        reason=reason, status_reason="Essential container in task exited",
    )  # fmt: skip
    return FoundRun(run, Record(key="k", name="train", job_name="train", env="local", queue="q"))


def write_result(folder: Path, header: ResultHeader, data: bytes = b"") -> None:
    output = context_in(folder).home.runs / "j-1" / "output"
    output.mkdir(parents=True, exist_ok=True)
    (output / RESULT).write_bytes(header.to_line() + data)


def test_a_value_comes_back(tmp_path: Path) -> None:
    write_result(tmp_path, ResultHeader(RETURNED, 1, "3.11"), pickle.dumps({"loss": 0.5}))
    context = context_in(tmp_path)
    assert read_result(context, ended(JobStatus.SUCCEEDED)) == {"loss": 0.5}


def test_an_exception_comes_back_with_its_traceback(tmp_path: Path) -> None:
    data = pickle.dumps(KeyError("lr"))
    write_result(tmp_path, ResultHeader(RAISED, 1, "3.11", "Traceback of the run"), data)
    with pytest.raises(KeyError) as raised:
        read_result(context_in(tmp_path), ended(JobStatus.FAILED, 1))
    assert raised.value.args == ("lr",)
    assert raised.value.__notes__ == ["In the run train j-1:\nTraceback of the run"]


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (ResultHeader(RAISED, 1, "3.11", "Boom: 1"), b"", "Boom: 1"),
        (ResultHeader(RAISED, 1, "3.11", "Boom: 1\n"), b"no pickle", "cannot be loaded here"),
        (ResultHeader(RAISED, 1, "3.4", "Boom: 1", by_value=True), b"", "Boom: 1"),
        (ResultHeader(RAISED, 1, "3.11", "KeyboardInterrupt"), pickle.dumps(KeyboardInterrupt()),
         "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_an_exception_that_cannot_be_raised_here_is_told_as_text(
    tmp_path: Path, header: ResultHeader, data: bytes, words: str
) -> None:
    write_result(tmp_path, header, data)
    with pytest.raises(RunFailed, match=words) as raised:
        read_result(context_in(tmp_path), ended(JobStatus.FAILED, 1))
    assert raised.value.exit_code == 1


def test_a_result_with_code_of_another_python_is_not_loaded(tmp_path: Path) -> None:
    write_result(tmp_path, ResultHeader(RETURNED, 1, "3.4", by_value=True), pickle.dumps(1))
    with pytest.raises(RunFailed, match=r"code of Python 3\.4"):
        read_result(context_in(tmp_path), ended(JobStatus.SUCCEEDED))


def test_a_run_that_was_killed_names_its_class_and_explain(tmp_path: Path) -> None:
    found = ended(JobStatus.FAILED, 137, reason="OutOfMemoryError: Container killed")
    with pytest.raises(RunFailed, match=r"out-of-memory: .*Why: batchml explain j-1") as raised:
        read_result(context_in(tmp_path), found)
    assert (raised.value.outcome, raised.value.exit_code) == ("out-of-memory", 137)


def test_the_exception_of_an_earlier_attempt_is_not_the_result(tmp_path: Path) -> None:
    write_result(tmp_path, ResultHeader(RAISED, 1, "3.11", "old"), pickle.dumps(KeyError("old")))
    found = ended(JobStatus.FAILED, 137, attempts=2, reason="OutOfMemoryError: killed")
    with pytest.raises(RunFailed, match="out-of-memory"):
        read_result(context_in(tmp_path), found)


def test_a_program_that_ends_before_the_function_has_no_result(tmp_path: Path) -> None:
    (context_in(tmp_path).home.runs / "j-1" / "output").mkdir(parents=True)
    with pytest.raises(RunFailed, match="the program ended before the function did"):
        read_result(context_in(tmp_path), ended(JobStatus.SUCCEEDED))


def test_results_are_in_the_order_of_the_items_and_an_error_names_its_item() -> None:
    assert in_order(iter([ItemResult(1, "b"), ItemResult(0, "a")])) == ["a", "b"]
    items = [ItemResult(1, error=KeyError("x")), ItemResult(0, "a")]
    with pytest.raises(KeyError) as raised:
        in_order(iter(items))
    assert raised.value.__notes__ == ["It is the result for item 1 of 2."]
