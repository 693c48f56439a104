"""In the style of PyTorch's DDP tutorial series: multigpu_torchrun.py with its snapshot.pt."""

import argparse
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model: nn.Module, save_every: int, snapshot_path: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.model, self.save_every, self.epochs_run = model, save_every, 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            print("Loading snapshot")
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}", flush=True)
        self.model = DDP(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            for _ in range(20):
                loss = nn.functional.mse_loss(self.model(torch.rand(32, 20)), torch.rand(32, 1))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(f"[GPU{self.rank}] Epoch {epoch} | Batchsize: 32 | Steps: 20", flush=True)
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch},
                           self.snapshot_path)  # fmt: skip
                print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}", flush=True)


parser = argparse.ArgumentParser(description="simple distributed training job")
parser.add_argument("total_epochs", type=int)
parser.add_argument("save_every", type=int)
args = parser.parse_args()
init_process_group(backend="gloo")
torch.set_num_threads(1)
Trainer(nn.Linear(20, 1), args.save_every, "snapshot.pt").train(args.total_epochs)
destroy_process_group()
