"""In the style of the Hugging Face Trainer: `out/checkpoint-N/`, of which the newest two stay."""

import argparse
import json
import re
import shutil
from pathlib import Path


def last_checkpoint(folder: Path) -> "Path | None":
    found = [path for path in folder.glob("checkpoint-*") if re.search(r"-\d+$", path.name)]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--max_steps", type=int, default=3000)
parser.add_argument("--save_steps", type=int, default=50)
parser.add_argument("--save_total_limit", type=int, default=2)
parser.add_argument("--resume_from_checkpoint", action="store_true")
args = parser.parse_args()

out = Path(args.output_dir)
out.mkdir(exist_ok=True)
state = {"global_step": 0, "weight": 0.0, "log_history": []}
if args.resume_from_checkpoint and (newest := last_checkpoint(out)):
    state = json.loads((newest / "trainer_state.json").read_text())
    print(f"Continuing training from checkpoint, will skip to global step {state['global_step']}")
while state["global_step"] < args.max_steps:
    loss = 0.0
    for number in range(800):
        x = number / 400
        error = state["weight"] * x - 2.0 * x
        state["weight"] -= 1e-4 * error * x
        loss += error * error
    state["global_step"] += 1
    if state["global_step"] % args.save_steps == 0:
        print({"loss": round(loss, 4), "epoch": state["global_step"] / 1000}, flush=True)
        folder = out / f"checkpoint-{state['global_step']}"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(repr(state["weight"]).encode())
        (folder / "trainer_state.json").write_text(json.dumps(state))
        others = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        for old in others[: -args.save_total_limit]:
            shutil.rmtree(old)
(out / "model.safetensors").write_bytes(repr(state["weight"]).encode())
print("Training completed. Do not forget to share your model on huggingface.co/models =)")
