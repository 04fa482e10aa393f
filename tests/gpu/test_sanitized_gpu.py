"""Broken on purpose, to show that a sanitizer sees into the kernels: left out of every other run."""

from dataclasses import replace

import torch

from kernel_contracts.running import call_for
from warpnorm import pipeline
from warpnorm.norms import RMS_NORM
from warpnorm.problem import View


def test_a_fault_that_memcheck_has_to_see(device: str) -> None:
    """A launch that is told of one row more than there is memory for."""
    input, output = torch.ones(64, 1024, device=device), torch.empty(64, 1024, device=device)
    call, views = call_for(RMS_NORM, 1, input), (View.of(input), View.of(output))
    launch = pipeline.prepare_forward(call, views, input.device, None)
    replace(launch, space=launch.space._replace(rows=65))((input,), (output,))
    torch.cuda.synchronize()
