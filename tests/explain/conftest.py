"""A scripted AWS, one for each module: its clients take a while to make."""

from collections.abc import Iterator

import pytest

from tests.support.explain_world import Aws


@pytest.fixture(scope="module")
def aws() -> Iterator[Aws]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield Aws()
