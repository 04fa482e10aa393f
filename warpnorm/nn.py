"""Drop-in modules: PyTorch's own classes with the same arguments, parameters and state_dict, run by warpnorm. Those with
something fused around them are of `blocks.py`."""

from typing import Any

import torch
from torch.fx import Proxy

from warpnorm import functional, parallel
from warpnorm.blocks import (
    AdaLayerNorm,
    AddLayerNorm,
    AddRMSNorm,
    BatchNormReLU2d,
    GatedRMSNorm,
    GroupNormSiLU,
    QKNorm,
    RMSNormFloat8,
    SyncBatchNormReLU2d,
    check_counter,
)
from warpnorm.errors import InputError
from warpnorm.trace import symbolic

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
    "SyncBatchNorm",
    "SyncBatchNormReLU2d",
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
        """As PyTorch's, but a batch that is refused is not counted, nor does it change the running statistics."""
        if isinstance(input, Proxy) and (call := symbolic.call_of(self, input)) is not None:
            return call
        self._check_input_dim(input)
        counter = self.num_batches_tracked if self.training and self.track_running_stats else None
        check_counter(counter)
        mean, variance = self.running_mean, self.running_var
        if self.training and not self.track_running_stats:
            mean = variance = None
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.momentum is None and counter is not None:
            momentum = 1.0 / (float(counter) + 1.0)  # the mean of all batches
        training = self.training or (mean is None and variance is None)
        output = self._normalize(input, mean, variance, training, momentum)
        if counter is not None:
            counter.add_(1)
        return output

    def _normalize(
        self,
        input: torch.Tensor,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
    ) -> torch.Tensor:
        return functional.batch_norm(input, mean, variance, self.weight, self.bias, training, momentum, self.eps)  # type: ignore[return-value]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, run by `warpnorm.batch_norm`."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, run by `warpnorm.batch_norm`."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, run by `warpnorm.batch_norm`."""


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.SyncBatchNorm`, on CPUs and GPUs: in training a batch is what all ranks of `process_group` (None: all ranks)
    hold together. Run by `warpnorm.parallel.batch_norm`: one collective forward and one backward."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise InputError(f"SyncBatchNorm: input has shape {tuple(input.shape)}, but must be (N, C) or (N, C, ...)")

    def _normalize(
        self,
        input: torch.Tensor,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
    ) -> torch.Tensor:
        given = (input, mean, variance, self.weight, self.bias, training, momentum, self.eps)
        if not self.training:  # without running statistics evaluation is by those of the batch here, as PyTorch's
            return functional.batch_norm(*given)  # type: ignore[return-value]
        return parallel.batch_norm(*given, group=self.process_group)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """The model with every BatchNorm in it, PyTorch's and warpnorm's, replaced by one of this class, and every
        `BatchNormReLU2d` by a `SyncBatchNormReLU2d`; they keep their parameters, which stay the same objects."""
        found = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(
            module, cls | SyncBatchNormReLU2d
        ):
            found = _shared_twin(cls, module, process_group)
        for name, child in module.named_children():
            found.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return found


def _shared_twin(cls: type[SyncBatchNorm], module: Any, process_group: Any) -> torch.nn.Module:
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        raise InputError(
            "convert_sync_batchnorm: a lazy BatchNorm does not know its channels yet; call the model once before"
        )
    kind: Any = SyncBatchNormReLU2d if isinstance(module, BatchNormReLU2d) else cls
    made = kind(module.num_features, module.eps, module.momentum, False, False, process_group=process_group)
    made.affine, made.track_running_stats = module.affine, module.track_running_stats
    made.weight, made.bias = module.weight, module.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(module, name))
    return made.train(module.training)


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
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Proxy) and (call := symbolic.call_of(self, input)) is not None:
            return call
        return super().forward(input)

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
