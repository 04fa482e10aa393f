"""What the user calls while a function is recorded, before PyTorch takes it apart."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from warpnorm.trace.fakes import StandIns, Symbols, is_fake
from warpnorm.trace.record import refuse

# What a fake tensor would answer differently from the user's
_tensor: Any = torch.Tensor
METHODS = {
    "strides": ("stride", "is_contiguous", "dim_order"),
    "storage": (
        "storage_offset", "data_ptr", "const_data_ptr", "untyped_storage", "storage", "is_shared", "is_pinned", "is_set_to",
    ),
    "base": ("_is_view",),
    "bits": ("is_conj", "is_neg", "is_inference"),
    "hooks": ("register_hook", "register_post_accumulate_grad_hook"),
    "requires_grad": ("requires_grad_",),
    "values": ("numpy", "tolist"),
}  # fmt: skip
ATTRIBUTES = (
    "requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "output_nr", "_base", "_version", "_backward_hooks",
)  # fmt: skip
LAYOUT_QUESTIONS = {
    **{getattr(_tensor, name): what for what, names in METHODS.items() for name in names if hasattr(_tensor, name)},
    **{getattr(_tensor, name).__get__: name.lstrip("_") for name in ATTRIBUTES},
    **dict.fromkeys((torch.is_conj, torch.is_neg, torch.is_inference), "bits"),
    _tensor.data.__set__: "data",
}


class Calls(TorchFunctionMode):
    """Sees what the user calls, before PyTorch takes it apart: norms and dropout go to `handlers`."""

    def __init__(self, handlers: Mapping[Any, Callable[..., Any]], fakes: Symbols | StandIns) -> None:
        super().__init__()
        self.handlers, self.fakes, self.has_gradients = handlers, fakes, torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LAYOUT_QUESTIONS:
            raise refuse(
                f"a look at the {LAYOUT_QUESTIONS[func]} of a tensor",
                "the captured function serves tensors that differ in it",
                "decide outside of the fused function",
            )
        answer = self.fakes.seen(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        handler = self.handlers.get(func)
        result = handler(func, *args, **kwargs) if handler is not None else func(*args, **kwargs)
        if self.has_gradients == torch.is_grad_enabled() or not is_fake(result):
            return result
        if not self.has_gradients:
            raise refuse(
                "torch.enable_grad() around a part of a function that is called without gradients",
                "a kernel has gradients as a whole",
                "enable them where the function is called",
            )
        return result.detach()  # inside the user's own torch.no_grad()
