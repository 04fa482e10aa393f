"""The operators of `library.py` on DTensors: rules for PyTorch's sharding propagation, so that what is split along rows
stays split wherever an operator meets a DTensor itself: in compiled fused functions, in exported programs. Registered when
the first one comes.

PyTorch's `register_sharding` takes operators with a fixed number of results, and keeps a decision for all texts; these rules
go one step below it, to where it registers itself, which takes lists of results and is told that the text counts."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from warpnorm import settings
from warpnorm.errors import InputError
from warpnorm.launch import call_text
from warpnorm.parallel.layout import Layout, Placed, shown
from warpnorm.problem import NUMBER

_log = logging.getLogger(__name__)
_is_registered = False


def register() -> None:
    """With PyTorch, once. A PyTorch that has no such names refuses the operators on DTensors itself."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    from torch.distributed.tensor import DTensor

    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        propagator = DTensor._op_dispatcher.sharding_propagator
        rule, info = propagator.register_op_strategy, RuntimeSchemaInfo
    except (ImportError, AttributeError):
        return
    rule(torch.ops.warpnorm.norm.default, _norm, info(1, needs_pytree=True))
    rule(torch.ops.warpnorm.norm_backward.default, _norm_backward, info(1, needs_pytree=True))


@settings.constant
def takes(text: str, sizes: list[tuple[int, bool]], codes: list[list[int | None] | None]) -> bool:
    """Whether the operator takes DTensors of so many dimensions, those that have all elements, placed so; none are given
    where parts are cut out of them. `compiled.py` asks, and a compiler takes the answer for a constant."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(code: int | None) -> Any:
        return Partial() if code is None else Replicate() if code < 0 else Shard(code)

    call, _ = call_text.read(text)
    placed = [
        Placed(f"operand {k}", ((1, 2)[is_whole],) * dims, tuple(map(placement, own)))
        for k, ((dims, is_whole), own) in enumerate(zip(sizes, codes, strict=True))
        if own is not None
    ]
    try:
        if not placed:
            raise InputError(f"{call.norm.name}: of what is cut out of a DTensor PyTorch gathers the gradient")
        _layout(call, placed)
    except InputError as error:
        _log.info("a fused function runs as it is under the compiler: %s", error)
        return False
    return True


def _norm(schema: Any) -> Any:
    call, _ = call_text.read(schema.args_schema[-1])
    specs = _specs(schema.args_schema)
    layout = _layout(call, _placed(specs))
    outputs = [layout.operand(layout.shape)] * len(call.outputs) + [layout.statistic()] * len(call.norm.statistics)
    return _strategy(specs, [layout.operand(spec.shape) for spec in specs], outputs)


def _norm_backward(schema: Any) -> Any:
    _, given, _, _, _, wanted, text = schema.args_schema
    call, _ = call_text.read(text)
    specs = _specs(schema.args_schema)
    tensors = [k for k, axes in enumerate(call.axes) if axes != NUMBER]
    first, last = len(given), len(given) + len(tensors)
    operands = dict(zip(tensors, specs[first:last], strict=True))
    layout = _layout(call, _placed(specs[first:last]))
    inputs = [
        *[layout.operand(layout.shape)] * len(given),
        *(layout.operand(spec.shape) for spec in operands.values()),
        *[layout.statistic()] * (len(specs) - last),
    ]
    return _strategy(specs, inputs, [layout.gradient(operands[i].shape) for i in wanted])


def _specs(arg: Any) -> list[Any]:
    """Of all tensors in arguments of the propagation's, in their order."""
    if hasattr(arg, "strategies"):
        return [arg.strategies[0].output_spec]
    parts = arg if isinstance(arg, list | tuple) else getattr(arg, "children", ())
    return [spec for part in parts for spec in _specs(part)]


def _placed(specs: Sequence[Any]) -> list[Placed]:
    return [Placed(f"operand {k}", tuple(spec.shape), spec.placements) for k, spec in enumerate(specs)]


def _layout(call: Any, placed: Sequence[Placed]) -> Layout:
    layout = Layout.of(call, placed)
    if layout.shared:
        raise InputError(
            f"{call.norm.name}: its operands are placed as {shown(placed[0].placements)}, but an operator has whole rows "
            "only: call the function of warpnorm on them, which exchanges statistics, or redistribute them"
        )
    return layout


def _strategy(specs: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The only way to run it: what is placed in another way is brought there first."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

    mesh = specs[0].mesh
    wanted = [
        DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
        for spec, placements in zip(specs, inputs, strict=True)
    ]
    made = tuple(DTensorSpec(mesh, placements) for placements in outputs)
    return OpStrategy([OpSpec(made, wanted, [[0.0]] * len(wanted))])
