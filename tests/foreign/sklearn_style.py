"""In the style of a scikit-learn grid search: nothing is saved before the end, so it starts anew."""

import itertools
import pickle
import random

random.seed(1)
X = [[random.gauss(0, 1) for _ in range(3)] for _ in range(300)]
y = [1.0 * a - 2.0 * b + 0.5 * c for a, b, c in X]
grid = {"alpha": [0.0, 0.01, 0.1, 1.0], "max_iter": [100, 300], "fold": range(4)}
print(f"Fitting 4 folds for each of 8 candidates, totalling {4 * 8} fits")
scores: dict[tuple[float, int], list[float]] = {}
best, best_loss = None, float("inf")
with open("cv_results.csv", "w") as table:
    for alpha, iterations, fold in itertools.product(*grid.values()):
        weights = [0.0, 0.0, 0.0]
        for _ in range(iterations):
            for row, target in zip(X[fold::4], y[fold::4]):
                error = sum(w * x for w, x in zip(weights, row)) - target
                weights = [w - 0.01 * (error * x + alpha * w) for w, x in zip(weights, row)]
        loss = sum(
            (sum(w * x for w, x in zip(weights, row)) - target) ** 2 for row, target in zip(X, y)
        )
        print(f"[CV {fold + 1}/4] END alpha={alpha}, max_iter={iterations};, score={-loss:.3f}", flush=True)
        table.write(f"{alpha},{iterations},{fold},{loss}\n")
        table.flush()
        if loss < best_loss:
            best, best_loss = weights, loss
with open("model.joblib", "wb") as file:
    pickle.dump(best, file)
