"""`batchml.local.batch.reads`."""

from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from batchml.local.batch import reads as tokens

PLACE = tuple[int, str, Annotated[int, Meta(ge=0)]]


@given(
    st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8")), st.integers(0, 2**62)
)
def test_what_was_encoded_comes_back(time: int, name: str, offset: int) -> None:
    token = tokens.encode((time, name, offset))
    assert tokens.decode(token, PLACE) == (time, name, offset)
    assert token.isascii()
    assert not {*token} & {*"=/+ "}


@pytest.mark.parametrize(
    "token",
    [
        "x", "=", "é", "a b", "W10", "e30=", "bnVsbA==", "LTE=", "W1tb" * 5000, "/w==",
        "WzEsMiwzXQ",
        "WzEsImEiLC0xXQ", tokens.encode(7), tokens.encode([1, "a"]), tokens.encode([1, "a", 2, 3]),
    ],
)  # fmt: skip
def test_what_was_never_given_out_is_refused(token: str) -> None:
    with pytest.raises(ValueError):
        tokens.decode(token, PLACE)


def test_padding_is_no_matter() -> None:
    """Older servers gave it out."""
    assert tokens.decode("NQ==", int) == tokens.decode("NQ", int) == 5
