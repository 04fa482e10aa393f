"""What `torch.fx.symbolic_trace` sees of a call: one node, as of a module of PyTorch's. It cannot look inside, where
a module asks for the dimensions of its input, and counts, while there is no input yet."""

from typing import Any

import torch
from torch.fx import Proxy


def proxy_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy | None:
    """What stands for an argument while a function is traced, if there is one."""
    for arg in args:
        if isinstance(arg, Proxy):
            return arg
    return next((arg for arg in kwargs.values() if isinstance(arg, Proxy)), None) if kwargs else None


def call_of(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a module as one node; nothing where it is no part of what is traced, or is all of it."""
    found = proxy_in(args, kwargs)
    tracer: Any = None if found is None else found.tracer
    try:
        path = tracer.path_of_module(module)
    except (AttributeError, NameError):
        return None
    return tracer.create_proxy("call_module", path, args, kwargs) if path else None
