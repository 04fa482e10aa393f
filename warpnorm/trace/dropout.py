"""The mask of a dropout as an operator: a function of a seed, an offset and the element's number alone, so that backward
draws it again instead of keeping it. Four words are drawn at once, for four elements. Here in PyTorch's integers;
`kernels/pointwise.py` has the same in Triton, `cpu/pointwise.h` in C."""

import torch

MASK = 0xFFFFFFFF
ROUNDS = 10
WORDS = 4  # of one draw
# In the last word of the counter, so that no number is drawn that PyTorch's own generator draws from the same seed
OUR_STREAMS = 0x80000000

_library = torch.library.Library("warpnorm", "DEF")
_library.define("keep(Tensor like, Tensor seed, Tensor offset, int threshold, float scale, int stream) -> Tensor")


def threshold(p: float) -> int:
    """A word below it is dropped: one of 2^32 with probability p."""
    return min(round(p * (MASK + 1)), MASK)


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS
) -> tuple[torch.Tensor, ...]:
    """The words of Philox-4x32, in int64 that hold 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & MASK) ^ c1 ^ k0, b & MASK, ((a >> 32) & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@torch.library.impl(_library, "keep", "CompositeExplicitAutograd")
def keep(
    like: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, threshold: int, scale: float, stream: int
) -> torch.Tensor:
    """`scale` where an element is kept, zero where it is dropped. Elements are numbered in the order of `like`'s axes."""
    draw = torch.arange(-(-like.numel() // WORDS), device=like.device)
    seed, offset = (number.reshape(-1)[:1].to(like.device) for number in (seed, offset))
    last = (((offset >> 32) & 0x7FFF) << 16) | stream | OUR_STREAMS
    counter = (draw & MASK, draw >> 32, (offset & MASK).expand_as(draw), last.expand_as(draw))
    words = torch.stack(philox(counter, (seed & MASK, (seed >> 32) & MASK)), 1)
    word = words.view(-1)[: like.numel()].view(like.shape)
    return (word >= threshold).to(like.dtype) * scale


@torch.library.register_fake("warpnorm::keep", lib=_library)
def _(
    like: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, threshold: int, scale: float, stream: int
) -> torch.Tensor:
    return torch.empty_like(like)
