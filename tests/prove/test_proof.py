"""How the answers to claims are read from the output of commands."""

import pytest

from batchml.prove.children import CommandResult
from batchml.prove.proof import judge_order, latencies, read_facts


def test_facts_are_read_from_any_log_and_cut_lines_are_ignored() -> None:
    text = (
        '[2026-11-28T10:00:00.000Z] PROOF {"fact": "user", "uid": 1000}\nother\n'
        '1 | [2026-11-28T10:00:01.000Z] PROOF {"fact": "line", "number": 1}\n'
        'PROOF {"fact": "line", "numb\nPROOF {broken}\n'
    )
    facts = read_facts(text)
    assert facts.find("user")["uid"] == 1000
    assert [each["number"] for each in facts.all("line")] == [1]
    assert facts.find("metadata") == {}


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([1, 2, 3], ""),
        ([1, 3], "lines are missing: 2"),
        ([1, 2, 2, 3], "lines came twice: 2"),
        ([1, 3, 2], "lines came in the order 1, 3, 2"),
        ([], "lines are missing: 1, 2, 3"),
    ],
)
def test_the_order_of_lines_is_right_or_it_is_said_what_is_wrong(
    numbers: list[int], why: str
) -> None:
    assert judge_order(numbers, 3) == why


def test_the_latency_of_a_line_is_from_its_printing_to_its_arrival() -> None:
    lines = [
        (100.5, "Output [x]:\n"),
        (101.5, 'PROOF {"fact": "line", "number": 1, "at": 100.0}\n'),
        (102.25, 'PROOF {"fact": "line", "number": 2, "at": 102.0}\n'),
    ]
    assert latencies(lines) == [1.5, 0.25]


def test_a_failed_command_is_described_by_its_own_message() -> None:
    err = "Code: 2 files\nbatchml: AWS denies ec2:CreateVpc.\n  Add this statement\n"
    result = CommandResult(("setup", "--yes"), 77, ((0.0, "not JSON\n"),), err, 1.0)
    assert result.document == {}
    assert result.describe() == (
        "batchml setup --yes ended with exit code 77: batchml: AWS denies ec2:CreateVpc. |   "
        "Add this statement"
    )
