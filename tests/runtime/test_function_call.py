"""The program that calls a function in a run: what it loads, and what it writes."""

import io
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchml.runs.functions.packing import pack_function
from batchml.runtime.function import CannotCall, ResultWriter, call, load
from batchml.runtime.protocol.function import (
    DESCRIPTION,
    ENDED,
    FOLDER,
    RAISED,
    RESULT,
    RETURNED,
    FunctionCall,
    ResultHeader,
    python_version,
)


def closure(value: int) -> Callable[..., Any]:
    """A function that is sent with its code."""
    return lambda *others: (value, *others)


def unpacked(folder: Path, function: Callable[..., Any], *items: tuple[Any, ...]) -> Path:
    """The code folder of a run that calls a function."""
    for name, data in pack_function(function, items, folder).files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def result_of(folder: Path) -> tuple[ResultHeader, Any]:
    stream = io.BytesIO((folder / RESULT).read_bytes())
    header = ResultHeader.read(stream)
    data = stream.read()
    return header, pickle.loads(data) if data else None


def environ(output: Path, **more: str) -> dict[str, str]:
    output.mkdir(exist_ok=True)
    return {"AWS_BATCH_JOB_ID": "j", "BATCHML_OUTPUT_DIR": str(output), **more}


def test_each_child_calls_the_function_with_its_item(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, closure(7), (1,), (2, "b"), (3,))
    for index, expected in enumerate([(7, 1), (7, 2, "b"), (7, 3)]):
        where = environ(tmp_path / "out", AWS_BATCH_JOB_ARRAY_INDEX=str(index))
        assert call(str(folder), where) == 0
        assert result_of(tmp_path / "out") == (
            ResultHeader(RETURNED, 1, python_version()),
            expected,
        )


def test_with_one_item_all_children_call_it(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, closure(7), ("a",))
    assert load(str(folder), 5)[1] == ("a",)


def test_an_exception_is_written_with_the_users_part_of_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked(tmp_path, int, ("no number",))
    assert call(str(folder), environ(tmp_path / "out", AWS_BATCH_JOB_ATTEMPT="2")) == 1
    header, error = result_of(tmp_path / "out")
    assert (header.end, header.attempt) == (RAISED, 2)
    assert isinstance(error, ValueError) and "no number" in header.text
    assert header.text in capsys.readouterr().err and "runtime/function.py" not in header.text


def test_a_result_that_cannot_be_pickled_is_an_error(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, threading.Lock, ())
    assert call(str(folder), environ(tmp_path / "out")) == 1
    header, value = result_of(tmp_path / "out")
    assert value is None and header.end == ENDED
    assert header.text.startswith("its result, a lock, cannot be pickled")


def test_a_function_that_ends_the_program_has_no_result(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, sys.exit, (3,))
    with pytest.raises(SystemExit):
        call(str(folder), environ(tmp_path / "out"))
    assert result_of(tmp_path / "out")[0].text == "the function ended the program: sys.exit(3)"


def test_code_of_another_python_is_not_loaded(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, closure(7), ())
    path = folder / FOLDER / DESCRIPTION
    path.write_bytes(FunctionCall.read(path.read_bytes())._replace(python="3.4").to_json())
    assert call(str(folder), environ(tmp_path / "out")) == 78
    assert "was sent by Python 3.4, and this image has" in result_of(tmp_path / "out")[0].text


def test_a_code_folder_without_a_function_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotCall, match="submit it from Python again"):
        load(str(tmp_path), 0)


def test_other_nodes_than_the_main_node_write_no_result(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, closure(7), ())
    where = environ(tmp_path / "out", AWS_BATCH_JOB_NODE_INDEX="1")
    assert call(str(folder), {**where, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}) == 0
    assert not (tmp_path / "out" / RESULT).exists()


def test_the_result_of_an_earlier_attempt_is_removed(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text("old")
    ResultWriter(str(tmp_path), 2).clear()
    assert not (tmp_path / RESULT).exists()


@pytest.mark.parametrize("data", [b"", b"{}\n", b"no json\n", b'{"end": "x"}\n', b"[1]\n"])
def test_another_file_is_no_result(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a result"):
        ResultHeader.read(io.BytesIO(data))
