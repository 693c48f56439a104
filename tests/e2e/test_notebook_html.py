"""What a notebook shows of real runs and comparisons."""

import pytest

from batchml import Client
from tests.e2e.test_dashboard_curves import train
from tests.support.cli import Cli

pytestmark = pytest.mark.full


def test_runs_and_comparisons_show_their_tables_and_curves(cli: Cli) -> None:
    ids = train(cli, "0.1", "0.2")
    client = Client(folder=cli.folder, environ=cli.environ)
    failed = client.submit(command=["sh", "-c", "echo 'ValueError: boom'; exit 3"], name="bad")
    failed.wait()
    shown = client.run(ids[0])._repr_html_()
    assert shown.count("<svg") == 2 and "SUCCEEDED" in shown
    assert "The program raised ValueError: boom" in failed._repr_html_()
    listed = client.runs()._repr_html_()
    assert listed.count("<tr") == 4 and "lr=0.2" in listed
    compared = client.compare(ids)._repr_html_()
    assert "Differences" in compared and compared.count("<polyline") >= 4
    assert "The code is the same." in client.diff(*ids)._repr_html_()
    for each in (shown, listed, compared):
        assert "class=" not in each and "<script" not in each and "<style" not in each


def test_an_environment_that_does_not_answer_is_a_sentence(cli: Cli) -> None:
    client = Client(folder=cli.folder, environ=cli.environ)
    run = client.submit(command=["true"])
    run.wait()
    run.job_id = "0" * 36  # which nobody has submitted
    assert run._repr_html_().startswith("<p")
