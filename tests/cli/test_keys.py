"""Keys that are read while something else is on the screen."""

import os
import sys
import termios
from io import StringIO

import pytest

from batchml.cli.terminal import reading_keys


def never(_seconds: float) -> None:
    raise AssertionError


def test_a_key_is_read_at_once_and_the_terminal_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner = os.openpty()
    with os.fdopen(inner) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(inner)
        with reading_keys(never) as rest:
            assert not termios.tcgetattr(inner)[3] & (termios.ICANON | termios.ECHO)
            assert termios.tcgetattr(inner)[3] & termios.ISIG  # Ctrl-C stays Ctrl-C
            assert rest(0.0) == ""
            os.write(outer, b"q")
            assert rest(60.0) == "q"
        assert termios.tcgetattr(inner) == before
    os.close(outer)


def test_where_nothing_can_be_typed_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("q"))
    slept: list[float] = []
    with reading_keys(slept.append) as rest:
        assert rest(3.0) == ""
    assert slept == [3.0]
