"""Finding: what a check says of one thing, and the way out."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Mark = Literal["ok", "warning", "problem"]

ALL_WELL, SOMETHING, ACCESS = 0, 1, 77  # exit codes of `doctor`


class Finding(Struct, frozen=True):
    """One line, and below it what to type or to paste, line by line.

    `check` is a word for scripts. `is_access` says that credentials or permissions are at fault.
    """

    check: str
    mark: Mark
    text: str
    fix: tuple[str, ...] = ()
    is_access: bool = False


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing is a problem, 77 when credentials or permissions are, else 1."""
    problems = [finding for finding in findings if finding.mark == "problem"]
    if any(finding.is_access for finding in problems):
        return ACCESS
    return SOMETHING if problems else ALL_WELL
