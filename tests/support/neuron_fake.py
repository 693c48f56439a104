"""Folders in place of /dev and /sys, with Neuron chips and the counters of their driver."""

from pathlib import Path

TREES = {"2.30": "stats/hardware", "2.31": "hardware/ecc"}  # where a driver has its counters


class FakeChips:
    """Chips of a host: `dev` and `sys` are the folders."""

    def __init__(
        self,
        folder: Path,
        count: int,
        driver: str = "2.30",
        name: str = "Trainium1",
        cores: int = 2,
    ) -> None:
        self.dev, self.sys = folder / "dev", folder / "sys"
        self._tree = TREES[driver]
        self.dev.mkdir(parents=True)
        for chip in range(count):
            (self.dev / f"neuron{chip}").touch()
            top = self._top(chip)
            (top / "info/architecture").mkdir(parents=True)
            (top / "info/architecture/device_name").write_text(f"{name}\n")
            (top / "core_count").write_text(f"{cores}\n")
            (top / "subsystem").symlink_to(top)  # as sysfs has it
            for counter in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
                self.count(chip, counter, 0)

    def _top(self, chip: int) -> Path:
        return self.sys / "devices/virtual/neuron_device" / f"neuron{chip}"

    def count(self, chip: int, counter: str, total: int) -> None:
        """Set a counter of a chip."""
        folder = self._top(chip) / self._tree / counter
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "total").write_text(f"{total}\n")
        (folder / "present").write_text("0\n")

    def environ(self, asked: int | None = None) -> dict[str, str]:
        found = {"BATCHML_SYS": str(self.sys), "BATCHML_HOST_ID": "i-1"}
        return found if asked is None else {**found, "BATCHML_NEURONS": str(asked)}
