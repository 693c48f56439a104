"""In the style of fairseq-train: `checkpoints/checkpoint_last.pt` is loaded when it is there."""

import argparse
import logging
import os
import pickle
import random
import shutil
import sys

logging.basicConfig(stream=sys.stdout, format="%(asctime)s | INFO | %(name)s | %(message)s")
logger = logging.getLogger("fairseq_cli.train")
logger.setLevel(logging.INFO)


def train_epoch(weight: float, lr: float) -> tuple[float, float]:
    loss = 0.0
    for _ in range(100_000):
        x = random.random()
        error = weight * x - 3.0 * x
        weight -= lr * error * x
        loss += error * error
    return weight, loss / 100_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epoch", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--save-dir", default="checkpoints")
    args = parser.parse_args()
    os.makedirs(args.save_dir, exist_ok=True)
    last = os.path.join(args.save_dir, "checkpoint_last.pt")
    weight, epoch = 0.0, 0
    if os.path.exists(last):
        with open(last, "rb") as file:
            weight, epoch = pickle.load(file)
        logger.info("Loaded checkpoint %s (epoch %d @ 0 updates)", last, epoch)
    else:
        logger.info("No existing checkpoint found %s", last)
    while epoch < args.max_epoch:
        weight, loss = train_epoch(weight, args.lr)
        epoch += 1
        logger.info("epoch %03d | loss %.4f", epoch, loss)
        name = os.path.join(args.save_dir, f"checkpoint{epoch}.pt")
        with open(name, "wb") as file:
            pickle.dump((weight, epoch), file)
        shutil.copyfile(name, last + ".tmp")
        os.replace(last + ".tmp", last)
        if epoch > 3:
            os.remove(os.path.join(args.save_dir, f"checkpoint{epoch - 3}.pt"))
    logger.info("done training")


main()
