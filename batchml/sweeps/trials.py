"""The parameters and commands of a sweep's trials, from the sweep's store.

The request of a trial has the defaults of its job. The runtime takes the trial's own parameters
from the manifest of its batch, so they are read there.
"""

import re
from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import BatchmlError
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.sweep import (
    CONTRACT,
    BadManifest,
    BadTrialContract,
    TrialContract,
    TrialEntry,
    batch_key,
    decode,
    ranked,
    rung_prefix,
)
from batchml.runtime.protocol.variables import Scalar, fill_command
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweeps.stores import open_sweep_store

_BATCH = re.compile(r"-w(\d{1,6})$")  # of the name of a batch's job: `batch_name`


def with_trials(context: Context, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs; those of trials with their own parameters and commands.

    The array of a batch has the parameters that all its trials share. Without the sweep's store a
    trial has no parameters. The store is read twice for each batch.
    """

    @cache
    def read(key: str, batch: int) -> BatchOfTrials | None:
        try:
            return read_batch(open_sweep_store(context, key), key, batch)
        except (BatchmlError, StoreError, BadManifest, BadTrialContract):
            return None

    @cache
    def read_rung(key: str, rung: int) -> tuple[int, ...]:
        """The numbers of the trials that a rung has chosen, the best first."""
        try:
            store = open_sweep_store(context, key)
            return tuple(ranked(store.keys(rung_prefix(rung - 1)))) if rung else ()
        except (BatchmlError, StoreError):
            return ()

    found = []
    for each in runs:
        number = _batch_number(each) if each.sweep else 0
        if not number:
            found.append(each)
            continue
        variables = each.run.environment if each.run else {}
        rung = int(variables.get("BATCHML_RUNG", 0))
        # All trials of such a sweep are in its first batch, by their number.
        batch = read(each.sweep, 1 if rung else number)
        found.append(with_trial(each, batch, read_rung(each.sweep, rung) if rung else None))
    return found


class BatchOfTrials:
    """The trials of a batch, by the index of their child, and the contract of the sweep."""

    def __init__(self, contract: TrialContract, entries: Sequence[TrialEntry]) -> None:
        self._contract = contract
        self._entries = entries

    def params(self, index: int) -> dict[str, Scalar] | None:
        """The parameters of a trial; None if the batch has no such trial."""
        if not 0 <= index < len(self._entries):
            return None
        return {**self._contract.params, **self._entries[index].params}

    def common_params(self) -> dict[str, Scalar]:
        """The parameters that have the same value in all trials."""
        tables = [{**self._contract.params, **entry.params} for entry in self._entries]
        first = tables[0] if tables else {}
        return {
            name: value
            for name, value in first.items()
            if all(name in table and table[name] == value for table in tables)
        }

    @property
    def template(self) -> tuple[str, ...]:
        """The command with its placeholders."""
        return self._contract.command


def read_batch(store: Store, key: str, number: int) -> BatchOfTrials:
    """Read a batch of the sweep `key`. Raises StoreError, BadManifest and BadTrialContract."""
    data, contract = store.get_many([batch_key(number), CONTRACT])
    if data is None or contract is None:
        raise BadManifest(f"{batch_key(number)} or {CONTRACT} is missing from the sweep's store.")
    lines = data.splitlines(keepends=True)
    entries = [decode(each, key, number, index, len(each)) for index, each in enumerate(lines)]
    return BatchOfTrials(TrialContract.from_json(contract), entries)


def with_trial(
    found: FoundRun, batch: BatchOfTrials | None, chosen: Sequence[int] | None = None
) -> FoundRun:
    """A trial's run with the trial's parameters and command. Pure.

    `chosen`: for a rung, the trial of each child; without it child i runs trial i of the batch.
    """
    index = _child_index(found)
    if index is None:
        common = batch.common_params() if batch and chosen is None else {}
        return _with_params(found, common)
    if chosen is not None:
        index = chosen[index] if index < len(chosen) else -1
    params = batch.params(index) if batch else None
    if batch is None or params is None:
        return _with_params(found, {})
    return _with_params(found, params, batch.template)


def _with_params(
    found: FoundRun, params: dict[str, Scalar], template: tuple[str, ...] = ()
) -> FoundRun:
    """The run with these parameters; with a template, also with the command that it makes.

    The template is kept as the job's, as in records of other runs: so commands that differ only in
    parameters are known to be the same.
    """
    run, record = found.run, found.record
    command = tuple(fill_command(template, params))
    job = {"command": list(template)} if template else {}
    return FoundRun(
        run and replace(run, params=params, command=command or run.command),
        record
        and replace(
            record, params=params, command=command or record.command, spec=record.spec or job
        ),
        found.idle,
    )


def _batch_number(found: FoundRun) -> int:
    """The number of the batch that a job runs; 0 for the controller of a sweep."""
    variables = found.run.environment if found.run else {}
    if variables.get("BATCHML_WAVE", "").isdigit():
        return int(variables["BATCHML_WAVE"])
    named = _BATCH.search(found.name)
    return int(named[1]) if named else 0


def _child_index(found: FoundRun) -> int | None:
    """The index of a child; 0 for a job of one trial, None for an array."""
    run, record = found.run, found.record
    if run is not None and run.array_index is not None:
        return run.array_index
    _, colon, index = found.job_id.partition(":")
    if colon:
        return int(index)
    size = (run.array_size if run else 0) or (record.array_size if record else 0)
    return None if size else 0
