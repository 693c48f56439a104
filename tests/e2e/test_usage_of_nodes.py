"""What the nodes of a real run use, and which rank is slow, as a user sees it. docs/seeing.md"""

from itertools import pairwise

from batchml import Client
from batchml.runs.find import load_runs
from batchml.runs.metrics.series import Series
from batchml.runs.metrics.usage import find_nodes, read_usage
from tests.support.cli import Cli, write_job
from tests.support.local_server import wait_for

JOB = """
image = "docker.io/library/python:3.12"
command = ["python", "burn.py"]
nodes = 2
env = {BATCHML_USAGE_EVERY = "0.5"}
[launch]
kind = "torchrun"
processes_per_node = 1
[resources]
vcpus = 1
memory = "64 MiB"
"""

# It computes 46 % of the time as far as the machine lets it, and writes down what it has had. Rank
# 0 says that it waits, and rank 1 that it does not.
BURN = """
import os, resource, time
from batchml.runtime import progress, report, should_stop
rank = int(os.environ["RANK"])
with open(os.path.join(os.environ["BATCHML_OUTPUT_DIR"], f"burn-{rank}"), "w") as told:
    step, began = 0, time.monotonic()
    while not should_stop():
        until = time.process_time() + 0.046
        while time.process_time() < until:
            pass
        time.sleep(max(0.0, began + 0.1 - time.monotonic()))
        step, passed = step + 1, time.monotonic() - began
        began += passed
        progress(step, waited=0.0 if rank else 0.4 * passed)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(time.time(), used.ru_utime + used.ru_stime, file=told, flush=True)
        report(step=step, loss=1 / step + rank)
"""


def own_share(text: str, start: float, end: float) -> float:
    """Cores that the burner had between two times, by its own account."""
    told = [tuple(map(float, line.split())) for line in text.splitlines() if line.count(" ") == 1]

    def used(at: float) -> float:
        (t0, u0), (t1, u1) = next(each for each in pairwise(told) if each[1][0] >= at)
        return u0 + (u1 - u0) * (at - t0) / (t1 - t0)

    return (used(end) - used(start)) / (end - start)


def mean(series: Series) -> tuple[float, float, float]:
    """Of all samples but the first: begin, end, and the mean, each by the time that it is for."""
    told = series.samples
    spans = [after.time - before.time for before, after in pairwise(told)]
    sums = sum(span * each.value for span, each in zip(spans, told[1:], strict=True))
    return told[0].time, told[-1].time, sums / sum(spans)


def test_a_burner_on_two_nodes_is_seen_as_it_sees_itself(cli: Cli) -> None:
    """(C3)"""
    write_job(cli.folder, "burn", JOB, burn__py=BURN)
    assert cli("local", "start", "--vcpus", "2", "--json").code == 0
    run = Client("local", cli.folder, environ=cli.environ).submit("burn")
    context = run._context

    def told() -> list[Series]:
        (found,) = load_runs(context, [run.job_id])
        uses = read_usage(context, find_nodes(context, found, []), whole=True)
        series = [each.series["cpu"] for each in uses if "cpu" in each.series]
        enough = len(series) == 2 and all(len(each.samples) > 8 for each in series)
        return series if enough else []

    series = wait_for(told, "both nodes have told what they use", 60)
    shown = cli("show", "@last", "--plot", "burn.html")
    as_json = cli("show", "@last", "--json").json
    top = cli("top", "--once").out
    run.cancel()
    run.wait()

    for rank, each in enumerate(series):
        start, end, cores = mean(each)
        text = (cli.home.runs / run.job_id / "output" / f"burn-{rank}").read_text()
        # a turn of the burner is 0.046 s; when the machine is busy, its turns are unequal
        assert abs(cores - own_share(text, start, end)) < 0.1
    assert "node 0  RUNNING" in shown.out
    assert "node 1  RUNNING" in shown.out
    assert "rank 1 on node 1 is the slow one: the others wait 40 % of a step for it" in shown.out
    assert as_json["slowRank"]["ranks"] == [1]
    assert [each["name"] for each in as_json["nodes"]] == ["node 0", "node 1"]
    assert 0 < as_json["metrics"]["loss"] <= 1  # of rank 0 alone
    assert "  node 1" in top
    page = (cli.folder / "burn.html").read_text()
    assert "CPU, cores" in page
    assert "loss" in page
