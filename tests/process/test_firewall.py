"""The firewall rule of instances, in a network of its own: real iptables, real users."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

from batchml.aws.ec2 import METADATA, make_user_data
from tests.aws.test_userdata import BOOTHOOK, scripts
from tests.support.needs import unavailable

CREDENTIALS = "169.254.170.2"  # of an ECS task
NETWORK = """
import json, os, socket, subprocess, sys

for words in (["link", "set", "lo", "up"], *(["addr", "add", f"{a}/32", "dev", "lo"]
              for a in sys.argv[2:])):
    subprocess.run(["ip", *words], check=True)
listening = [socket.create_server((address, 80)) for address in sys.argv[2:]]

def reaches(user, address):
    child = os.fork()
    if child == 0:
        os.setuid(user)  # who may not read what create_connection would import
        client = socket.socket()
        client.settimeout(1)
        try:
            client.connect((address, 80))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

def seen():
    return {f"{u} {a}": reaches(u, a) for u in (0, 1000, 65534) for a in sys.argv[2:]}

before = seen()
for boot in range(2):
    subprocess.run(["bash", sys.argv[1]], check=True)
rules = subprocess.run(["iptables", "-S", "OUTPUT"], capture_output=True, text=True, check=True)
print(json.dumps([before, seen(), rules.stdout.splitlines()]))
"""


def test_jobs_that_are_not_root_reach_their_credentials_and_not_the_instances(
    tmp_path: Path,
) -> None:
    path = {**os.environ, "PATH": f"/usr/sbin:{os.environ['PATH']}"}
    if which("iptables", path=path["PATH"]) is None or which("ip", path=path["PATH"]) is None:
        unavailable("iptables or ip is not installed")
    apart = ["unshare", "--net"]
    if os.geteuid() != 0 or subprocess.run([*apart, "true"], check=False).returncode:
        unavailable("no network of its own can be made here")
    (hook,) = scripts(make_user_data(), BOOTHOOK)
    (tmp_path / "hook").write_text(hook)
    shown = subprocess.run(
        [*apart, sys.executable, "-c", NETWORK, str(tmp_path / "hook"), METADATA, CREDENTIALS],
        env=path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    before, after, rules = json.loads(shown.stdout)
    assert all(before.values())
    assert {each for each, reached in after.items() if not reached} == {
        f"1000 {METADATA}", f"65534 {METADATA}",
    }  # fmt: skip
    assert len([rule for rule in rules if METADATA in rule]) == 1
