"""Where head and workers of a Ray gang find each other."""

import os
import stat
from pathlib import Path

import pytest

from batchml.runtime.nodes.ray.rules import HeadRecord, HeadRendezvous
from batchml.runtime.storage.store import StoreError

CARD = HeadRecord("job-1", 1, "10.0.0.1", 6379, 7000, "2.60.0", "3.11.7", 0.0)


def test_group_runs_of_any_user_can_use_the_workspace_for_their_rendezvous(tmp_path: Path) -> None:
    """A server under a strict umask, and containers of another user after it."""
    meeting = HeadRendezvous.of({"BATCHML_WORKSPACE": str(tmp_path), "BATCHML_GANG_KEY": "key"})
    assert meeting.head() is None
    assert meeting.end_code() is None
    before = os.umask(0o077)
    try:
        meeting.publish(CARD)
        meeting.end(3, 1.0)
    finally:
        os.umask(before)
    assert (meeting.head(), meeting.end_code()) == (CARD, 3)
    for folder in (".batchml", ".batchml/gangs", ".batchml/gangs/key", ".batchml/gangs/key/gang"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o777
    meeting.publish(CARD)
    assert meeting.end_code() is None  # the gang begins again


def test_a_group_run_without_a_store_for_its_rendezvous_fails() -> None:
    with pytest.raises(StoreError, match="cannot find each other"):
        HeadRendezvous.of({"BATCHML_WORKSPACE": "/w"})
