"""The one tolerance rule: an error may not exceed PyTorch's own error in the same dtype by more than one rounding of the
result. How errors are measured is for those who use it."""

from typing import NamedTuple

import torch


class Error(NamedTuple):
    """Root mean square and largest error, over the root mean square and largest true value."""

    mean: float
    largest: float


def why_inaccurate(what: str, ours: Error, torchs: Error, dtype: torch.dtype) -> str | None:
    """No worse than PyTorch plus one rounding in the mean, and nowhere worse than twice PyTorch plus one rounding; a
    sentence where it is."""
    rounding = torch.finfo(dtype).eps / 2
    for kind, error, allowed in (("mean", ours.mean, torchs.mean), ("largest", ours.largest, 2 * torchs.largest)):
        if not error <= allowed + rounding:
            return f"{what}: {kind} error {error:.3e}, but PyTorch's allows {allowed:.3e} + {rounding:.1e}"
    return None
