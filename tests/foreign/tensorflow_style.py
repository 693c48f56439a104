"""In the style of tf.train.Supervisor: the text file `checkpoint` names the newest of several."""

import os
import re
import struct
import time

LOGDIR, LAST = "train_logs", 100
os.makedirs(LOGDIR, exist_ok=True)
index = os.path.join(LOGDIR, "checkpoint")
weight, step = 0.0, 0
if os.path.exists(index):
    with open(index) as file:
        name = re.search(r'model_checkpoint_path: "(.*)"', file.read())[1]
    with open(f"{LOGDIR}/{name}.data-00000-of-00001", "rb") as file:
        (weight,) = struct.unpack("<d", file.read())
    step = int(name.rpartition("-")[2])
    print(f"INFO:tensorflow:Restoring parameters from {LOGDIR}/{name}")
kept = [name] if step else []
while step < LAST:
    for number in range(40_000):
        weight -= 1e-5 * (weight - 6.0) * (number % 4)
    step += 1
    if step % 10:
        continue
    print(f"INFO:tensorflow:loss = {(weight - 6.0) ** 2:.6f}, step = {step}", flush=True)
    name = f"model.ckpt-{step}"
    with open(f"{LOGDIR}/{name}.data-00000-of-00001", "wb") as file:
        file.write(struct.pack("<d", weight))
    with open(f"{LOGDIR}/{name}.index", "w") as file:
        file.write("weight\n")
    kept.append(name)
    with open(index + ".tmp", "w") as file:
        file.write(f'model_checkpoint_path: "{name}"\n')
    os.replace(index + ".tmp", index)
    for old in kept[:-5]:
        for suffix in (".data-00000-of-00001", ".index"):
            os.remove(f"{LOGDIR}/{old}{suffix}")
    kept = kept[-5:]
    with open(f"{LOGDIR}/events.out.tfevents.{os.getpid()}", "ab") as file:
        file.write(struct.pack("<dd", time.time(), weight))
