"""A small GPT learns the text beside it, letter by letter, with PyTorch's norms, with the same ones patched, and with norms
that are fused with what stands around them: the residual stream and, of queries and keys, the packed projection.

    python examples/gpt.py --norms torch fused --steps 100
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from training import compare, is_right, options

import warpnorm

TEXT = (Path(__file__).parent / "alice.txt").read_text()
LETTERS = sorted(set(TEXT))
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])
DIM, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 128, 4, 2, 64, 16, 60
EPS = 1e-6


class AddRMSNorm(torch.nn.Module):
    """The residual stream and its norm, in plain PyTorch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(dim, eps=EPS)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return self.norm(h), h


class QKNorm(torch.nn.Module):
    def __init__(self, head_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_norm, self.k_norm = torch.nn.RMSNorm(head_dim, eps=EPS), torch.nn.RMSNorm(head_dim, eps=EPS)

    def forward(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.split(self.heads, -2)
        return self.q_norm(q), self.k_norm(k), v


class Block(torch.nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        head_dim = DIM // HEADS
        self.before, self.between = (
            warpnorm.nn.AddRMSNorm(DIM, eps=EPS) if is_fused else AddRMSNorm(DIM) for _ in range(2)
        )
        self.heads = warpnorm.nn.QKNorm(head_dim, HEADS, HEADS, EPS) if is_fused else QKNorm(head_dim, HEADS)
        self.packed, self.out = torch.nn.Linear(DIM, 3 * DIM, bias=False), torch.nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = self.before(x, residual)
        heads = self.heads(self.packed(y).view(*y.shape[:-1], 3 * HEADS, -1))
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), is_causal=True)
        y, residual = self.between(self.out(attended.transpose(1, 2).flatten(2)), residual)
        return self.down(F.gelu(self.up(y))), residual


class GPT(torch.nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(len(LETTERS), DIM), torch.nn.Embedding(CONTEXT, DIM)
        self.blocks = torch.nn.ModuleList(Block(is_fused) for _ in range(LAYERS))
        self.last = warpnorm.nn.AddRMSNorm(DIM, eps=EPS) if is_fused else AddRMSNorm(DIM)
        self.head = torch.nn.Linear(DIM, len(LETTERS), bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.letters(codes)
        residual = self.places.weight[: codes.shape[1]].expand_as(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(self.last(x, residual)[0])


def build(norms: str) -> torch.nn.Module:
    model = GPT(norms == "fused")
    if norms == "warpnorm":
        print(warpnorm.patch(model), file=sys.stderr)
    return model


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(CODES) - CONTEXT - 1, (BATCH,), generator=generator)
    pieces = torch.stack([CODES[start : start + CONTEXT + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def main() -> int:
    asked = options("A small GPT learns a text, letter by letter.", STEPS)
    return 0 if is_right(compare("a small GPT", build, draw, asked)) else 1


if __name__ == "__main__":
    sys.exit(main())
