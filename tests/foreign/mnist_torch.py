"""In the style of the MNIST example of PyTorch: `--save-model` writes mnist_cnn.pt at the end."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--save-model", action="store_true", default=False)
args = parser.parse_args()
torch.manual_seed(args.seed)
torch.set_num_threads(1)
images, labels = torch.rand(640, 784), torch.randint(0, 10, (640,))
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10))
optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
for epoch in range(1, args.epochs + 1):
    model.train()
    for index in range(0, 640, args.batch_size):
        data, target = images[index : index + args.batch_size], labels[index : index + args.batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    print(f"Train Epoch: {epoch} [640/640 (100%)]\tLoss: {loss.item():.6f}", flush=True)
    with open("train_loss.txt", "a") as file:
        file.write(f"{loss.item()}\n")
if args.save_model:
    torch.save(model.state_dict(), "mnist_cnn.pt")
