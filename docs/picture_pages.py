"""Make docs/dashboard*.webp: the pages of the dashboard, from real runs in a real browser.

Trains some runs and a sweep in a folder of its own, and takes each page while runs go on; the
README's picture has all of them. `make picture`, or `python -m docs.picture_pages`; it needs
Chromium.
"""

import json
import tempfile
import time
from html import escape
from pathlib import Path

from batchml.local.home import Home
from tests.support.browser import Browser, Page, browser
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import running, wait_for

WIDTH, HEIGHT = 1280, 960
TILES = 2  # in a row of the README's picture
HERE = Path(__file__).parent

CONFIG = """
[env.local]
usd_per_hour = 24.0
"""
JOB = """
image = "python"
command = ["python", "train.py", "{lr}", "{l2}", "{batch}", "{epochs}", "{pause}"]
[params]
lr = 0.1
l2 = 0.0001
batch = 16
epochs = 24
pause = 0.0
[metrics]
step = 'epoch (\\d+)'
loss = 'loss=(\\S+)'
accuracy = 'accuracy=(\\S+)'
[resources]
vcpus = 1
memory = "256 MiB"
"""
# Logistic regression on points of two noisy spirals, by their distances to twenty others.
TRAIN = """
import math, random, sys, time

lr, l2, batch, epochs, pause = (float(word) for word in sys.argv[1:6])
if lr <= 0:
    raise ValueError(f"lr={lr}: the learning rate must be positive")
random.seed(1)

def points(count):
    for number in range(count):
        kind, turn = number % 2, random.uniform(0.5, 5)
        angle = turn + kind * math.pi
        yield [turn * math.cos(angle) + random.gauss(0, 0.3),
               turn * math.sin(angle) + random.gauss(0, 0.3)], kind

centres = [point for point, _ in points(20)]

def features(point):
    return [math.exp(-math.dist(point, each) ** 2) for each in centres] + [1.0]

train = [(features(point), kind) for point, kind in points(3000)]
test = [(features(point), kind) for point, kind in points(300)]
weights = [0.0] * 21

def guess(x):
    return 1 / (1 + math.exp(-sum(w * v for w, v in zip(weights, x))))

print(f"{len(train)} points to train, {len(test)} to test", flush=True)
for epoch in range(1, int(epochs) + 1):
    random.shuffle(train)
    loss = 0.0
    for start in range(0, len(train), int(batch)):
        part = train[start:start + int(batch)]
        slope = [l2 * w for w in weights]
        for x, kind in part:
            p = guess(x)
            loss -= math.log(max(1e-9, p if kind else 1 - p))
            slope = [s + (p - kind) * v / len(part) for s, v in zip(slope, x)]
        weights = [w - lr * s for w, s in zip(weights, slope)]
    loss /= len(train)
    right = sum((guess(x) > 0.5) == (kind == 1) for x, kind in test) / len(test)
    print(f"epoch {epoch} loss={loss:.4f} accuracy={right:.4f}", flush=True)
    time.sleep(pause)
"""
SWEEP = """
job = "spirals"
name = "spirals-tune"
method = "tpe"
goal = { max = "accuracy" }
[space]
lr = { log = [0.003, 3.0] }
l2 = { log = [1e-5, 0.1] }
batch = { choice = [8, 16, 32] }
[early_stop]
method = "asha"
min = 2
max = 24
[limits]
trials = 30
parallel = 2
"""
RUNS = [
    ("ada", "lr=0.02"), ("ada", "lr=0.1"), ("ada", "lr=0.5"), ("ada", "lr=2.0"), ("ben", "lr=-0.1"),
    ("ben", "lr=0.5", "batch=8"), ("ben", "lr=0.1", "batch=8"), ("cleo", "lr=1.0", "batch=32"),
]  # fmt: skip
# The run that goes on, and six that have ended.
CHOSEN = """(() => {
    const rows = [...document.querySelectorAll('#runs tbody tr')];
    const of = (state) => rows.filter((row) => /spirals/.test(row.innerText)
        && row.innerText.includes(state)).map((row) => row.dataset.id);
    return [...of('RUNNING').slice(0, 1), ...of('SUCCEEDED').slice(0, 6)];
})()"""
DRAWN = "document.documentElement.dataset.ready > 0"
FILLED = """[...document.querySelectorAll('[data-panel]')].every(each => each.children.length
    || each.hidden)"""


def must(cli: Cli, *words: str) -> str:
    made = cli(*words, timeout=900)
    if made.code:
        raise SystemExit(f"batchml {' '.join(words)}: {made.err}")
    return made.out


def tell(story: Cli) -> str:
    """Runs that have ended, wait and go on, and a sweep. Returns the sweep's key."""
    (story.folder / "batchml.toml").write_text(CONFIG)
    write_job(story.folder, "spirals", JOB, train__py=TRAIN, sweep__toml=SWEEP)
    for owner, *params in RUNS:
        changes = [word for each in params for word in ("-p", each)]
        tags = ("--tag", f"owner={owner}", "--tag", "team=vision")
        story("submit", "spirals", "--wait", *changes, *tags, timeout=900)
    story("submit", "--wait", "--name", "check-data", "--tag", "owner=ben", "--", "python3", "-c",
          "import numpyy", timeout=900)  # fmt: skip
    must(story, "submit", "--name", "explore", "--", "sleep", "600")
    must(story, "cancel", "@last")
    must(story, "sweep", "spirals", "--name", "spirals-tune")
    long = ("-p", "epochs=300", "-p", "pause=0.5", "--tag", "owner=ada")
    must(story, "submit", "spirals", "-p", "lr=2.0", *long)
    must(story, "submit", "spirals", "-p", "lr=0.7", *long)
    for rate in ("0.2", "0.4", "0.8"):  # there is no room for these
        must(story, "submit", "spirals", "-p", f"lr={rate}", "--tag", "owner=cleo", *long)
    key: str = json.loads(must(story, "sweeps", "ls", "--json"))[0]["sweepId"]
    return key


def picture(page: Page, name: str) -> Path:
    path = HERE / f"{name}.webp"
    page.screenshot(path, whole=False)
    return path


class Camera:
    """Takes pictures of the pages of a running dashboard."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self._base = page, base
        page.resize(WIDTH, HEIGHT)

    def take(self, path: str, ready: str, name: str, top: str = "") -> Path:
        """A page, once `ready` is true. `top`: the element that the window is scrolled to."""
        self.page.go(f"{self._base}{path}")
        here = f"location.pathname === {path.partition('?')[0]!r}"
        wait_for(self.page, f"{here} && {DRAWN} && {ready}")
        if top:
            self.page.evaluate(f"document.querySelector({top!r}).scrollIntoView()")
        time.sleep(2)  # until plots and fonts are drawn
        return picture(self.page, name)


def together(chromium: Browser, pictures: dict[str, Path], folder: Path) -> None:
    """All pictures as one."""
    tiles = "".join(
        f'<figure><figcaption>{escape(words)}</figcaption><img src="{path.as_uri()}"></figure>'
        for words, path in pictures.items()
    )
    style = (
        "body{background:#dfe4ea;display:grid;gap:14px;font:600 17px system-ui,sans-serif;"
        f"grid-template-columns:repeat({TILES},1fr);margin:0;padding:14px}} figure{{margin:0}}"
        "figcaption{padding:0 0 4px 2px} img{border-radius:6px;display:block;width:100%}"
    )
    file = folder / "together.html"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8><style>{style}</style>{tiles}")
    page = chromium.open(file, 1600)
    wait_for(page, "[...document.images].every(each => each.complete)")
    page.resize(1600, page.evaluate("document.documentElement.scrollHeight"))
    picture(page, "dashboard")


def take_all(camera: Camera, going: str, ended: list[str], key: str) -> dict[str, Path]:
    columns = "name,status,params,accuracy,loss,ran,queue,age,id"
    curve, rows = "document.querySelector('.curve')", "document.querySelectorAll('tbody tr').length"
    return {
        "Runs": camera.take(f"/?cols={columns}", f"{rows} > 10", "dashboard-runs"),
        "A run": camera.take(f"/run/{going}", f"{curve} && {FILLED}", "dashboard-run"),
        "Compare": camera.take(f"/compare?runs={','.join(ended)}", f"{curve} && {FILLED}",
                               "dashboard-compare", ".curves"),
        "Sweeps": camera.take(f"/sweep/{key}", "document.querySelector('#plots svg')",
                              "dashboard-sweep"),
        "Cluster": camera.take("/cluster?span=15m", FILLED, "dashboard-cluster"),
        "Cost": camera.take("/cost?since=24h", FILLED, "dashboard-cost"),
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bml-") as place:
        folder = Path(place)
        (folder / "work").mkdir()
        (folder / "browser").mkdir()
        story = Cli(folder / "work", Home(folder / "home"))
        try:
            key = tell(story)
            with running(story) as dashboard, browser(folder / "browser") as chromium:
                camera = Camera(dashboard.enter(chromium, WIDTH), dashboard.base)
                going, *ended = camera.page.evaluate(CHOSEN)
                together(chromium, take_all(camera, going, ended, key), folder)
        finally:
            story("local", "reset", "--yes")


if __name__ == "__main__":
    main()
