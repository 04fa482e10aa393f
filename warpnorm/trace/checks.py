"""Whether every operator of a captured call, and its derivative, can be in a kernel; if not, which of the user's it is."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from warpnorm.errors import FusionError, OperatorError
from warpnorm.problem import Call
from warpnorm.space import Gradients
from warpnorm.trace import capture, differentiate
from warpnorm.trace.expression import CAST, Expression, Ref, Step


def check_operators(call: Call, dtypes: Sequence[torch.dtype]) -> None:
    """Every operator has a row in the table, or is made of those that have. `dtypes` are those of the operands."""
    own = _inside(call, dtypes)
    try:
        capture.forward_graphs(call.prologue, call.epilogue, own, call.compute)
    except (OperatorError, RuntimeError) as error:
        raise _at_fault(call, own, error) from None


def check_gradients(call: Call, dtypes: Sequence[torch.dtype], wanted: tuple[int, ...]) -> None:
    """The same of the derivatives."""
    own = _inside(call, dtypes)
    graphs = capture.forward_graphs(call.prologue, call.epilogue, own, call.compute)
    given = tuple(k for k, dtype in enumerate(call.outputs) if dtype.is_floating_point)
    gradients = Gradients.of(graphs, given, wanted)
    try:
        differentiate.backward_graphs(call.prologue, call.epilogue, own, call.compute, gradients)
    except (OperatorError, RuntimeError) as error:
        raise _at_fault(call, own, error) from None


def _inside(call: Call, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
    """With those of the numbers that are drawn."""
    return capture.probe_dtypes([*dtypes, *[torch.int64] * (len(call.axes) - len(dtypes))], call.compute)


def _at_fault(call: Call, dtypes: tuple[torch.dtype, ...], error: Exception) -> FusionError:
    """Which of the user's operators it is: the first with which the trace ends, or that cannot be differentiated by
    itself."""
    parts = [(call.prologue, dtypes), (call.epilogue, (call.compute, call.compute, *dtypes))]
    expressions = [(e, own) for e, own in parts if isinstance(e, Expression)]
    for expression, own in expressions:
        for k, step in enumerate(expression.steps):
            so_far = replace(expression, steps=expression.steps[: k + 1], outputs=(Ref(step.name),), is_single=True)
            try:
                capture.pointwise(so_far, expression.inputs, own)
            except (OperatorError, RuntimeError) as reason:
                return FusionError(f"{step.line}: {_called(step)} cannot be fused: {reason}; or call it outside")
    steps = [step for expression, _ in expressions for step in expression.steps]
    named = str(error).split(" ")[0]  # the primitive operator that has no row
    for step in [s for s in steps if s.target.split(".")[1] == named]:
        return FusionError(f"{step.line}: {_called(step)} cannot be fused: {error}; or call it outside")
    for step in steps:
        if step.target == CAST and not dict(step.kwargs)["dtype"].is_floating_point:
            continue
        refs = tuple(dict.fromkeys(arg.name for arg in step.args if isinstance(arg, Ref)))
        alone = Expression(refs, (step,), (Ref(step.name),), call.compute, is_single=True)
        kinds = [call.compute] * len(refs)
        try:
            capture.pointwise(alone, refs, kinds)
            differentiate.vjp(alone, refs, kinds, refs, ["grad"], call.compute)
        except (OperatorError, RuntimeError) as reason:
            return FusionError(
                f"{step.line}: {step.target.removesuffix('.default')} cannot be fused: {reason}; call it outside of the "
                "fused function, or add a row to the table in warpnorm/trace/operators.py"
            )
    return FusionError(f"the function cannot be fused: {error}")


def _called(step: Step) -> str:
    mode = dict(step.kwargs).get("rounding_mode")
    return f"{step.target} with rounding_mode={mode}" if mode else step.target
