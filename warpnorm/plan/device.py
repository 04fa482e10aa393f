"""The numbers of a device that plans follow from, read off the GPU at hand or given for one that is not."""

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """`backend` and `arch` name the compiler's target; `units` are multiprocessors or compute units."""

    backend: str
    arch: int | str
    warp_size: int
    units: int
    registers_per_unit: int
    shared_bytes: int  # the most that one program can have
    cache_bytes: int  # of L2
    has_teams: bool = True  # programs that all run at the same time, and wait as this backend's assembler can

    def registers(self, warps: int) -> int:
        """That each thread can have where a multiprocessor, which has four schedulers, holds so many warps."""
        return min(255, self.registers_per_unit // 4 // (-(-warps // 4) * self.warp_size) // 8 * 8)

    @property
    def is_interpreter(self) -> bool:
        return self.backend == "interpreter"


# Runs programs one after another on the CPU: a handful, so that tests see several programs share the rows.
INTERPRETER = Device(
    "interpreter", "cpu", warp_size=32, units=3, registers_per_unit=65536, shared_bytes=232448, cache_bytes=1 << 20,
    has_teams=False,
)  # fmt: skip

# For compiling without a GPU at hand: A100, H200, B200, MI300X.
KNOWN = {
    "sm_80": Device(
        "cuda", 80, warp_size=32, units=108, registers_per_unit=65536, shared_bytes=166912, cache_bytes=40 << 20
    ),
    "sm_90": Device(
        "cuda", 90, warp_size=32, units=132, registers_per_unit=65536, shared_bytes=232448, cache_bytes=50 << 20
    ),
    "sm_100": Device(
        "cuda", 100, warp_size=32, units=148, registers_per_unit=65536, shared_bytes=232448, cache_bytes=126 << 20
    ),
    "gfx942": Device(
        "hip",
        "gfx942",
        warp_size=64,
        units=304,
        registers_per_unit=131072,
        shared_bytes=65536,
        cache_bytes=4 << 20,
        has_teams=False,
    ),
}


def of(device: torch.device) -> Device:
    """The numbers of a GPU; tensors on a CPU are the interpreter's."""
    found = _numbers(device)
    return replace(found, has_teams=False) if _number(device) in _without_teams else found


def refuse_teams(device: torch.device) -> None:
    """For one that did not launch a team, whatever the reason: it gets no plans for them any more."""
    _without_teams.add(_number(device))


_without_teams: set[int | None] = set()


def _number(device: torch.device) -> int | None:
    return torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index


@cache
def _numbers(device: torch.device) -> Device:
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch: int | str = properties.gcnArchName.split(":")[0]
        backend = "hip"
    else:
        arch = properties.major * 10 + properties.minor
        backend = "cuda"
    registers = getattr(properties, "regs_per_multiprocessor", 65536)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    units, cache = properties.multi_processor_count, properties.L2_cache_size
    return Device(backend, arch, properties.warp_size, units, registers, shared, cache, has_teams=backend == "cuda")
