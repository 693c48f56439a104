"""Sharded checkpoints: each process writes its share, and any number of processes can read them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from batchml.runtime import checkpoint


class Checkpoints:
    """Checkpoints of a training: weights, the optimizer's state, and the position in the data.

    `folder` has the checkpoints; "" is the checkpoint folder of the run.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder

    def _state(self, step: int, position: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        done = {"step": torch.tensor(step), "position": torch.tensor(position)}
        return {"model": model, "optimizer": optimizer, "done": done}

    def save(self, step: int, position: int) -> bool:
        """Save after `step` steps. Return False if that failed; older checkpoints remain."""
        state = self._state(step, position)

        def write_shard(folder: str) -> None:
            dcp.save(state, checkpoint_id=folder)

        rank, world = dist.get_rank(), dist.get_world_size()
        return checkpoint.save_shards(write_shard, step, rank, world, folder=self._folder)

    def load(self) -> tuple[int, int]:
        """Load the newest complete checkpoint; return its step and position, 0 without one.

        Rank 0 chooses for all ranks, so that all continue from the same step. Raises ValueError for
        a checkpoint of another model.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            newest = checkpoint.newest(self._folder)
            found = [newest and newest.path]
        dist.broadcast_object_list(found)
        if found[0] is None:
            return 0, 0
        state = self._state(0, 0)
        try:
            dcp.load(state, checkpoint_id=found[0])
        except CheckpointException as error:
            causes = sorted({str(cause[0]) for cause in error.failures.values()})
            raise ValueError(f"{found[0]} is of another model: {'; '.join(causes)}") from None
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["done"]["step"]), int(state["done"]["position"])
