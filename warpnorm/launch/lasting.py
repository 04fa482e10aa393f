"""Memory that is kept between calls."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# Bytes that a stream keeps for the backwards of fused functions, which come one after another: what their programs leave for
# each other then is no memory of the call, of which eager PyTorch needs none. Whatever is larger is taken anew
LARGEST_LOAN = 1 << 20
Tensors = TypeVar("Tensors", bound=Sequence[torch.Tensor])


def lasting(make: Callable[[], Tensors], device: torch.device) -> Tensors:
    """What `make` gives, for work of the current stream. On a GPU a thread of its own makes it, on that thread's stream:
    what is allocated while a graph is warmed up, as `torch.compile` does in its mode "reduce-overhead", would belong to the
    graph, which takes back whatever is not among its results."""
    if device.type != "cuda":
        return make()

    def made() -> tuple[Tensors, torch.cuda.Stream]:
        with torch.cuda.device(device):
            return make(), torch.cuda.current_stream()

    with ThreadPoolExecutor(1) as thread:
        found, maker = thread.submit(made).result()
    user = torch.cuda.current_stream(device)
    user.wait_stream(maker)
    for tensor in found:
        tensor.record_stream(user)  # so that nobody else has it, once it is dropped, before the work is done
    return found


def new_lender(device: torch.device) -> torch.Tensor:
    return lasting(lambda: (torch.empty(LARGEST_LOAN, dtype=torch.uint8, device=device),), device)[0]
