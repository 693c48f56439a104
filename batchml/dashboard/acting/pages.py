"""The routes of what acts, and of the pages with its buttons and forms."""

from typing import Any

from batchml.client import Client
from batchml.dashboard.act import read_text
from batchml.dashboard.acting import repair, runs, submit, tools
from batchml.dashboard.app import PageQuery, Route, route
from batchml.dashboard.html import Html
from batchml.handles import RunHandle


class ActingPages:
    """The actions of one environment, and their forms: a method for each route."""

    def __init__(self, client: Client, opened: tools.Tools, *, read_only: bool = False) -> None:
        self._client, self._tools, self._read_only = client, opened, read_only

    def routes(self) -> list[Route]:
        client = self._client
        return [
            route("/run/*/actions", self.run_actions),
            route("/run/*/explanation", self.explanation),
            route("/submit", self.jobs),
            route("/submit/*", self.job),
            route("/preview/rerun", lambda q: runs.preview_rerun(client, q)),
            route("/preview/submit", lambda q: submit.preview_submit(client, q)),
            route("/act/cancel", lambda q: runs.cancel(client, q)),
            route("/act/rerun", lambda q: runs.rerun(client, q)),
            route("/act/submit", lambda q: submit.submit(client, q)),
            route("/act/tensorboard", self.open_tensorboard),
            route("/act/notebook", lambda q: tools.start_notebook(self._tools, q)),
            route("/act/open-notebook", self.open_notebook),
        ]

    def _run(self, word: str) -> RunHandle:
        return self._client.run(word)

    def run_actions(self, query: PageQuery) -> Html:
        found = self._run(query.parts[0]).seen
        assert found is not None  # as `Client.run` has found it
        return runs.actions_panel(found, self._client.env_option, self._client.project,
                                  read_only=self._read_only)  # fmt: skip

    def explanation(self, query: PageQuery) -> Html:
        handle, client = self._run(query.parts[0]), self._client
        assert handle.seen is not None  # as `Client.run` has found it
        return repair.explanation_panel(
            handle.seen, handle.explain(), client.env_option, client.jobs, client.folder,
            client.project, read_only=self._read_only,
        )  # fmt: skip

    def jobs(self, query: PageQuery) -> Html:
        notebook = tools.notebook_action(self._client.env_option)
        return submit.jobs_page(self._client.jobs(), self._client.folder, self._client.env,
                                notebook, read_only=self._read_only)  # fmt: skip

    def job(self, query: PageQuery) -> Html:
        found = submit.find_known_job(self._client, query.parts[0])
        return submit.job_page(found, self._client.env, self._client.env_option,
                               read_only=self._read_only)  # fmt: skip

    def open_tensorboard(self, query: PageQuery) -> dict[str, Any]:
        return tools.open_tensorboard(self._tools, self._acted(query))

    def open_notebook(self, query: PageQuery) -> dict[str, Any]:
        return tools.open_notebook(self._tools, self._acted(query))

    def _acted(self, query: PageQuery) -> str:
        """The job id of the run that an action is about. Raises NotFound."""
        return self._run(read_text(query.body, "run")).job_id
