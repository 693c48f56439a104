"""In the style of Keras's fit() with BackupAndRestore, ModelCheckpoint and CSVLogger."""

import json
import os
import shutil
import zipfile

EPOCHS = int(os.environ.get("EPOCHS", "10"))
weight, initial_epoch = 0.0, 0
backup = "backup/training_metadata.json"
if os.path.exists(backup):
    with open(backup) as file:
        saved = json.load(file)
    weight, initial_epoch = saved["weight"], saved["epoch"]
    print(f"Restored from backup/: epoch {initial_epoch}")
for epoch in range(initial_epoch, EPOCHS):
    print(f"Epoch {epoch + 1}/{EPOCHS}")
    for batch in range(1, 21):
        for number in range(24_000):
            weight -= 1e-5 * (weight - 0.5) * (number % 4)
        bar = "=" * batch + ">" + "." * (20 - batch)
        print(f"\r{batch}/20 [{bar}] - loss: {(weight - 0.5) ** 2:.4f}", end="", flush=True)
    print(f" - val_accuracy: {1 - abs(weight - 0.5):.4f}")
    with open("training.log", "a") as file:
        file.write(f"{epoch},{1 - abs(weight - 0.5)}\n")
    with zipfile.ZipFile("model.keras", "w") as archive:
        archive.writestr("model.weights.h5", repr(weight))
    os.makedirs("backup", exist_ok=True)
    with open(backup + ".new", "w") as file:
        json.dump({"weight": weight, "epoch": epoch + 1}, file)
    os.replace(backup + ".new", backup)
shutil.rmtree("backup")
