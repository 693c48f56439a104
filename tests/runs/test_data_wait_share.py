"""The sentence of `show` about the time for which a run waited for data."""

from batchml.model.run import JobStatus, Run
from batchml.runs.metrics.data_wait import data_wait_json, find_data_wait
from batchml.runs.metrics.usage import NodeRun, UsageSample


def use(node: str, **usage: float) -> UsageSample:
    run = Run(job_id="j", name="n", job_name="n", key="", queue="q", status=JobStatus.RUNNING)
    return UsageSample(NodeRun(node, run), usage)


def test_the_node_that_waited_most_is_named() -> None:
    nodes = [
        use("node 0", cpu=1.0, staging=12.0, io_wait=3.0, data_wait=4.2),
        use("node 1", cpu=1.0, staging=80.5, data_wait=22.0),
        use("node 2", cpu=1.0),
    ]
    share = find_data_wait(nodes)
    assert share is not None
    assert share.describe(True) == "22 % of the time on node 1 (staging 1 min 20 s)"
    one = find_data_wait(nodes[:1])
    assert one is not None
    assert one.describe(False) == "4 % of the time (staging 12 s, disks 3.0 s)"
    assert data_wait_json(one) == {"dataWait": {"percent": 4.2, "staging": 12.0, "disks": 3.0}}


def test_little_time_at_disks_is_no_line_but_staging_always_is() -> None:
    assert find_data_wait([use("", io_wait=0.4, data_wait=0.9)]) is None
    assert find_data_wait([use("", cpu=1.0)]) is None and data_wait_json(None) == {}
    assert find_data_wait([use("", staging=0.2, data_wait=0.1)]) is not None
    assert find_data_wait([use("", io_wait=2.0, data_wait=1.0)]) is not None
