"""What the compiler makes of the kernels by channel, for GPUs that are not here: the plans that `choose.py` picks."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compiled.test_compiled import NVIDIA, local_memory
from warpnorm import pipeline
from warpnorm.codegen import bind
from warpnorm.norms import BATCH_NORM, GROUP_NORM, Norm
from warpnorm.plan import choose, grid
from warpnorm.plan.device import KNOWN, Device
from warpnorm.plan.plan import COLUMN, Plan
from warpnorm.problem import FULL, BackwardProblem, Call, ForwardProblem, View
from warpnorm.reference import Affine, Itself
from warpnorm.space import Space

Posed = tuple[tuple[ForwardProblem, Space], tuple[BackwardProblem, Space]]


@dataclass(frozen=True)
class Case:
    name: str
    norm: Norm
    shape: tuple[int, ...]
    is_last: bool
    groups: int = 0

    def problems(self, dtype: torch.dtype, samples: int = 0) -> Posed:
        """With both parameters, which are float32 for batch norm, as in mixed precision."""
        shape = (samples or self.shape[0], *self.shape[1:])
        memory_format = torch.channels_last if self.is_last else torch.contiguous_format
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
        whole = View(shape, strides, dtype, True)
        of_channel = torch.float32 if self.norm is BATCH_NORM else dtype
        parameter = View((shape[1], 1, 1), (1, 1, 1), of_channel, True)
        mask = (False, True, False, False)
        call = Call(
            self.norm, 1, 1e-5, Itself(), Affine(True, True), (FULL, mask, mask), (dtype,), groups=self.groups
        )  # fmt: skip
        views = (whole, parameter, parameter, whole)
        return pipeline.forward_problem(call, views), pipeline.backward_problem(call, views, (0,), (0, 1, 2))

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("batch_nchw", BATCH_NORM, (64, 256, 56, 56), False),
    Case("batch_last", BATCH_NORM, (64, 256, 56, 56), True),
    Case("group_nchw", GROUP_NORM, (32, 320, 64, 64), False, 32),
    Case("group_last", GROUP_NORM, (32, 320, 64, 64), True, 32),
)


def compile_all(case: Case, dtype: torch.dtype, device: Device) -> list[tuple[str, Plan, Any]]:
    """Everything that a call launches, forward and backward."""
    (forward, _), (backward, _) = case.problems(dtype)
    plans = choose.forward(forward, device), choose.backward(backward, device)
    merge, line_sum, tall_sum = (
        choose.column_merge(forward, device), choose.line_sum(backward, device), choose.tall_sum(backward, device)
    )  # fmt: skip
    found = [
        ("statistics", plans[0], bind.line_statistics(forward, plans[0], device, 0)),
        ("merge", merge, bind.row_statistics(forward, merge, device, 0)),
        ("forward", plans[0], bind.forward(forward, plans[0], device, 0)),
        ("sums", plans[1], bind.backward_sums(backward, plans[1], device, 0)),
        ("piece sums", line_sum, bind.piece_sums(backward, line_sum, device, 0)),
        ("backward", plans[1], bind.backward(backward, plans[1], device, 0)),
        ("gradient sums", tall_sum, bind.gradient_sums(backward, backward.reduced, tall_sum, device, 0)),
    ]
    return [(name, plan, kernel.compiled) for name, plan, kernel in found]


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sixteen_byte_accesses_and_no_local_memory(case: Case, dtype: torch.dtype, target: str) -> None:
    """Along the lines or across them, as memory runs."""
    device = KNOWN[target]
    for name, plan, kernel in compile_all(case, dtype, device):
        assert plan.pattern == COLUMN or "sums" in name
        code = kernel.asm["ptx"]
        if name in ("statistics", "forward", "sums", "backward"):
            loads = re.findall(r"ld\.global\S*\.v4\.b32", code) + re.findall(r"cp\.async\.cg\S* .*0x10", code)
            assert loads, f"{name} with {plan}"
        if name in ("forward", "backward"):
            assert re.search(r"st\.global\S*\.v4\.b32", code), f"{name} with {plan}"
        assert local_memory(kernel.asm["cubin"]) == 0, f"{name} with {plan}"
        assert kernel.metadata.shared <= device.shared_bytes, f"{name} with {plan}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_amd_by_channel(case: Case, dtype: torch.dtype) -> None:
    device = KNOWN["gfx942"]
    for name, plan, kernel in compile_all(case, dtype, device):
        code = kernel.asm["amdgcn"]
        assert "global_load" in code or "buffer_load" in code, name
        if name in ("forward", "backward"):
            assert re.search(r"(global|buffer)_store_dwordx4", code), f"{name} with {plan}"
        assert kernel.metadata.shared <= device.shared_bytes, f"{name} with {plan}"


@pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "channels_last"])
def test_plans_do_not_depend_on_the_samples(is_last: bool) -> None:
    """A sample's groups have the same bits in every batch: so are their parts, by whose order sums are made."""
    device = KNOWN["sm_90"]
    for size in (1, 7, 56, 200):
        for groups in (1, 8, 64):
            case = Case("group", GROUP_NORM, (1, 64, size, size), is_last, groups)
            parts = set()
            for samples in (1, 2, 3, 64, 1000):
                for problem, space in case.problems(torch.bfloat16, samples)[:1]:
                    plan = choose.forward(problem, device)
                    parts.add((plan, grid.part_cols(plan, space) if plan.pattern == COLUMN else space.cols))
            assert len(parts) == 1, f"{groups} groups of {size} x {size}"
