"""The residual add before a norm, and the one after its backward, as part of the operator, where PyTorch's compiler Inductor
has both in one graph: to it an operator is a barrier, so a norm alone would have the sum written and read once more. Only
our own operators are touched, and only where the summands lie in memory anyway."""

import operator
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from warpnorm.launch import call_text
from warpnorm.problem import FULL, Call, Literal, operand_name
from warpnorm.reference import Affine, Itself
from warpnorm.trace.expression import Expression, Ref, Step

aten = torch.ops.aten
PASSES = "torch._inductor.fx_passes.post_grad"
# Where it is tested. A step of two transformer blocks with norms as modules takes 9.10 ms on an H200, 9.22 without, and with
# PyTorch's norms 9.17 and 9.22 in the same runs
DEVICES = ("cpu", "cuda")
# Operators whose operands and results are in memory: kernels of libraries, and ours
APART = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.t.default,
    aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip
_is_registered = False


def register() -> None:
    """With Inductor, once it is there: it brings seconds of imports. One that has no such names does without."""
    global _is_registered
    if _is_registered or PASSES not in sys.modules:
        return
    _is_registered = True
    try:
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

        norm, norm_backward = torch.ops.warpnorm.norm.default, torch.ops.warpnorm.norm_backward.default
        APART.update((norm, norm_backward))
        for target, handler in ((norm, _forward), (norm_backward, _backward)):
            register_graph_pattern(CallFunctionVarArgs(target), pass_dict=pass_patterns[0])(handler)
    except (ImportError, AttributeError, IndexError, TypeError):
        return


def _forward(match: Any, operands: Sequence[Any], numbers: Sequence[float], text: str) -> None:
    """norm(a + b) -> norm of both, which also writes the sum if somebody else reads it."""
    node, (c, *parameters) = match.output_node(), operands
    call = _plain(text, numbers)
    terms = _terms(c)
    if call is None or terms is None or c in parameters or not all(p < c for p in parameters):
        return
    if not all(map(_is_in_memory, terms)) or not c.meta["val"].is_contiguous():
        return
    is_read = len(c.users) > 1
    fused = _with_sum(call, c.meta["val"].dtype, 2, is_read)
    values = list(node.meta["val"])
    if is_read:
        values.insert(1, c.meta["val"])
    given = [*terms, *parameters]
    graph = match.graph
    with graph.inserting_before(c):
        made = graph.call_function(node.target, (given, [], _text(fused, given)))
        made.meta = dict(node.meta) | {"val": values, "eager_input_vals": _eager(made)}
        results = [graph.call_function(operator.getitem, (made, k)) for k in range(len(values))]
        for result, value in zip(results, values, strict=True):
            result.meta["val"] = value
    for result in list(node.users):
        number = result.args[1]
        result.replace_all_uses_with(results[number + (is_read and number > 0)])
        graph.erase_node(result)
    graph.erase_node(node)
    if is_read:
        c.replace_all_uses_with(results[1])
    graph.erase_node(c)


def _backward(
    match: Any,
    grads: Sequence[Any],
    given: Sequence[int],
    tensors: Sequence[Any],
    numbers: Sequence[float],
    rows: Sequence[Any],
    wanted: Sequence[int],
    text: str,
) -> None:
    """The gradient of c and another that is added to it -> one, by a call that has c as an output too."""
    node, call = match.output_node(), _plain(text, numbers)
    gradient = next((user for user in node.users if 0 in wanted and user.args[1] == list(wanted).index(0)), None)
    if call is None or gradient is None or len(gradient.users) != 1 or list(given) != [0]:
        return
    (total,) = gradient.users
    terms = _terms(total)
    if terms is None:
        return
    other = terms[terms[0] is gradient]
    if other is gradient or not _is_in_memory(other, total) or _depends(other, node):
        return
    results = list(node.users)
    if not all(user > total for result in results if result is not gradient for user in result.users):
        return
    fused = _with_sum(call, gradient.meta["val"].dtype, 1, True)
    arguments: Any = ([*grads, other], [0, 1], tensors, [], rows, wanted, _text(fused, tensors))
    graph = match.graph
    with graph.inserting_before(total):
        made = graph.call_function(node.target, arguments)
        made.meta = dict(node.meta) | {"eager_input_vals": _eager(made)}
    node.replace_all_uses_with(made)
    for result in results:
        made.append(result)
    total.replace_all_uses_with(gradient)
    graph.erase_node(total)
    graph.erase_node(node)


def _plain(text: str, numbers: Sequence[float]) -> Call | None:
    """The call, if it is a norm of one tensor over rows, with its weight and bias."""
    call, _ = call_text.read(text)
    is_plain = type(call.prologue) is Itself and type(call.epilogue) is Affine and not call.norm.is_by_channel
    return call if is_plain and not numbers else None


def _terms(node: Any) -> tuple[Any, Any] | None:
    """The two tensors that a node adds, alike in shape and dtype."""
    is_sum = getattr(node, "target", None) is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if not is_sum or not all(isinstance(term, torch.fx.Node) for term in node.args):
        return None
    values = [term.meta.get("val") for term in (node, *node.args)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    if node.meta["val"].device.type not in DEVICES:
        return None
    kinds = {(value.dtype, value.device, tuple(map(str, value.shape))) for value in values}
    return tuple(node.args) if len(kinds) == 1 else None


def _depends(node: Any, on: Any) -> bool:
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node is on:
            return True
        if node not in seen and node > on:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _is_in_memory(node: Any, but_for: Any = None) -> bool:
    """Whether a tensor is written in any case: by a kernel that is no part of another, or because one such reads it."""
    made = node
    while made.target in VIEWS:
        made = made.args[0]
    if made.op in ("placeholder", "get_attr") or made.target in APART:
        return True
    if made.target is operator.getitem and getattr(made.args[0].target, "namespace", "prims") != "prims":
        return True
    users = [user for user in node.users if user is not but_for]
    return any(user.target in APART or (user.target in VIEWS and _is_in_memory_of(user)) for user in users)


def _is_in_memory_of(view: Any) -> bool:
    return any(user.target in APART or (user.target in VIEWS and _is_in_memory_of(user)) for user in view.users)


def _with_sum(call: Call, dtype: torch.dtype, summands: int, is_output: bool) -> Call:
    """The call of so many summands, which returns c too, in their dtype, if that is an output."""
    parameters = len(call.axes) - 1
    names = tuple(operand_name(i) for i in range(summands + parameters))
    affine: Any = call.epilogue
    steps: list[Step] = []

    def step(name: str, left: Any, right: Any) -> Ref:
        steps.append(Step(f"s{len(steps)}", name, (left, right), ()))
        return Ref(steps[-1].name)

    rest, y = iter(names[summands:]), Ref("xhat")
    if affine.has_weight:
        weight = Ref(next(rest))
        if affine.weight_offset:
            weight = step("aten.add.Tensor", weight, Literal.of(affine.weight_offset))
        y = step("aten.mul.Tensor", y, weight)
    if affine.has_bias:
        y = step("aten.add.Tensor", y, Ref(next(rest)))
    epilogue = Expression(("xhat", "c", *names), tuple(steps), (y, Ref("c")) if is_output else (y,), call.compute)
    prologue: Any = call.prologue
    if summands == 2:
        added = Step("s0", "aten.add.Tensor", (Ref(names[0]), Ref(names[1])), ())
        prologue = Expression(names, (added,), (Ref("s0"),), call.compute, is_single=True)
    return replace(
        call,
        prologue=prologue,
        epilogue=epilogue,
        axes=(*[FULL] * summands, *call.axes[1:]),
        outputs=(*call.outputs, dtype) if is_output else call.outputs,
    )


def _text(call: Call, operands: Sequence[Any]) -> str:
    text = call_text.written(call, tuple(operand.meta["val"].dtype for operand in operands))
    assert text is not None
    return text


def _eager(node: Any) -> tuple[Any, Any]:
    """What Inductor lays operands out by."""
    return torch.fx.map_arg(node.args, lambda arg: arg.meta["val"]), {}
