"""The small ResNet and the small GPT of this folder on several ranks, with norms that ranks share: the batch of the ResNet
is split, and its BatchNorms take their statistics over all of it; the hidden dimension of the GPT is split, and its RMSNorms
take theirs over all columns. Both are checked against one process that trains the whole, and what was sent is printed.

    torchrun --nproc-per-node 2 examples/distributed.py --steps 10
"""

import argparse
import copy
import sys
from typing import Any

import gpt
import resnet
import torch
import torch.distributed as dist
import torch.distributed.nn  # here, for loaded later its defaults would hold the process group past its end
import torch.nn.functional as F
from torch import Tensor
from training import Draw

import warpnorm
from warpnorm import parallel

TOLERANCE = 1e-3  # of a loss, which is 1 to 4: rounding differs, and training amplifies it


class Summed(torch.autograd.Function):
    """All ranks have the sum of their parts, and each part the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        dist.all_reduce(part := part.clone())
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Shared(torch.autograd.Function):
    """All ranks have the same, and it has the gradient of what all make of it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        dist.all_reduce(grad := grads[0].clone())
        return grad


class FromPart(torch.nn.Module):
    """A linear layer of a hidden dimension that is split: this rank has the weights of its columns."""

    def __init__(self, linear: torch.nn.Linear, part: slice) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(linear.weight[:, part].detach().clone()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = Summed.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class ToPart(torch.nn.Module):
    """A linear layer that gives this rank's part of a hidden dimension."""

    def __init__(self, linear: torch.nn.Linear, part: slice) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(linear.weight[part].detach().clone())
        self.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias[part].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Shared.apply(x), self.weight, self.bias)


class AddRMSNorm(parallel.RMSNorm):
    """The residual stream and its norm, both split, fused."""

    @warpnorm.fuse
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return parallel.rms_norm(h, h.shape[-1:], self.weight, self.eps), h


def split_gpt(whole: gpt.GPT) -> gpt.GPT:
    """The same model, whose residual stream is split over ranks."""
    model = copy.deepcopy(whole)
    part = slice(*parallel.modules.part_of(gpt.DIM, None))
    for embedding in (model.letters, model.places):
        embedding.weight = torch.nn.Parameter(embedding.weight[:, part].detach().clone())
    for block in model.blocks:
        block.before, block.between = (AddRMSNorm.from_whole(old.norm) for old in (block.before, block.between))
        block.packed, block.up = FromPart(block.packed, part), FromPart(block.up, part)
        block.out, block.down = ToPart(block.out, part), ToPart(block.down, part)
    model.last, model.head = AddRMSNorm.from_whole(model.last.norm), FromPart(model.head, part)
    return model


def train(model: torch.nn.Module, draw: Draw, steps: int, part: slice, is_reduced: bool) -> list[float]:
    """The losses. Of a batch that is split each rank has the loss of its part, and gradients are added up."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        inputs, targets = draw(generator)
        optimizer.zero_grad()
        found = F.cross_entropy(model(inputs[part]).flatten(0, -2), targets[part].flatten(), reduction="sum")
        loss = found / targets.numel()
        loss.backward()
        loss = loss.detach()
        if is_reduced:
            for tensor in (loss, *(p.grad for p in model.parameters() if p.grad is not None)):
                added = tensor.clone(memory_format=torch.contiguous_format)  # ranks may lay it out differently
                dist.all_reduce(added)
                tensor.copy_(added)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(name: str, alone: torch.nn.Module, shared: torch.nn.Module, draw: Draw, steps: int, part: slice) -> bool:
    is_reduced = part != slice(None)
    expected = train(alone, draw, steps, slice(None), False)
    with parallel.tally() as sent:
        found = train(shared, draw, steps, part, is_reduced)
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"{name} on {dist.get_world_size()} ranks, {steps} steps: loss {found[0]:.4f} to {found[-1]:.4f}")
        print(f"  largest difference to one process: {difference:.1e}")
        print(f"  norms sent {sent.messages / steps:g} messages and {sent.bytes / steps:,.0f} bytes a step and rank")
    return difference < TOLERANCE and found[-1] < found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Two small models on several ranks, checked against one process.")
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    alone = resnet.build("fused")
    shared = warpnorm.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    cuts = [resnet.BATCH * i * (i + 1) // (ranks * (ranks + 1)) for i in range(ranks + 1)]  # uneven: 1, 2, 3, ... parts
    part = slice(cuts[rank], cuts[rank + 1])
    is_right = compare("a small ResNet, its batch split", alone, shared, resnet.draw, steps, part)

    whole = gpt.build("torch")
    is_right &= compare(
        "a small GPT, its hidden dimension split", whole, split_gpt(whole), gpt.draw, steps, slice(None)
    )
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
