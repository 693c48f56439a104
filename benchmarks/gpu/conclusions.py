"""What the measurements of the checks mean. Pure, and without PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.report import number

GIB = float(1 << 30)

# --- LeNet: kernels and limits --------------------------------------------------------------------

GROUPS = (  # a kernel belongs to the first whose pattern its name has, ignoring case
    ("compiled", "triton"),
    ("optimizer", "multi_tensor|sgd"),
    ("pooling", "pool"),
    ("convolutions", "conv|fprop|dgrad|wgrad|cudnn|nchw|nhwc"),
    ("copies", "memcpy|memset|copy"),
    ("matrix products", "gemm|gemv|cublas|cutlass|nvjet|splitk|addmm|aten::mm"),
    ("loss", "softmax|nll|cross_entropy"),
    ("reading images", "index|gather|sort|perm"),
    ("reductions", "reduce|argmax|sum"),
    ("elementwise", "elementwise|tanh|div|mul|add|fill|zero|eq"),
)


class Kernels(NamedTuple):
    """The kernels of one step, on a CPU the operators."""

    number: float
    seconds: float
    groups: dict[str, float]  # seconds
    longest: list[tuple[str, float, float]]  # name, number, seconds

    def describe(self) -> str:
        """What share of the kernels' time each group has."""
        shares = sorted(self.groups.items(), key=lambda group: -group[1])
        words = [f"{name} {100 * part / self.seconds:.0f} %" for name, part in shares if part]
        return f"{self.number:.0f} kernels a step: {', '.join(words)}"

    def to_json(self) -> dict[str, Any]:
        longest = [
            {"name": name, "a_step": number, "us": round(1e6 * seconds, 2)}
            for name, number, seconds in self.longest
        ]
        groups = {name: round(1e6 * seconds, 2) for name, seconds in self.groups.items()}
        return {
            "number": self.number,
            "us": round(1e6 * self.seconds, 2),
            "groups_us": groups,
            "longest": longest,
        }


def group_of(kernel: str) -> str:
    for name, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "others"


class Bound(NamedTuple):
    """No epoch is shorter than this."""

    name: str
    seconds: float
    note: str


def traffic(images: int, steps: int, activations: int, weights: int) -> float:
    """The bytes that an epoch moves if no cache helps: each activation and its gradient is written
    and read once; a step reads the weights twice, writes and reads their gradients, reads and
    writes weights and momenta.
    """
    return images * 4.0 * activations + steps * 8.0 * weights


def fastest(found: Sequence[tuple[float, float]]) -> int:
    """The place of the fastest among those that learn as well as the first: a point less at most.
    Each has its seconds, and its percentage of right answers.

    Without this rule the largest batch would win, which hardly trains.
    """
    good = [place for place, each in enumerate(found) if each[1] >= found[0][1] - 1]
    return min(good, key=lambda place: found[place][0])


# --- Feeding a trainer ----------------------------------------------------------------------------

CLAIM = 23.0  # percent more steps for a dollar


class Fed(NamedTuple):
    """The steps with one number of workers, after a warm-up."""

    workers: int
    steps: int
    images: int
    seconds: float
    waited: float  # seconds that waited for data
    busy: float  # seconds in which the device computed

    @property
    def speed(self) -> float:
        """Images a second."""
        return self.images / self.seconds

    @property
    def idle(self) -> float:
        """Percent of the time without work for the device."""
        return 100 * max(0.0, 1 - self.busy / self.seconds)


def price_of(further: bool, prices: dict[str, float]) -> float:
    """Dollars an hour of the host of the GPU, and of a further host."""
    return prices.get("head", 0.0) + further * prices.get("worker", 0.0)


def feeding_sentences(
    found: list[Fed], head: int, prices: dict[str, float], limit: float
) -> Iterator[str]:
    """Say which part of the trainer's limit workers reach, and whether a further host pays. `limit`
    is in images a second, `head` the workers of the host of the GPU.
    """
    most_workers = found[-1]
    share = most_workers.speed / limit
    yield (
        f"{most_workers.workers} workers reach {100 * share:.1f} % of what the trainer can take"
        f" ({number(limit)} images/s)."
    )
    if share < 0.9 and most_workers.workers:
        needed = number(round(most_workers.workers / share))
        yield f"At this speed of a worker the trainer could take some {needed} workers."
    alone = [each for each in found if each.workers <= head]
    both = [each for each in found if each.workers > head]
    if not alone or not both or not prices.get("head") or not prices.get("worker"):
        return
    dearer = price_of(True, prices) / price_of(False, prices)
    faster = both[-1].speed / alone[-1].speed
    gain = 100 * (faster / dearer - 1)
    verdict = (
        "confirmed" if gain >= CLAIM else "refuted: it pays, but less" if gain > 0 else "refuted"
    )
    yield (
        f"{both[-1].workers} workers beside {alone[-1].workers}: {faster:.2f} times as fast for"
        f" {dearer:.2f} times the price of an hour: {gain:+.0f} % steps for a dollar. The claim"
        f" of +{CLAIM:.0f} % is {verdict}."
    )


# --- Llama ----------------------------------------------------------------------------------------

MFU_GOAL = 45.0  # percent, at 1 to 3 B weights, compiled
STATE = 16  # bytes of a weight: itself, its gradient and two moments, in 32 bits
USABLE = 0.92  # of the free memory: the allocator's blocks do not fit together exactly


class Variant(NamedTuple):
    """A way to train. All use AdamW with its state in 32 bits, and bf16 in products."""

    sharded: bool  # by FSDP2, whose only process has the whole model
    recompute: bool
    compiled: bool

    def __str__(self) -> str:
        words = ["FSDP2" if self.sharded else "one process without FSDP2"]
        words += ["recomputation"] * self.recompute + ["compiled"] * self.compiled
        return ", ".join(words)


class Measured(NamedTuple):
    size: str
    variant: Variant
    batch: int  # sequences
    speed: float  # tokens a second
    step: float  # seconds
    memory: float  # bytes at the highest
    start: float  # seconds until the second step: compilation and the first use of kernels
    loss: float


def bytes_of_token(config: Any, recompute: bool) -> float:
    """Estimate the memory of the activations of a token: per layer some 20 bytes of a unit of
    width and 8 of a hidden unit; for a vocabulary's word a score, its copy in 32 bits, that one's
    gradient and the softmax.
    """
    layer = 20 * config.width + 8 * config.hidden
    layers = 2 * config.width * config.layers + layer if recompute else layer * config.layers
    return float(layers + 14 * config.vocabulary)


def fitting_batch(config: Any, recompute: bool, free: float, most: int = 16) -> int:
    """The number of sequences of a step that fit into so many bytes: a power of two; 0: none."""
    left = USABLE * free - STATE * config.parameters()
    count = left / (bytes_of_token(config, recompute) * config.sequence)
    return 0 if count < 1 else min(most, 1 << int(math.log2(count)))


def llama_sentences(done: list[Measured], known: dict[str, Any], peak: float) -> list[str]:
    """What compilation, recomputation and FSDP2 change, and the best MFU."""
    found = []
    by_variant = {(each.size, each.variant): each for each in done}
    for each in done:
        pairs = (
            ("Compiled blocks are", each.variant._replace(compiled=False), each.variant.compiled),
            ("Recomputation is", each.variant._replace(recompute=False), each.variant.recompute),
            ("FSDP2 in one process is", each.variant._replace(sharded=False), each.variant.sharded),
        )
        for words, other, is_changed in pairs:
            before = by_variant.get((each.size, other))
            if is_changed and before is not None and before.batch == each.batch:
                saved = (before.memory - each.memory) / GIB
                memory = f"{abs(saved):.1f} GiB {'less' if saved >= 0 else 'more'}"
                found.append(
                    f"{words} {each.speed / before.speed:.2f} times as fast, with {memory}"
                    f" ({each.size}, {before.variant})."
                )
    if peak:
        rated = [(each.speed * known[each.size].flops_per_token() / peak, each) for each in done]
        share, best = max(rated, key=lambda pair: pair[0])
        met = "met" if 100 * share >= MFU_GOAL else "not met"
        found.append(
            f"Best: {100 * share:.1f} % MFU ({best.size}, {best.variant}); the goal of"
            f" {MFU_GOAL:.0f} % is {met}."
        )
    else:
        found.append("Without a peak for this device there is no MFU.")
    return found
