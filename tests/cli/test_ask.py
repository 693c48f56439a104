"""The questions that `setup` and `teardown` ask."""

import io
import sys

import pytest

from batchml.cli.output import confirm
from batchml.errors import UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("expected", "typed", "agreed"),
    [
        (("y", "yes"), "y\n", True),
        (("y", "yes"), " YES \n", True),
        (("y", "yes"), "\n", False),
        (("y", "yes"), "", False),  # Ctrl-D
        (("batchml-dev-GPU",), "batchml-dev-GPU\n", True),
        (("batchml-dev-GPU",), "y\n", False),
    ],
)
def test_an_answer_is_what_was_expected_or_no(
    monkeypatch: pytest.MonkeyPatch, expected: tuple[str, ...], typed: str, agreed: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert confirm("Do this?", "--yes", yes=False, expected=expected) is agreed


def test_without_a_terminal_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="add --yes"):
        confirm("Do this?", "--yes", yes=False)
    assert confirm("Do this?", "--yes", yes=True)
