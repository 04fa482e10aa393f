"""Under `torch.compile` a norm, a module and a fused function are one operator forward and one backward, with the bits of
plain calls, and another number of rows compiles nothing anew."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

import warpnorm
from cpu.seen import Seen
from warpnorm import routing

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")

COLS = 2048
NORM, NORM_BACKWARD = "warpnorm.norm.default", "warpnorm.norm_backward.default"


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@warpnorm.fuse
def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    h = residual + F.silu(x)
    return F.layer_norm(h, h.shape[-1:], weight), h


@warpnorm.fuse
def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    h = F.silu(gate) * value
    return F.rms_norm(h, h.shape[-1:], eps=1e-6)


@warpnorm.fuse
def detaching(x: torch.Tensor) -> Any:
    with torch.no_grad():
        s = x * 2
    return F.rms_norm(x + s, x.shape[-1:]), (x * 3).detach()


@warpnorm.fuse
def ours_inside(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.relu(warpnorm.layer_norm(x * 2, (COLS,), weight))


@warpnorm.fuse
def reshaping(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.view(x.shape[0], 2, -1) * 2, (2 * COLS,))


def rows(*sizes: int) -> Callable[[int], torch.Tensor]:
    return lambda count: torch.randn(count, *sizes, requires_grad=True)


def images(size: int, memory_format: torch.memory_format = torch.contiguous_format) -> Callable[[int], torch.Tensor]:
    return lambda count: torch.randn(count, 32, size, size).to(memory_format=memory_format).requires_grad_()


def vector(size: int) -> Callable[[int], torch.Tensor]:
    return lambda _: torch.randn(size, requires_grad=True)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    arguments: tuple[Callable[[int], torch.Tensor], ...]
    why: str
    parts: int = 1  # launches of an eager backward, which a compiler sees as one operator


CASES = [
    Case("layer_norm", lambda x, w, b: warpnorm.layer_norm(x, (COLS,), w, b), (rows(COLS), vector(COLS), vector(COLS)),
         "the plain call"),
    Case("rms_norm", lambda x, w: warpnorm.rms_norm(x, (COLS,), w), (rows(COLS), vector(COLS)), "one statistic alone"),
    Case("number", lambda x: warpnorm.rms_norm(x, (COLS,), 2.0), (rows(COLS),), "a weight that is no tensor"),
    Case("offset", lambda x, w: warpnorm.layer_norm(x, (COLS,), w, weight_offset=1.0), (rows(3, COLS), vector(COLS)),
         "a keyword that PyTorch's operator does not have"),
    Case("statistics", lambda x: warpnorm.layer_norm(x, (COLS,), return_stats=True), (rows(COLS),), "they are returned"),
    Case("batch_norm", lambda x, w: warpnorm.batch_norm(x, None, None, w, training=True), (images(64), vector(32)),
         "a row is a channel"),
    Case("channels_last", lambda x: warpnorm.batch_norm(x, None, None, training=True),
         (images(64, torch.channels_last),), "the memory format stays"),
    Case("group_norm", lambda x, w: warpnorm.group_norm(x, 4, w), (images(128), vector(32)), "rows are groups"),
    Case("instance_norm", lambda x: warpnorm.instance_norm(x), (images(128),), "as many groups as channels"),
    Case("block", block, (rows(COLS), rows(COLS), vector(COLS)), "two outputs, one of them read in backward"),
    Case("swiglu", swiglu, (rows(2 * COLS),), "operands are views of an argument"),
    Case("detaching", detaching, (rows(COLS),), "where gradients end is kept"),
    Case("ours_inside", ours_inside, (rows(COLS), vector(COLS)), "a norm of ours inside of a fused function"),
    Case("reshaping", reshaping, (rows(4 * COLS),), "the function asks for the number of rows"),
    Case("post_norm", warpnorm.fuse(lambda x, r: F.layer_norm(x + r, (COLS,))), (rows(COLS), rows(COLS)),
         "two gradients are one tensor"),
    Case("AddRMSNorm", warpnorm.nn.AddRMSNorm(COLS), (rows(COLS), rows(COLS)), "a method, its weight is a parameter"),
    Case("QKNorm", warpnorm.nn.QKNorm(COLS, 2, 1), (rows(4, COLS),), "an operand that no gradient reaches", parts=2),
    Case("GroupNormSiLU", warpnorm.nn.GroupNormSiLU(4, 32), (images(64),), "a fused module by channel"),
]  # fmt: skip


def leaves(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_operator_each_way(case: Case) -> None:
    seen = Seen()
    compiled = torch.compile(case.function, backend=seen, fullgraph=True)
    for count in (3, 5, 9):
        given = [argument(count) for argument in case.arguments]
        same = [tensor.detach().clone().requires_grad_() for tensor in given]
        found, right = leaves(compiled(*given)), leaves(case.function(*same))
        for ours, expected in zip(found, right, strict=True):
            assert torch.equal(ours, expected), case.why
            assert ours.stride() == expected.stride()
            assert ours.requires_grad == expected.requires_grad
        grad = torch.randn_like(found[0])
        found[0].backward(grad)
        right[0].backward(grad)
        for ours, expected in zip(given, same, strict=True):
            if case.parts == 1:
                assert torch.equal(ours.grad, expected.grad), case.why
            else:
                torch.testing.assert_close(ours.grad, expected.grad)
    assert seen.frames == 2, "once with the first number of rows, once for all"
    own = [name for graph in seen.graphs for name in graph if "norm" in name]
    assert set(own) <= {NORM, NORM_BACKWARD}
    assert len(own) == 4


def test_a_norm_of_ours_inside_is_part_of_the_operator() -> None:
    seen = Seen()
    given = rows(COLS)(4).detach(), vector(COLS)(0).detach()
    torch.compile(ours_inside, backend=seen, fullgraph=True)(*given)
    assert seen.graphs == [[NORM]]


def assigning(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = x + r
    h[..., 0] = 0.0
    return F.rms_norm(h, (COLS,))


def emptying(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = x + r
    r[...] = 0.0
    return F.rms_norm(h, (COLS,))


@pytest.mark.parametrize("function", [assigning, emptying], ids=lambda f: f.__name__)
def test_what_is_written_into_is_not_lost(function: Callable[..., torch.Tensor]) -> None:
    """Such functions are not fused: they run as they are."""
    x, r = torch.randn(2, 4, COLS)
    right, emptied = function(x, same := r.clone()), same
    compiled = torch.compile(warpnorm.fuse(function), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, r), right)
    assert torch.equal(r, emptied)


@pytest.mark.parametrize("is_input", [False, True], ids=["apart", "input"])
def test_out(is_input: bool) -> None:
    x, w = torch.randn(4, COLS), torch.randn(COLS)
    right = warpnorm.rms_norm(x, (COLS,), w)
    out = x if is_input else torch.empty_like(x)
    compiled = torch.compile(
        lambda x, w, out: warpnorm.rms_norm(x, (COLS,), w, out=out), backend="aot_eager", fullgraph=True
    )
    found = compiled(x, w, out)
    assert torch.equal(found, right)
    assert torch.equal(out, right)


@pytest.mark.parametrize("norm", [warpnorm.layer_norm, warpnorm.rms_norm], ids=lambda f: f.__name__)
def test_another_number_of_columns_compiles_once(norm: Callable[..., Any]) -> None:
    seen = Seen()
    compiled = torch.compile(lambda x: norm(x, x.shape[-1:]), backend=seen, fullgraph=True)
    for count, cols in ((4, 2048), (5, 2048), (3, 4096), (7, 3072), (8, 5120), (9, 6144)):
        x = torch.randn(count, cols)
        assert torch.equal(compiled(x), norm(x, (cols,)))
    assert seen.frames <= 3, "for the first shape, for all rows, for all columns"


@pytest.mark.parametrize(("cols", "is_left"), [(32, True), (512, True), (513, False)])
def test_small_rows_are_left_to_the_compiler(cols: int, is_left: bool, caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    x = torch.randn(4, cols)
    with caplog.at_level("INFO", "warpnorm.compiled"):
        torch.compile(lambda x: warpnorm.rms_norm(x, (cols,)), backend=seen, fullgraph=True)(x)
        torch.compile(warpnorm.fuse(lambda x: F.layer_norm(x * 2, (cols,))), backend=seen, fullgraph=True)(x)
    assert [name for graph in seen.graphs for name in graph].count(NORM) == (0 if is_left else 2)
    assert ("quicker for rows so small" in caplog.text) == is_left


def test_a_program_that_is_exported_may_run_without_a_compiler() -> None:
    program = torch.export.export(warpnorm.nn.RMSNorm(128), (torch.randn(4, 128),))
    assert NORM in [str(node.target) for node in program.graph.nodes]


def test_every_size_may_be_a_symbol() -> None:
    def alone(x: torch.Tensor) -> torch.Tensor:
        return warpnorm.rms_norm(x, x.shape[-1:])

    fused = warpnorm.fuse(lambda x: F.rms_norm(x * 2, x.shape[-1:], eps=1e-6))
    seen = Seen()
    compiled = torch.compile(alone, backend=seen, fullgraph=True, dynamic=True)
    compiled_fused = torch.compile(fused, backend=seen, fullgraph=True, dynamic=True)
    frames = []
    for count, cols in ((3, 2048), (4, 3000), (5, 4096)):
        x, y = torch.randn(count, 2048), torch.randn(count, cols)
        assert torch.equal(compiled(x), alone(x))
        assert torch.equal(compiled_fused(y), fused(y))
        frames.append(seen.frames)
    assert len(set(frames)) == 1
    assert all(graph == [NORM] for graph in seen.graphs)


def test_what_a_fused_function_reads_is_guarded() -> None:
    scale = 2.0
    weight = torch.randn(COLS, requires_grad=True)

    @warpnorm.fuse
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x * scale, (COLS,), weight)

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, COLS)
    before = compiled(x)
    assert torch.equal(before, scaled(x))
    scale = -2.0
    assert torch.equal(compiled(x), -before)
    compiled(x).sum().backward()
    assert weight.grad is not None, "a tensor of the closure gets a gradient"


@pytest.mark.parametrize("make", [warpnorm.nn.BatchNorm2d, warpnorm.nn.BatchNormReLU2d], ids=lambda make: make.__name__)
def test_running_statistics_are_averaged(make: Any) -> None:
    ours, plain = make(32), make(32)
    seen = Seen()
    compiled = torch.compile(ours, backend=seen, fullgraph=True)
    for count in (3, 4, 5):
        x = torch.randn(count, 32, 64, 64) + 1
        assert torch.equal(compiled(x), plain(x))
    for mine, expected in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)
    assert ours.num_batches_tracked == 3
    assert all([name for name in graph if "norm" in name] in ([NORM], [NORM_BACKWARD]) for graph in seen.graphs)


def test_a_momentum_that_changes() -> None:
    """By Inductor, which makes something else of a symbolic alpha."""
    x, running = 3 * torch.randn(4, 4, 8, 8), (torch.zeros(4), torch.ones(4))
    expected = tuple(t.clone() for t in running)
    step = torch.compile(lambda x, momentum: warpnorm.batch_norm(x, *running, training=True, momentum=momentum))
    for momentum in (0.5, 0.4, 0.3):
        step(x, momentum)
        F.batch_norm(x, *expected, training=True, momentum=momentum)
    for mine, theirs in zip(running, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@inductor.patch({"cpp.threads": 2})
def test_a_batch_that_changes_too() -> None:
    """By Inductor, which keeps an old product of two numbers that change, where it has two threads."""
    running = torch.zeros(8), torch.ones(8)
    expected = tuple(t.clone() for t in running)
    step = torch.compile(lambda x, momentum: warpnorm.batch_norm(x, *running, training=True, momentum=momentum))
    for samples, momentum in ((4, 0.9), (2, 0.5), (6, 0.3), (3, 0.2)):
        x = torch.randn(samples, 8, 150, 150) * samples + samples
        step(x, momentum)
        F.batch_norm(x, *expected, training=True, momentum=momentum)
        for mine, theirs in zip(running, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("function", [warpnorm.batch_norm, warpnorm.instance_norm], ids=lambda f: f.__name__)
def test_running_statistics_of_symbolic_sizes(function: Any) -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return function(x, mean, variance, **{"training": True} if function is warpnorm.batch_norm else {})

    compiled = torch.compile(step, dynamic=True, fullgraph=True, backend="aot_eager")
    for samples in (4, 3):
        x, found, expected = (
            torch.randn(samples, 8, 150, 150),
            [torch.zeros(8), torch.ones(8)],
            [torch.zeros(8), torch.ones(8)],
        )
        torch.testing.assert_close(compiled(x, *found), step(x, *expected))
        torch.testing.assert_close(found, expected)


def test_dropout_takes_the_plain_path() -> None:
    seen = Seen()
    module = warpnorm.nn.AddRMSNorm(COLS, dropout=0.5)
    _, h = torch.compile(module, backend=seen, fullgraph=True)(torch.ones(4, COLS), torch.zeros(4, COLS))
    assert set(h.unique().tolist()) == {0.0, 2.0}
    assert not any("warpnorm" in name for graph in seen.graphs for name in graph)


def test_checkpoint() -> None:
    def checkpointed(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, h = checkpoint(block, warpnorm.rms_norm(x, (COLS,)), r, w, use_reentrant=False)
        return y + h

    given = [torch.randn(4, COLS, requires_grad=True), torch.randn(4, COLS), torch.randn(COLS, requires_grad=True)]
    grad = torch.randn(4, COLS)
    checkpointed(*given).backward(grad)
    right, given[0].grad, given[2].grad = [given[0].grad, given[2].grad], None, None
    torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(*given).backward(grad)
    for tensor, expected in zip((given[0], given[2]), right, strict=True):
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-4, atol=1e-4)


def test_transforms_inside_see_plain_operators() -> None:
    x, w = torch.randn(4, COLS), torch.randn(COLS)
    for function in (
        lambda x: warpnorm.rms_norm(x, (COLS,), w),
        warpnorm.fuse(lambda x: F.rms_norm(x, (COLS,), w) * 2),
    ):
        gradient = torch.func.grad(lambda x, f=function: f(x).square().sum())
        found = torch.compile(gradient, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, gradient(x))
        mapped = torch.compile(torch.func.vmap(function), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(mapped(x), function(x))


def test_autocast() -> None:
    x = torch.randn(4, COLS, dtype=torch.bfloat16)
    fused = warpnorm.fuse(lambda x: F.layer_norm(x * 2, (COLS,)))
    with torch.autocast("cpu", torch.bfloat16):
        for function in (lambda x: warpnorm.layer_norm(x, (COLS,)), fused):
            found = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
            assert found.dtype == F.layer_norm(x, (COLS,)).dtype
            assert torch.equal(found, function(x))


def test_inductor() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, h = block(x.sin(), x, w)
        return warpnorm.rms_norm(y * 2, (COLS,)).relu() + h

    x, w = torch.randn(5, COLS, requires_grad=True), torch.randn(COLS, requires_grad=True)
    right = model(x, w)
    grad = torch.randn_like(right)
    right.backward(grad)
    expected, x.grad, w.grad = (x.grad, w.grad), None, None
    found = torch.compile(model, fullgraph=True)(x, w)
    found.backward(grad)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close((x.grad, w.grad), expected, rtol=1e-4, atol=1e-4)
