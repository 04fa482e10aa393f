"""A fused function on a CPU is the plain function, to the bit, whatever kind of function it is and however it is called; it
is captured once for all numbers of rows. What cannot be fused is in `test_fuse_refusals.py`."""

import copy
import functools
import inspect
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import warpnorm
from cpu.truth import random
from warpnorm import FusionError
from warpnorm.trace import fusion

Function = Callable[..., Any]
factor = 2.0


def swish(x: Tensor, r: Tensor, weight: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Swish, then a norm."""
    h = F.silu(x) * r * scale
    return F.layer_norm(h, h.shape[-1:], weight)


def gathered(*parts: Tensor, **named: Any) -> dict[str, Any]:
    h = parts[0] * named["pair"][0] + named["pair"][1]["x"]
    return {"y": warpnorm.rms_norm(h, (8,)), "rest": [h, parts[0], "a word", None]}


fused_swish, fused_gathered = warpnorm.fuse(swish), warpnorm.fuse(gathered)
fused_inside = warpnorm.fuse(lambda x, r: fused_swish(x * 2, r, scale=3.0) + r)


class Block(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.scale = scale

    def plain(self, x: Tensor, r: Tensor) -> Tensor:
        return self.norm(F.silu(x) * r * self.scale)

    @warpnorm.fuse
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        """Swish, then a norm."""
        return self.norm(F.silu(x) * r * self.scale)


class Child(Block):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return super().forward(x, r) + 1


class Kinds:
    scale = 2.0

    @staticmethod
    @warpnorm.fuse
    def static(x: Tensor, r: Tensor) -> Tensor:
        return swish(x, r)

    @classmethod
    @warpnorm.fuse
    def of_class(cls, x: Tensor, r: Tensor) -> Tensor:
        return swish(x, r, scale=cls.scale)

    @warpnorm.fuse
    def method(self, x: Tensor, r: Tensor) -> Tensor:
        return swish(x, r, scale=self.scale)

    def __call__(self, x: Tensor, r: Tensor) -> Tensor:
        return swish(x, r, scale=self.scale)


@warpnorm.fuse
def decorated(x: Tensor, r: Tensor) -> Tensor:
    return swish(x, r)


def closure(scale: float) -> Function:
    return lambda x, r: swish(x, r, scale=scale)


block, child, on_instance = Block(), Child(), Block()
PARAMETERS = [parameter for module in (block, child, on_instance) for parameter in module.parameters()]
SAME: dict[str, tuple[Function, Function]] = {
    "function": (decorated, swish),
    "lambda": (warpnorm.fuse(closure(3.0)), closure(3.0)),
    "module": (block, block.plain),
    "child_of_module": (child, lambda x, r: child.plain(x, r) + 1),
    "forward_of_instance": (warpnorm.fuse(on_instance.plain), on_instance.plain),
    "static": (Kinds.static, swish),
    "of_class": (Kinds.of_class, Kinds()),
    "method": (Kinds().method, Kinds()),
    "partial": (warpnorm.fuse(functools.partial(swish, scale=2.0)), Kinds()),
    "callable_object": (warpnorm.fuse(Kinds()), Kinds()),
    "fused_twice": (warpnorm.fuse(fused_swish), swish),
    "fused_in_fused": (fused_inside, lambda x, r: swish(x * 2, r, scale=3.0) + r),
    "norm_alone": (lambda x, r: warpnorm.fuse(F.layer_norm)(x, (8,)), lambda x, r: F.layer_norm(x, (8,))),
    "positional": (lambda x, r: fused_swish(x, r, r.view(-1)[:8]), lambda x, r: swish(x, r, r.view(-1)[:8])),
    "keywords": (lambda x, r: fused_swish(r=r, x=x, scale=4), lambda x, r: swish(x, r, scale=4)),
    "containers": (lambda x, r: fused_gathered(x, pair=[r, {"x": x}]), lambda x, r: gathered(x, pair=[r, {"x": x}])),
}


def assert_same(fused: Function, plain: Function, *given: Tensor) -> None:
    """Every result, its dtype, whether it has a gradient, and the gradients: to the bit."""
    found = []
    for function in (plain, fused):
        own = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
        result = function(*own)
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        total = sum((t.double() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in outputs)
        wanted = [t for t in (*own, *PARAMETERS) if t.requires_grad]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        found.append(pytree.tree_map_only(Tensor, lambda t: (t.dtype, t.requires_grad, t.tolist()), (result, grads)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("fused", "plain"), SAME.values(), ids=SAME)
def test_is_the_plain_function(fused: Function, plain: Function) -> None:
    for shape in ((4, 8), (2, 3, 8)):
        assert_same(fused, plain, random(shape), random(shape, seed=1))
    x, r = random((4, 8)), random((4, 8), seed=1)
    with torch.no_grad():
        assert not any(t.requires_grad for t in pytree.tree_leaves(fused(x, r)) if isinstance(t, Tensor))
    with torch.inference_mode():
        assert all(t.is_inference() for t in pytree.tree_leaves(fused(x * 1, r * 1)) if isinstance(t, Tensor))


SHAPES = [
    ((0, 8), (8,)), ((2, 0, 8), (8,)), ((4, 0), (4, 0)), ((1, 8), (1, 8)), ((8,), (8,)), ((4, 8), ()), ((), (4, 8)),
    ((4, 8), (4, 1)), ((2, 3, 8), (2, 1, 8)), ((3, 1, 8), (1, 4, 8)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Without rows, without columns, of one dimension and of none; by column, row and sample."""
    assert_same(fused_swish, swish, random(shapes[0]), random(shapes[1], seed=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    plain = lambda x, r: F.layer_norm(F.silu(x / 2) * 1.5 + r, (8,)) * 2  # noqa: E731
    fused, given = warpnorm.fuse(plain), (random((4, 8)).to(dtype), random((4, 8), seed=1))
    assert_same(fused, plain, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(fused, plain, *given)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(fused, plain, *given)
    finally:
        torch.set_default_dtype(torch.float32)


def test_keeps_what_describes_a_function() -> None:
    assert (fused_swish.__name__, fused_swish.__doc__) == ("swish", "Swish, then a norm.")
    assert (fused_swish.__wrapped__, inspect.signature(fused_swish)) == (swish, inspect.signature(swish))
    assert (Block.forward.__qualname__, block.forward.__doc__) == ("Block.forward", "Swish, then a norm.")
    assert list(inspect.signature(block.forward).parameters) == ["x", "r"], "as of any method"


def test_modules_are_copied_pickled_and_saved() -> None:
    x, r = random((4, 8)), random((4, 8), seed=1)
    original, replaced = Block(), Block()
    original(x, r)
    assert list(original.state_dict()) == ["norm.weight", "norm.bias"]
    replaced.forward = warpnorm.fuse(replaced.plain)
    for module in (original, replaced):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(x, r), module(x, r))
            with torch.no_grad():
                twin.norm.weight.mul_(2)
            assert torch.equal(twin(x, r), twin.plain(x, r)), "the twin reads its own parameters"
            assert torch.equal(module(x, r), module.plain(x, r))


@pytest.mark.parametrize("function", [decorated, Block.forward], ids=["function", "method"])
def test_decorated_functions_are_pickled_by_name(function: Function) -> None:
    assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function


def test_compilers_follow_it() -> None:
    """Of small rows they see the plain function; `test_compile.py` has the others."""
    x, r = random((4, 8)), random((4, 8), seed=1)
    fused = warpnorm.fuse(swish)
    assert torch.equal(torch.compile(fused, backend="eager", fullgraph=True)(x, r), swish(x, r))
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x, r), block.plain(x, r))


def test_transforms_see_the_plain_function(captures: list[Any]) -> None:
    x, r = random((4, 8)), random((4, 8), seed=1)
    fused = warpnorm.fuse(swish)
    found, expected = (torch.func.grad(lambda x, f=f: f(x, r).square().sum())(x) for f in (fused, swish))
    assert torch.equal(found, expected)
    assert torch.equal(torch.func.vmap(fused)(x, r), torch.func.vmap(swish)(x, r))
    assert torch.equal(torch.func.jvp(fused, (x, r), (r, x))[1], torch.func.jvp(swish, (x, r), (r, x))[1])
    assert captures == []


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was captured since."""
    found, original = [], fusion.capture_call

    def capture_call(*args: Any) -> fusion.Captured:
        time.sleep(0.01)  # so that threads meet
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(fusion, "capture_call", capture_call)
    return found


def prologue(function: Function, *given: Any) -> str:
    """The steps of the captured graph."""
    return "".join(line.strip() for line in warpnorm.explain(function, *given).prologue.splitlines()[1:-1])


def test_captured_once_for_all_numbers_of_rows(captures: list[Any]) -> None:
    fused = warpnorm.fuse(swish)
    for rows in (2, 3, 4, 100, 4097):
        fused(random((rows, 8)), random((rows, 8)))
        fused(random((rows, 16))[:, ::2], random((8, rows)).t())
    assert len(captures) == 1
    for first, second in ((2, 3), (3, 2), (7, 7), (2, 100)):
        fused(random((first, second, 8)), random((first, second, 8)))
        fused(random((first, second, 8)).requires_grad_(), random((first, second, 8)))
    assert len(captures) == 2
    assert len(fused._prepared) == 5 + 4


DIFFERENT: dict[str, tuple[Any, ...]] = {
    "dtype": (random((4, 8), torch.bfloat16), random((4, 8))),
    "rank": (random((2, 2, 8)), random((2, 2, 8))),
    "columns": (random((4, 16)), random((4, 16))),
    "a_column": (random((4, 8)), random((8,))),
    "one_a_row": (random((4, 8)), random((4, 1))),
    "a_sample": (random((2, 3, 8)), random((2, 1, 8))),
    "a_scalar": (random((4, 8)), torch.tensor(2.0)),
    "a_number": (random((4, 8)), 2.0),
    "another_number": (random((4, 8)), 3.0),
    "one_row": (random((1, 8)), random((1, 8))),
}


def test_captured_again_for_what_is_another_kernel(captures: list[Any]) -> None:
    fused = warpnorm.fuse(swish)
    x = random((4, 8))
    fused(x, random((4, 8)))
    fused(x, x)
    assert len(captures) == 2, "one tensor twice is one operand"
    for count, (name, given) in enumerate(DIFFERENT.items(), start=3):
        for _ in range(2):
            assert torch.equal(fused(*given), swish(*given)), name
        assert len(captures) == count, name


def test_constants_from_outside(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the function reads when it is called counts, not what it read when it was captured."""
    x = random((4, 8))
    first, second = (warpnorm.fuse(lambda x, k=k: F.layer_norm(x * k, (8,))) for k in (2.0, 3.0))
    closures = [warpnorm.fuse(closure(k)) for k in (2.0, 3.0)]
    assert [prologue(f, x)[-5:] for f in (first, second)] == [" 2.0)", " 3.0)"]
    assert [prologue(f, x, x)[-5:] for f in closures] == [" 2.0)", " 3.0)"]
    on_global = warpnorm.fuse(lambda x: F.layer_norm(x * factor, (8,)))
    owner = Block(scale=5.0)
    assert (prologue(on_global, x)[-5:], prologue(owner.forward, x, x)[-5:]) == (" 2.0)", " 5.0)")
    monkeypatch.setitem(globals(), "factor", 7.0)
    owner.scale = 6.0
    before = len(captures)
    for module in (owner, owner, Block(scale=6.0)):
        assert (prologue(on_global, x)[-5:], prologue(module.forward, x, x)[-5:]) == (" 7.0)", " 6.0)")
        assert len(captures) == before + 2, "a module like it has the same graph"


def test_comparisons_with_the_number_of_rows(captures: list[Any]) -> None:
    fused = warpnorm.fuse(lambda x: F.layer_norm(x * 2 if x.shape[0] > 100 else x + 3, (8,)))
    for rows, count in ((4, 1), (100, 1), (101, 2), (5000, 2), (99, 2), (102, 2)):
        assert ("aten.mul" if rows > 100 else "aten.add") in prologue(fused, random((rows, 8)))
        assert len(captures) == count, rows


BY_ROWS: dict[str, tuple[Function, Callable[[int], float]]] = {
    "divided": (lambda x: x / x.shape[0], lambda rows: rows),
    "root": (lambda x: x * math.sqrt(len(x)), math.sqrt),
    "power": (lambda x: x * x.size(0) ** -0.5, lambda rows: rows**-0.5),
    "elements": (lambda x: x + x.numel(), lambda rows: rows * 8),
    "looked_up": (lambda x: x * {4: 0.1, 5: 0.2, 6: 0.3}[x.shape[0]], lambda rows: (rows - 3) / 10),
}


@pytest.mark.parametrize(("before", "number"), BY_ROWS.values(), ids=BY_ROWS)
def test_numbers_of_rows_in_a_formula(before: Function, number: Callable[[int], float]) -> None:
    fused = warpnorm.fuse(lambda x: F.layer_norm(before(x), (8,)))
    for rows in (4, 5, 6, 4):
        shown = prologue(fused, random((rows, 8)))
        assert float(shown.split()[-1].rstrip(")")) == pytest.approx(number(rows)), shown


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


BESIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "rows": lambda x: x.shape[0],
    "half": lambda x: x.shape[0] / 2,
    "root": lambda x: x.shape[0] ** 0.5,
    "comparison": lambda x: x.shape[0] > 4,
    "text": lambda x: f"{x.shape[0]} rows",
    "shown": lambda x: str(x.shape),
    "dictionary": lambda x: {"rows": x.shape[0], "name": "a name"},
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_results_that_tell_of_sizes(beside: Callable[[torch.Tensor], Any]) -> None:
    """Are those of each call, though it is fused once for many."""
    fused = warpnorm.fuse(lambda x: (F.layer_norm(x, (8,)), beside(x)))
    for rows in (4, 5, 6, 4):
        x = random((rows, 8))
        found = fused(x)[1]
        assert found == beside(x)
        assert type(found) is type(beside(x))


@pytest.mark.parametrize("beside", [Holder, lambda x: lambda: x, lambda x: {x}], ids=["object", "function", "set"])
def test_results_that_may_hold_tensors_are_refused(beside: Callable[[torch.Tensor], Any]) -> None:
    """Those of a capture would come back, which are nobody's."""
    fused = warpnorm.fuse(lambda x: (F.layer_norm(x, (8,)), beside(x)))
    with pytest.raises(FusionError, match=r"which may hold tensors"):
        fused(random((4, 8)))


def test_threads_capture_once(captures: list[Any]) -> None:
    fused = warpnorm.fuse(swish)
    x, r = random((4, 8)), random((4, 8), seed=1)
    barrier = threading.Barrier(8)

    def is_right(thread: int) -> bool:
        rows = 2 + thread % 3
        barrier.wait()
        return torch.equal(fused(x[:rows], r[:rows]), swish(x[:rows], r[:rows]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(8)))
    assert len(captures) == 1


def test_what_has_no_key_is_refused_by_name() -> None:
    settings = type("Settings", (), {})()
    fused = warpnorm.fuse(lambda x: F.layer_norm(x * len(repr(settings)), (8,)))
    line = fused.__wrapped__.__code__.co_firstlineno
    with pytest.raises(FusionError, match=rf"{__file__}:{line}\) cannot be captured: `settings` is of type Settings"):
        fused(random((4, 8)))
    assert (fused._captured, fused._prepared) == ({}, {})


def test_costs_no_time_on_a_cpu() -> None:
    """Within a tenth of eager. Something else may run beside; then the best of several attempts counts."""
    x, r = random((4096, 1024)), random((4096, 1024), seed=1)
    plain = lambda x, r: F.layer_norm(F.silu(x) * r, (1024,))  # noqa: E731
    functions = warpnorm.fuse(plain), plain

    def attempt() -> float:
        times: dict[Function, list[float]] = {function: [] for function in functions}
        for repeat in range(20):
            for function in functions[
                :: 1 if repeat % 2 else -1
            ]:  # neither always has the other's leavings in the cache
                start = time.perf_counter()
                function(x, r)
                times[function].append(time.perf_counter() - start)
        return median(times[functions[0]]) / median(times[plain])

    assert any(attempt() < 1.1 for _ in range(8))


def detached_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.detach()
    for _ in range(60):
        h = h * h
    return F.layer_norm(x, (8,)), h


def doubled_and_viewed(x: Tensor) -> Tensor:
    h = x * 1e-9
    for _ in range(30):
        h = h + h
    return F.layer_norm(h.view(x.shape[0], -1), (8,))


@pytest.mark.parametrize(("function", "shape"), [(detached_powers, (4, 8)), (doubled_and_viewed, (4, 2, 4))])
def test_a_value_that_is_read_twice_is_looked_at_once(function: Function, shape: tuple[int, ...]) -> None:
    """Else the capture of a chain takes twice as long with every link: for ever, here."""
    x = random(shape, requires_grad=True)
    found, wanted = (pytree.tree_leaves(f(x)) for f in (warpnorm.fuse(function), function))
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
