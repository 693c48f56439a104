"""What a test needs and a machine may lack: an engine, a scanner, an accelerator."""

import os
from typing import NoReturn

import pytest


def is_required() -> bool:
    """True in CI, where a test that cannot run is a failure: BATCHML_REQUIRE_DOCKER=1."""
    return bool(os.environ.get("BATCHML_REQUIRE_DOCKER"))


def unavailable(what: str) -> NoReturn:
    """Skip the test, visibly, for want of `what`; fail it in CI."""
    if is_required():
        pytest.fail(what)
    pytest.skip(what)
