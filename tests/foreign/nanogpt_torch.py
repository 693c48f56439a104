"""In the style of nanoGPT: settings are `--key=value`, `out/ckpt.pt`, `--init_from=resume`."""

import os
import sys
from ast import literal_eval

import torch

out_dir, eval_interval, max_iters, init_from, learning_rate = "out", 100, 6000, "scratch", 1e-3
for arg in sys.argv[1:]:
    key, val = arg.lstrip("-").split("=")
    assert key in globals(), f"Unknown config key: {key}"
    print(f"Overriding: {key} = {val}")
    globals()[key] = val if isinstance(globals()[key], str) else literal_eval(val)
torch.set_num_threads(1)
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
model = torch.nn.Sequential(torch.nn.Embedding(65, 16), torch.nn.Linear(16, 65))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num, best_val_loss = 0, 1e9
if init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
else:
    print("Initializing a new model from scratch")
while iter_num <= max_iters:
    x = torch.randint(0, 65, (12, 8))
    loss = torch.nn.functional.cross_entropy(model(x).view(-1, 65), x.roll(1, 1).view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: train loss {loss.item():.4f}, val loss {loss.item():.4f}", flush=True)
        if iter_num > 0:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                          "iter_num": iter_num, "best_val_loss": best_val_loss}  # fmt: skip
            print(f"saving checkpoint to {out_dir}")
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    iter_num += 1
