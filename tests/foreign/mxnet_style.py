"""In the style of MXNet's image-classification examples: `PREFIX-0003.params`, `--load-epoch`."""

import argparse
import glob
import json
import logging
import struct

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--model-prefix", default="mnist/mlp")
parser.add_argument("--load-epoch", type=int, help="the epoch to load; default: the newest")
parser.add_argument("--num-epochs", type=int, default=50)
parser.add_argument("--disp-batches", type=int, default=100)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(levelname)s:root:%(message)s")

weight, begin = 0.0, args.load_epoch or 0
for path in sorted(glob.glob(f"{args.model_prefix}-*.params")):
    begin = max(begin, int(path[-11:-7]))
if begin:
    with open(f"{args.model_prefix}-{begin:04d}.params", "rb") as file:
        (weight,) = struct.unpack("<d", file.read())
    logging.info("Loaded model %s_%04d.params", args.model_prefix, begin)
else:
    __import__("os").makedirs(args.model_prefix.rpartition("/")[0] or ".", exist_ok=True)
with open(f"{args.model_prefix}-symbol.json", "w") as file:
    json.dump({"nodes": [{"op": "FullyConnected", "name": "fc1"}]}, file)
for epoch in range(begin, args.num_epochs):
    for batch in range(200):
        for number in range(480):
            weight -= 1e-5 * (weight - 4.0) * number
        if batch % args.disp_batches == 0:
            logging.info("Epoch[%d] Batch [%d]\tSpeed: 1 samples/sec", epoch, batch)
    logging.info("Epoch[%d] Validation-accuracy=%f", epoch, 1 - abs(4.0 - weight) / 4)
    with open(f"{args.model_prefix}-{epoch + 1:04d}.params", "wb") as file:
        file.write(struct.pack("<d", weight))
    logging.info('Saved checkpoint to "%s-%04d.params"', args.model_prefix, epoch + 1)
