"""In the style of XGBoost's demos: a model file every ten rounds, training goes on from the newest."""

import json
import random
from pathlib import Path

ROUNDS = 1600
random.seed(7)
rows = [(x := random.random(), 3 * x + random.gauss(0, 0.01)) for _ in range(1200)]
trees: list[tuple[float, float, float]] = []  # threshold, left, right
models = sorted(Path("models").glob("model_*.json"))
if models:
    trees = [tuple(tree) for tree in json.loads(models[-1].read_text())["trees"]]
    print(f"[{len(trees)}] continues from {models[-1]}")
guess = [sum(left if x < at else right for at, left, right in trees) for x, _ in rows]
while len(trees) < ROUNDS:
    at = random.random()
    rest = [y - now for (_, y), now in zip(rows, guess)]
    sides = [[r for (x, _), r in zip(rows, rest) if (x < at) is side] for side in (True, False)]
    left, right = (0.1 * sum(side) / (len(side) + 1.0) for side in sides)
    trees.append((at, left, right))
    guess = [now + (left if x < at else right) for (x, _), now in zip(rows, guess)]
    if len(trees) % 10 == 0:
        error = (sum(r * r for r in rest) / len(rest)) ** 0.5
        print(f"[{len(trees)}]\ttrain-rmse:{error:.5f}", flush=True)
        Path("models").mkdir(exist_ok=True)
        Path(f"models/model_{len(trees):04d}.json").write_text(json.dumps({"trees": trees}))
Path("xgb.model.json").write_text(json.dumps({"trees": trees}))
