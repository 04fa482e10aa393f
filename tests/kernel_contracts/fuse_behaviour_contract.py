"""Contract: how a fused function behaves: what it returns and keeps, that it is repeatable, batch-invariant, captured and
compiled once, differentiable twice, and that spellings of one function agree in every bit."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import warpnorm
from kernel_contracts.fuse_contract import COLS, drawn, layer, rms
from kernel_contracts.fuse_operators_contract import Found, check_fused
from warpnorm.trace import fusion

WIDTHS = (37, 256, 9000)  # unaligned, aligned, walked


def block(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + F.silu(x)
    return F.layer_norm(h, h.shape[-1:], weight, bias), h


def operands(device: str, rows: int = 6, cols: int = COLS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [drawn(shape, k, dtype, device) for k, shape in enumerate(((rows, cols), (rows, cols), (cols,), (cols,)))]


def assert_same_bits(found: Found, wanted: Found) -> None:
    for name, result in found.named.items():
        assert result.equal(wanted.named[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_fused_repeats_every_bit(cols: int, dtype: torch.dtype, device: str) -> None:
    fused = warpnorm.fuse(block)
    given = operands(device, 5, cols, dtype)
    first = Found.of(fused, given, 0)
    assert_same_bits(Found.of(fused, given, 0), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_fused_rows_do_not_know_their_neighbours(cols: int, dtype: torch.dtype, device: str) -> None:
    def adaptive(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x) + scale
        return layer(h) * (1 + scale) + weight, h

    fused = warpnorm.fuse(adaptive)
    shapes = ((4, 3, cols), (4, 1, cols), (cols,))
    x, scale, weight = (drawn(shape, k, dtype, device) for k, shape in enumerate(shapes))
    whole = fused(x, scale, weight)
    for samples, positions in ((1, 3), (2, 3), (4, 1), (3, 2), (1, 1)):
        some = fused(x[:samples, :positions], scale[:samples], weight)
        for part, all_of_it in zip(some, whole, strict=True):
            assert part.equal(all_of_it[:samples, :positions])


def test_a_mask_filled_by_a_number_in_a_tensor(device: str) -> None:
    """Of another dtype, and differentiated: the same as the words that say where."""
    x, y = (drawn((6, COLS), k, torch.bfloat16, device) for k in range(2))
    number = torch.tensor(0.7, device=device)
    filled = warpnorm.fuse(lambda x, y, number: rms(x.masked_fill(y > 0, number)))
    said = warpnorm.fuse(lambda x, y, number: rms(torch.where(y > 0, number.bfloat16(), x)))
    assert_same_bits(Found.of(filled, [x, y, number], 0), Found.of(said, [x, y, number], 0))


class Counts:
    """How often a fused function was captured, and how many kernels were built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = 0
        capture = fusion.capture_call

        def counted(*args: Any) -> fusion.Captured:
            self.captures += 1
            return capture(*args)

        monkeypatch.setattr(fusion, "capture_call", counted)

    @property
    def kernels(self) -> int:
        from warpnorm.codegen import bind

        return sum(len(step.built) for step in (bind.forward, bind.backward, bind.backward_sums, bind._column_sum))


def test_fused_for_other_row_counts_is_neither_captured_nor_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    counts = Counts(monkeypatch)
    fused = warpnorm.fuse(lambda x, a, w: (lambda h: (layer(h) * w + a, h))(x * torch.sin(a) + 0.125))

    def call(b: int, t: int, h: int) -> None:
        Found.of(fused, [drawn(s, k, torch.float32, device) for k, s in enumerate(((b, t, h), (b, 1, h), (h,)))], 0)

    call(2, 3, 72)
    assert counts.captures == 1
    before = counts.kernels
    for b, t in ((2, 3), (3, 2), (5, 7), (2, 100), (64, 2)):
        call(b, t, 72)
    assert (counts.captures, counts.kernels) == (1, before)
    call(2, 3, 40)
    assert counts.captures == 2, "the count must see a capture where there is one"
    assert counts.kernels > before


def test_fused_lone_row_is_not_compiled_anew(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """It is captured anew, for a size of one is how broadcasting is spelled."""
    counts = Counts(monkeypatch)
    fused = warpnorm.fuse(lambda x, r: rms(x * torch.sin(r) + 0.375))

    def call(*shape: int) -> None:
        Found.of(fused, [drawn(shape, k, torch.float32, device) for k in range(2)], 0)

    call(3, 72)
    before = counts.kernels
    for shape in ((1, 72), (72,), (2, 3, 72), (1, 3, 72), (1, 1, 72)):
        call(*shape)
    assert counts.kernels == before


def test_fused_in_several_threads_is_captured_and_compiled_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from warpnorm.codegen.kernel import BoundKernel

    counts = Counts(monkeypatch)
    fused = warpnorm.fuse(lambda x: rms(x * x.sin() + 0.625))
    x = drawn((4, 88), 0, torch.float32, device)
    before = counts.kernels
    barrier, lock = threading.Barrier(4), threading.Lock()
    found = []
    launch = BoundKernel.launch

    def launched_alone(*args: Any) -> None:  # the interpreter runs one kernel at a time
        with lock:
            launch(*args)

    monkeypatch.setattr(BoundKernel, "launch", launched_alone)

    def first_call() -> None:
        barrier.wait()
        found.append(fused(x))

    threads = [threading.Thread(target=first_call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(result.equal(found[0]) for result in found)
    torch.testing.assert_close(found[0], rms(x * x.sin() + 0.625))
    assert (counts.captures, counts.kernels - before) == (1, 1)


@pytest.mark.parametrize("norm", [layer, rms], ids=lambda norm: norm.__name__)
def test_fused_keeps_its_inputs_and_two_numbers_a_row(norm: Callable[..., torch.Tensor], device: str) -> None:
    def gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x) * torch.sigmoid(gate) + x
        return torch.tanh(norm(h) * weight), h

    shapes = ((6, 2 * COLS), (6, 1), (2 * COLS,))
    leaves = [drawn(shape, k, torch.float32, device).requires_grad_() for k, shape in enumerate(shapes)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        warpnorm.fuse(gated)(*leaves)
    own = {leaf.data_ptr() for leaf in leaves}
    extra = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert sum(tensor.numel() for tensor in extra) == (2 if norm is layer else 1) * 6
    assert all(tensor.dtype == torch.float32 for tensor in extra)


def swish(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = F.silu(x) * r
    return layer(h), h


def adaptive_residual(x: torch.Tensor, r: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rms(x + r * gate) * (1 + scale)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (swish, ((2, 2, 3), (2, 2, 3))),
        (adaptive_residual, ((2, 2, 3), (2, 2, 3), (2, 1, 1), (2, 1, 3))),
    ],
    ids=["swish", "adaptive_residual"],
)
def test_fused_gradcheck_and_gradgradcheck(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], device: str
) -> None:
    leaves = [drawn(shape, k, torch.float64, device).requires_grad_() for k, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(warpnorm.fuse(function), leaves)
    assert torch.autograd.gradgradcheck(warpnorm.fuse(function), leaves, fast_mode=True)


def test_fused_second_derivatives_are_those_of_the_plain_function(device: str) -> None:
    """Also of operands that are broadcast, and of one output alone."""

    def penalty(function: Callable[..., Any], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().double().requires_grad_() for t in given]
        y, _ = function(*leaves)
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    found, wanted = (penalty(function, operands(device)) for function in (warpnorm.fuse(block), block))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# Spellings


class Spelled(nn.Module):
    """The same function as the method of a module, around a norm that is a module."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    @warpnorm.fuse
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = residual + F.silu(x)
        return self.norm(h), h


def by_module(kind: type[nn.LayerNorm]) -> Callable[..., Any]:
    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        module = Spelled(kind(COLS).to(x.device))
        for name, value in (("weight", weight), ("bias", bias)):
            delattr(module.norm, name)
            setattr(module.norm, name, value)
        return module(x, residual)

    return call


def in_place(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x * 1.0
    F.silu(h, inplace=True)
    h += r
    return F.layer_norm(h, h.shape[-1:], w, b), h


fused_block = warpnorm.fuse(block)
SPELLINGS: dict[str, Callable[..., Any]] = {
    "keywords": lambda x, r, w, b: fused_block(x, bias=b, residual=r, weight=w),
    "norm_keywords": warpnorm.fuse(
        lambda x, r, w, b: (lambda h: (F.layer_norm(h, normalized_shape=[COLS], bias=b, weight=w, eps=1e-5), h))(
            r + F.silu(x)
        )
    ),
    "torch_layer_norm": warpnorm.fuse(
        lambda x, r, w, b: (lambda h: (torch.layer_norm(h, (COLS,), w, b), h))(r + F.silu(x))
    ),
    "ours": warpnorm.fuse(lambda x, r, w, b: (lambda h: (warpnorm.layer_norm(h, COLS, w, b), h))(r + F.silu(x))),
    "ours_by_dimension": warpnorm.fuse(
        lambda x, r, w, b: (lambda h: (warpnorm.layer_norm(h, weight=w, bias=b, normalized_dim=-1), h))(r + F.silu(x))
    ),
    "methods": warpnorm.fuse(lambda x, r, w, b: (lambda h: (F.layer_norm(h, (COLS,), w, b), h))(F.silu(x).add(r))),
    "in_place": warpnorm.fuse(in_place),
    "module": by_module(nn.LayerNorm),
    "our_module": by_module(warpnorm.nn.LayerNorm),
    "fused_twice": warpnorm.fuse(warpnorm.fuse(block)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_fused_spellings_agree_in_every_bit(name: str, device: str) -> None:
    given = operands(device)
    assert_same_bits(Found.of(SPELLINGS[name], given, 0), Found.of(fused_block, given, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_fused_lone_norm_is_the_function_itself(cols: int, dtype: torch.dtype, device: str) -> None:
    x, _, weight, bias = operands(device, 5, cols, dtype)
    for given, function, own in (
        ((x, weight, bias), lambda x, w, b: F.layer_norm(x, (cols,), w, b), warpnorm.layer_norm),
        ((x, weight), lambda x, w: F.rms_norm(x, (cols,), w), warpnorm.rms_norm),
    ):
        expected = Found.of(lambda x, *parameters, own=own: own(x, (cols,), *parameters), given, 0)
        assert_same_bits(Found.of(warpnorm.fuse(function), given, 0), expected)


# Results


def around(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = x * r.sin()
    y = layer(h)
    return h, y, torch.tanh(y) * h


RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "before_and_after": around,
    "after_alone": lambda x, r: around(x, r)[1],
    "nested": lambda x, r: {"norm": (around(x, r)[1], [None, 3]), "scale": 0.5, "name": "block"},
    "an_input": lambda x, r: (x, rms(x + r.sin()), r),
    "a_view_of_an_input": lambda x, r: (rms(x + r.sin()), x[:, ::2]),
    "twice": lambda x, r: (lambda y: (y, y, {"again": y}))(rms(x + r.sin())),
    "one_element_list": lambda x, r: [rms(x + r.sin())],
    "comparisons": lambda x, r: (lambda y: (y, y > 0, (y * 5).to(torch.int32), x > r))(rms(x + r)),
    "detached": lambda x, r: (lambda h: (rms(h * x), h.detach()))(x * r.sin()),
    "detached_norm": lambda x, r: (lambda y: (y * x, y.detach()))(rms(x * r.sin())),
}


@pytest.mark.parametrize("name", RESULTS)
def test_fused_results(name: str, device: str) -> None:
    function = RESULTS[name]
    fused = warpnorm.fuse(function)
    x, r = (drawn((3, COLS), seed, torch.float32, device).requires_grad_() for seed in (1, 2))
    found, tree = pytree.tree_flatten(fused(x, r))
    wanted, wanted_tree = pytree.tree_flatten(function(x, r))
    assert tree == wanted_tree
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is x, mine is r) == (theirs is x, theirs is r)
        assert [mine is other for other in found] == [theirs is other for other in wanted]
        if isinstance(theirs, torch.Tensor):
            assert (mine.requires_grad, mine.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
        else:
            assert mine == theirs

    def tensors_of(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *o: tuple(t for t in pytree.tree_leaves(function(*o)) if isinstance(t, torch.Tensor))

    def make(seed: int) -> list[torch.Tensor]:
        return [drawn((3, COLS), seed + k, torch.float32, device) for k in (0, 50)]

    check_fused(tensors_of(fused), tensors_of(function), make)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_fused_results_of_which_some_have_a_gradient(used: tuple[int, ...], device: str) -> None:
    fused = warpnorm.fuse(around)
    check_fused(
        lambda *o: tuple(fused(*o)[k] for k in used),
        lambda *o: tuple(around(*o)[k] for k in used),
        lambda seed: [drawn((3, COLS), seed + k, torch.float32, device) for k in (0, 50)],
    )


LIMITS = {
    "clamp": lambda x, s: x.sin() * s.clamp(-1.0, 0.75),
    "maximum": lambda x, s: torch.maximum(x, s) + torch.minimum(s, x),
    "where": lambda x, s: torch.where((s > 0.5) | (x < s), x, s),
}


@pytest.mark.parametrize("number", [0.5, 2.0])
@pytest.mark.parametrize("name", LIMITS)
def test_fused_limits_of_a_lone_value(name: str, number: float, device: str) -> None:
    """Compared as a scalar, and then beside the elements of a tile."""

    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return LIMITS[name](rms(x), s)

    def make(seed: int) -> list[torch.Tensor]:
        return [drawn((3, COLS), seed, torch.float32, device), torch.tensor(number, device=device)]

    check_fused(warpnorm.fuse(function), function, make)


def test_fused_reshape_of_any_strides(device: str) -> None:
    """A copy where there is no such view, as of PyTorch."""
    fused = warpnorm.fuse(lambda x: rms(x.reshape(-1, x.shape[-1]) * 2.0))
    x = drawn((4, 6, 40), 0, torch.float32, device)
    for strided in (x, x.transpose(0, 1), x[:, ::2], x):
        given = strided.detach().requires_grad_()
        found, expected = fused(given), fused.__wrapped__(given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        grad = torch.ones_like(found)
        for a, b in zip(*(torch.autograd.grad(o, given, grad) for o in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_fused_lone_column_is_its_own_mean(device: str) -> None:
    """What stands before the norm is rounded backward as it was forward: xhat and its gradient are zero then."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + x * torch.sin(x)
        y = F.layer_norm(h, (1,))
        return y * h, y

    x = drawn((4096, 1), 0, torch.float32, device).requires_grad_()
    outputs = warpnorm.fuse(program)(x)
    (gradient,) = torch.autograd.grad(outputs, x, [drawn((4096, 1), k, torch.float32, device) for k in (1, 2)])
    assert all(output.eq(0).all() for output in outputs)
    assert gradient.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fused_strided_rows_with_several_results(dtype: torch.dtype, device: str) -> None:
    """Which Triton refuses as they are first written: see `bind.py`."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x + torch.sin(x) * torch.sin(x)
        y = rms(h)
        return y * torch.sin(y), y, h * y

    def make(seed: int) -> list[torch.Tensor]:
        return [drawn((2, 24576), seed, dtype, device)[:, ::2]]

    check_fused(warpnorm.fuse(function), function, make)
