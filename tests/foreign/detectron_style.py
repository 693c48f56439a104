"""In the style of Detectron2: `output/last_checkpoint` names the newest file, `--resume` reads it."""

import argparse
import json
import os
import pickle
import time

parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
parser.add_argument("opts", nargs="*", help="KEY VALUE ...")
args = parser.parse_args()
config = {"SOLVER.MAX_ITER": "600", "SOLVER.CHECKPOINT_PERIOD": "20", "OUTPUT_DIR": "output"}
config.update(zip(args.opts[::2], args.opts[1::2]))
output, last_iter = config["OUTPUT_DIR"], int(config["SOLVER.MAX_ITER"])
os.makedirs(output, exist_ok=True)
pointer = f"{output}/last_checkpoint"
weight, start = 0.0, 0
if args.resume and os.path.exists(pointer):
    with open(pointer) as file:
        name = file.read().strip()
    with open(f"{output}/{name}", "rb") as file:
        weight, start = pickle.load(file)
    print(f"[d2.checkpoint]: [Checkpointer] Loading from {output}/{name} ...")
for iteration in range(start, last_iter):
    begun = time.perf_counter()
    for number in range(6000):
        weight -= 1e-5 * (weight - 2.5) * (number % 5)
    if (iteration + 1) % int(config["SOLVER.CHECKPOINT_PERIOD"]) and iteration + 1 < last_iter:
        continue
    metrics = {"iteration": iteration, "total_loss": (weight - 2.5) ** 2}
    print(f"iter: {iteration}  total_loss: {metrics['total_loss']:.4f}", flush=True)
    with open(f"{output}/metrics.json", "a") as file:
        file.write(json.dumps({**metrics, "time": time.perf_counter() - begun}) + "\n")
    name = f"model_{iteration:07d}.pth" if iteration + 1 < last_iter else "model_final.pth"
    with open(f"{output}/{name}", "wb") as file:
        pickle.dump((weight, iteration + 1), file)
    with open(pointer, "w") as file:
        file.write(name)
