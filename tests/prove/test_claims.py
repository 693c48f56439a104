"""The claims, and the lines of documents and code that are marked as unverified."""

import re
from pathlib import Path

from batchml.prove.claims import ASSUMPTIONS, BY_ID, CLAIMS, EVERYWHERE, claims_of, why_not_asked
from batchml.prove.service import ASKERS
from batchml.prove.steps import BY_NAME, STEPS

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"\(U\)|\bunverified\b", re.IGNORECASE)
OWN = ("batchml/prove/", "docs/prove.md")  # they speak of the mark


def marked_lines() -> list[tuple[str, str]]:
    """The lines with a mark: file, text with the line before and the line after it."""
    paths = [ROOT / "README.md"]
    for folder, pattern in (("docs", "*.md"), ("batchml", "*.py"), ("cfn", "*"), ("images", "*")):
        paths += [path for path in (ROOT / folder).rglob(pattern) if path.is_file()]
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name.startswith(OWN) or "__pycache__" in name:
            continue
        lines = path.read_text("utf-8", "replace").splitlines()
        for at, line in enumerate(lines):
            if MARK.search(line):
                found.append((name, " ".join(lines[max(at - 1, 0) : at + 2])))
    return found


def test_every_line_that_is_marked_as_unverified_has_a_row() -> None:
    missing = [
        f"{file}: {text}" for file, text in marked_lines()
        if not any(row.file == file and row.words in text for row in ASSUMPTIONS)
    ]  # fmt: skip
    assert not missing, "\n".join(["add rows to ASSUMPTIONS of batchml/prove/claims.py:", *missing])


def test_every_row_has_a_line_that_is_marked_as_unverified() -> None:
    lines = marked_lines()
    gone = [
        row for row in ASSUMPTIONS
        if not any(row.file == file and row.words in text for file, text in lines)
    ]  # fmt: skip
    assert not gone


def test_every_row_is_decided_by_claims_or_says_why_not() -> None:
    for row in ASSUMPTIONS:
        assert bool(row.claims) != bool(row.undecided), row
        assert set(row.claims) <= set(BY_ID), row


def test_every_claim_belongs_to_a_step_and_every_step_has_a_function() -> None:
    assert {claim.step for claim in CLAIMS} == set(BY_NAME) == set(ASKERS)
    assert len(BY_ID) == len(CLAIMS)
    for step in STEPS:
        assert set(step.needs) <= {each.name for each in STEPS[: STEPS.index(step)]}


def test_a_claim_is_asked_or_says_why_not() -> None:
    for world in EVERYWHERE:
        for claim in CLAIMS:
            is_asked = claim in claims_of(claim.step, world, ("gpu",))
            assert is_asked == (why_not_asked(claim, world, ("gpu",)) == ""), claim
    assert why_not_asked(BY_ID["user-1000"], "local", ()) == "only AWS can show it"
    assert why_not_asked(BY_ID["nodes-meet"], "aws", ()) == "without --nodes"
