"""The service of spot hosts that tells containers of a notice: its own shell, real curl, and a
metadata service on this machine."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from batchml.aws.ec2 import METADATA, make_user_data
from batchml.runtime.telemetry.spot import FILE, NoticeSource, SpotNotice, SpotWatcher
from tests.aws.test_userdata import BOOTHOOK, Instance, instance, scripts
from tests.process.test_notice import ACTION, AT, Metadata, Run, listening, metadata
from tests.support.local_server import wait_for
from tests.support.needs import unavailable

__all__ = ["instance", "metadata"]

REBALANCE = {"noticeTime": "2026-09-18T08:00:00Z"}


def installed(instance: Instance) -> Path:
    hook = scripts(make_user_data(is_spot=True), BOOTHOOK)[-1]
    for _ in range(2):  # two boots
        shown = instance.run(hook)
        assert (shown.returncode, shown.stderr) == (0, "")
    return instance.root / "usr/local/sbin/batchml-notice"


@pytest.fixture
def folder(instance: Instance, metadata: Metadata) -> Iterator[Path]:
    """`/run/batchml` of a host whose service runs, some hundred times as often as on a host."""
    if which("curl") is None:
        unavailable("curl is not installed")
    script = installed(instance)
    script.write_text(script.read_text().replace(f"http:/{METADATA}", metadata.address))
    instance.install("sleep", "exec /bin/sleep 0.02")
    path = f"{instance.bin}:{os.environ['PATH']}"
    process = subprocess.Popen([script], env={"PATH": path}, start_new_session=True)
    yield instance.root / "run/batchml"
    assert process.poll() is None, "it ends when its host does"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def looked(metadata: Metadata, times: int = 2) -> None:
    """Wait until it has asked for everything so many times from now."""
    until = len(metadata.asked) + 2 * times + 1
    wait_for(lambda: len(metadata.asked) >= until, "it asks")


def test_only_spot_hosts_have_the_service_and_each_boot_starts_it(instance: Instance) -> None:
    assert "batchml-notice" not in make_user_data()
    script = installed(instance)
    assert os.access(script, os.X_OK)
    unit = (instance.root / "etc/systemd/system/batchml-notice.service").read_text()
    assert f"ExecStart={script}\n" in unit
    assert "Restart=always" in unit
    assert "RuntimeDirectory" not in unit  # containers would keep the folder that was there before
    assert instance.called("systemctl") == [
        "daemon-reload", "start --no-block batchml-notice",
    ] * 2  # fmt: skip


def test_what_ec2_announces_is_there_for_containers_and_before_it_nothing(
    folder: Path, metadata: Metadata
) -> None:
    looked(metadata)
    assert list(folder.iterdir()) == []
    assert set(metadata.asked) == {
        f"/latest/meta-data/{each}"
        for each in ("spot/instance-action", "events/recommendations/rebalance")
    }
    run = Run(BATCHML_NOTICE_FILE=str(folder / "notice"))
    companion = listening(run)
    metadata.answers["events/recommendations/rebalance"] = REBALANCE
    wait_for((folder / "notice.rebalance").exists, "the advice is there")
    assert json.loads((folder / "notice.rebalance").read_text()) == REBALANCE
    companion.poll()
    companion.tick(0)
    assert len(run.said) == 1 and run.stopped == []
    metadata.token = "t2"  # the first one has ended
    metadata.answers["spot/instance-action"] = ACTION
    wait_for((folder / "notice").exists, "the notice is there")
    assert (folder / "notice").stat().st_mode & 0o777 == 0o644
    heard(companion, run)


def heard(companion: SpotWatcher, run: Run) -> None:
    companion.poll()
    companion.tick(1)
    [(reason, code)] = run.stopped
    assert code == 75
    assert "in 118 s" in reason
    companion.finish()


def test_a_notice_that_is_withdrawn_stops_nobody_who_comes_later(
    folder: Path, metadata: Metadata
) -> None:
    """A host that was hibernated has it still when it goes on."""
    metadata.answers["spot/instance-action"] = {**ACTION, "action": "hibernate"}
    wait_for((folder / "notice").exists, "the notice is there")
    metadata.answers.clear()
    wait_for(lambda: not (folder / "notice").exists(), "it is gone")


def test_a_notice_stays_while_the_service_answers_with_errors(
    folder: Path, metadata: Metadata
) -> None:
    metadata.answers["spot/instance-action"] = ACTION
    wait_for((folder / "notice").exists, "the notice is there")
    metadata.status = 500
    looked(metadata)
    assert json.loads((folder / "notice").read_text()) == ACTION


def test_where_the_host_writes_nothing_the_metadata_service_is_asked(
    metadata: Metadata, tmp_path: Path
) -> None:
    """A queue that is not of `setup`: the folder is empty there, and no firewall in the way."""
    run = Run(
        BATCHML_NOTICE_FILE=str(tmp_path / "notice"),
        AWS_EC2_METADATA_SERVICE_ENDPOINT=metadata.address,
    )
    metadata.answers["spot/instance-action"] = ACTION
    companion = listening(run, now=AT - 118)
    wait_for(lambda: bool(metadata.asked), "it has asked")
    heard(companion, run)


def test_where_nobody_answers_the_file_is_read_for_as_long_as_the_run_lasts(tmp_path: Path) -> None:
    asked = []

    def refuses(method: str, url: str, headers: object, timeout: float) -> bytes:
        asked.append(url)
        raise OSError("unreachable")

    path = tmp_path / "notice"
    service = "http://169.254.169.254"
    environ = {FILE: str(path), "AWS_EC2_METADATA_SERVICE_ENDPOINT": service}
    source = NoticeSource(environ, refuses)
    for _ in range(9):
        assert source.notice() is None
        assert not source.recommends_rebalance()
    assert len(asked) == 3
    path.write_text(json.dumps(ACTION))
    assert source.notice() == SpotNotice("terminate", AT)
