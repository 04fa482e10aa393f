"""What backward keeps of a tile from its first visit to its second: what the machine code then does not compute again."""

import re

import pytest
import torch
import torch.nn.functional as F
from test_compiled import NVIDIA, local_memory

import warpnorm
from warpnorm.codegen import bind
from warpnorm.explain import Direction
from warpnorm.kernels.blocks import keep_nothing
from warpnorm.plan.device import KNOWN
from warpnorm.plan.plan import ROW, TEAM


def activated(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.gelu(x + bias), x.shape[-1:], weight)


def backward_of(cols: int, dtype: torch.dtype, target: str) -> Direction:
    x = torch.empty(64, cols, dtype=dtype, device="meta").requires_grad_()
    bias, weight = (torch.empty(cols, dtype=dtype, device="meta").requires_grad_() for _ in range(2))
    found = warpnorm.explain(activated, x, bias, weight, target=target).backward
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("cols", "pattern"), [(4096, ROW), (8192, ROW), (16384, TEAM)])
@pytest.mark.parametrize("target", NVIDIA)
def test_the_normal_distribution_is_computed_once(cols: int, pattern: str, dtype: torch.dtype, target: str) -> None:
    """Two exponentials an element, of the distribution and of its density: three if it were computed again. A team's first
    and last row stand outside of its loop, each one visit."""
    found, device = backward_of(cols, dtype, target), KNOWN[target]
    assert found.plan.pattern == pattern
    compiled = bind.backward(found.problem, found.plan, device, 0).compiled
    elements = found.plan.block_cols * found.plan.chunks // (found.plan.warps * device.warp_size)
    rounds = 2 if pattern == TEAM else 1
    assert len(re.findall(r"\bex2\.approx", compiled.asm["ptx"])) == 2 * elements * rounds
    assert local_memory(compiled.asm["cubin"]) == 0


def test_amd_computes_it_again() -> None:
    """Its assembler takes no halves by pairs."""

    def keeps(target: str) -> bool:
        found = backward_of(4096, torch.bfloat16, target)
        return bind.backward(found.problem, found.plan, KNOWN[target], 0).constants["KEEP"] is not keep_nothing

    assert [keeps("sm_90"), keeps("gfx942")] == [True, False]
