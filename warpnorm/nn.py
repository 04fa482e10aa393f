"""Drop-in modules: PyTorch's own classes with the same arguments, parameters and state_dict, run by warpnorm. Those with
something fused around them are of `blocks.py`."""

import torch

from warpnorm import functional
from warpnorm.blocks import (
    AdaLayerNorm,
    AddLayerNorm,
    AddRMSNorm,
    BatchNormReLU2d,
    GatedRMSNorm,
    GroupNormSiLU,
    QKNorm,
    RMSNormFloat8,
)

__all__ = [
    "AdaLayerNorm",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormReLU2d",
    "GatedRMSNorm",
    "GroupNorm",
    "GroupNormSiLU",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "QKNorm",
    "RMSNorm",
    "RMSNormFloat8",
]


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `warpnorm.layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[return-value]


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `warpnorm.rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)  # type: ignore[return-value]


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm`, run by `warpnorm.group_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)  # type: ignore[return-value]


class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As PyTorch's, but a batch that is refused is not counted."""
        self._check_input_dim(input)
        is_tracking = self.training and self.track_running_stats
        mean, variance = self.running_mean, self.running_var
        if self.training and not self.track_running_stats:
            mean = variance = None
        momentum = 0.0 if self.momentum is None else self.momentum
        if is_tracking and self.momentum is None and self.num_batches_tracked is not None:
            momentum = 1.0 / (float(self.num_batches_tracked) + 1.0)  # the mean of all batches
        training = self.training or (mean is None and variance is None)
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, training, momentum, self.eps)
        if is_tracking and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output  # type: ignore[return-value]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, run by `warpnorm.batch_norm`."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, run by `warpnorm.batch_norm`."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, run by `warpnorm.batch_norm`."""


class LazyBatchNorm1d(_BatchNorm, torch.nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d`: becomes a `BatchNorm1d` of this module at its first call."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, torch.nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d`: becomes a `BatchNorm2d` of this module at its first call."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, torch.nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d`: becomes a `BatchNorm3d` of this module at its first call."""

    cls_to_become = BatchNorm3d


class _InstanceNorm(torch.nn.modules.instancenorm._InstanceNorm):
    def _apply_instance_norm(self, input: torch.Tensor) -> torch.Tensor:
        """PyTorch's forward calls this, with a batch of one where the input is a single sample."""
        use_input_stats = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        return functional.instance_norm(  # type: ignore[return-value]
            input, self.running_mean, self.running_var, self.weight, self.bias, use_input_stats, momentum, self.eps
        )


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, run by `warpnorm.instance_norm`."""


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, run by `warpnorm.instance_norm`."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, run by `warpnorm.instance_norm`."""


class LazyInstanceNorm1d(_InstanceNorm, torch.nn.LazyInstanceNorm1d):
    """`torch.nn.LazyInstanceNorm1d`: becomes an `InstanceNorm1d` of this module at its first call."""

    cls_to_become = InstanceNorm1d


class LazyInstanceNorm2d(_InstanceNorm, torch.nn.LazyInstanceNorm2d):
    """`torch.nn.LazyInstanceNorm2d`: becomes an `InstanceNorm2d` of this module at its first call."""

    cls_to_become = InstanceNorm2d


class LazyInstanceNorm3d(_InstanceNorm, torch.nn.LazyInstanceNorm3d):
    """`torch.nn.LazyInstanceNorm3d`: becomes an `InstanceNorm3d` of this module at its first call."""

    cls_to_become = InstanceNorm3d
