"""Launches that follow one another on GPUs where the next one can be made ready before the one before it ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(IS_CHAINED: tl.constexpr):
    """Waits until the launch before this one has ended, and what it wrote is there."""
    if IS_CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(HAS_NEXT: tl.constexpr):
    """Which waits for this one: its programs are made ready as soon as all of this launch have come here. Near the end:
    LayerNorm backward of 4096 x 4096 takes 32.0 us so, and 34.1 where they come here first."""
    if HAS_NEXT:
        gdc_launch_dependents()
