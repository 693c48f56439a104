"""The claims, and the assumptions that they decide. Their lines: tests/test_documents.py."""

from batchml.prove.claims import ASSUMPTIONS, BY_ID, CLAIMS, EVERYWHERE, claims_of, why_not_asked
from batchml.prove.service import ASKERS
from batchml.prove.steps import BY_NAME, STEPS


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
    assert why_not_asked(BY_ID["user-1000"], "local", ()) == "it needs AWS"
    assert why_not_asked(BY_ID["shell-runs"], "endpoint", ()) == "", (
        "whether it runs jobs, it shows"
    )
    assert why_not_asked(BY_ID["nodes-meet"], "aws", ()) == "it needs --nodes"
