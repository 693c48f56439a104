"""Which part of the GPU's peak the Llama of jobs/llama reaches: its MFU, and what changes it.

MFU is tokens a second times the operations of a token, by the peak of the data sheet for products
of dense bf16 matrices. A token has 6 N + 12 L d s operations: N weights of matrix products (without
the embedding, which is no product), L layers of width d, sequences of s tokens. Computing
activations again does not count. The tokens are random, which costs the same as text.

Published for one H100 of a group of eight, in bf16 (mosaicml/llm-foundry, scripts/train/
benchmarking): 42 % for 1 B weights, 42 to 46 % for 3 B, 46 % for 7 B. One GPU has no communication.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from batchml.runtime.protocol.instance_types import accelerator_of_card
from benchmarks.gpu import limits
from benchmarks.gpu.checks import CheckRun, first_line
from benchmarks.gpu.conclusions import (
    GIB,
    Measured,
    Variant,
    fitting_batch,
    llama_sentences,
)
from benchmarks.gpu.machine import load_module
from benchmarks.gpu.timing import free_memory, synchronize

SECONDS = 4.0  # of measuring a variant
START_SECONDS = 12.0  # that must be left for a variant, and for a compiled one
COMPILE_SECONDS = 35.0


EAGER = Variant(sharded=True, recompute=False, compiled=False)
COMPILED = EAGER._replace(compiled=True)
LONGEST = EAGER._replace(recompute=True, compiled=True)
# What is compared at a size that needs no recomputation.
VARIANTS = (
    EAGER, COMPILED, EAGER._replace(sharded=False), EAGER._replace(recompute=True), LONGEST,
)  # fmt: skip


def sizes() -> dict[str, Any]:
    """The sizes of the job, and one between 1 B and 7 B weights; the largest last."""
    job = load_module("llama", "model")
    middle = {"3b": job.Config(3072, 26, 24, 8, 8192, 4096)}
    found: dict[str, Any] = {**job.SIZES, **middle}
    return dict(sorted(found.items(), key=lambda each: int(each[1].parameters())))


def measure(run: CheckRun) -> None:
    sharding = load_module("llama", "sharding")
    known = sizes()
    free, dtype = 1e9, torch.float32
    if run.device == "cuda":
        free = float(torch.cuda.mem_get_info()[0])
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = torch.bfloat16
        else:
            torch.set_float32_matmul_precision("high")
            run.finding("This GPU computes no bf16: all figures are for 32 bits.")
    names = ["tiny"] if run.small else [name for name in known if name != "tiny"]
    base = [name for name in names if fitting_batch(known[name], False, free)]
    largest = [name for name in names if fitting_batch(known[name], True, free)]
    if not largest:
        run.leave(f"{free / GIB:.1f} GiB of free memory hold none of the sizes {', '.join(names)}")
    compared = "1b" if "1b" in base else (base or largest)[-1]
    plan = [(compared, variant) for variant in VARIANTS]
    if largest[-1] != compared:
        plan[2:2] = [(largest[-1], LONGEST)]
        plan.append((largest[-1], EAGER._replace(recompute=True)))
    process = sharding.join(1, bf16=dtype == torch.bfloat16)
    try:
        done = perform(run, plan, known, process, dtype, free)
        if not run.small:  # then the steps are too short to say anything
            for sentence in llama_sentences(done, known, peak_of(run)):
                run.finding(sentence)
            biggest = known[largest[-1]].parameters() / 1e9
            words = f"The largest size for {free / GIB:.0f} GiB of free memory"
            run.finding(f"{words}: {largest[-1]}, {biggest:.2f} B weights.")
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()


def perform(
    run: CheckRun, plan: list[tuple[str, Variant]], known: dict[str, Any], process: Any,
    dtype: torch.dtype, free: float,
) -> list[Measured]:  # fmt: skip
    """Measure variant after variant, as far as time allows."""
    done = []
    for size, variant in plan:
        if run.left() < (COMPILE_SECONDS if variant.compiled else START_SECONDS):
            run.finding(f"Left out for lack of time: {size}, {variant}.")
            continue
        config = replace(known[size], recompute=variant.recompute)
        # The batch of the comparison is the one that fits without recomputation.
        batch = fitting_batch(config, False, free) or fitting_batch(config, True, free)
        while batch:
            try:
                found = measure_variant(size, config, variant, process, dtype, batch)
            except torch.OutOfMemoryError:
                run.finding(f"{size}, {variant}: {batch} sequences do not fit.")
                batch //= 2
            except Exception as error:  # such as a compiler that the machine lacks
                run.finding(f"Not possible here: {size}, {variant}: {first_line(error)}.")
                break
            else:
                done.append(found)
                show(run, found, config, peak_of(run))
                break
            finally:
                free_memory()
    if not done:
        run.leave("no variant could be measured, for the reasons below")
    return done


def peak_of(run: CheckRun) -> float:
    """The GPU's peak in operations a second by its data sheet; 0 if it is not in the table."""
    if run.device != "cuda":
        return 0.0
    gpu = torch.cuda.get_device_properties(0)
    row = accelerator_of_card(gpu.name, gpu.total_memory / GIB)
    return 1e12 * (row.bf16_tflops or 0.0) if row else 0.0


def show(run: CheckRun, found: Measured, config: Any, peak: float) -> None:
    name = f"{found.size}, {found.variant}"
    note = (
        f"step {found.step:.3g} s of {found.batch} x {config.sequence} tokens,"
        f" {found.memory / GIB:.1f} GiB, start {found.start:.0f} s"
    )
    run.figure(name, found.speed, "tokens/s", note)
    rate = found.speed * config.flops_per_token()
    if peak:
        run.figure(f"{name}: MFU", 100 * rate / peak, "%", f"of {peak / 1e12:.0f} TFLOP/s")
    product = run.before("limits", limits.SUSTAINED)
    if product:
        note = f"of the measured {product:.0f} TFLOP/s"
        run.figure(f"{name}: of a product", 100 * rate / product / 1e12, "%", note)
    run.detail(name, {"flops": rate, "loss": found.loss, "memory": found.memory})


# --- Training -------------------------------------------------------------------------------------


def measure_variant(
    size: str, config: Any, variant: Variant, process: Any, dtype: torch.dtype, batch: int
) -> Measured:
    """Train some steps. Raises OutOfMemoryError, and ArithmeticError if the loss is no number."""
    device = process.device
    began = time.perf_counter()
    trainer = Trainer(config, variant, process, dtype)
    shape = (batch, config.sequence + 1)
    tokens = torch.randint(config.vocabulary, shape, device=device)
    inputs, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(2):
        loss = trainer.step(inputs, wanted)
    synchronize(device.type)
    start = time.perf_counter() - began
    trainer.step(inputs, wanted)
    synchronize(device.type)
    count, since = 0, time.perf_counter()
    limit = SECONDS if device.type == "cuda" else 0.2
    while count < 3 or time.perf_counter() - since < limit:
        loss = trainer.step(inputs, wanted)
        synchronize(device.type)
        count += 1
    step = (time.perf_counter() - since) / count
    value = float(loss)
    if not math.isfinite(value):
        raise ArithmeticError(f"the loss is {value}")
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    speed = batch * config.sequence / step
    return Measured(size, variant, batch, speed, step, float(memory), start, value)


class Trainer:
    """The model of the job and its optimizer."""

    def __init__(self, config: Any, variant: Variant, process: Any, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self._sharding = load_module("llama", "sharding")
        self._variant, self._dtype, self._device = variant, dtype, process.device.type
        if variant.sharded:
            self.model = self._sharding.build(config, process, dtype)
            self._fill()
        else:
            with process.device:
                self.model = load_module("llama", "model").Llama(config)
        if variant.compiled:
            self._compile()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Do one step; return the loss, on the device."""
        enabled = not self._variant.sharded and self._dtype != torch.float32
        self.optimizer.zero_grad()
        with torch.autocast(self._device, self._dtype, enabled=enabled):
            loss: torch.Tensor = self.model(tokens, wanted)
        loss.backward()
        if self._variant.sharded:
            self._sharding.clip_gradients(self.model.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _fill(self) -> None:
        """Random weights, at once on the device. The job's own need the whole model once more."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                own = parameter.to_local()
                _ = own.fill_(1) if "norm" in name else own.normal_(0, 0.02)

    def _compile(self) -> None:
        """Compile the blocks, which are alike, so that the first one's code serves all. What FSDP2
        does before and after a block, and the recomputation, stay outside of it.
        """
        torch._dynamo.reset()
        backend = "inductor" if self._device == "cuda" else "aot_eager"
        for block in self.model.blocks:
            block._forward = torch.compile(block._forward, backend=backend, dynamic=False)
