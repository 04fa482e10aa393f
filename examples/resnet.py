"""A small ResNet learns to tell discs, squares and crosses apart, which it draws itself, with PyTorch's BatchNorm, with the
same patched, and with BatchNorm, the residual and ReLU in one kernel.

    python examples/resnet.py --norms torch fused --steps 100
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from training import compare, is_right, options

import warpnorm

SIZE, BATCH, STEPS, WIDTHS = 32, 32, 40, (16, 32, 64)
SHAPES = ("disc", "square", "cross")


class BatchNormReLU(torch.nn.BatchNorm2d):
    """In plain PyTorch."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        normalized = super().forward(input)
        return F.relu(normalized if residual is None else normalized + residual)


class NormAndReLU(torch.nn.Module):
    """The same, of a norm that can be patched."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        normalized = self.norm(input)
        return F.relu(normalized if residual is None else normalized + residual)


KINDS = {"torch": BatchNormReLU, "warpnorm": NormAndReLU, "fused": warpnorm.nn.BatchNormReLU2d}


class Block(torch.nn.Module):
    def __init__(self, before: int, channels: int, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.first = torch.nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.second = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = torch.nn.ModuleList([kind(channels), kind(channels)])
        self.around = torch.nn.Conv2d(before, channels, 1, stride, bias=False) if stride > 1 else torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x))
        return self.norms[1](self.second(y), self.around(x))


class ResNet(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False), kind(WIDTHS[0])
        widths = (WIDTHS[0], *WIDTHS)
        self.blocks = torch.nn.Sequential(*(Block(*pair, kind) for pair in zip(widths, WIDTHS, strict=False)))
        self.head = torch.nn.Linear(WIDTHS[-1], len(SHAPES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(images))).mean((2, 3)))


def build(norms: str) -> torch.nn.Module:
    model = ResNet(KINDS[norms])
    if norms == "warpnorm":
        print(warpnorm.patch(model), file=sys.stderr)
    return model.to(memory_format=torch.channels_last)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of one shape each, somewhere, of some size, in noise."""
    labels = torch.randint(len(SHAPES), (BATCH,), generator=generator)
    centres = torch.randint(10, SIZE - 10, (BATCH, 2, 1, 1), generator=generator)
    radii = torch.randint(4, 9, (BATCH, 1, 1), generator=generator)
    places = torch.arange(SIZE)
    down, right = (places[:, None] - centres[:, 0]).abs(), (places[None, :] - centres[:, 1]).abs()
    drawn = torch.stack(
        [
            down**2 + right**2 <= radii**2,
            torch.maximum(down, right) <= radii,
            (torch.minimum(down, right) <= radii // 4) & (torch.maximum(down, right) <= radii),
        ]
    )
    images = drawn[labels, torch.arange(BATCH)].float() + 0.3 * torch.randn(BATCH, SIZE, SIZE, generator=generator)
    return images[:, None], labels


def main() -> int:
    asked = options("A small ResNet learns to tell shapes apart.", STEPS)
    return 0 if is_right(compare("a small ResNet", build, draw, asked)) else 1


if __name__ == "__main__":
    sys.exit(main())
