"""Data-parallel training on two nodes: jobs/ddp, and any script that was written for torchrun."""

import os
import re
from pathlib import Path

import pytest

from tests.support.cli import Cli, read_rest, read_until, write_job
from tests.support.worlds import ROOT, Worlds, kill_a_rank

TORTURE = bool(os.environ.get("BATCHML_TORTURE"))
PER_NODE = 4 if TORTURE else 1
KILLS = 5 if TORTURE else 1
EPOCHS = 36 * KILLS if TORTURE else 24


def check_losses(printed: str) -> None:
    """It learns, and no epoch was trained on twice with another outcome."""
    found = re.findall(r"Epoch (\d+) \| Loss: ([0-9.]+)", printed)
    losses = dict(found)
    assert len({*found}) == len(losses) == EPOCHS, found
    assert float(losses["0"]) > 20 and float(losses[str(EPOCHS - 1)]) < 3


def write_ddp(folder: Path) -> Path:
    """The job as it is, with fewer processes."""
    source = ROOT / "jobs" / "ddp"
    toml = re.sub(r"per_node = \d+", f"per_node = {PER_NODE}", (source / "job.toml").read_text())
    return write_job(folder, "ddp", toml, ddp__py=(source / "ddp.py").read_text())


@pytest.mark.slow
def test_a_killed_rank_changes_no_bit_of_the_end(cli: Cli, worlds: Worlds, tmp_path: Path) -> None:
    """Two nodes train; any rank is killed; all go on from the last snapshot. (A1, C1)

    The classic lines are there, and the last snapshot is that of an unbroken training, bit for bit.
    """
    job, world = write_ddp(cli.folder), 2 * PER_NODE
    watching = cli.watch("submit", "--wait", "ddp", "-p", f"epochs={EPOCHS}", "-p", "save_every=3")
    seen = read_until(watching, "Submitted job")
    folder = cli.home.runs / re.findall(r"ddp - ([0-9a-f-]{36})", seen)[0] / "checkpoints"
    for _ in range(KILLS):
        kill_a_rank(folder, world)
        seen += read_until(watching, "Resuming training from snapshot at Epoch")
        seen += read_until(watching, "Training snapshot saved at snapshot.pt")
    out, err = read_rest(watching)
    assert watching.returncode == 0, seen + out + err
    check_losses(seen + out)
    assert re.search(rf"\[GPU{world - 1}\] Epoch 7 \| Batchsize: 32 \| Steps: \d+\n", seen + out)
    codes, printed = worlds.run(job / "ddp.py", tmp_path, world, EPOCHS, 3)
    assert {*codes} == {0}, printed
    together = f", {world} processes (gloo)" if world > 1 else ""
    assert printed.count(f"device: CPU, 1 thread, fp32{together}\n") == 1, printed
    check_losses(printed)
    assert (tmp_path / "snapshot.pt").read_bytes() == (folder / "snapshot.pt").read_bytes()


# Ranks of torch that see GPUs as `gpus` says; all else is real.
LACKS_A_GPU = """
import os
import sys
from types import SimpleNamespace

import torch

from batchml.runtime.device import NoDevice, join_torch

gpus = int(sys.argv[1 + int(os.environ["RANK"])])
card = SimpleNamespace(name="H200", total_memory=150 << 30, major=9, minor=0, uuid="the card")
cuda = SimpleNamespace(
    init=torch.cuda.init, is_available=lambda: gpus > 0, device_count=lambda: gpus,
    get_arch_list=lambda: ["sm_90"],
    get_device_properties=lambda index: card, set_device=lambda device: None,
)
torch_here = SimpleNamespace(
    cuda=cuda, distributed=torch.distributed, device=torch.device, version=torch.version,
    get_num_threads=torch.get_num_threads, __version__=torch.__version__,
)
try:
    join_torch(torch_here, can_share=False)
except NoDevice as error:
    sys.exit(error.report())
"""


@pytest.mark.slow
def test_ranks_that_cannot_train_together_all_end_with_the_reason(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Otherwise ranks on GPUs would wait for those on CPUs. The store of rank 0 is real."""
    program = tmp_path / "lacks.py"
    program.write_text(LACKS_A_GPU)
    for gpus, code, why in (
        ((0, 1, 1), 75, "cannot use a GPU, but others have H200"),
        ((1, 1, 1), 78, "3 processes have 1 GPU, and this program needs one for each"),
    ):
        codes, printed = worlds.run(program, tmp_path, 3, *gpus)
        assert codes == [code] * 3, printed
        assert printed.count(why) == 1 and "Traceback" not in printed, printed


# As such scripts are written: it knows the launcher's variables and nothing else.
PLAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
rank, local, world = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(int(sys.argv[1])):
    print(f"[GPU{rank}] Epoch {epoch} | World: {world} | Local: {local}")
    loss = model(torch.rand(32, 20)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

PLAIN_JOB = """
image = "pytorch"
command = ["torchrun", "--nproc_per_node=1", "plain.py", "4"]
nodes = 2
[launch]
kind = "torchrun"
"""


@pytest.mark.slow
def test_a_script_written_for_torchrun_runs_as_it_is(cli: Cli) -> None:
    """Its own `torchrun` is replaced, with what it was told."""
    write_job(cli.folder, "plain", PLAIN_JOB, plain__py=PLAIN)
    shown = cli("submit", "--wait", "plain", timeout=240)
    assert shown.code == 0, shown.out + shown.err
    assert "[GPU0] Epoch 3 | World: 2 | Local: 0" in shown.out


AWS_SCRIPT = """#!/bin/bash
#SBATCH --job-name=ddp-venv
#SBATCH --exclusive
#SBATCH --wait-all-nodes=1
#SBATCH --nodes 2
#BATCHML --image pytorch
declare -a TORCHRUN_ARGS=(
    --nproc_per_node=1
    --nnodes=$SLURM_JOB_NUM_NODES
    --rdzv_id=$SLURM_JOB_ID
    --rdzv_backend=c10d
    --rdzv_endpoint=$(hostname):29500
)
srun torchrun "${TORCHRUN_ARGS[@]}" plain.py 4
"""


@pytest.mark.slow
def test_torchrun_under_srun_meets_at_the_host_name_of_the_first_node(cli: Cli) -> None:
    """As AWS's example for CPUs, `1.venv-train.sbatch`: PyTorch's own agents find each other."""
    (cli.folder / "plain.py").write_text(PLAIN)
    (cli.folder / "train.sbatch").write_text(AWS_SCRIPT)
    shown = cli("submit", "--wait", "train.sbatch", timeout=240)
    assert shown.code == 0, shown.out + shown.err
    for rank in (0, 1):
        assert f"[GPU{rank}] Epoch 3 | World: 2 | Local: 0" in shown.out
