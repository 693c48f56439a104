"""A run that does nothing: shown where a user looks, and ended if the job asks for it."""

import pytest

from tests.support.cli import Cli

SAVE = """
import os, time
from batchml.runtime import should_stop
print("node", os.environ["AWS_BATCH_JOB_NODE_INDEX"], flush=True)
while not should_stop():
    time.sleep(0.1)
open(os.path.join(os.environ["BATCHML_OUTPUT_DIR"], "saved"), "w").close()
"""
# Below what --idle-after takes, so that the test is quick.
QUICK = ("--set-env", "BATCHML_IDLE_AFTER=2", "--set-env", "BATCHML_USAGE_EVERY=0.5")


@pytest.mark.journey
def test_two_nodes_without_a_launcher_that_do_nothing_save_and_end_together(cli: Cli) -> None:
    (cli.folder / "save.py").write_text(SAVE)
    done = cli("submit", "--wait", "--nodes", "2", *QUICK, "--", "python", "save.py")
    assert done.code == 79, done.err
    assert "batchml: idle for 0 min, since" in done.out
    assert "no output, no progress. The run saves and stops" in done.out
    run_id = cli("show", "@last", "--json").json["jobId"]
    assert (cli.home.root / "runs" / run_id / "output" / "saved").exists()
    found = cli("explain", "@last", "--json").json
    assert (found["cause"], found["class"], found["exitCode"]) == ("idle", "app-error", 79)
    assert "did nothing for 2 s and was ended (79)" in found["evidence"][0]
