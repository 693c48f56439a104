"""Distribute one model over all processes: by FSDP2, and by tensor parallelism if requested."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from model import Config, Llama, first_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from batchml.runtime.device import join_torch


class Process(NamedTuple):
    """This process among all processes. A single process needs no launcher."""

    device: torch.device
    precision: str  # that pays on this device: bf16 or fp32
    mesh: DeviceMesh  # axes "data" and "tensor"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    @property
    def readers(self) -> int:
        """The number of tensor groups. Processes of a group read the same data."""
        return self.mesh["data"].size()

    @property
    def reader(self) -> int:
        return self.mesh["data"].get_local_rank()


def join(tensor_parallel: int, bf16: bool) -> Process:
    """Connect to the other processes.

    Raises ValueError if they cannot form tensor groups, and NoDevice if they lack GPUs.
    """
    joined = join_torch(torch, bf16=bf16, can_share=False)
    device, world = joined.device, joined.world
    if world % tensor_parallel:
        raise ValueError(f"--tensor-parallel {tensor_parallel} does not divide {world} processes.")
    shape = (world // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    return Process(device, joined.precision, mesh)


def build(config: Config, process: Process, dtype: torch.dtype) -> Llama:
    """Build the model. Each process has only its share, at any time.

    Raises ValueError if the heads cannot be divided among the processes of a tensor group.
    """
    with torch.device("meta"):
        model = Llama(config)
    _split_tensors(model, process.mesh["tensor"])
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary positions need their 32 bits
    )
    for block in model.blocks:
        fully_shard(block, mesh=process.mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=process.mesh["data"], mp_policy=policy)
    model.to_empty(device=process.device)
    return model


def _split_tensors(model: Llama, mesh: DeviceMesh) -> None:
    """Split each pair of matrix products so that one all-reduce follows it (Megatron-LM)."""
    size = mesh.size()
    if size == 1:
        return
    config = model.config
    if config.heads % size or config.kv_heads % size or config.vocabulary % size:
        raise ValueError(
            f"--tensor-parallel {size} has to divide {config.heads} heads,"
            f" {config.kv_heads} heads of keys and values, and {config.vocabulary} tokens."
        )
    column, row = ColwiseParallel, RowwiseParallel
    ends = {
        "embedding": row(input_layouts=Replicate()),
        "output": column(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        attention = {f"attention.w{name}": column() for name in "qkv"}
        forward = {"feed_forward.w1": column(), "feed_forward.w3": column()}
        outward = {"attention.wo": row(), "feed_forward.w2": row()}
        parallelize_module(block, mesh, {**attention, **forward, **outward})


def fill(model: Llama, seed: int, device: torch.device) -> None:
    """Fill the model with the initial weights. Each process takes its share."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    for part in first_weights(model.config, seed, device):
        set_model_state_dict(model, part, options=options)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`; return the norm before.

    Unlike `torch.nn.utils.clip_grad_norm_` it needs one all-reduce, and weights may be on several
    meshes: tensor parallelism does not split the weights of the norms.
    """
    world = dist.get_world_size()
    squares, pieces = [], []
    for parameter in parameters:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        piece = gradient.to_local()
        holders = world // _pieces(gradient)
        squares.append(torch.linalg.vector_norm(piece, dtype=torch.float32) ** 2 / holders)
        pieces.append(piece)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for piece in pieces:
        piece.mul_(factor)
    return norm


def _pieces(tensor: DTensor) -> int:
    """Count the pieces into which a tensor is cut, without copies on other processes."""
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(i) for i, at in axes if not at.is_replicate())
