"""How fast LeNet trains when the images are on the device, and what the time goes to.

The network is that of jobs/lenet. Each variant trains from the same weights. The goal of 0.1 s for
an epoch of 60,000 images means 1.6 us an image, so the starts of kernels rule, and the variants are
ways to need fewer of them (larger batches, a compiled step) or cheaper ones (a CUDA graph).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from batchml.runtime import mnist
from benchmarks.gpu import limits
from benchmarks.gpu.checks import CheckRun, first_line
from benchmarks.gpu.conclusions import Bound, Kernels, fastest, group_of, traffic
from benchmarks.gpu.machine import load_program
from benchmarks.gpu.report import number
from benchmarks.gpu.timing import capture, free_memory, synchronize

GOAL = 0.1  # seconds an epoch, on an H200
IMAGES = 60_000
EAGER, GRAPH, COMPILED = "eager", "graph", "compiled in a graph"
# fp32 is PyTorch's default, in which convolutions may use TF32, and matrix products do not.
FP32, TF32, BF16, BF16_WEIGHTS = "fp32", "tf32", "bf16", "bf16 weights"
NCHW, NHWC = "contiguous", "channels_last"


class Variant(NamedTuple):
    mode: str
    precision: str
    layout: str
    batch: int
    as_job: bool = False  # with the job's choice of cuDNN's algorithms: the deterministic ones

    def __str__(self) -> str:
        job = ", as the job" if self.as_job else ""
        return f"{self.mode}, {self.precision}, {self.layout}, {self.batch}{job}"


FULL = (
    Variant(EAGER, FP32, NHWC, 64, as_job=True),
    Variant(EAGER, FP32, NCHW, 64),
    Variant(EAGER, FP32, NHWC, 64),
    Variant(EAGER, BF16, NHWC, 64),
    Variant(GRAPH, FP32, NHWC, 64),
    Variant(GRAPH, FP32, NCHW, 64),
    Variant(GRAPH, BF16, NHWC, 64),
    Variant(GRAPH, TF32, NHWC, 128),
    Variant(GRAPH, TF32, NHWC, 256),
    Variant(EAGER, TF32, NHWC, 1024),
    Variant(GRAPH, TF32, NHWC, 1024),
    Variant(GRAPH, TF32, NCHW, 1024),
    Variant(GRAPH, BF16, NHWC, 1024),
    Variant(GRAPH, BF16_WEIGHTS, NHWC, 1024),
    Variant(GRAPH, BF16_WEIGHTS, NHWC, 4096),
    Variant(COMPILED, TF32, NHWC, 64),
    Variant(COMPILED, TF32, NHWC, 1024),
)
SMALL = (
    Variant(EAGER, FP32, NHWC, 16, as_job=True),
    Variant(EAGER, FP32, NCHW, 16),
    Variant(EAGER, BF16, NHWC, 16),
    Variant(EAGER, BF16_WEIGHTS, NHWC, 32),
)
EPOCHS = 4  # of a variant, of which the first warms up
UNROLL = 12  # steps of a graph at most
COMPILE_SECONDS = 30.0  # that must be left for a compiled variant


def measure(run: CheckRun) -> None:
    variants = SMALL if run.small else FULL
    job = load_program("lenet")
    digits = load_digits(72 if run.small else IMAGES)
    run.detail("data", digits.source)
    run.figure("images", digits.train.size, "", f"source: {digits.source}")
    device = torch.device(run.device)
    train, validation = (job.to_device(split, device) for split in digits[:2])
    done: list[Trained] = []
    for variant in variants:
        if run.left() < (COMPILE_SECONDS if variant.mode == COMPILED else 5.0):
            run.finding(f"Left out for lack of time: {variant}.")
            continue
        try:
            trainer = Trainer(variant, job, train)
            seconds = trainer.train()
        except Exception as error:  # such as a compiler that the machine lacks
            run.finding(f"Not possible here: {variant}: {first_line(error)}.")
            continue
        done.append(Trained(trainer, seconds, 100 * trainer.accuracy(*validation)))
        note = f"{trainer.steps} steps, {done[-1].right:.2f} % right after {EPOCHS} epochs"
        run.figure(str(variant), seconds, "s", note)
        del trainer
        free_memory()
    if not done:
        run.leave("no variant could be trained, for the reasons below")
    best = done[fastest([(each.seconds, each.right) for each in done])]
    conclude(run, done[0], best)


class Trained(NamedTuple):
    """A variant after its training."""

    trainer: Trainer
    seconds: float  # of an epoch
    right: float  # percent of the validation images


def conclude(run: CheckRun, first: Trained, best: Trained) -> None:
    met = "is met" if best.seconds < GOAL else "is not met"
    run.figure("best epoch", best.seconds, "s", str(best.trainer.variant))
    run.finding(
        f"Best: {best.trainer.variant}, {number(best.seconds)} s an epoch, "
        f"{first.seconds / best.seconds:.1f} times as fast as the job; the goal of {GOAL} s "
        f"{met if run.device == 'cuda' else 'is for a GPU'}."
    )
    names = {"the job": first} if first is best else {"the job": first, "the best": best}
    for name, each in names.items():
        explain(run, name, each.seconds, each.trainer)


def explain(run: CheckRun, name: str, seconds: float, trainer: Trainer) -> None:
    """Say what the time of an epoch goes to, and how far it is from the limits."""
    kernels = trainer.profile()
    if kernels.number == 0:
        run.finding(f"{name}: the profiler saw no kernels.")
        return
    run.figure(f"kernels a step, {name}", kernels.number)
    run.detail(f"kernels, {name}", kernels.to_json())
    rest = ""
    if run.device == "cuda":
        busy = 100 * min(1.0, kernels.seconds * trainer.steps / seconds)
        run.figure(f"busy, {name}", busy, "%", "time in kernels, of the epoch's time")
        rest = f"; {100 - busy:.0f} % of the time runs no kernel"
    run.finding(f"{name}: {kernels.describe()}{rest}.")
    found = bounds(run, trainer, kernels.number)
    for bound in found:
        run.figure(f"{bound.name}, {name}", bound.seconds, "s", bound.note)
    if found:
        nearest = max(found, key=lambda bound: bound.seconds)
        run.finding(
            f"{name}: {seconds / nearest.seconds:.1f} times its nearest limit, {nearest.name} "
            f"({number(nearest.seconds)} s)."
        )


# --- Data -----------------------------------------------------------------------------------------


def open_nothing(*_arguments: object, **_options: object) -> NoReturn:
    """Instead of `urlopen`: the checks use no network."""
    raise OSError("no network is used")


def load_digits(count: int) -> mnist.Digits:
    """MNIST from $BATCHML_DATA_DIR or the loader's cache, else a synthetic set of the same shape.

    `count` is the number of images to train on; those for validation are a sixth of it.
    """
    found = mnist.load(
        opener=open_nothing, log=lambda line: None, fallback=lambda: synthetic(count)
    )

    def cut(split: mnist.Split, size: int) -> mnist.Split:
        return mnist.Split(split.images[: size * mnist.SIDE**2], split.labels[:size])

    return mnist.Digits(cut(found.train, count), cut(found.validation, count // 6), found.source)


def synthetic(count: int) -> mnist.Digits:
    """Images of the shape of MNIST: a random pattern for each class, and noise. Always the same."""
    rng = torch.Generator().manual_seed(0)
    patterns = (torch.rand(mnist.CLASSES, mnist.SIDE**2, generator=rng) > 0.8).float() * 200

    def split(size: int) -> mnist.Split:
        labels = torch.randint(mnist.CLASSES, (size,), generator=rng)
        noise = torch.randint(56, (size, mnist.SIDE**2), generator=rng)
        images = (patterns[labels] + noise).to(torch.uint8)
        return mnist.Split(images.numpy().tobytes(), labels.to(torch.uint8).numpy().tobytes())

    return mnist.Digits(split(count), split(count // 6), "synthetic")


# --- Training -------------------------------------------------------------------------------------


class Trainer:
    """Trains LeNet in one variant, on images (N, 1, 28, 28) of bytes and labels (N) of a device."""

    def __init__(
        self,
        variant: Variant,
        job: Any,
        train: tuple[Tensor, Tensor],
        capture: Callable[[Callable[[], object]], Any] = capture,
    ) -> None:
        """`capture` makes a CUDA graph, which has a method `replay`, of a function."""
        torch.manual_seed(0)
        torch.backends.cudnn.deterministic = variant.as_job
        torch.backends.cudnn.benchmark = not variant.as_job
        torch.set_float32_matmul_precision("high" if variant.precision == TF32 else "highest")
        self.variant, self._job = variant, job
        self.images, self.labels = train
        self.device = self.labels.device
        self.dtype = torch.bfloat16 if variant.precision == BF16_WEIGHTS else torch.float32
        layout = torch.channels_last if variant.layout == NHWC else torch.contiguous_format
        self.model = job.build_lenet().to(self.device, self.dtype, memory_format=layout)
        rate = 0.05 * min(8.0, variant.batch / 64)  # in proportion to the batch, up to a limit
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.full, rest = divmod(len(self.labels), variant.batch)
        self.steps = self.full + bool(rest)
        self.right = torch.zeros((), dtype=torch.long, device=self.device)
        self.order = torch.arange(len(self.labels), device=self.device)
        self._forward = self._loss
        if variant.mode == COMPILED:
            self._forward = torch.compile(self._loss, dynamic=False)
        self._graphs: list[tuple[int, Any]] = []  # (steps, graph), the longest first
        if variant.mode != EAGER:
            self._capture(capture)

    def train(self, epochs: int = EPOCHS) -> float:
        """Train; return the median time of the epochs after the first, in seconds."""
        times = []
        for _ in range(epochs):
            synchronize(self.device.type)
            start = time.perf_counter()
            self._epoch()
            synchronize(self.device.type)
            times.append(time.perf_counter() - start)
        return median(times[1:])

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """The fraction of these that the model classifies correctly."""
        right = 0
        with torch.inference_mode(), self.autocast():
            for x, y in zip(images.split(1000), labels.split(1000), strict=True):
                right += int(self._job.right_answers(self.model(self.scale(x)), y))
        return right / len(labels)

    def profile(self, steps: int = 48) -> Kernels:
        """The kernels of some steps, in an epoch of their own."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        steps = min(steps, self.full)
        self._shuffle()
        with profile(activities=kinds) as recorded:
            done = self._steps(steps)
            synchronize(self.device.type)
        return kernels_of(recorded.key_averages(), done, on_gpu)

    def activations(self) -> int:
        """The bytes of all activations of one image, the input's included."""
        sizes = [self.images[0].numel() * (1 + self.dtype.itemsize)]
        hooks = [
            layer.register_forward_hook(lambda _layer, _input, y: sizes.append(y.nbytes))
            for layer in self.model
            if not isinstance(layer, torch.nn.Flatten)  # a view
        ]
        with torch.inference_mode(), self.autocast():
            self.model(self.scale(self.images[:1]))
        for hook in hooks:
            hook.remove()
        return sum(sizes)

    def _epoch(self) -> None:
        self._shuffle()
        done = self._steps(self.full)
        rest = self.order[done * self.variant.batch :]
        if len(rest):  # not compiled: another shape would be compiled again
            self._step(self.images[rest], self.labels[rest], self._loss)

    def _shuffle(self) -> None:
        torch.randperm(len(self.order), out=self.order)
        self.right.zero_()

    def _steps(self, count: int) -> int:
        """Do so many steps of whole batches, from the epoch's first on; return their number."""
        if not self._graphs:
            chosen = self.order[: count * self.variant.batch]
            images, labels = self.images[chosen], self.labels[chosen]
            size = self.variant.batch
            for x, y in zip(images.split(size), labels.split(size), strict=True):
                self._step(x, y)
            return count
        self.position.zero_()
        left = count
        for steps, graph in self._graphs:
            for _ in range(left // steps):
                graph.replay()
            left %= steps
        return count

    def _step(self, images: Tensor, labels: Tensor, forward: Any = None) -> None:
        loss, scores = (forward or self._forward)(images, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.right += self._job.right_answers(scores, labels)

    def _loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            scores = self.model(self.scale(images))
        return functional.cross_entropy(scores.float(), labels), scores.detach()

    def scale(self, images: Tensor) -> Tensor:
        scaled: Tensor = self._job.scale(images)
        return scaled.to(self.dtype)

    def autocast(self) -> Any:
        if self.variant.precision != BF16:
            return contextlib.nullcontext()
        # Each weight is cast once a step, so a cache would save nothing, and a graph must not find
        # casts that were made outside of it.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _capture(self, capture: Callable[[Callable[[], object]], Any]) -> None:
        """Capture a graph of many steps and one of a single step.

        A graph reads the next batch by itself: it has the order of the epoch and its own position
        in it, both on the device. So an epoch is nothing but replays.
        """
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        batches = self.order[: self.full * self.variant.batch].view(self.full, self.variant.batch)
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        for steps in sorted({max(1, min(UNROLL, self.full // 4)), 1}, reverse=True):

            def work(steps: int = steps) -> None:
                for _ in range(steps):
                    rows = batches.index_select(0, self.position).view(-1)
                    self._step(self.images.index_select(0, rows), self.labels.index_select(0, rows))
                    self.position.add_(1)

            self.position.zero_()
            self._graphs.append((steps, capture(work)))
        with torch.no_grad():  # forget what the captures trained
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
                self.optimizer.state[parameter]["momentum_buffer"].zero_()


# --- Profile and limits ---------------------------------------------------------------------------


def kernels_of(events: Iterable[Any], steps: int, on_gpu: bool) -> Kernels:
    """Sum up the profiler's averages. Those of the GPU are kernels and copies; an operator has the
    time of its kernels, too, which must not count twice.
    """
    from torch.autograd import DeviceType

    rows = []
    for event in events:
        if on_gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            rows.append((event.key, event.count, event.self_device_time_total / 1e6))
        elif not on_gpu and event.self_cpu_time_total > 0:
            rows.append((event.key, event.count, event.self_cpu_time_total / 1e6))
    groups: defaultdict[str, float] = defaultdict(float)
    for name, _, seconds in rows:
        groups[group_of(name)] += seconds / steps
    rows.sort(key=lambda row: -row[2])
    longest = [(name[:120], count / steps, seconds / steps) for name, count, seconds in rows[:12]]
    total = sum(count for _, count, _ in rows) / steps, sum(row[2] for row in rows) / steps
    return Kernels(*total, dict(groups), longest)


def bounds(run: CheckRun, trainer: Trainer, kernels: float) -> list[Bound]:
    """The limits of an epoch, from what the check `limits` measured; empty without its figures."""
    eager = trainer.variant.mode == EAGER
    launch = run.before("limits", limits.EAGER_LAUNCH if eager else limits.GRAPH_LAUNCH)
    bandwidth = run.before("limits", limits.BANDWIDTH)
    product = max(run.before("limits", name) or 0.0 for name in limits.PRODUCTS)
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    moved = traffic(len(trainer.labels), trainer.steps, trainer.activations(), weights)
    operations = len(trainer.labels) * flops(trainer)
    found = []
    if launch:
        seconds = kernels * trainer.steps * launch / 1e6
        found.append(Bound("launch limit", seconds, f"{launch:.2f} us a kernel"))
    if bandwidth:
        note = f"{moved / 1e9:.1f} GB at {bandwidth:.0f} GB/s"
        found.append(Bound("bandwidth limit", moved / bandwidth / 1e9, note))
    if product:
        note = f"{number(operations / 1e12)} TFLOP at {number(product)} TFLOP/s"
        found.append(Bound("compute limit", operations / product / 1e12, note))
    return found


def flops(trainer: Trainer) -> float:
    """The operations for one image, forward and backward: three times those forward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode(), trainer.autocast():
        trainer.model(trainer.scale(trainer.images[:1]))
    return 3.0 * float(counter.get_total_flops())
