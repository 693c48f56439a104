"""In the style of Ultralytics: `runs/train/exp/weights/{last,best}.pt`, `results.csv`, `resume=True`."""

import csv
import pickle
import sys
import warnings
from pathlib import Path

options = dict(word.split("=", 1) for word in sys.argv[1:])
epochs = int(options.get("epochs", 10))
save_dir = Path("runs/train/exp")
weights = save_dir / "weights"
last, best = weights / "last.pt", weights / "best.pt"
weight, start, fitness = 0.0, 0, 0.0
if options.get("resume") == "True" and last.exists():
    weight, start, fitness = pickle.loads(last.read_bytes())
    print(f"Resuming training {last} from epoch {start + 1} to {epochs} total epochs")
elif options.get("resume") == "True":
    warnings.warn(f"{last} not found, training from scratch", stacklevel=1)
weights.mkdir(parents=True, exist_ok=True)
with (save_dir / "results.csv").open("a", newline="") as file:
    table = csv.writer(file)
    if not start:
        table.writerow(["epoch", "box_loss", "mAP50"])
    for epoch in range(start, epochs):
        box_loss = 0.0
        for number in range(300_000):
            error = weight - 1.0
            weight -= 2e-5 * error * (number % 3)
            box_loss += error * error
        mean_precision = 1 - abs(1 - weight)
        print(f"{epoch + 1}/{epochs}  box_loss={box_loss:.4g}  mAP50={mean_precision:.3f}", flush=True)
        table.writerow([epoch + 1, box_loss, mean_precision])
        file.flush()
        last.write_bytes(pickle.dumps((weight, epoch + 1, fitness)))
        if mean_precision >= fitness:
            fitness = mean_precision
            best.write_bytes(last.read_bytes())
print(f"Results saved to {save_dir}")
