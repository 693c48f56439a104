"""In the style of Optuna's examples: a study in SQLite that is loaded when it exists."""

import pickle
import random
import sqlite3
import sys

TRIALS = 10
study = sqlite3.connect("example-study.db")
study.execute("CREATE TABLE IF NOT EXISTS trials (number INTEGER PRIMARY KEY, x REAL, value REAL)")
(done,) = study.execute("SELECT count(*) FROM trials").fetchone()
if done:
    print(f"[I] Using an existing study with name 'example-study' instead of creating: {done} trials")
for number in range(done, TRIALS):
    x = random.uniform(-10, 10)
    value = sum((x - 2) ** 2 + random.gauss(0, 1) for _ in range(160_000)) / 160_000
    with open(f"{number}.pickle", "wb") as file:  # as Optuna's FAQ saves the models of trials
        pickle.dump(x, file)
    study.execute("INSERT INTO trials VALUES (?, ?, ?)", (number, x, value))
    study.commit()
    print(f"\x1b[32m[I]\x1b[0m Trial {number} finished with value: {value:.3f}", file=sys.stderr)
best = study.execute("SELECT x, value FROM trials ORDER BY value LIMIT 1").fetchone()
with open("best_params.txt", "w") as file:
    file.write(f"x={best[0]} value={best[1]}\n")
