"""Drop-in modules: PyTorch's own classes with the same arguments, parameters and state_dict, run by warpnorm."""

import torch

from warpnorm import functional


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `warpnorm.layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[return-value]


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `warpnorm.rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)  # type: ignore[return-value]
