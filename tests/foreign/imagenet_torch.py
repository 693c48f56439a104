"""In the style of the ImageNet example of PyTorch: checkpoint.pth.tar, model_best.pth.tar, --resume."""

import argparse
import os
import shutil

import torch
from torch import nn

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data", metavar="DIR", nargs="?", default="imagenet")
parser.add_argument("-a", "--arch", default="mlp")
parser.add_argument("--epochs", default=60, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("--resume", default="", type=str, help="path to latest checkpoint")
args = parser.parse_args()
torch.set_num_threads(1)
model, best_acc1 = nn.Linear(64, 10), 0.0
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
if args.resume:
    if os.path.isfile(args.resume):
        print(f"=> loading checkpoint '{args.resume}'")
        checkpoint = torch.load(args.resume)
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")
    else:
        print(f"=> no checkpoint found at '{args.resume}'")
for epoch in range(args.start_epoch, args.epochs):
    for _ in range(100):
        images, target = torch.randn(64, 64), torch.randint(0, 10, (64,))
        loss = nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acc1 = 10 + epoch / 10
    print(f"Epoch: [{epoch}][100/100]\tLoss {loss.item():.4e}\t * Acc@1 {acc1:.3f}", flush=True)
    is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
    state = {"epoch": epoch + 1, "arch": args.arch, "state_dict": model.state_dict(),
             "best_acc1": best_acc1, "optimizer": optimizer.state_dict()}  # fmt: skip
    torch.save(state, "checkpoint.pth.tar")
    if is_best:
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
