"""In the style of PyTorch Lightning: a new `lightning_logs/version_N` for each start, a coloured bar
that rewrites its line, and `--ckpt_path last`."""

import argparse
import glob
import os
import pickle
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--max_epochs", type=int, default=50)
parser.add_argument("--ckpt_path", default=None)
args = parser.parse_args()

version = len(glob.glob("lightning_logs/version_*"))
folder = f"lightning_logs/version_{version}"
os.makedirs(f"{folder}/checkpoints")
with open(f"{folder}/hparams.yaml", "w") as file:
    file.write(f"max_epochs: {args.max_epochs}\n")
weight, epoch = 0.0, 0
found = sorted(glob.glob("lightning_logs/*/checkpoints/*.ckpt"), key=os.path.getmtime)
if args.ckpt_path == "last" and found:
    with open(found[-1], "rb") as file:
        weight, epoch = pickle.load(file)
    print(f"Restored all states from the checkpoint at {found[-1]}")
previous = ""
while epoch < args.max_epochs:
    for batch in range(10):
        for number in range(9000):
            weight -= 1e-5 * (weight - 1.5) * (number % 7)
        done = "━" * (4 * batch)
        sys.stdout.write(f"\r\x1b[37mEpoch {epoch}/{args.max_epochs}\x1b[0m \x1b[38;5;197m{done}\x1b[0m")
        sys.stdout.flush()
    epoch += 1
    sys.stdout.write("\n")
    path = f"{folder}/checkpoints/epoch={epoch - 1}-step={epoch * 10}.ckpt"
    with open(path, "wb") as file:
        pickle.dump((weight, epoch), file)
    if previous:
        os.remove(previous)
    previous = path
print(f"`Trainer.fit` stopped: `max_epochs={args.max_epochs}` reached.")
