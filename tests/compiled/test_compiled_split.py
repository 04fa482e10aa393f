"""What the compiler makes of the steps of norms that ranks share, for a GPU that is not here: statistics without an output,
results by given statistics, the sums that are exchanged, and the gradients."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled.test_compiled import local_memory
from warpnorm import pipeline
from warpnorm.codegen.bind import BoundKernel
from warpnorm.norms import BATCH_NORM, LAYER_NORM, RMS_NORM, Norm
from warpnorm.parallel import split
from warpnorm.plan import device as devices
from warpnorm.plan.device import KNOWN
from warpnorm.problem import COLUMN, FULL, Call, View
from warpnorm.reference import Affine, Itself

SPILLED = 16  # bytes, of parts of 80,000 columns, which are walked by blocks
GPU = torch.device("cuda", 0)


def kernels_of(launch: Any) -> list[Any]:
    found = [value for value in vars(launch).values() if isinstance(value, BoundKernel)]
    return [kernel.compiled for kernel in found]


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(BATCH_NORM, (64, 256, 56, 56)), (LAYER_NORM, (4096, 2048)), (RMS_NORM, (4096, 2048)), (LAYER_NORM, (64, 80000))],
    ids=("batch", "layer", "rms", "long_layer"),
)
def test_all_steps_compile(norm: Norm, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "of", lambda device: KNOWN["sm_90"])
    is_batch, dims = norm is BATCH_NORM, len(shape)
    mask: Any = tuple(dim == 1 for dim in range(dims)) if is_batch else COLUMN
    count = 1 + norm.is_centered
    call = Call(norm, 1, 1e-5, Itself(), Affine(True, count == 2), (FULL, *[mask] * count), (torch.bfloat16,))
    x = View(shape, torch.empty(shape, device="meta").stride(), torch.bfloat16)
    sizes = (shape[1], *[1] * (dims - 2)) if is_batch else shape[-1:]
    parameter = View(sizes, torch.empty(sizes, device="meta").stride(), torch.float32)
    by_row = (shape[1], *[1] * (dims - 2)) if is_batch else (*shape[:-1], 1)
    row = View(by_row, torch.empty(by_row, device="meta").stride(), torch.float32)
    operands = (x, *[parameter] * count)
    rows = [row] * (3 if norm.is_centered else 1)

    statistics = replace(call, eps=0.0, epilogue=split.Nothing(), outputs=())
    launches = [pipeline.prepare_forward.__wrapped__(statistics, operands, GPU, None)]
    given = split.applied(call, split.Given, dims)
    launches.append(pipeline.prepare_forward.__wrapped__(given, (*operands, *rows, x), GPU, None))
    summed = (1, *((len(operands), len(operands) + 2) if norm.is_centered else (len(operands),)))
    launches.append(pipeline.prepare_backward.__wrapped__(given, (*operands, *rows, x), GPU, (0,), summed, None))
    returned = split.applied(call, split.Returned, dims)
    one = View(shape, (0,) * dims, torch.float32)
    views = (*operands, *rows, *[row] * count, x, one)
    launches.append(pipeline.prepare_backward.__wrapped__(returned, views, GPU, (0, 1), (0,), None))
    is_written = [False, True, False, True]
    for launch, writes in zip(launches, is_written, strict=True):
        for kernel in kernels_of(launch):
            assert local_memory(kernel.asm["cubin"]) <= SPILLED
        stores = re.findall(r"st\.global\S*\.v4\.b32", "".join(kernel.asm["ptx"] for kernel in kernels_of(launch)))
        assert stores or not writes
