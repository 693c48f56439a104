"""A folder in place of /sys, with EFA devices and the name of an instance type."""

from pathlib import Path


def fake_sys(folder: Path, devices: int, instance_type: str = "") -> None:
    """Make or extend the folder. Each device has dropped one packet before."""
    for number in range(devices):
        device = folder / "class" / "infiniband" / f"rdmap{number}"
        counters = device / "ports" / "1" / "hw_counters"
        counters.mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir(exist_ok=True)
        (device / "device" / "vendor").write_text("0x1d0f\n")
        (device / "device" / "device").write_text("0xefa2\n")
        (counters / "rx_drops").write_text("1\n")
        (counters / "retrans_pkts").write_text("0\n")
    if instance_type:
        dmi = folder / "devices" / "virtual" / "dmi" / "id"
        dmi.mkdir(parents=True, exist_ok=True)
        (dmi / "product_name").write_text(f"{instance_type}\n")
