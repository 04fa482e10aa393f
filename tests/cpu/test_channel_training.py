"""Whole models trained with the norms by channel of `warpnorm.nn` and of `torch.nn`, by PyTorch's operators; that the rule
which compares them sees what is wrong; and that what it rests on is so. The kernels have the same rule for a contract."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernel_contracts.channel_training_contract import SMALL, TINY, TRAININGS, Size, Training, check_training, train

by_training = pytest.mark.parametrize("training", TRAININGS, ids=str)
BY_NAME = {training.name: training for training in TRAININGS}


@by_training
def test_fifty_steps_go_pytorchs_way(training: Training) -> None:
    check_training(training, SMALL, "cpu")


class WithoutTerms(nn.BatchNorm2d):
    """Its gradient takes the statistics for constants."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(input.detach(), (0, 2, 3), correction=0)
        super().forward(input)
        return F.batch_norm(input, mean, variance, self.weight, self.bias, False, 0.0, self.eps)


class Biased(nn.BatchNorm2d):
    """Averages the variance of the batch, not its estimate for all that it was drawn from."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = self.running_var.clone()
        output = super().forward(input)
        if self.training:
            count = input.numel() // input.shape[1]
            self.running_var = self.running_var.lerp(before * (1 - self.momentum), 1 / count)
        return output


@dataclass(frozen=True)
class Wrong:
    name: str
    training: str
    module: str
    kind: type[nn.Module]
    seen: str
    why: str
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


WRONG = [
    Wrong("eps", "resnet", "BatchNorm2d", nn.BatchNorm2d, "loss", "an eps of another norm", {"eps": 1.2e-5}),
    Wrong("momentum", "resnet", "BatchNorm2d", nn.BatchNorm2d, "running_mean", "one percent", {"momentum": 0.101}),
    Wrong("gradient", "resnet", "BatchNorm2d", WithoutTerms, "loss", "right forward, wrong backward"),
    Wrong("biased", "resnet", "BatchNorm2d", Biased, "running_var", "right but for one value in the count"),
    Wrong("group_eps", "unet", "GroupNorm", nn.GroupNorm, "loss", "an eps of another norm", {"eps": 1.2e-5}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_rule_sees(wrong: Wrong) -> None:
    def module(*sizes: int) -> nn.Module:
        return wrong.kind(*sizes, **wrong.keywords)

    modules = SimpleNamespace(**{wrong.module: module})
    with pytest.raises(AssertionError, match=rf"{wrong.seen}.* off by .*shuffled"):
        check_training(BY_NAME[wrong.training], TINY, "cpu", modules)


@pytest.mark.parametrize("size", [SMALL, TINY], ids=["small", "tiny"])
def test_no_gate_is_near_zero(size: Size) -> None:
    """Else rounding opens and shuts it, and losses part that are all right: then the models need another seed."""
    nearest = []

    def watch(module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        if isinstance(module, nn.ReLU):
            nearest.append(arguments[0].detach().abs().min().item())

    handle = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        train(BY_NAME["resnet"], size, nn, "cpu", dtype=torch.float64)
    finally:
        handle.remove()
    assert len(nearest) == size.steps * 5
    assert min(nearest) > 8e-6
