"""Page tokens of `batchml.local.batch.reads`."""

from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from batchml.local.batch import reads

PLACE = tuple[int, str, Annotated[int, Meta(ge=0)]]


@given(
    st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8")), st.integers(0, 2**62)
)
def test_what_was_encoded_comes_back(time: int, name: str, offset: int) -> None:
    token = reads.encode_token((time, name, offset))
    assert reads.decode_token(token, PLACE) == (time, name, offset)
    assert token.isascii()
    assert not {*token} & {*"=/+ "}


@pytest.mark.parametrize(
    "token",
    [
        "x", "=", "é", "a b", "W10", "e30=", "bnVsbA==", "LTE=", "W1tb" * 5000, "/w==",
        "WzEsMiwzXQ",
        "WzEsImEiLC0xXQ", reads.encode_token(7), reads.encode_token([1, "a"]),
        reads.encode_token([1, "a", 2, 3]),
    ],
)  # fmt: skip
def test_what_was_never_given_out_is_refused(token: str) -> None:
    with pytest.raises(ValueError):
        reads.decode_token(token, PLACE)


def test_padding_is_no_matter() -> None:
    """Older servers gave it out."""
    assert reads.decode_token("NQ==", int) == reads.decode_token("NQ", int) == 5
