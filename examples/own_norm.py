"""A norm that nobody has written a kernel for: RMSNorm of activations that a learned limit clamps softly, with a gate at a
temperature of its own for every sample. Forward and all five gradients are compared with plain PyTorch in float64."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import warpnorm

SAMPLES, TOKENS, WIDTH, TOLERANCE = 4, 64, 768, 1e-3


@warpnorm.fuse
def clamped_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, limit: Tensor, temperature: Tensor) -> Tensor:
    """x and gate are (samples, tokens, width), weight is (width,), limit a scalar, temperature (samples, 1, 1)."""
    clamped = limit * torch.tanh(x / limit)
    return F.rms_norm(clamped, clamped.shape[-1:], weight, eps=1e-6) * torch.sigmoid(gate / temperature)


def operands(device: str) -> list[Tensor]:
    x, gate = torch.randn(2, SAMPLES, TOKENS, WIDTH, device=device).unbind()
    x = x.where(torch.rand_like(x) > 0.001, 100 * x)  # outliers, which the clamp is for
    weight, limit = torch.rand(WIDTH, device=device) + 0.5, torch.tensor(4.0, device=device)
    temperature = torch.linspace(0.5, 2, SAMPLES, device=device).view(SAMPLES, 1, 1)
    return [x, gate, weight, limit, temperature]


def difference(found: Tensor, true: Tensor) -> float:
    """The largest, as a part of the largest true value."""
    return ((found - true).abs().max() / true.abs().max()).item()


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    given = [operand.requires_grad_() for operand in operands(device)]
    exact = [operand.detach().double().requires_grad_() for operand in given]
    result, true = clamped_gated_norm(*given), clamped_gated_norm.__wrapped__(*exact)
    grad_output = torch.randn_like(result)
    grads = torch.autograd.grad(result, given, grad_output)
    true_grads = torch.autograd.grad(true, exact, grad_output.double())
    names = ("result", "x", "gate", "weight", "limit", "temperature")
    found = [difference(a, b) for a, b in zip((result, *grads), (true, *true_grads), strict=True)]
    print(f"{SAMPLES} samples of {TOKENS} tokens of {WIDTH} on {device}")
    print(f"largest difference to plain PyTorch in float64: {max(found):.1e}, in {names[found.index(max(found))]}")
    explanation = warpnorm.explain(clamped_gated_norm, *given)
    lines = explanation.forward.lines() + (explanation.backward.lines() if explanation.backward else [])
    print("\n".join(line for line in lines if line.startswith(("launch", "memory"))))
    return 0 if max(found) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
