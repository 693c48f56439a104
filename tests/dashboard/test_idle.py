"""When the dashboard ends by itself."""

from batchml.dashboard.service import IDLE_AFTER, is_idle


def test_it_ends_after_an_hour_without_a_page_but_not_with_one() -> None:
    assert not is_idle(IDLE_AFTER - 1, has_listeners=False)
    assert is_idle(IDLE_AFTER + 1, has_listeners=False)
    assert not is_idle(10 * IDLE_AFTER, has_listeners=True)
