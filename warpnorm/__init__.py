"""Normalization for PyTorch: one fused Triton kernel forward and one backward on a GPU, native code on a CPU.

`pipeline.py` is the map of what happens in one call.
"""

import torch

from warpnorm.version import VERSION, require_torch

require_torch(torch.__version__)  # before anything that an older one does not have

from warpnorm import nn, parallel
from warpnorm.errors import (
    FusionError,
    InputError,
    InputTypeError,
    OperatorError,
    SettingError,
    UnavailableError,
    WarpnormError,
)
from warpnorm.explain import explain
from warpnorm.functional import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from warpnorm.fuse import fuse
from warpnorm.integrate.patch import patch, unpatch

__version__ = VERSION
__all__ = [
    "FusionError",
    "InputError",
    "InputTypeError",
    "OperatorError",
    "SettingError",
    "UnavailableError",
    "WarpnormError",
    "batch_norm",
    "explain",
    "fuse",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "nn",
    "parallel",
    "patch",
    "rms_norm",
    "unpatch",
]
