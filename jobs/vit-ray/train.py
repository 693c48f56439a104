"""Train a vision transformer on the head of a Ray cluster, with images that all nodes prepare.

Ray Data draws and blurs images on every CPU. Ray Train runs the training on the node with the
resource `trainer`, which is the head. The training continues from the newest checkpoint in
$BATCHML_CHECKPOINT_DIR, and writes report.json and vit.pt to $BATCHML_OUTPUT_DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import figures
import ray
import ray.train
import torch
from meters import Meters
from model import Vit
from pictures import CLASSES, Blur, Draw, node_number
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import Tensor
from torch.nn import functional

from batchml.runtime import checkpoint, report
from batchml.runtime.device import join_torch
from batchml.runtime.storage.files import write_atomically

LINE_EVERY = 100  # steps between two log lines, or a tenth of all steps
STOPPED = 128 + signal.SIGTERM  # exit code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ViT while Ray Data blurs its images.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side; a multiple of 8")
    parser.add_argument("--blurs", type=int, default=10, help="rounds of the blur")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=2, help="batches to prefetch")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument(
        "--warm-up", type=int, default=5, help="first steps, which the report leaves out"
    )
    parser.add_argument(
        "--trainers", type=int, default=0, help="0: one for each GPU of the head, or one"
    )
    parser.add_argument(
        "--prices", default="", help="prices of an hour: head=DOLLARS,worker=DOLLARS"
    )
    options = parser.parse_args()
    if min(options.steps, options.batch_size, options.save_every) < 1 or options.seed < 0:
        parser.error("--steps, --batch-size and --save-every start at 1, --seed at 0")
    if options.size < 16 or options.size % 8:
        parser.error("--size is a multiple of 8 from 16 on")
    try:
        options.prices = figures.read_prices(options.prices)
    except ValueError as error:
        parser.error(f"--prices: {error}")
    return options


# --- In the trainer's process, on the head -------------------------------------------------------


class Training:
    """The model and the optimizer after `step` steps."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config["seed"])
        # Ray has chosen the GPU, and made the process group.
        chosen = {"LOCAL_RANK": str(get_device().index or 0)}
        joined = join_torch(torch, {**os.environ, **chosen})
        self.config, self.device, self.step = config, joined.device, 0
        self.autocast, self.is_first = joined.autocast, joined.rank == 0
        self.bare = Vit(config["size"], CLASSES).to(self.device)
        self.model = prepare_model(self.bare) if joined.world > 1 else self.bare
        self.optimizer = torch.optim.SGD(
            self.bare.parameters(), lr=config["lr"], momentum=config["momentum"]
        )

    def resume(self) -> None:
        if self.config["checkpoint"]:
            path = Path(self.config["checkpoint"], "state.pt")
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.bare.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            if self.is_first:
                print(f"Resuming after step {self.step}", flush=True)

    def save(self) -> None:
        if self.is_first:
            state = {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}
            state = {**state, "step": self.step}
            folder = self.config["checkpoints"]
            checkpoint.save(
                lambda path: torch.save(state, os.path.join(path, "state.pt")), self.step,
                folder=folder,
            )  # fmt: skip

    def learn(self, images: Tensor, labels: Tensor) -> float:
        with self.autocast():
            scores = self.model(images)
        loss = functional.cross_entropy(scores.float(), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()  # waits for the device, so that the step's time is complete


class Clock:
    """Measures the time of the steps, and the part that waits for data."""

    def __init__(self, warm_up: int) -> None:
        self._left = warm_up
        self.began = self.since = time.time()
        self.count = self.images = 0
        self.waited = self._window_waited = self._window = 0.0
        self.rows: Counter[int] = Counter()

    def add(self, begin: float, got: float, end: float, nodes: Tensor) -> None:
        self.rows.update(nodes.tolist())
        self._window += end - begin
        self._window_waited += got - begin
        if self._left > 0:
            self._left -= 1
            self.began = end
            return
        self.count += 1
        self.images += len(nodes)
        self.waited += got - begin
        self.since = end

    def window(self) -> tuple[float, float]:
        """Return the seconds since the last call, and the part that waited for data."""
        found, self._window, self._window_waited = (self._window, self._window_waited), 0.0, 0.0
        return found

    def steps(self) -> figures.Steps:
        return figures.Steps(
            self.count, self.since - self.began if self.count else 0.0, self.waited, self.began,
            self.images, dict(self.rows),
        )  # fmt: skip


def train(config: dict[str, Any]) -> None:
    """Run the training loop of Ray Train, in one process or one for each GPU of the head."""
    training, clock = Training(config), Clock(config["warm_up"])
    training.resume()
    every = max(1, min(LINE_EVERY, config["steps"] // 10))
    shard = ray.train.get_dataset_shard("train")
    batches = iter(
        shard.iter_torch_batches(
            batch_size=config["batch_size"], prefetch_batches=config["prefetch"], drop_last=True
        )
    )
    losses: list[float] = []
    stopped = False
    while training.step < config["steps"] and not stopped:
        begin = time.time()
        batch = next(batches, None)
        if batch is None:
            break
        got = time.time()
        check_order(training, batch["number"])
        losses.append(training.learn(batch["image"], batch["label"]))
        clock.add(begin, got, time.time(), batch["node"])
        if training.step % every == 0:
            log_steps(training, clock, losses, config["steps"])
            losses = []
        stopped = checkpoint.should_stop()
        if stopped or training.step % config["save_every"] == 0:
            training.save()
    training.save()
    if training.is_first:
        weights = {name: value.cpu() for name, value in training.bare.state_dict().items()}
        torch.save(weights, config["result"] + ".pt")
        result = {"step": training.step, "stopped": stopped, **clock.steps()._asdict()}
        write_atomically(config["result"], json.dumps(result).encode())
    ray.train.report({"step": training.step})


def check_order(training: Training, numbers: Tensor) -> None:
    """Check that each image came once and in order, even if nodes were lost."""
    first = training.step * training.config["batch_size"]
    if training.config["trainers"] == 1 and numbers.tolist() != [
        *range(first, first + len(numbers))
    ]:
        raise RuntimeError(f"step {training.step + 1} got the images {numbers.tolist()}")


def log_steps(training: Training, clock: Clock, losses: list[float], steps: int) -> None:
    if not training.is_first:
        return
    seconds, waited = clock.window()
    mean = sum(losses) / len(losses)
    print(
        f"step {training.step}/{steps} | loss {mean:.4f} | step time {seconds / len(losses):.3f} s "
        f"| data wait {100 * waited / seconds:.0f} %",
        flush=True,
    )
    averages = figures.averages(clock.steps()) if clock.count else {}
    report(step=training.step, total=steps, loss=mean, **averages)


# --- In the driver --------------------------------------------------------------------------------


def dataset(options: argparse.Namespace, first: int, trainers: int) -> ray.data.Dataset:
    """Make the dataset with the images of all remaining steps, in order."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = (
        True  # so that a resumed training gets the right images
    )
    rows = (options.steps - first) * options.batch_size * trainers
    blocks = max(1, min(rows // options.batch_size, 2000))
    start = first * options.batch_size * trainers
    drawn = ray.data.range(rows, override_num_blocks=blocks).map_batches(
        Draw(options.size, options.seed, start), batch_size=None
    )
    return drawn.map_batches(Blur(options.blurs), batch_size=None, num_cpus=1)


def fit(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run the training to its end, or to a stop; return the result of the trainer."""
    checkpoints = os.path.abspath(os.environ.get("BATCHML_CHECKPOINT_DIR", "checkpoints"))
    found = checkpoint.newest(checkpoints)
    head = next(node for node in ray.nodes() if node["Alive"] and "trainer" in node["Resources"])
    gpus = int(head["Resources"].get("GPU", 0))
    trainers = options.trainers or max(1, gpus)
    if trainers > gpus > 0:  # Ray would wait for ever
        sys.exit(f"--trainers {trainers}: the head has {gpus} GPUs, and each trainer takes one")
    result = os.path.join(folder, "result.json")
    config = {
        **vars(options),
        "trainers": trainers,
        "checkpoints": checkpoints,
        "checkpoint": found.path if found else "",
        "result": result,
    }
    scaling = ray.train.ScalingConfig(
        num_workers=trainers,
        use_gpu=gpus > 0,
        # The head's CPUs are for the blur: a trainer that waits for data needs none.
        resources_per_worker={"trainer": 1 / trainers, "CPU": 0, **({"GPU": 1} if gpus else {})},
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=scaling,
        datasets={"train": dataset(options, found.step if found else 0, trainers)},
        run_config=ray.train.RunConfig(name="vit", storage_path=os.path.join(folder, "ray")),
    )
    trainer.fit()
    answer: dict[str, Any] = json.loads(Path(result).read_text())
    return answer


def nodes_of(meters: Meters, steps: figures.Steps) -> list[figures.Node]:
    found = []
    for name, node in meters.nodes.items():
        is_head = "node:__internal_head__" in node["Resources"] or "trainer" in node["Resources"]
        samples, vcpus = meters.samples.get(name, []), node["Resources"].get("CPU", 0.0)
        cpu = figures.used(samples, steps.began, steps.began + steps.seconds)
        role = "head" if is_head else "worker"
        found.append(
            figures.Node(
                f"{role} {node['NodeManagerAddress']}", role, vcpus,
                steps.rows.get(node_number(name), 0), round(cpu / vcpus, 3) if vcpus else None,
                figures.mean_gpu(samples),
            )
        )  # fmt: skip
    return sorted(found)


def main() -> int:
    options = parse_arguments()
    ray.init(log_to_driver=True)
    # The trainer sees a stop by `should_stop`, saves and ends; then this process ends, too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    meters = Meters()
    output = Path(os.environ.get("BATCHML_OUTPUT_DIR", "."))
    with tempfile.TemporaryDirectory(prefix="vit-") as folder:
        result = fit(options, folder)
        meters.stop()
        step, stopped = result.pop("step"), result.pop("stopped")
        rows = {int(node): count for node, count in result.pop("rows").items()}
        steps = figures.Steps(**result, rows=rows)
        write_atomically(str(output / "vit.pt"), Path(folder, "result.json.pt").read_bytes())
    if stopped:
        print(f"Stopped after step {step} of {options.steps}; a checkpoint is saved", flush=True)
        return STOPPED
    summary = figures.report(steps, nodes_of(meters, steps), options.prices)
    write_atomically(str(output / "report.json"), json.dumps(summary, indent=1).encode())
    # So the last values of the run's metrics are those of the report.
    names = [*figures.averages(steps), "dollars_per_1000_steps"]
    report(step=step, total=options.steps, **{name: summary[name] for name in names})
    print("\n".join(figures.lines(summary)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
