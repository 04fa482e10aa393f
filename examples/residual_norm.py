"""The residual stream of a pre-norm transformer: what a layer adds to the stream and the norm for the next layer in one
kernel, which returns both. The sum is read once and written once, where two operators would read it a second time."""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import warpnorm

LAYERS, TOKENS, WIDTH, TOLERANCE = 4, 128, 512, 1e-3


def add_norm(stream: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = stream + update
    return F.rms_norm(stream, stream.shape[-1:], weight, eps=1e-6), stream


fused_add_norm = warpnorm.fuse(add_norm)


def run(step: Callable[..., tuple[Tensor, Tensor]], stream: Tensor, weights: Tensor, mixers: Tensor) -> Tensor:
    """Layers that only mix channels, without attention. Returns the last stream and the gradients, in one row."""
    update = torch.zeros_like(stream)
    for weight, mixer in zip(weights, mixers, strict=True):
        normed, stream = step(stream, update, weight)
        update = F.gelu(normed @ mixer)
    loss = step(stream, update, weights[0])[0].square().mean() + stream.square().mean()
    grads = torch.autograd.grad(loss, (weights, mixers))
    return torch.cat([stream.detach().flatten(), *(grad.flatten() for grad in grads)])


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    stream = torch.randn(2, TOKENS, WIDTH, device=device)
    weights = torch.ones(LAYERS, WIDTH, device=device, requires_grad=True)
    mixers = (torch.randn(LAYERS, WIDTH, WIDTH, device=device) / WIDTH**0.5).requires_grad_()
    fused, plain = (run(step, stream, weights, mixers) for step in (fused_add_norm, add_norm))
    difference = (fused - plain).abs().max().item()
    print(f"{LAYERS} layers, {2 * TOKENS} tokens of {WIDTH} on {device}")
    print(f"largest difference to plain PyTorch, stream and gradients: {difference:.1e}")
    explanation = warpnorm.explain(fused_add_norm, stream, torch.zeros_like(stream), weights[0])
    lines = explanation.forward.lines() + (explanation.backward.lines() if explanation.backward else [])
    print("\n".join(line for line in lines if line.startswith(("launch", "memory"))))
    return 0 if difference < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
