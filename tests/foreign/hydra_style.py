"""In the style of a Hydra application: each start works in `outputs/DATE/TIME`, and starts anew."""

import datetime
import logging
import os
import pickle
import sys

overrides = dict(word.split("=", 1) for word in sys.argv[1:])
now = datetime.datetime.now()
folder = f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S}"
os.makedirs(f"{folder}/.hydra", exist_ok=True)
with open(f"{folder}/.hydra/overrides.yaml", "w") as file:
    file.writelines(f"- {name}={value}\n" for name, value in overrides.items())
os.chdir(folder)
logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
logging.getLogger().addHandler(logging.FileHandler("train.log"))
weight = 0.0
for epoch in range(int(overrides.get("trainer.epochs", 30))):
    for number in range(60_000):
        weight -= 1e-5 * (weight - 1.0) * (number % 3)
    logging.info("epoch %d: loss %.5f", epoch, (weight - 1.0) ** 2)
    with open("model.pkl", "wb") as file:
        pickle.dump(weight, file)
with open("done.txt", "w") as file:
    file.write("ok\n")
