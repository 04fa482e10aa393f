"""Where a call runs, and who decides: by our kernels, by native code, or by PyTorch's own operators, which compilers and
transforms see through."""

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from warpnorm import settings, version
from warpnorm.errors import UnavailableError
from warpnorm.launch import launcher
from warpnorm.norms import BATCH_NORM, GROUP_NORM, LAYER_NORM, Norm

# Elements of a row, of a sample, and of a batch that is one row, up to which PyTorch's own operators are quicker on a CPU
# than a call of ours. Not of all rows: a row's bits do not depend on its neighbours. rms_norm of 1 x 64 takes 13 us,
# PyTorch's 11, of 64 x 1024 21 and 30; silu(x) * r -> layer_norm of 1 x 512 18 and 8, of 64 x 512 49 and 156
SMALL_ROW = 63
# Of a layer_norm alone, where calls that repeat stay Python's: of 8 x 64 one takes 45 us, by the compiled launcher 6, and
# PyTorch's 9
SMALL_LONE_ROW = 1024
# Under a compiler, which writes its own code for PyTorch's operators and what is around them, where a call of ours is one of
# Python. Add and rms_norm of 1024 rows, both directions, in microseconds of one thread, ours and the compiler's: 1296 and
# 784 of 128 columns, 2468 and 2143 of 512, 3689 and 4753 of 1024
SMALL_COMPILED_ROW = 512
SMALL_SAMPLE = 1 << 14
SMALL_BATCH = 1 << 16
# Of a group_norm alone. Not of instance_norm, or of a channel in each group: forward of 8 x 64 x 32 x 32 takes 149 us, by
# PyTorch's operator 1017, backward 350 both, of 8 x 512 x 8 x 8 245 and 568, and 317 and 232
LONE_SAMPLE = 1 << 18
# Of an instance_norm alone, channels last: both directions of 32 x 64 x 56 x 56 take 14 ms, by PyTorch's operators 40, of
# 2 x 64 x 32 x 32 721 us and 644
LAST_SAMPLE = 1 << 16
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
TRACED_TYPES = (*PLAIN_TYPES, FakeTensor, FunctionalTensor)


def route(input: torch.Tensor, *parameters: torch.Tensor | float | None, is_large: bool = True) -> str:
    """`kernels`, `native` or `reference`: the one place that decides. `is_large`: native code is worth a call."""
    if torch.compiler.is_compiling():
        settings.prepare()
    forced = settings.current().route
    if forced == "kernels":
        if not has_triton():
            raise UnavailableError(f"the kernels need Triton to run: {why_no_triton()}; or set WARPNORM_ROUTE=auto")
        if not (input.is_cuda or settings.is_interpreting()):
            raise UnavailableError(
                f"the kernels need a GPU, but input is on {input.device}; or set WARPNORM_ROUTE=auto"
            )
    if forced == "native":
        if not has_compiler():
            raise UnavailableError(f"native code needs a compiler: {why_no_compiler()}; or set WARPNORM_ROUTE=auto")
        return (
            "native" if input.is_cpu and input.numel() > 0 and not is_left_alone((input, *parameters)) else "reference"
        )
    if forced != "auto":
        return forced
    if input.is_cpu and not input.is_cuda:
        if not is_large or input.numel() == 0 or settings.is_interpreting():
            return "reference"
        return "native" if not is_left_alone((input, *parameters)) and has_compiler() else "reference"
    if not input.is_cuda or input.numel() == 0 or not has_triton() or settings.is_interpreting():
        return "reference"
    return "reference" if is_left_alone((input, *parameters)) else "kernels"


def is_large(norm: Norm, shape: Sequence[int], cols: int) -> bool:
    """Whether native code is worth a call, by what decides about a row: its columns, the samples of a batch, a sample."""
    if not norm.is_by_channel:
        return cols > _small_row()
    numel = prod(shape)
    return numel > SMALL_BATCH if norm == BATCH_NORM else numel > SMALL_SAMPLE * max(shape[0], 1)


def is_large_input(norm: Norm, input: torch.Tensor, cols: int = 0, groups: int = 0) -> bool:
    """The same of a norm alone, where PyTorch's own operator is as quick in some cases: by running statistics; images whose
    channels lie side by side, but in batches; batches of 16 bits where they do not; small samples in groups of several
    channels."""
    if not norm.is_by_channel:
        return is_long(norm, cols)
    if norm == BATCH_NORM:
        is_quicker = input.dtype.itemsize > 2 or (input.dtype == torch.bfloat16 and not input.is_contiguous())
        return input.ndim > 2 and is_quicker and is_large(norm, input.shape, cols)
    if norm != GROUP_NORM:
        return False
    # Of which a compiler writes its own code for smaller samples
    is_lone = input.ndim > 1 and groups == input.shape[1] and not torch.compiler.is_compiling()
    if input.is_contiguous():
        return input.numel() > (SMALL_SAMPLE if is_lone else LONE_SAMPLE) * input.shape[0]
    is_last = input.ndim in LAST and input.is_contiguous(memory_format=LAST[input.ndim])
    return is_lone and is_last and input.numel() > LAST_SAMPLE * input.shape[0]


def is_short(shape: Any) -> bool:
    """Whether rows of so many columns are PyTorch's operator's on a CPU. Asked before anything else, which would take half
    as long as that."""
    if type(shape) not in (tuple, torch.Size, list) or len(shape) != 1 or type(shape[0]) is not int:
        return False
    is_operators = shape[0] <= SMALL_ROW or (shape[0] <= SMALL_LONE_ROW and not has_launcher())
    return is_operators and settings.current().route == "auto"


def takes_operators(
    input: torch.Tensor, normalized_shape: Any = None, norm: Norm = LAYER_NORM, groups: int = 0
) -> bool:
    """Whether a call without extras may go to PyTorch's operator unchecked: it is quicker than to check, and what the
    operator refuses is checked after all."""
    if torch.compiler.is_compiling() or not isinstance(input, torch.Tensor):
        return False  # a compiler would not see the refusal
    if not is_strided(input):  # nobody else can read it
        return True
    if not input.is_cpu:
        return False
    route = settings.current().route
    if route != "auto":
        return route == "reference"
    try:
        cols = normalized_shape if isinstance(normalized_shape, int) else prod(normalized_shape or ())
        return not (is_large_input(norm, input, cols, groups) and has_compiler())
    except (TypeError, ValueError, IndexError):
        return False


def is_long(norm: Norm, cols: int) -> bool:
    """Whether native code is worth a row of a norm that stands alone. A compiler writes its own code for layer_norm, and
    what an export becomes does not hang on the machine."""
    if not norm.is_centered or cols <= SMALL_ROW or cols > SMALL_LONE_ROW:
        return cols > _small_row()
    return not torch.compiler.is_compiling() and has_launcher()


def _small_row() -> int:
    """An exported program may be run by anything."""
    is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return SMALL_COMPILED_ROW if is_compiled else SMALL_ROW


@settings.constant
def has_launcher() -> bool:
    """Whether calls that repeat may become the compiled launcher's. Not whether it is there by now: the bits of a row do not
    change when it is."""
    return launcher.can_be_built() and has_compiler()


@settings.constant
def has_compiler() -> bool:
    from warpnorm.cpu import build

    return build.is_there()


def why_no_compiler() -> str:
    from warpnorm.cpu import build

    return build.why_not()


def is_seen_through(tensors: Sequence[torch.Tensor | float | None]) -> bool:
    """Whether something traces or transforms the call, which sees PyTorch's operators only: compilers, `torch.func`,
    forward-mode gradients, dispatch modes, subclasses and layouts that may have no memory of their own."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or any(isinstance(t, torch.Tensor) and (type(t) not in PLAIN_TYPES or not is_strided(t)) for t in tensors)
    )


def is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def is_traced(tensors: Sequence[torch.Tensor | float | None]) -> bool:
    """Whether a compiler or an export sees the call, and nothing else does: then it may become one operator of
    `library.py`."""
    return (
        torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(type(t) in TRACED_TYPES or not isinstance(t, torch.Tensor) for t in tensors)
    )


def is_left_alone(tensors: Sequence[torch.Tensor | float | None]) -> bool:
    """Whether what sees the call has to see PyTorch's own operators."""
    return is_seen_through(tensors) and not is_traced(tensors)


@settings.constant
def has_triton() -> bool:
    return not why_no_triton()


@cache
def why_no_triton() -> str:
    """Why no kernel can be compiled, if so. Its version is read, not imported, which would take as long as a call."""
    spec = find_spec("triton") if sys.platform == "linux" else None
    if spec is None or spec.origin is None:
        return "Triton is not installed"
    found = re.search(r"""^__version__ = ['"](.*)['"]""", Path(spec.origin).read_text(), re.MULTILINE)
    if found and version.numbers(found[1]) < version.TRITON:
        return f"they need Triton {version.spelled(version.TRITON)} or later, but {found[1]} is installed"
    return ""


def is_native(device: torch.device) -> bool:
    return device.type == "cpu" and not settings.is_interpreting()
