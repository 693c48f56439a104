"""The accelerators and network interfaces of EC2 instance types: one table for the whole program.

Sources: EC2's DescribeInstanceTypes as moto 5.2.5 has it (ec2/resources/instance_types.json.gz)
and as karpenter-provider-aws has it (website, instance-types.md of 2026-08-21): both agree on every
row. Of types that neither has (p3, g3, f1, dl1, p6e-gb200): EC2's pages of these types. Speeds are
dense, of NVIDIA's data sheets and of AWS Neuron's pages on the architecture of each chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, NamedTuple, Optional, Tuple

NVIDIA, NEURON = "nvidia", "neuron"  # the makers whose devices jobs can use
UNKNOWN = "unknown"

_Pair = Tuple[int, int]


class Accelerator(NamedTuple):
    """A GPU or another chip for training and inference; the figures are those of one chip.

    `maker` is "nvidia", "neuron" (AWS), "amd", "habana", "qualcomm", "xilinx" or "unknown".
    """

    maker: str
    name: str
    memory_gib: float = 0  # that programs see
    capability: Optional[_Pair] = None  # NVIDIA's compute capability
    bf16_tflops: Optional[float] = None  # None: it computes no bf16, or nobody published it
    fp16_tflops: Optional[float] = None
    bandwidth_gbs: Optional[float] = None  # of its memory, in GB/s
    cores: int = 0  # NeuronCores

    @property
    def last_cuda(self) -> Optional[int]:
        """The last major version of CUDA that computes on it, where one is known.

        Source: CUDA 13.0 release notes: without Maxwell, Pascal and Volta.
        """
        old = self.capability is not None and self.capability < (7, 5)
        return 12 if old else None

    @property
    def last_driver(self) -> Optional[int]:
        """The last branch of NVIDIA's driver that knows it, where one is known."""
        return 580 if self.last_cuda == 12 else None

    @property
    def needs_open_modules(self) -> bool:
        """Whether only NVIDIA's open kernel modules work: Blackwell and later."""
        return self.capability is not None and self.capability >= (10, 0)

    @property
    def needs_nvlsm(self) -> bool:
        """Whether its NVLink switches need the subnet manager `nvlsm` on the host."""
        return self.name in ("B200", "B300", "GB200")


@dataclass(frozen=True)
class InstanceDevices:
    """The devices of an instance type."""

    instance_type: str
    accelerator: Optional[Accelerator] = None
    count: int = 0  # accelerators; 0 also of types with a part of one (g6f)
    efa_cards: int = 0  # EFA interfaces; 0: the type has no EFA
    network_cards: int = 1
    gbps: Optional[float] = None  # sustained, of all network cards together

    @property
    def job_counts(self) -> Tuple[int, ...]:
        """The numbers of accelerators that a job may take.

        A job on Trainium needs chips that are neighbours. Source: AWS Neuron, "Neuron Scheduler
        Extension" (k8s-neuron-scheduler).
        """
        chips = self.accelerator
        if chips is not None and chips.name == "Trainium" and self.count == 16:
            return (1, 4, 8, 16)
        return tuple(range(1, self.count + 1))


_ACCELERATORS: Dict[str, Accelerator] = {
    "M60": Accelerator(NVIDIA, "M60", 8, (5, 2), bandwidth_gbs=160),
    "V100": Accelerator(NVIDIA, "V100", 16, (7, 0), None, 125, 900),
    "V100-32": Accelerator(NVIDIA, "V100", 32, (7, 0), None, 125, 900),
    "T4": Accelerator(NVIDIA, "T4", 16, (7, 5), None, 65, 320),
    "T4G": Accelerator(NVIDIA, "T4G", 16, (7, 5), None, 65, 320),
    "A100": Accelerator(NVIDIA, "A100", 40, (8, 0), 312, 312, 1555),
    "A100-80": Accelerator(NVIDIA, "A100", 80, (8, 0), 312, 312, 2039),
    "A10G": Accelerator(NVIDIA, "A10G", 22.4, (8, 6), 70, 70, 600),
    "L4": Accelerator(NVIDIA, "L4", 22.4, (8, 9), 121, 121, 300),
    "L40S": Accelerator(NVIDIA, "L40S", 44.7, (8, 9), 362, 362, 864),
    "H100": Accelerator(NVIDIA, "H100", 80, (9, 0), 989, 989, 3350),
    "H200": Accelerator(NVIDIA, "H200", 141, (9, 0), 989, 989, 4800),
    "B200": Accelerator(NVIDIA, "B200", 179, (10, 0), 2250, 2250, 8000),
    "B300": Accelerator(NVIDIA, "B300", 268.6, (10, 3), 2250, 2250, 8000),
    "GB200": Accelerator(NVIDIA, "GB200", 185, (10, 0), 2500, 2500, 8000),
    "RTX PRO 4500": Accelerator(NVIDIA, "RTX PRO 4500", 32, (12, 0)),
    "RTX PRO 6000": Accelerator(NVIDIA, "RTX PRO 6000", 96, (12, 0), bandwidth_gbs=1597),
    "Trainium": Accelerator(NEURON, "Trainium", 32, None, 190, 190, 820, cores=2),
    "Trainium2": Accelerator(NEURON, "Trainium2", 96, None, 667, 667, 2900, cores=8),
    "Inferentia": Accelerator(NEURON, "Inferentia", 8, None, 64, 64, 50, cores=4),
    "Inferentia2": Accelerator(NEURON, "Inferentia2", 32, None, 190, 190, 820, cores=2),
    "Radeon Pro V520": Accelerator("amd", "Radeon Pro V520", 8),
    "Gaudi": Accelerator("habana", "Gaudi", 32),
    "AI100": Accelerator("qualcomm", "AI100", 15.6),
    "Alveo U30": Accelerator("xilinx", "Alveo U30"),
    "FPGA": Accelerator("xilinx", "FPGA"),
}

_Size = Tuple[int, int, int, Optional[float]]

# Family -> (accelerator, size -> (count, EFA interfaces, network cards, Gbps)).
_ACCELERATED: Dict[str, Tuple[str, Dict[str, _Size]]] = {
    "p3": ("V100", {
        "2xlarge": (1, 0, 1, 2.5), "8xlarge": (4, 0, 1, 10), "16xlarge": (8, 0, 1, 25),
    }),
    "p3dn": ("V100-32", {"24xlarge": (8, 1, 1, 100)}),
    "p4d": ("A100", {"24xlarge": (8, 4, 4, 400)}),
    "p4de": ("A100-80", {"24xlarge": (8, 4, 4, 400)}),
    "p5": ("H100", {"4xlarge": (1, 1, 1, 100), "48xlarge": (8, 32, 32, 3200)}),
    "p5e": ("H200", {"48xlarge": (8, 32, 32, 3200)}),
    "p5en": ("H200", {"48xlarge": (8, 16, 16, 3200)}),
    "p6-b200": ("B200", {"48xlarge": (8, 8, 8, 3200)}),
    "p6-b300": ("B300", {"48xlarge": (8, 16, 17, 6400)}),
    "p6e-gb200": ("GB200", {"36xlarge": (4, 4, 17, 1600)}),
    "g3": ("M60", {"4xlarge": (1, 0, 1, 5), "8xlarge": (2, 0, 1, 10), "16xlarge": (4, 0, 1, 25)}),
    "g3s": ("M60", {"xlarge": (1, 0, 1, None)}),
    "g4dn": ("T4", {
        "xlarge": (1, 0, 1, 5), "2xlarge": (1, 0, 1, 10), "4xlarge": (1, 0, 1, 20),
        "8xlarge": (1, 1, 1, 50), "12xlarge": (4, 1, 1, 50), "16xlarge": (1, 1, 1, 50),
        "metal": (8, 1, 1, 100),
    }),
    "g4ad": ("Radeon Pro V520", {
        "xlarge": (1, 0, 1, 2), "2xlarge": (1, 0, 1, 4.167), "4xlarge": (1, 0, 1, 8.333),
        "8xlarge": (2, 0, 1, 15), "16xlarge": (4, 0, 1, 25),
    }),
    "g5": ("A10G", {
        "xlarge": (1, 0, 1, 2.5), "2xlarge": (1, 0, 1, 5), "4xlarge": (1, 0, 1, 10),
        "8xlarge": (1, 1, 1, 25), "12xlarge": (4, 1, 1, 40), "16xlarge": (1, 1, 1, 25),
        "24xlarge": (4, 1, 1, 50), "48xlarge": (8, 1, 1, 100),
    }),
    "g5g": ("T4G", {
        "xlarge": (1, 0, 1, 1.25), "2xlarge": (1, 0, 1, 2.5), "4xlarge": (1, 0, 1, 5),
        "8xlarge": (1, 0, 1, 12), "16xlarge": (2, 0, 1, 25), "metal": (2, 0, 1, 25),
    }),
    "g6": ("L4", {
        "xlarge": (1, 0, 1, 2.5), "2xlarge": (1, 0, 1, 5), "4xlarge": (1, 0, 1, 10),
        "8xlarge": (1, 1, 1, 25), "12xlarge": (4, 1, 1, 40), "16xlarge": (1, 1, 1, 25),
        "24xlarge": (4, 1, 1, 50), "48xlarge": (8, 1, 1, 100),
    }),
    "gr6": ("L4", {"4xlarge": (1, 0, 1, 10), "8xlarge": (1, 1, 1, 25)}),
    "g6f": ("L4", {
        "large": (0, 0, 1, 1.5), "xlarge": (0, 0, 1, 2.5), "2xlarge": (0, 0, 1, 5),
        "4xlarge": (0, 0, 1, 10),
    }),
    "gr6f": ("L4", {"4xlarge": (0, 0, 1, 10)}),
    "g6e": ("L40S", {
        "xlarge": (1, 0, 1, 2.5), "2xlarge": (1, 0, 1, 5), "4xlarge": (1, 0, 1, 20),
        "8xlarge": (1, 1, 1, 25), "12xlarge": (4, 1, 1, 100), "16xlarge": (1, 1, 1, 35),
        "24xlarge": (4, 2, 2, 200), "48xlarge": (8, 4, 4, 400),
    }),
    "g7": ("RTX PRO 4500", {
        "2xlarge": (1, 0, 1, 60), "4xlarge": (1, 0, 1, 60), "8xlarge": (1, 1, 1, 80),
        "12xlarge": (2, 1, 1, 175), "24xlarge": (4, 1, 1, 350), "48xlarge": (8, 2, 2, 700),
    }),
    "g7e": ("RTX PRO 6000", {
        "2xlarge": (1, 0, 1, 50), "4xlarge": (1, 0, 1, 50), "8xlarge": (1, 1, 1, 100),
        "12xlarge": (2, 1, 1, 400), "24xlarge": (4, 2, 2, 800), "48xlarge": (8, 4, 4, 1600),
    }),
    "trn1": ("Trainium", {"2xlarge": (1, 0, 1, 3.125), "32xlarge": (16, 8, 8, 800)}),
    "trn1n": ("Trainium", {"32xlarge": (16, 16, 16, 1600)}),
    "trn2": ("Trainium2", {"3xlarge": (1, 1, 1, 200), "48xlarge": (16, 16, 16, 3200)}),
    "trn2u": ("Trainium2", {"48xlarge": (16, 16, 16, 3200)}),
    "inf1": ("Inferentia", {
        "xlarge": (1, 0, 1, 5), "2xlarge": (1, 0, 1, 5), "6xlarge": (4, 0, 1, 25),
        "24xlarge": (16, 1, 1, 100),
    }),
    "inf2": ("Inferentia2", {
        "xlarge": (1, 0, 1, 2.083), "8xlarge": (1, 0, 1, 16.667), "24xlarge": (6, 0, 1, 50),
        "48xlarge": (12, 0, 1, 100),
    }),
    "dl1": ("Gaudi", {"24xlarge": (8, 4, 4, 400)}),
    "dl2q": ("AI100", {"24xlarge": (8, 1, 1, 100)}),
    "vt1": ("Alveo U30", {
        "3xlarge": (1, 0, 1, 3.12), "6xlarge": (2, 0, 1, 6.25), "24xlarge": (8, 1, 1, 25),
    }),
    "f1": ("FPGA", {"2xlarge": (1, 0, 1, 2.5), "4xlarge": (2, 0, 1, 5), "16xlarge": (8, 0, 1, 25)}),
    "f2": ("FPGA", {
        "6xlarge": (1, 0, 1, 12.5), "12xlarge": (2, 0, 1, 25), "48xlarge": (8, 1, 1, 100),
    }),
}  # fmt: skip

# Families without accelerators -> their sizes with EFA. Other sizes have one card and no EFA.
_CPU: Dict[str, Dict[str, Tuple[int, int, float]]] = {
    "c5n": {"9xlarge": (1, 1, 50), "18xlarge": (1, 1, 100), "metal": (1, 1, 100)},
    "c6a m6a r6a": {"48xlarge": (1, 1, 50), "metal": (1, 1, 50)},
    "c6gn im4gn": {"16xlarge": (1, 1, 100)},
    "c6i c6id m6i m6id r6i r6id": {"32xlarge": (1, 1, 50), "metal": (1, 1, 50)},
    "c6in m6idn m6in r6idn r6in": {"32xlarge": (2, 2, 200), "metal": (2, 2, 200)},
    "c7a c7i m7a m7i r7a r7i": {"48xlarge": (1, 1, 50), "metal-48xl": (1, 1, 50)},
    "c7g c7gd m7g m7gd r7g r7gd": {"16xlarge": (1, 1, 30), "metal": (1, 1, 30)},
    "c7gn": {"16xlarge": (1, 1, 200), "metal": (1, 1, 200)},
    "c8a m8a r8a": {"48xlarge": (1, 1, 75), "metal-48xl": (1, 1, 75)},
    "c8g c8gd m8g m8gd r8g r8gd x8g": {
        "24xlarge": (1, 1, 40), "48xlarge": (1, 1, 50),
        "metal-24xl": (1, 1, 40), "metal-48xl": (1, 1, 50),
    },
    "c8gb m8gb r8gb": {
        "16xlarge": (1, 1, 133.33), "24xlarge": (1, 1, 200), "48xlarge": (2, 2, 400),
        "metal-24xl": (1, 1, 200), "metal-48xl": (2, 2, 400),
    },
    "c8gn m8gn r8gn": {
        "16xlarge": (1, 1, 200), "24xlarge": (1, 1, 300), "48xlarge": (2, 2, 600),
        "metal-24xl": (1, 1, 300), "metal-48xl": (2, 2, 600),
    },
    "c8i c8id m8i m8id r8i r8id": {
        "48xlarge": (1, 1, 75), "96xlarge": (1, 1, 100),
        "metal-48xl": (1, 1, 75), "metal-96xl": (1, 1, 100),
    },
    "c8ib m8ib m8idb r8ib r8idb": {
        "48xlarge": (1, 1, 200), "96xlarge": (2, 2, 400),
        "metal-48xl": (1, 1, 200), "metal-96xl": (2, 2, 400),
    },
    "c8in m8idn m8in r8idn r8in": {
        "48xlarge": (1, 1, 300), "96xlarge": (2, 2, 600),
        "metal-48xl": (1, 1, 300), "metal-96xl": (2, 2, 600),
    },
    "c9g c9gd m9g m9gd r9g r9gd": {"48xlarge": (1, 1, 100), "metal-48xl": (1, 1, 100)},
    "hpc6a": {"48xlarge": (1, 1, 100)},
    "hpc6id": {"32xlarge": (2, 2, 200)},
    "hpc7a": {
        "12xlarge": (2, 2, 300), "24xlarge": (2, 2, 300),
        "48xlarge": (2, 2, 300), "96xlarge": (2, 2, 300),
    },
    "hpc7g": {"4xlarge": (1, 1, 200), "8xlarge": (1, 1, 200), "16xlarge": (1, 1, 200)},
    "hpc8a": {"96xlarge": (2, 2, 300)},
    "i3en": {"12xlarge": (1, 1, 50), "24xlarge": (1, 1, 100), "metal": (1, 1, 100)},
    "i4g": {"16xlarge": (1, 1, 37.5)},
    "i4i": {"32xlarge": (1, 1, 75), "metal": (1, 1, 75)},
    "i7i": {"24xlarge": (1, 1, 56.25), "48xlarge": (1, 1, 100), "metal-48xl": (1, 1, 100)},
    "i7ie": {"48xlarge": (1, 2, 100), "metal-48xl": (1, 2, 100)},
    "i8g": {"48xlarge": (1, 1, 100), "metal-48xl": (1, 1, 90)},
    "i8ge": {"48xlarge": (1, 2, 180), "metal-48xl": (1, 2, 180)},
    "m5dn m5n r5dn r5n": {"24xlarge": (1, 1, 100), "metal": (1, 1, 100)},
    "m5zn x2iezn": {"12xlarge": (1, 1, 100), "metal": (1, 1, 100)},
    "m8azn": {"24xlarge": (1, 1, 200), "metal-24xl": (1, 1, 200)},
    "r7iz": {"32xlarge": (1, 1, 50), "metal-32xl": (1, 1, 50)},
    "u7i-12tb": {"224xlarge": (1, 1, 100)},
    "u7i-6tb u7i-8tb": {"112xlarge": (1, 1, 100)},
    "u7in-16tb u7in-24tb u7in-32tb": {"224xlarge": (2, 2, 200)},
    "x2idn x2iedn": {"32xlarge": (1, 1, 100), "metal": (1, 1, 100)},
    "x8aedz": {"24xlarge": (1, 1, 75), "metal-24xl": (1, 1, 75)},
    "x8i": {
        "48xlarge": (1, 1, 75), "64xlarge": (1, 1, 80), "96xlarge": (1, 1, 100),
        "metal-48xl": (1, 1, 75), "metal-96xl": (1, 1, 100),
    },
    "a1 c3 c4 c5 c5a c5ad c5d c6g c6gd c7i-flex c8i-flex c8ine d2 d3 d3en h1 i2 i3 is4gen m3 m4 m5 "
    "m5a m5ad m5d m6g m6gd m7i-flex m8i-flex m8ine r3 r4 r5 r5a r5ad r5b r5d r6g r6gd r8i-flex t2 "
    "t3 t3a t4g t8i u-3tb1 u-6tb1 x1 x1e x2gd z1d": {},
}  # fmt: skip

# The letters of EC2's families with accelerators: EC2 User Guide, "Instance type naming".
_ACCELERATED_FAMILY = r"(p|gr?|trn|inf|dl|f|vt)[0-9][a-z0-9-]*"
_SIZE = r"(?:metal-)?(\d*)xl"
_METAL = 96  # vCPUs; most metal types have that or more


@lru_cache(maxsize=None)
def _cpu_families() -> Dict[str, Dict[str, Tuple[int, int, float]]]:
    return {family: sizes for families, sizes in _CPU.items() for family in families.split()}


def _sizes(family: str) -> Dict[str, _Size]:
    """The sizes of a family with accelerators, the smallest first."""
    return _ACCELERATED[family][1] if family in _ACCELERATED else {}


def family_accelerator(name: str) -> Optional[Accelerator]:
    """The accelerator of an instance type or family; None if it has none.

    The accelerator of a family that the table lacks has the maker "unknown".
    """
    family = name.partition(".")[0]
    if family in _ACCELERATED:
        return _ACCELERATORS[_ACCELERATED[family][0]]
    return Accelerator(UNKNOWN, "") if re.fullmatch(_ACCELERATED_FAMILY, family) else None


def devices_of(instance_type: str) -> Optional[InstanceDevices]:
    """The devices of an instance type; None for a type or family that the table does not have."""
    family, _, size = instance_type.partition(".")
    if size in _sizes(family):
        return InstanceDevices(instance_type, family_accelerator(family), *_sizes(family)[size])
    sizes = _cpu_families().get(family)
    if sizes is None or not size:
        return None
    efa_cards, network_cards, gbps = sizes.get(size, (0, 1, None))
    return InstanceDevices(instance_type, None, 0, efa_cards, network_cards, gbps)


def family_types(name: str) -> Tuple[InstanceDevices, ...]:
    """The types of a family in the table, or the type itself: `("trn1.2xlarge", "trn1.32xlarge")`.

    Of families without accelerators, the types that have EFA.
    """
    family, _, size = name.partition(".")
    sizes = (size,) if size else (*_sizes(family), *_cpu_families().get(family, ()))
    found = (devices_of(f"{family}.{each}") for each in sizes)
    return tuple(each for each in found if each is not None)


def accelerator_of_card(product: str, memory_gib: float = 0) -> Optional[Accelerator]:
    """The row of a card by its product name as NVML and PyTorch say it: "NVIDIA A100-SXM4-80GB".

    `memory_gib` chooses between cards of one name. Cards that no instance type has are not in the
    table, nor are the slower PCIe cards of a name: then None.
    """
    words = re.split(r"[^A-Za-z0-9]+", product)
    if "PCIe" in words or "PCIE" in words or "NVL" in words:
        return None
    text = " ".join(words)
    found = [
        each
        for each in _ACCELERATORS.values()
        if each.maker == NVIDIA and re.search(rf"\b{each.name}\b", text)
    ]
    sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+GB", word)]
    memory = memory_gib or next(iter(sizes), 0)
    return min(found, key=lambda each: abs(each.memory_gib - memory), default=None)


def vcpus_of(instance_type: str) -> int:
    """The vCPUs of a type, or of a family's smallest type.

    The name of the size tells: an xlarge has 4 vCPUs, an Nxlarge 4 N, and smaller sizes 2.
    """
    family, _, size = instance_type.partition(".")
    size = size or next(iter(_sizes(family)), "large")
    match = re.match(_SIZE, size)
    if match:
        return 4 * int(match[1] or 1)
    return _METAL if size == "metal" else 2
