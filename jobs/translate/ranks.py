"""The ranks of a training: processes that torchrun starts, or one process without torchrun."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import distributed, nn

from batchml.runtime.device import join_torch


class Ranks:
    """This rank, and operations of all ranks together. Raises NoDevice."""

    def __init__(self) -> None:
        joined = join_torch(torch)
        self.rank, self.world, self.device = joined.rank, joined.world, joined.device
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.autocast = joined.autocast

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wrap the model so that gradients are the means over all ranks."""
        if self.world == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def sum(self, *numbers: float) -> list[float]:
        if self.world == 1:
            return list(numbers)
        block = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(block)
        return [float(number) for number in block]

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0, on all ranks."""
        values = [value]
        if self.world > 1:
            distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def leave(self) -> None:
        # DistributedDataParallel is part of a reference cycle and holds the process group. If the
        # group lives until Python ends, the process may abort there (torch 2.13, gloo).
        gc.collect()
        distributed.destroy_process_group()
