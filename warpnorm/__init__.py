"""Normalization for PyTorch: one fused Triton kernel forward and one backward on a GPU, PyTorch's operators on a CPU.

`pipeline.py` is the map of what happens in one call.
"""

from warpnorm import nn
from warpnorm.errors import InputError, InputTypeError, OperatorError, UnavailableError, WarpnormError
from warpnorm.functional import layer_norm, rms_norm

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "InputTypeError",
    "OperatorError",
    "UnavailableError",
    "WarpnormError",
    "layer_norm",
    "nn",
    "rms_norm",
]
