"""Look around in a container, and print each fact as a line `PROOF {"fact": ..., ...}`.

`python probe.py MODE X`; X is the parameter of a trial. Standard library only, Python 3.8. Files in
the workspace are below `proofs/TOKEN`: the content of the file `token` that was sent along.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

STEP = 0.2  # seconds between two signs of life
METADATA = "169.254.169.254"


def say(fact: str, **values: Any) -> None:
    print("PROOF " + json.dumps({"fact": fact, **values}), flush=True)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def token() -> str:
    return Path(__file__).with_name("token").read_text("utf-8").strip()


def workspace() -> Path:
    """The proof's folder in the workspace; without one a folder that no other run sees."""
    folder = Path(os.environ.get("BATCHML_WORKSPACE", ".")) / "proofs" / token()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- What a run finds -----------------------------------------------------------------------------


def look_around() -> None:
    """The facts of one run; it leaves a file in the workspace, an output and a checkpoint."""
    say("code", token=token())
    say("user", uid=os.getuid(), gid=os.getgid())
    (workspace() / "first").write_text(token(), "utf-8")
    folder = Path(os.environ["BATCHML_OUTPUT_DIR"])
    (folder / "proof.txt").write_text(token(), "utf-8")
    folder = Path(os.environ["BATCHML_CHECKPOINT_DIR"])
    (folder / "proof.txt").write_text(token(), "utf-8")
    say("shared-memory", mib=shared_memory())
    say("batch", **reach_batch())
    if "BATCHML_ENDPOINT_URL" not in os.environ:  # not on the embedded server
        say("metadata", **reach_metadata())
        say("role", **look_at_role())
        say("missing-key", **get_missing_key())
    for number in range(1, 21):
        say("line", number=number)


def shared_memory() -> int:
    """The size of /dev/shm in MiB; 0 without one."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize // 2**20


def reach_batch() -> "dict[str, Any]":
    """Whether AWS Batch answers. It refuses a request without a signature, which is an answer."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
    suffix = ".cn" if region.startswith("cn-") else ""
    url = os.environ.get("AWS_ENDPOINT_URL_BATCH", f"https://batch.{region}.amazonaws.com{suffix}")
    request = urllib.request.Request(f"{url}/v1/describejobqueues", b"{}", method="POST")
    return ask(request, limit=10.0)


def reach_metadata() -> "dict[str, Any]":
    """Whether the host's metadata service gives a token: it must not."""
    request = urllib.request.Request(
        f"http://{METADATA}/latest/api/token", method="PUT",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    )  # fmt: skip
    return ask(request, limit=3.0)


def look_at_role() -> "dict[str, Any]":
    """The name of the role whose credentials the container agent gives, and what it may not do."""
    path = os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "")
    if not path:
        return {"role": ""}
    try:
        with urllib.request.urlopen(f"http://169.254.170.2{path}", timeout=5) as answer:
            role = str(json.load(answer).get("RoleArn", "")).rpartition("/")[2]
    except (OSError, ValueError) as error:
        return {"role": "", "error": str(error)}
    # Jobs read code, and only submitters write it: cfn/roles.yaml.
    try:
        status = open_bucket().send("PUT", f"code/proof-{token()}", accept=(403,)).status
    except (ImportError, LookupError, OSError) as error:
        return {"role": role, "denied": "", "error": str(error)}
    return {"role": role, "denied": "PUT of code/" if status == 403 else ""}


def get_missing_key() -> "dict[str, Any]":
    """What S3 answers for a key that is not there, and what batchml's store makes of it."""
    key = f"runs/proof-{token()}/missing"
    try:
        from batchml.runtime.storage.backends import open_store

        client = open_bucket()
        found = client.send("GET", key, accept=(403, 404))
        bucket = os.environ["BATCHML_STORE"].split("/")[2]
        value = open_store(f"s3://{bucket}", os.environ).get(key)
    except (ImportError, LookupError, OSError) as error:
        return {"answer": "", "error": str(error)}
    return {
        "answer": "missing" if value is None else "a value", "status": found.status,
        "namesListBucket": b"s3:ListBucket" in found.body,
    }  # fmt: skip


def open_bucket() -> Any:
    """The environment's bucket, with the job's role."""
    from batchml.runtime.storage.s3 import S3Client
    from batchml.runtime.storage.store import BRIEF

    return S3Client(os.environ["BATCHML_STORE"].split("/")[2], os.environ, limits=BRIEF)


def ask(request: urllib.request.Request, limit: float) -> "dict[str, Any]":
    """`{"answer": STATUS}`, or `{"answer": 0, "error": ...}` if nothing answers."""
    # No proxy of the environment: the question is what this container reaches by itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=limit) as answer:
            return {"answer": answer.status}
    except urllib.error.HTTPError as error:
        return {"answer": error.code}
    except OSError as error:
        return {"answer": 0, "error": str(error)}


# --- Other modes ----------------------------------------------------------------------------------


def look_again() -> None:
    """Read in the workspace what another run has written."""
    path = workspace() / "first"
    say("workspace", seen=path.read_text("utf-8") if path.exists() else "")


def be_a_child() -> None:
    """Child 1 of an array fails at its first run."""
    index = os.environ["AWS_BATCH_JOB_ARRAY_INDEX"]
    mark = workspace() / f"child-{index}"
    runs = int(mark.read_text("utf-8")) if mark.exists() else 0
    mark.write_text(str(runs + 1), "utf-8")
    say("child", index=int(index), run=runs + 1)
    if index == "1" and not runs:
        raise RuntimeError("child 1 of the proof fails at its first run")


def be_a_trial() -> None:
    score = float(sys.argv[2])
    print(f"score={score}", flush=True)


def print_lines() -> None:
    """Lines with the time at which each was printed, in seconds since the epoch."""
    for number in range(1, 11):
        say("line", number=number, at=time.time())
        pause(0.5)


def hold_on() -> None:
    """Live until SIGTERM and beyond, and print a sign of life as long as possible."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    say("holding")
    while not stopped.wait(STEP):
        pass
    began = time.monotonic()
    stop_file = os.path.exists(os.environ["BATCHML_STOP_FILE"])
    say("stopping", signal="SIGTERM", stopFile=stop_file)
    while True:
        say("alive", seconds=round(time.monotonic() - began, 1))
        pause(STEP)


def resume() -> None:
    """The first attempt saves a checkpoint and waits for its end; the second goes on from it."""
    path = Path(os.environ["BATCHML_CHECKPOINT_DIR"]) / "step"
    found = path.read_text("utf-8") if path.exists() else ""
    say("attempt", number=int(os.environ["BATCHML_ATTEMPT"]), found=found)
    if found:
        return
    path.write_text("41", "utf-8")
    say("saved", step="41")
    pause(500)


def look_for_gpu() -> None:
    """The GPU by nvidia-smi, where the driver is, and a training step if PyTorch is there."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        say("nvidia-smi", code=done.returncode, gpus=done.stdout.splitlines())
    except OSError as error:
        say("nvidia-smi", code=127, gpus=[], error=str(error))
    folders = ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    say("driver", found=[f for f in folders if os.path.exists(os.path.join(f, "libcuda.so.1"))])
    say("step", **train_a_step())


def train_a_step() -> "dict[str, Any]":
    try:
        import torch
    except ImportError:
        return {"device": "", "error": "the image has no PyTorch"}
    if not torch.cuda.is_available():
        return {"device": "", "error": "PyTorch finds no GPU"}
    model = torch.nn.Linear(64, 1).cuda()
    sample = torch.randn(256, 64, device="cuda")
    before = model(sample).square().mean()
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    after = model(sample).square().mean()
    return {"device": torch.cuda.get_device_name(0), "before": before.item(), "after": after.item()}


# --- Two nodes ------------------------------------------------------------------------------------

PORT = 29_533
MESSAGE = 64 * 2**20  # bytes


def meet() -> None:
    """Exchange a message with the other node, and add both parts: an all-reduce over two nodes."""
    index = int(os.environ["AWS_BATCH_JOB_NODE_INDEX"])
    mine = bytes([index + 1]) * MESSAGE
    with connect(index) as other:
        other.settimeout(120)
        exchange(other, mine[:1024], index)  # both are there
        began = time.monotonic()
        theirs = exchange(other, mine, index)
        seconds = time.monotonic() - began
    total = mine[0] + theirs[0]
    gbit = 2 * 8 * MESSAGE / seconds / 1e9
    say("nodes", index=index, sum=total, seconds=round(seconds, 3), gbitPerSecond=round(gbit, 2))


def connect(index: int) -> socket.socket:
    """A connection between the two nodes; the main node listens."""
    if index == int(os.environ["AWS_BATCH_JOB_MAIN_NODE_INDEX"]):
        # On one machine each node may have a loopback address of its own.
        with socket.create_server((os.environ.get("BATCHML_NODE_ADDRESS", ""), PORT)) as server:
            server.settimeout(300)
            return server.accept()[0]
    address = os.environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    end = time.monotonic() + 300
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5)
        except OSError:
            if time.monotonic() > end:
                raise
            pause(1)


def exchange(other: socket.socket, mine: bytes, index: int) -> bytes:
    """Send `mine` and receive as much, at the same time."""
    thread = threading.Thread(target=other.sendall, args=(mine,))
    thread.start()
    received = bytearray()
    while len(received) < len(mine):
        # What follows may be here already: it belongs to the next exchange.
        part = other.recv(min(1 << 20, len(mine) - len(received)))
        if not part:
            raise ConnectionError(f"node {1 - index} has gone")
        received += part
    thread.join()
    return bytes(received)


MODES = {
    "inside": look_around, "again": look_again, "child": be_a_child, "trial": be_a_trial,
    "lines": print_lines, "hold": hold_on, "resume": resume, "gpu": look_for_gpu, "nodes": meet,
}  # fmt: skip


def main(mode: str) -> str | None:
    if mode not in MODES:
        return f"no mode {mode!r}: {', '.join(MODES)}"
    MODES[mode]()
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
