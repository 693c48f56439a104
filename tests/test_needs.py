"""What a machine lacks is skipped on a laptop and fails in CI."""

import pytest

from tests.support.needs import unavailable


def test_it_is_skipped_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHML_REQUIRE_DOCKER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no scanners"):
        unavailable("no scanners")


def test_it_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHML_REQUIRE_DOCKER", "1")
    with pytest.raises(pytest.fail.Exception, match="no scanners"):
        unavailable("no scanners")
