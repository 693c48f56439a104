"""Open the workspace of an environment: a local folder, an EFS, or an FSx for Lustre."""

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.naming import queue_name
from batchml.config.settings import Setting
from batchml.context import Context, Notify, open_cache
from batchml.errors import NotFound
from batchml.model.environment import sharers

if TYPE_CHECKING:
    from batchml.local.home import Home
    from batchml.workspace.base import WorkspaceBackend
    from batchml.workspace.remote import RemoteStorage


def open_workspace(context: Context, notify: Notify = lambda words: None) -> "WorkspaceBackend":
    """Open the workspace that an environment uses. Another environment may own it.

    `notify` gets messages about transfer runs. Raises NotFound if there is no workspace, and the
    errors of reading CloudFormation stacks.
    """
    if context.settings.is_local:
        from batchml.workspace.local import LocalWorkspace

        home = context.home
        home.prepare()
        return LocalWorkspace(home.root, context.folder, lambda: _count_running(home))
    owner = owning_context(context)
    outputs = open_cache(owner).outputs()
    if not outputs.get("BucketName") or not outputs.get("FileSystemId"):
        raise NotFound("Workspace", owner.env, [], _describe_absence(owner))
    storage = _remote_storage(owner, outputs["BucketName"], outputs["FileSystemId"], notify)
    if outputs.get("LustreMountName"):
        return _open_lustre(storage)
    from batchml.workspace.remote import RemoteWorkspace, list_in_running_run

    return RemoteWorkspace(storage, lambda path: list_in_running_run(owner, path))


def _count_running(home: "Home") -> int:
    """Count the running attempts of `local`, which a command that deletes nothing need not know."""
    from batchml.local.deletion_guard import count_running

    return count_running(home)


def _open_lustre(storage: "RemoteStorage") -> "WorkspaceBackend":
    from batchml.aws.fsx import FsxApi
    from batchml.aws.s3 import BucketStore
    from batchml.model.names import new_token
    from batchml.runtime.transfer.s3_archives import PosixArchive
    from batchml.workspace.lustre import LustreLink, LustreWorkspace
    from batchml.workspace.remote import ARCHIVE_PREFIX

    context, bucket = storage.context, storage.bucket
    session = context.connect()
    api = FsxApi(session)
    link = LustreLink(api, storage.file_system, context.clock, lambda: new_token(os.urandom))
    url = f"s3://{bucket}/{ARCHIVE_PREFIX}"
    archive = PosixArchive.open(url, session.variables(os.environ))
    return LustreWorkspace(storage, link, archive, BucketStore(session, bucket))


def _remote_storage(
    context: Context, bucket: str, file_system: str, notify: Notify
) -> "RemoteStorage":
    from batchml.aws.s3 import BucketStore
    from batchml.runtime.transfer.archives import ArchiveStore
    from batchml.runtime.transfer.backends import open_archive
    from batchml.workspace.remote import RemoteStorage
    from batchml.workspace.transfer_runs import TransferRuns

    session = context.connect()
    environ = session.variables(os.environ)

    def open_store(url: str) -> ArchiveStore:
        return open_archive(url, environ)

    return RemoteStorage(
        context,
        bucket,
        file_system,
        TransferRuns(context, BucketStore(session, bucket), notify),
        open_store,
        lambda: count_unfinished(context),
    )


def count_unfinished(context: Context) -> int:
    """Count unfinished runs in all environments that share the workspace; a large count is too low.

    AWS Batch is asked for one page per queue and state. A queue that does not exist has no runs.
    """
    api, environments = ComputeApi(context.connect()), context.settings.environments
    existing = api.queues()
    names = {
        queue_name(env, environments[env], queue)
        for env in (context.env, *sharers(context.env, environments))
        for queue in environments[env].queues
    }
    return sum(api.unfinished(name) for name in sorted(names & set(existing)))


def owning_context(context: Context) -> Context:
    """Return the context of the environment that owns the workspace."""
    owner = context.settings.environment.storage.shared_with
    if not owner:
        return context
    env = Setting(owner, f"env.{context.env}.storage.shared_with")
    context.settings.check(owner)
    return context.with_settings(replace(context.settings, env=env))


def _describe_absence(context: Context) -> str:
    if context.settings.environment.storage.workspace == "none":
        return f'The environment has none: [env.{context.env}.storage] workspace = "none".'
    return f"To make it: batchml setup --env {context.env}."
