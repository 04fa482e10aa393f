"""The tensors of a fused function as the operands of its call: seen through the function's views, on one device, and spread
out where a kernel could not sum their gradients."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from warpnorm.problem import Call
from warpnorm.trace import fusion

LARGEST_GROUPS = 65535  # programs along the second axis of a grid, where `long_row` has the groups of rows


class Prepared(NamedTuple):
    """A captured function on tensors of one exact shape."""

    captured: fusion.Captured
    inputs: tuple[fusion.Input, ...]
    leaves: tuple[Any, ...]
    order: tuple[int, ...] | None  # the user's tensors that are operands, but for views, or averaged into
    differentiable: tuple[int, ...]  # of these operands
    number: Any = ()  # the momentum of that


def arrange(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> tuple[Call, list[torch.Tensor | float]]:
    """The call and its operands, but for what is drawn: the user's tensors, seen through the function's views. Gradients can
    be summed for one way of grouping rows, into not too many groups; another operand is expanded, and PyTorch sums."""
    call = prepared.captured.call
    device = leader(tensors).device
    operands: list[Any] = [i(tensors) for i in prepared.inputs]
    for k in prepared.captured.unreached:  # which get no gradient, not zeros
        if operands[k].requires_grad:
            operands[k] = operands[k].detach()
    axes: list[Any] = list(call.axes)
    groups: tuple[bool, ...] | None = None
    shape: Any = None
    for k, operand in enumerate(operands):
        if operand.device != device:  # a scalar on the CPU beside tensors on a GPU
            operands[k] = operand = operand.to(device)
        row_dims = 2 if call.norm.is_by_channel else len(axes[k]) - call.col_dims
        rows, cols = axes[k][:row_dims], axes[k][row_dims:]
        if not call.norm.is_by_channel and any(cols) and not any(rows):
            operands[k] = operand = spread(operand)
        if not operand.requires_grad or not torch.is_grad_enabled():
            continue
        is_partial = any(cols) and not all(cols)
        if call.norm.is_by_channel:  # of lines, or of everything
            is_partial = is_partial or (any(cols) and not all(rows))
        elif any(rows) and not all(rows) and not is_partial:
            groups = groups or rows
            is_partial = rows != groups or prod(operand.shape[: operand.ndim - call.col_dims]) > LARGEST_GROUPS
        if is_partial:
            shape = shape or torch.broadcast_shapes(*(o.shape for o in operands))
            operands[k], axes[k] = operand.expand(shape), (True,) * len(shape)
    if tuple(axes) != call.axes:
        call = replace(call, axes=tuple(axes))
    return call, operands


def leader(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor on the device that the function runs on. One without elements, if there is one: then nothing is launched."""
    found = [t for t in tensors if not is_host_scalar(t)] or list(tensors)
    return next((t for t in found if t.numel() == 0), found[0])


def spread(parameter: torch.Tensor) -> torch.Tensor:
    """An expanded parameter, which the kernels would take for a scalar, with a value for each column."""
    return parameter.contiguous() if 0 in parameter.stride() else parameter


def is_host_scalar(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.device.type == "cpu"
