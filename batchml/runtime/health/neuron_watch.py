"""Watch for Neuron chips that break while the run goes on."""

from __future__ import annotations

from typing import Dict, List

from batchml.runtime.health.checks import MONITOR, RETRY, HostCheck, worst
from batchml.runtime.health.efa import sys_folder
from batchml.runtime.health.gate import OFF, EndingAttempt, HealthSettings, end_on_unfit_host
from batchml.runtime.health.neurons import check_counters, run_chips, uncorrected_errors

# What Neuron's runtime prints when a chip is broken.
_TEXTS = (
    "Uncorrectable HBM memory error is detected", "Uncorrectable SRAM", "NRT_EXEC_HW_ERR_HBM_UE",
    "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", "NRT_EXEC_HW_ERR_DMA_ABORT", "is in an abort state",
)  # fmt: skip
_POLL = 30.0  # seconds between two looks at the counters


class NeuronWatcher:
    """An attempt plug-in: leaves the host when a chip of the run breaks.

    After a command that failed it looks once more, because the program mostly ends first.
    """

    def __init__(self, attempt: EndingAttempt, dev: str = "/dev") -> None:
        self._attempt = attempt
        is_on = HealthSettings.read(attempt.environ).checks != OFF
        self._sys = sys_folder(attempt.environ)
        self._chips = run_chips(attempt.environ, dev) if is_on else []
        self._before = self._read()
        self._next = 0.0
        self._has_left = False

    def _read(self) -> Dict[int, Dict[str, int]]:
        return {chip: uncorrected_errors(self._sys, chip) for chip in self._chips}

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + _POLL
        self._react(self._new_errors())

    def finish(self) -> None:
        if not self._attempt.code or not self._chips:
            return
        found = self._new_errors()
        for line in self._attempt.last_lines():
            text = next((text for text in _TEXTS if text in line), "")
            if text:
                found.append(HostCheck("the program", RETRY, f"Neuron's runtime says: {text}"))
        self._react(found)

    def _new_errors(self) -> List[HostCheck]:
        return [
            check
            for chip, counts in self._read().items()
            for check in check_counters(f"neuron{chip}", counts, self._before[chip])
            if check.severity > MONITOR
        ]

    def _react(self, found: List[HostCheck]) -> None:
        if not self._has_left and worst(found) > MONITOR:
            self._has_left = True
            end_on_unfit_host(self._attempt, max(found, key=lambda check: check.severity))
