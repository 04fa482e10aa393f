"""An activation and the norm behind it as one kernel: Swish with a slope that is learned, then LayerNorm, in a module
that is trained. A twin whose block is plain PyTorch takes the same steps; both must arrive at the same parameters."""

import copy
import sys
from functools import partial

import torch
from torch import Tensor, nn

import warpnorm

WIDTH, STEPS, TOLERANCE = 512, 20, 1e-3


class SwishLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.LayerNorm(width)

    @warpnorm.fuse
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * torch.sigmoid(self.slope * x))


def train(network: nn.Module, x: Tensor, wanted: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, WIDTH), SwishLayerNorm(WIDTH), nn.Linear(WIDTH, 8)).to(device)
    twin = copy.deepcopy(network)
    twin[1].forward = partial(SwishLayerNorm.forward.__wrapped__, twin[1])  # the function as it was written
    x, wanted = torch.randn(256, 64, device=device), torch.randn(256, 8, device=device)
    losses, _ = train(network, x, wanted), train(twin, x, wanted)
    difference = max((a - b).abs().max().item() for a, b in zip(network.parameters(), twin.parameters(), strict=True))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps on {device}")
    print(f"largest difference to plain PyTorch in a parameter: {difference:.1e}")
    explanation = warpnorm.explain(network[1].forward, network[0](x))
    lines = explanation.forward.lines() + (explanation.backward.lines() if explanation.backward else [])
    print("\n".join(line for line in lines if line.startswith(("launch", "memory"))))
    return 0 if difference < TOLERANCE and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
