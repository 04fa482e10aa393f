"""What the user calls while a function is recorded, before PyTorch takes it apart."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from warpnorm.trace.fakes import StandIns, Symbols, is_fake
from warpnorm.trace.record import refuse

# What a fake tensor would answer differently from the user's
_tensor: Any = torch.Tensor
LAYOUT_QUESTIONS = {
    _tensor.stride: "strides", _tensor.is_contiguous: "strides", _tensor.storage_offset: "storage",
    _tensor.data_ptr: "storage", _tensor.requires_grad.__get__: "requires_grad",
    _tensor.is_leaf.__get__: "is_leaf", _tensor.grad.__get__: "grad", _tensor.requires_grad_: "requires_grad",
    _tensor.data.__set__: "data",
    _tensor.grad_fn.__get__: "grad_fn", _tensor.numpy: "values", _tensor.tolist: "values",
}  # fmt: skip


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
        if self.has_gradients and not torch.is_grad_enabled() and is_fake(result):
            return result.detach()  # inside the user's own torch.no_grad()
        return result
