"""What cannot be fused: refused at the first call, at the user's own line, with what to do instead; nothing is written and
nothing half-done stays."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warpnorm
from cpu.truth import random
from warpnorm import FusionError, InputError, InputTypeError, WarpnormError
from warpnorm.fuse import Fused
from warpnorm.trace import fusion

Function = Callable[..., Any]
MARK = "# refused"


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def if_sum(x: Tensor) -> Tensor:
    if x.sum() > 0:  # refused
        x = -x
    return norm(x)


def if_all(x: Tensor) -> Tensor:
    if (x > 0).all():  # refused
        x = -x
    return norm(x)


def if_one(x: Tensor) -> Tensor:
    y = x * 2
    return norm(y) if y[0, 0] > 0 else norm(-y)  # refused


def while_one(x: Tensor) -> Tensor:
    while x[0, 0] < 1:  # refused
        x = x + 1
    return norm(x)


def iadd(x: Tensor) -> Tensor:
    x += 1  # refused
    return norm(x)


def set_row(x: Tensor) -> Tensor:
    x[0] = 1  # refused
    return norm(x)


def set_column(x: Tensor) -> Tensor:
    x[:, 0] = x[:, 1]  # refused
    return norm(x)


def new_data(x: Tensor) -> Tensor:
    x.data = -x  # refused
    return norm(x)


def result_set_row(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = 1  # refused
    return norm(y)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("count", torch.ones(8))

    def to_parameter(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1)  # refused
        return F.layer_norm(x, (8,), self.weight)

    def to_buffer(self, x: Tensor) -> Tensor:
        self.count.mul_(2)  # refused
        return F.layer_norm(x, (8,), self.count)

    def to_name(self, x: Tensor) -> Tensor:  # refused
        self.count = self.count * 2
        return F.layer_norm(x, (8,), self.count)


@dataclass(frozen=True)
class Refusal:
    """`said` names the operator or what it is; the line is the one with a mark, or that of a lambda. `shapes` are those of
    the arguments, or the arguments."""

    name: str
    function: Function
    said: str
    why: str
    shapes: tuple[Any, ...] = ((4, 8),)

    @property
    def line(self) -> int:
        code = self.function.__code__
        lines = inspect.getsource(code).splitlines()
        return code.co_firstlineno + next((k for k, line in enumerate(lines) if line.endswith(MARK)), 0)

    def arguments(self) -> list[Tensor]:
        return [random(shape, seed=k) if isinstance(shape, tuple) else shape for k, shape in enumerate(self.shapes)]


PAIR = ((4, 8), (3, 1, 8))
BAGS = ((4, 8), torch.tensor([0, 1]))
REFUSALS = [
    Refusal("no_norm", lambda x: F.silu(x) + 1, "no norm", "elementwise code alone is not what this is for"),
    Refusal("two_norms", lambda x: F.layer_norm(F.rms_norm(x, (8,)), (8,)), "second norm", "one reduction a kernel"),
    Refusal("same_norm_twice", lambda x: norm(x) + F.layer_norm(-x, (8,)), "second norm", "side by side, too"),
    Refusal("norm_unused", lambda x: (F.layer_norm(x, (8,)), x * 2)[1], "norm", "no result depends on it"),
    Refusal("norm_of_constant", lambda x: F.layer_norm(torch.ones(4, 8), (8,)) + x, "constant", "nothing is read"),
    Refusal("matmul", lambda x: norm(x @ x.T @ x), "aten.mm", "rows meet each other"),
    Refusal("linear", lambda x, w: norm(F.linear(x, w)), "aten.", "a product of matrices", ((4, 8), (8, 8))),
    Refusal("softmax", lambda x: norm(x.softmax(-1)), "softmax", "a second reduction"),
    Refusal("cumsum", lambda x: norm(x.cumsum(-1)), "aten.cumsum", "columns depend on each other"),
    Refusal("sum", lambda x: norm(x - x.sum(-1, keepdim=True)), "aten.sum", "a second reduction"),
    Refusal("mean_of_batch", lambda x: norm(x - x.mean(0)), "aten.mean", "over rows"),
    Refusal("max", lambda x: norm(x.max(-1, keepdim=True).values + x), "aten.max", "with two results"),
    Refusal("vector_norm", lambda x: norm(F.normalize(x)), "vector_norm", "inside a function of PyTorch"),
    Refusal("sort", lambda x: norm(x.sort(-1).values), "aten.sort", "columns change places"),
    Refusal("cat", lambda x: norm(torch.cat([x, x])), "aten.cat", "two tensors in one place"),
    Refusal("index_by_tensor", lambda x, i: norm(x[i]), "aten.index", "the tensor says where to read", BAGS),
    Refusal("mask", lambda x: norm(x[x > 0]), "aten.index", "as many rows as the values say"),
    Refusal("gather", lambda x: norm(x.gather(1, x.long())), "aten.gather", "the tensor says where to read"),
    Refusal(
        "reshape_mixes_rows",
        lambda x, b: F.layer_norm((x * b).reshape(8, 4), (4,)),
        "aten.view",
        "a column's value has no place in the new shape",
        ((4, 8), (8,)),
    ),
    Refusal("if_sum", if_sum, "aten.sum", "a branch on a value"),
    Refusal("if_all", if_all, "aten.all", "a branch on all values"),
    Refusal("if_one", if_one, "value of a tensor", "a branch on a computed element"),
    Refusal("while", while_one, "value of a tensor", "a loop on a value"),
    Refusal("float", lambda x: norm(x * float(x[0, 0])), "value of a tensor", "the number would be captured"),
    Refusal("item", lambda x: norm(x * x[0, 0].item()), "value of a tensor", "the number would be captured"),
    Refusal("tolist", lambda x: norm(x * x.tolist()[0][0]), "value", "the number would be captured"),
    Refusal("equal", lambda x: norm(x) if torch.equal(x, x) else x, "aten.equal", "a branch on all values"),
    Refusal("allclose", lambda x: norm(x) if torch.allclose(x, x) else x, "allclose", "a branch on all values"),
    Refusal("add_", lambda x: norm(x.add_(1)), "aten.add_", "a method that writes into an input"),
    Refusal("iadd", iadd, "aten.add_", "an argument is the caller's tensor"),
    Refusal("set_row", set_row, "aten.fill_", "an assignment to a part"),
    Refusal("set_column", set_column, "aten.copy_", "an assignment to a part"),
    Refusal("copy_", lambda x: norm(x.copy_(-x)), "aten.copy_", "replaces an input"),
    Refusal("masked_fill_", lambda x: norm(x.masked_fill_(x > 0, 0.0)), "aten.masked_fill_", "where a mask says"),
    Refusal("normal_", lambda x: norm(x.normal_()), "aten.normal_", "writes random numbers"),
    Refusal("relu_inplace", lambda x: norm(F.relu(x, inplace=True)), "aten.relu_", "an option of PyTorch's functions"),
    Refusal("dropout_inplace", lambda x: norm(F.dropout(x, 0.5, inplace=True)), "writes", "an option of dropout"),
    Refusal("out", lambda x: norm(torch.mul(x, 2, out=x)), "out=", "writes into an input"),
    Refusal("out_elsewhere", lambda x: norm(torch.mul(x, 2, out=torch.empty_like(x))), "out=", "writes anywhere"),
    Refusal("row_add_", lambda x: norm(x[0].add_(1)), "aten.add_", "a view of an input is the input"),
    Refusal("view_mul_", lambda x: norm(x.view(2, 2, 8).mul_(2)), "aten.mul_", "a view of an input is the input"),
    Refusal("data_add_", lambda x: norm(x.data.add_(1)), "aten.add_", "behind autograd's back"),
    Refusal("new_data", new_data, "data", "an input with another memory"),
    Refusal("requires_grad_", lambda x: norm(x.requires_grad_()), "requires_grad", "an input of another kind"),
    Refusal("contiguous_add_", lambda x: norm(x.contiguous().add_(1)), "aten.add_", "no copy where it is contiguous"),
    Refusal("result_set_row", result_set_row, "aten.fill_", "a part of a value is no value of its own"),
    Refusal("parameter_add_", Writer().to_parameter, "aten.add_", "a module's tensors are inputs"),
    Refusal("buffer_mul_", Writer().to_buffer, "aten.mul_", "a module's tensors are inputs"),
    Refusal("buffer_assigned", Writer().to_name, "self.count", "it would happen while capturing only"),
    Refusal("sum_after", lambda x: norm(x).sum(-1), "aten.sum", "a result of lower rank"),
    Refusal("view_after", lambda x: F.layer_norm(x, (8,)).view(8, 4), "aten.view", "a result of another shape"),
    Refusal("row_after", lambda x: norm(x)[0], "aten.select", "a result of lower rank"),
    Refusal("broadcast_after", lambda x, y: norm(x) + y, "shape (3, 4, 8)", "more rows than were normalized", PAIR),
    Refusal("lower_rank", lambda x: (norm(x), x[0] * 2), "shape (8,)", "a result that is not one value an element"),
    Refusal("one_a_row", lambda x: (norm(x), x[:, :1] * 2), "shape (4, 1)", "a result of one column"),
    Refusal("randn_like", lambda x: norm(x + torch.randn_like(x)), "aten.randn_like", "only dropout is drawn inside"),
    Refusal("rand", lambda x: norm(x + torch.rand(4, 8)), "aten.rand", "only dropout is drawn inside"),
    Refusal("bernoulli", lambda x: norm(torch.bernoulli(x.sigmoid())), "aten.bernoulli", "drawn by hand"),
    Refusal("tensor_inside", lambda x: norm(x * torch.tensor([1.0] * 8)), "torch.tensor", "nowhere to read it from"),
    Refusal("arange_inside", lambda x: norm(x * torch.arange(8)), "aten.arange", "nowhere to read it from"),
    Refusal("is_contiguous", lambda x: norm(x if x.is_contiguous() else -x), "strides", "one capture, any strides"),
    Refusal("stride", lambda x: norm(x * x.stride(0)), "strides", "one capture, any strides"),
    Refusal("data_ptr", lambda x: norm(x * (x.data_ptr() % 16)), "storage", "one capture, any memory"),
    Refusal("requires_grad", lambda x: norm(x if x.requires_grad else -x), "requires_grad", "one capture for both"),
    Refusal("is_leaf", lambda x: norm(x if x.is_leaf else -x), "is_leaf", "one capture for both"),
    Refusal("grad", lambda x: norm(x if x.grad is None else -x), "grad", "one capture for both"),
    Refusal("i0", lambda x: norm(torch.special.i0(x)), "aten.i0", "no row in the table"),
    Refusal("digamma_after", lambda x: norm(x).digamma(), "aten.digamma", "no row in the table, behind the norm"),
    Refusal("bits", lambda x: norm((x * 2).view(torch.int32) * 1.0), "aten.view", "a computed value has no bits yet"),
    Refusal("own_gradient", lambda x: norm(Triple.apply(x)), "Triple", "a gradient that is not the operators'"),
    Refusal("other_device", lambda x: norm(x.to("meta")), "another device", "a kernel runs on one"),
]


def refusal_of(fused: Function, given: list[Tensor], held: list[Tensor]) -> WarpnormError:
    """What a call raises; all tensors, also those that a module holds, are as they were."""
    tensors = [*given, *held]
    before = [(t._version, t.requires_grad, t.data_ptr(), t.detach().clone()) for t in tensors]
    with pytest.raises(WarpnormError) as caught:
        fused(*given)
    for tensor, (version, requires_grad, pointer, values) in zip(tensors, before, strict=True):
        assert (tensor._version, tensor.requires_grad, tensor.data_ptr()) == (version, requires_grad, pointer)
        assert torch.equal(tensor, values), "something was written"
    return caught.value


def assert_empty(fused: Fused) -> None:
    assert (fused._captured, fused._prepared, fused._differentiable) == ({}, {}, set())


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_is_refused_at_its_line_with_what_to_do(refusal: Refusal) -> None:
    fused = warpnorm.fuse(refusal.function)
    owner = getattr(refusal.function, "__self__", None)
    held = [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []
    first = refusal_of(fused, refusal.arguments(), held)
    assert_empty(fused)
    assert type(first) is FusionError, refusal.why
    assert f"{__file__}:{refusal.line}" in str(first), f"not at line {refusal.line}: {first}"
    fact, _, instead = str(first).partition("; ")
    assert refusal.said in fact, first
    assert len(instead) > 10, f"does not say what to do: {first}"
    second = refusal_of(fused, refusal.arguments(), held)
    assert (type(second), str(second)) == (type(first), str(first))
    assert_empty(fused)


@pytest.mark.parametrize("given", [(), (3, "x"), ([1.0, 2.0],)], ids=["nothing", "numbers", "list"])
def test_no_tensor_at_all(given: tuple[Any, ...]) -> None:
    fused = warpnorm.fuse(lambda *args: norm(torch.ones(4, 8)))
    with pytest.raises(InputError, match="needs a tensor among its arguments, but there is none"):
        fused(*given)
    assert_empty(fused)


def test_an_argument_that_is_forgotten() -> None:
    fused = warpnorm.fuse(lambda x: norm(x))
    with pytest.raises(InputTypeError, match="missing a required argument: 'x'"):
        fused()
    assert_empty(fused)


def test_an_argument_that_is_an_array() -> None:
    """It cannot be passed as an argument: it is one."""
    fused = warpnorm.fuse(lambda x, scale: norm(x) * scale)
    with pytest.raises(FusionError, match=r"is of type ndarray, .* Pass a number, a tensor, .* torch\.as_tensor"):
        fused(torch.ones(4, 8), torch.ones(8).numpy())
    assert_empty(fused)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.Tensor.to_sparse, r"x has layout torch.sparse_coo, .* x\.to_dense\(\)"),
        (torch.Tensor.to_sparse_csr, r"x has layout torch.sparse_csr, .* x\.to_dense\(\)"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"x is quantized, .* x\.dequantize\(\)"),
    ],
    ids=["sparse", "csr", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers(make: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    fused = warpnorm.fuse(lambda x: norm(x.relu()))
    with pytest.raises(InputError, match=said):
        fused(make(torch.ones(4, 8)))
    assert_empty(fused)


@pytest.mark.parametrize("shape", [(), (8,), (0,)], ids=str)
@pytest.mark.parametrize(
    "norm_of", [lambda x: F.group_norm(x, 2), F.instance_norm, lambda x: F.batch_norm(x, None, None, training=True)],
    ids=["group_norm", "instance_norm", "batch_norm"],
)  # fmt: skip
def test_an_input_without_channels(norm_of: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    fused = warpnorm.fuse(lambda x: F.relu(norm_of(x)))
    with pytest.raises(InputError, match=rf"_norm: input .*{len(shape)} dimensions, but must .*at least 2"):
        fused(torch.ones(shape))
    assert_empty(fused)


def test_tensors_on_two_devices() -> None:
    fused = warpnorm.fuse(lambda x, y: norm(x + y))
    x, elsewhere = random((4, 8)), torch.ones(8, device="meta")
    with pytest.raises(InputError, match="on cpu, meta, not on one"):
        fused(x, elsewhere)
    assert_empty(fused)
    assert torch.equal(fused(x, torch.tensor(2.0)), norm(x + 2)), "a scalar may be on the CPU"


@pytest.mark.parametrize("given", [3, None, "layer_norm", torch.ones(2)], ids=lambda given: type(given).__name__)
def test_only_what_can_be_called_is_fused(given: Any) -> None:
    with pytest.raises(InputTypeError, match=f"takes a function, but got something of type {type(given).__name__}"):
        warpnorm.fuse(given)


def test_no_derivative() -> None:
    """Refused only where a gradient is wanted, at the first call and not when it is too late, in backward."""
    fused = warpnorm.fuse(lambda x: norm(torch.heaviside(x, x) + x))
    line = f"{__file__}:{fused.__wrapped__.__code__.co_firstlineno}"
    x = random((4, 8), requires_grad=True)
    for _ in range(2):
        with pytest.raises(FusionError, match=f"{line}: aten.heaviside cannot be fused: derivative .*; "):
            fused(x)
    with torch.no_grad():
        assert torch.equal(fused(x), norm(torch.heaviside(x, x) + x))
    assert torch.equal(fused(x.detach()), norm(torch.heaviside(x, x) + x))


MADE_INSIDE: dict[str, Function] = {
    "clone": lambda x: x.clone().add_(1),
    "copy": lambda x: x.to(x.dtype, copy=True).mul_(2),
    "result": lambda x: (x * 2).mul_(3).add_(x),
    "zeros": lambda x: torch.zeros_like(x).add_(x),
    "empty": lambda x: torch.empty_like(x).copy_(x * 2),
    "integers": lambda x: torch.zeros_like(x, dtype=torch.int64).copy_(x * 3) * 0.5,
    "number": lambda x: x * torch.tensor(2.0),
}


@pytest.mark.parametrize("make", MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_tensors_made_inside_may_be_written(make: Function) -> None:
    fused, x = warpnorm.fuse(lambda x: norm(make(x))), random((4, 8))
    expected = make(x)
    assert torch.equal(fused(x), norm(expected))
    ((captured,),) = fused._captured.values()
    torch.testing.assert_close(captured.call.prologue(x), expected)


def test_a_clone_is_another_tensor() -> None:
    fused = warpnorm.fuse(lambda x: (norm(x), x.clone(), x))
    fused(random((4, 8)))
    ((captured,),) = fused._captured.values()
    assert [type(leaf) for leaf in captured.leaves] == [fusion.Output, fusion.Output, fusion.Input]


def test_grad_mode_is_no_constant() -> None:
    fused = warpnorm.fuse(lambda x: norm(x * 2 if torch.is_grad_enabled() else x * 3))
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            assert f", {2 if is_enabled else 3})" in warpnorm.explain(fused, random((4, 8))).prologue


def test_what_was_captured_before_a_refusal_stays() -> None:
    def block(x: Tensor, is_sorted: bool) -> Tensor:
        return norm(x.sort(-1).values if is_sorted else x * 2)

    fused = warpnorm.fuse(block)
    x = random((4, 8))
    assert torch.equal(fused(x, False), block(x, False))
    captured = dict(fused._captured)
    with pytest.raises(FusionError, match=r"aten\.sort"):
        fused(x, True)
    assert fused._captured == captured
    assert len(fused._prepared) == 1
    assert torch.equal(fused(x, False), block(x, False))


def test_own_errors_of_the_function_pass_through() -> None:
    def picky(x: Tensor, is_early: bool) -> Tensor:
        if is_early:
            raise ValueError("before the norm")
        y = norm(x)
        raise KeyError("after the norm", y.shape[-1])

    fused = warpnorm.fuse(picky)
    for _ in range(2):
        with pytest.raises(ValueError, match="before the norm") as caught:
            fused(random((4, 8)), True)
        assert type(caught.value) is ValueError
        with pytest.raises(KeyError, match=r"'after the norm', 8"):
            fused(random((4, 8)), False)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            fused(random((4, 8)), True, nonsense=1)
        assert_empty(fused)
