"""How well CPU workers feed a vision transformer, and whether more of them pay.

Model, pictures, blur and prices are those of jobs/vit-ray. Where Ray is installed, Ray Data makes
the pictures as in the job, else PyTorch's DataLoader. Without workers the trainer's own process
makes them. The original of the job, a SageMaker cluster of a g5.xlarge (4 vCPUs, $1.408 an hour)
with a c5.4xlarge (16 vCPUs, $0.816), claimed 23 % better price for a step than the g5.xlarge alone.
Here the first four workers stand for the CPUs of the GPU's host, the others for a further host.
All cores are those of this machine, so no network is part of the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.checks import CheckRun, first_line
from benchmarks.gpu.conclusions import Fed, feeding_sentences, price_of
from benchmarks.gpu.machine import ROOT, load_module, load_program
from benchmarks.gpu.timing import synchronize


class Sizes(NamedTuple):
    workers: tuple[int, ...]
    head: int  # workers that the host of the GPU has; more need a further host
    seconds: float  # of measuring a number of workers
    side: int  # pixels
    blurs: int
    batch: int
    width: int
    depth: int
    heads: int


FULL = Sizes((0, 4, 12), 4, 14.0, 224, 10, 16, 384, 12, 6)
SMALL = Sizes((0, 1, 2), 1, 0.3, 32, 1, 4, 16, 1, 2)
SEED = 0
STEPS = 2000  # of Ray's dataset at most: the job makes a block of each, up to this number


def measure(run: CheckRun) -> None:
    sizes = SMALL if run.small else FULL
    prices = load_module("vit-ray", "figures").read_prices(run.option("prices") or "")
    trainer = Trainer(sizes, run.device)
    speed = most(trainer, sizes)
    run.figure("images on the device", speed, "images/s", "the trainer's limit, without feeding")
    cpus = len(os.sched_getaffinity(0))
    if cpus <= max(sizes.workers):
        run.finding(f"{max(sizes.workers)} workers and the trainer share {cpus} CPUs here.")
    ray = open_ray(run, max(sizes.workers))
    try:
        found = compare(run, trainer, sizes, prices, ray)
    finally:
        if ray is not None:
            ray.close()
    if not run.small:  # then the steps are too short to say anything
        for sentence in feeding_sentences(found, sizes.head, prices, speed):
            run.finding(sentence)


def compare(
    run: CheckRun, trainer: Trainer, sizes: Sizes, prices: dict[str, float], ray: RayBatches | None
) -> list[Fed]:
    """Feed the trainer by each number of workers in turn."""
    found: list[Fed] = []
    for place, workers in enumerate(sizes.workers):
        share = (run.left() - 5) / (len(sizes.workers) - place)
        seconds = min(sizes.seconds, share / 2)  # the other half is for the start
        fed, source = feed(run, trainer, sizes, workers, seconds, ray)
        found.append(fed)
        words = f"{workers} workers"
        run.figure(words, fed.speed, "images/s", f"{source}, {fed.steps} steps of {sizes.batch}")
        run.figure(f"{words}: idle", fed.idle, "%", "time without work for the device")
        run.figure(f"{words}: wait", 100 * fed.waited / fed.seconds, "%", "time without data")
        price = price_of(workers > sizes.head, prices)
        run.figure(
            f"{words}: 1000 steps", 1000 * price * fed.seconds / 3600 / fed.steps, "$",
            f"at ${price:g} an hour",
        )  # fmt: skip
    return found


# --- The trainer ----------------------------------------------------------------------------------


class Trainer:
    """The job's model and optimizer, in bf16 on a GPU."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        torch.manual_seed(SEED)
        self.device = device
        model, pictures = load_module("vit-ray", "model"), load_module("vit-ray", "pictures")
        self.model = model.Vit(
            sizes.side, pictures.CLASSES, sizes.width, sizes.depth, sizes.heads
        ).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train on images (N, 3, side, side) of bytes; return the seconds that the device took."""
        watch = Stopwatch(self.device)
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            scores = self.model(images)
        loss = functional.cross_entropy(scores.float(), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return watch.stop()


class Stopwatch:
    """Measures the time of the work between its start and `stop` on the device's own clock."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began = time.perf_counter()
        if device == "cuda":
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def stop(self) -> float:
        """Wait for the device; return seconds."""
        if self._device != "cuda":
            return time.perf_counter() - self._began
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


def most(trainer: Trainer, sizes: Sizes, seconds: float = 3.0) -> float:
    """The images a second of a trainer whose images are on the device."""
    shape = (sizes.batch, 3, sizes.side, sizes.side)
    images = torch.randint(256, shape, dtype=torch.uint8, device=trainer.device)
    labels = torch.arange(sizes.batch, device=trainer.device) % 10
    for _ in range(5):
        trainer.step(images, labels)
    limit = min(seconds, sizes.seconds)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < limit:
        trainer.step(images, labels)
        steps += 1
    synchronize(trainer.device)
    return steps * sizes.batch / (time.perf_counter() - start)


# --- Feeding --------------------------------------------------------------------------------------


def feed(
    run: CheckRun,
    trainer: Trainer,
    sizes: Sizes,
    workers: int,
    seconds: float,
    ray: RayBatches | None,
) -> tuple[Fed, str]:
    """Train on what so many workers make; return the steps, and who made the batches."""
    if workers and ray is not None:
        try:
            with time_limit(2 * seconds + 5):
                fed = train(trainer, ray.batches(sizes, workers), workers, seconds)
            return fed, "Ray Data"
        except Exception as error:
            run.finding(f"Ray Data did not work with {workers} workers ({first_line(error)}).")
        finally:
            gc.collect()  # its executor ends with the iterator
    source = "DataLoader" if workers else "the trainer's process"
    return train(trainer, loader(sizes, workers), workers, seconds), source


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time: Ray may wait for a worker without end."""

    def interrupt(*_arguments: object) -> None:
        raise TimeoutError(f"it did not end within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def train(
    trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]], workers: int, seconds: float
) -> Fed:
    """Train for so long, and for two steps at least, after a warm-up of a batch of each worker."""
    for _ in range(workers + 1):
        trainer.step(*next(batches))
    steps, images, waited, busy = 0, 0, 0.0, 0.0
    start = time.perf_counter()
    while steps < 2 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        waited += time.perf_counter() - begin
        busy += trainer.step(*batch)
        steps, images = steps + 1, images + len(batch[1])
    return Fed(workers, steps, images, time.perf_counter() - start, waited, busy)


class Pictures:
    """The job's pictures by their numbers, drawn and blurred on one core."""

    def __init__(self, sizes: Sizes) -> None:
        self._pictures = load_module("vit-ray", "pictures")
        self._draw = self._pictures.Draw(sizes.side, SEED)
        self._blurs = sizes.blurs

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        import numpy

        drawn = self._draw({"id": numpy.array([number])})
        images = torch.from_numpy(drawn["image"].astype(numpy.float32))
        blurred = self._pictures.blur(images, self._blurs).round().clamp(0, 255).to(torch.uint8)
        return blurred[0], torch.tensor(int(drawn["label"][0]))


def loader(sizes: Sizes, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the pictures in order, without end. Workers have one thread each."""
    pictures = Pictures(sizes)
    if not workers:
        return inline(pictures, sizes.batch)
    options: dict[str, Any] = {"multiprocessing_context": "fork", "prefetch_factor": 2}
    return iter(
        torch.utils.data.DataLoader(
            pictures, sizes.batch, sampler=itertools.count(), num_workers=workers, **options
        )
    )


def inline(pictures: Pictures, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the batches in this process, with one thread, as a worker does."""
    numbers = itertools.count()
    while True:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = [pictures[number] for number in itertools.islice(numbers, size)]
        torch.set_num_threads(threads)
        yield torch.stack([image for image, _ in found]), torch.stack([y for _, y in found])


def open_ray(run: CheckRun, workers: int) -> RayBatches | None:
    """A Ray of this machine with so many CPUs, None where it cannot be started."""
    if not run.facts.get("machine", {}).get("ray"):
        run.finding("Ray is not installed: the batches come from PyTorch's DataLoader.")
        return None
    try:
        return RayBatches(workers)
    except Exception as error:
        run.finding(f"Ray cannot be started here ({first_line(error)}): DataLoader feeds.")
        return None


class RayBatches:
    """Makes batches by the dataset of the job, on a Ray of this machine."""

    def __init__(self, workers: int) -> None:
        # Ray's workers import the job's modules, and inherit this environment.
        folders = [str(ROOT / "jobs" / "vit-ray"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a thread of Ray Data would start it again
        self._job = load_program("vit-ray")
        self._ray = self._job.ray
        self._ray.init(
            num_cpus=workers, num_gpus=0, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=512 << 20,
        )  # fmt: skip

    def batches(self, sizes: Sizes, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that so many of Ray's CPUs make."""
        data = self._ray.data
        context = data.DataContext.get_current()
        context.execution_options.resource_limits = data.ExecutionResources(cpu=workers)
        options = argparse.Namespace(
            steps=STEPS, batch_size=sizes.batch, size=sizes.side, blurs=sizes.blurs, seed=SEED
        )
        found = self._job.dataset(options, 0, 1).iter_torch_batches(
            batch_size=sizes.batch, prefetch_batches=2, drop_last=True
        )
        for batch in found:
            yield batch["image"], batch["label"]

    def close(self) -> None:
        self._ray.shutdown()
