"""In the style of JAX with Orbax: a step is a folder that is renamed when it is complete."""

import json
import os
import shutil

FOLDER, STEPS, KEEP = "ckpts", 240, 3
os.makedirs(FOLDER, exist_ok=True)
for name in os.listdir(FOLDER):
    if ".orbax-checkpoint-tmp" in name:
        shutil.rmtree(f"{FOLDER}/{name}")
steps = sorted(int(name) for name in os.listdir(FOLDER))
weight, begin = 0.0, 0
if steps:
    begin = steps[-1]
    with open(f"{FOLDER}/{begin}/params/array.json") as file:
        weight = json.load(file)["weight"]
    print(f"Restoring checkpoint from {FOLDER}/{begin}.")
for step in range(begin + 1, STEPS + 1):
    for number in range(16_000):
        weight -= 1e-5 * (weight + 2.0) * (number % 5)
    if step % 30 == 0:
        temporary = f"{FOLDER}/{step}.orbax-checkpoint-tmp-{os.getpid()}"
        os.makedirs(f"{temporary}/params")
        with open(f"{temporary}/params/array.json", "w") as file:
            json.dump({"weight": weight}, file)
        os.rename(temporary, f"{FOLDER}/{step}")
        print(f"step {step}: loss={(weight + 2.0) ** 2:.5f}", flush=True)
        for old in sorted(map(int, os.listdir(FOLDER)))[:-KEEP]:
            shutil.rmtree(f"{FOLDER}/{old}")
