"""In the style of PyTorch's word_language_model: the best model goes to model.pt; no resuming."""

import argparse
import math
import time

import torch
from torch import nn

parser = argparse.ArgumentParser(description="PyTorch RNN/LSTM Language Model")
parser.add_argument("--model", default="LSTM")
parser.add_argument("--lr", type=float, default=20)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()
torch.manual_seed(1111)
torch.set_num_threads(1)
rnn, decoder = nn.LSTM(16, 16), nn.Linear(16, 30)
corpus, best_val_loss, lr = torch.randn(35, 20, 16), None, args.lr
try:
    for epoch in range(1, args.epochs + 1):
        began = time.time()
        for _ in range(20):
            output, _state = rnn(corpus)
            loss = nn.functional.cross_entropy(decoder(output).view(-1, 30), torch.randint(0, 30, (700,)))
            for parameter in (*rnn.parameters(), *decoder.parameters()):
                parameter.grad = None
            loss.backward()
            for parameter in (*rnn.parameters(), *decoder.parameters()):
                parameter.data.add_(parameter.grad, alpha=-lr / 1000)
        print("-" * 89)
        print(f"| end of epoch {epoch:3d} | time: {time.time() - began:5.2f}s | valid loss {loss:5.2f} "
              f"| valid ppl {math.exp(loss.item()):8.2f}", flush=True)  # fmt: skip
        if not best_val_loss or loss.item() < best_val_loss:
            with open(args.save, "wb") as file:
                torch.save((rnn.state_dict(), decoder.state_dict()), file)
            best_val_loss = loss.item()
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("Exiting from training early")
