"""What is to be read off compiled code: reductions, barriers, the width of loads and stores, registers, spills."""

import re
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from warpnorm.codegen.kernel import BoundKernel


@dataclass(frozen=True)
class Listing:
    """Instructions counted in the code as it is written down, not as often as it runs; bytes for one thread."""

    shuffles: int
    barriers: int
    load_bytes: tuple[int, ...]  # the widths that occur
    store_bytes: tuple[int, ...]
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {_shown(getattr(self, f.name))}" for f in fields(self))


def read(kernel: BoundKernel) -> Listing:
    compiled = kernel.compiled
    shared = compiled.metadata.shared
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        registers, spilled = _usage(compiled.asm["cubin"])
        loads = [
            *_vector_bytes(r"ld\.global", code),
            *(int(n) for n in re.findall(r"cp\.async\.c[ag]\S* .*?, (\d+)", code)),
        ]
        loads += [int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\S* .*?, 0x([0-9a-f]+)", code)]
        return Listing(
            code.count("shfl.sync"), code.count("bar.sync"), _widths(loads),
            _widths(_vector_bytes(r"st\.global", code)), shared, registers, spilled,
        )  # fmt: skip
    code = compiled.asm["amdgcn"]
    sizes = {"byte": 1, "ubyte": 1, "short": 2, "ushort": 2, "short_d16": 2}
    sizes |= {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}

    def widths(kind: str) -> tuple[int, ...]:
        found = re.findall(rf"(?:global|buffer)_{kind}_(\w+)", code)
        return _widths([sizes.get(name.removesuffix("_hi"), 0) for name in found])

    def number(name: str) -> int | None:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else None

    return Listing(
        len(re.findall(r"_dpp|ds_bpermute|ds_swizzle|v_permlane", code)), code.count("s_barrier"), widths("load"),
        widths("store"), shared, number("vgpr_count"), number("vgpr_spill_count"),
    )  # fmt: skip


def _vector_bytes(instruction: str, code: str) -> list[int]:
    found = re.findall(rf"{instruction}\S*?(?:\.v(\d))?\.[bufs](\d+)\b", code)
    return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]


def _widths(found: list[int]) -> tuple[int, ...]:
    return tuple(sorted({width for width in found if width}))


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers, and bytes of stack and local memory, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (None, None)


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
