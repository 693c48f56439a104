"""TorchX's aws_batch scheduler, in its own environment: runs, waits, reads a log, lists."""

from torchx.components.utils import sh
from torchx.runner import get_runner

with get_runner() as runner:
    script = "echo node $AWS_BATCH_JOB_NODE_INDEX of $AWS_BATCH_JOB_NUM_NODES"
    app = sh("sh", "-c", script, image="any", num_replicas=2, memMB=64)
    handle = runner.run(app, scheduler="aws_batch", cfg={"queue": "default"})
    status = runner.wait(handle, wait_interval=0.2)
    print("state", status.state.name)
    print("log", *(line.strip() for line in runner.log_lines(handle, "sh", k=0)))
    print("listed", handle in [each.app_handle for each in runner.list("aws_batch")])
    print("replicas", runner.describe(handle).roles[0].num_replicas)
