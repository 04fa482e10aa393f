"""The mathematical library of a GPU for Triton's interpreter, which has only empty stubs of its functions: each by
PyTorch's function on the CPU, in the same dtype."""

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

# Those that PyTorch has under the same name, with the same meaning; a stub that is missing here gives None
SAME_NAME = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "fmod", "floor", "ceil", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc"),
)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in SAME_NAME}
FUNCTIONS |= {"rint": torch.round, "nearbyint": torch.round, "fast_expf": torch.exp, "fast_dividef": torch.div}
DTYPES = {tl.float32: torch.float32, tl.float64: torch.float64}


def provide_library() -> None:
    """For the rest of the process."""
    for name, function in FUNCTIONS.items():
        setattr(libdevice, name, in_the_interpreter(function))


def in_the_interpreter(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor | float]:
    """`function` on the interpreter's values: tensors of one floating dtype, which are broadcast, and numbers, which
    stay numbers where they are alone."""

    def call(*args: tl.tensor | float) -> tl.tensor | float:
        dtypes = {arg.dtype for arg in args if isinstance(arg, tl.tensor)}
        if not dtypes:
            return function(*(torch.tensor(arg, dtype=torch.float64) for arg in args)).item()
        (dtype,) = dtypes
        values = [_to_torch(arg, DTYPES[dtype]) for arg in args]
        result = function(*values)
        if result.ndim == 0:  # which the interpreter holds as an array of one
            return tl.tensor(TensorHandle(result.numpy().reshape(1), dtype), dtype)
        return tl.tensor(TensorHandle(result.numpy(), dtype), tl.block_type(dtype, list(result.shape)))

    return call


def _to_torch(arg: tl.tensor | float, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(arg, tl.tensor):
        return torch.tensor(arg, dtype=dtype)
    value = torch.from_numpy(np.ascontiguousarray(arg.handle.data))
    return value if arg.type.is_block() else value.reshape(())
