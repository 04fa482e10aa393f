"""The two kinds of tensors that a function is recorded on: stand-ins tell the same as symbols, and never a size that the
record is not for."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.fuse_operators_contract import DROPOUT, TABLE, Row
from warpnorm import routing, settings
from warpnorm.fuse import HANDLERS, NORMS
from warpnorm.trace import fusion

Function = Callable[..., Any]
Shapes = Sequence[tuple[int, ...]]


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def request(function: Function, *given: torch.Tensor) -> fusion.Request:
    names = [f"x{i}" for i in range(len(given))]
    return fusion.Request(function, (given, {}), given, names, HANDLERS, NORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row", [*TABLE, DROPOUT], ids=lambda row: row.name)
def test_both_tell_the_same_of_every_operator(row: Row, dtype: torch.dtype) -> None:
    def function(*given: torch.Tensor) -> torch.Tensor:
        return row.function(norm(row.function(*given)), *given[1:])

    asked = request(function, *row.operands(0, dtype, "cpu"))
    by_stand_ins, by_symbols = fusion.by_stand_ins(asked), fusion.by_symbols(asked)
    assert by_stand_ins is not None
    for what in ("call", "inputs", "draws", "leaves", "tree", "names", "effects"):
        assert getattr(by_stand_ins, what) == getattr(by_symbols, what), what


ASKING: dict[str, Function] = {
    "shape": lambda x: norm(x * x.shape[0]),
    "shape_from_behind": lambda x: norm(x * x.shape[-2]),
    "shape_compared": lambda x: norm(x) if x.shape == (4, 8) else norm(-x),
    "shape_unpacked": lambda x: norm(x * (lambda rows, cols: rows / cols)(*x.shape)),
    "shape_as_a_key": lambda x: norm(x * {(4, 8): 2.0}.get(x.shape, 3.0)),
    "shape_as_text": lambda x: norm(x * len(f"{x.shape}")),
    "shape_multiplied": lambda x: norm(x * math.prod(x.shape)),
    "size": lambda x: norm(x * x.size(0)),
    "size_by_name": lambda x: norm(x * x.size(dim=-2)),
    "whole_size": lambda x: norm(x * x.size()[0]),
    "length": lambda x: norm(x * len(x)),
    "elements": lambda x: norm(x * x.numel()),
    "elements_by_torch": lambda x: norm(x * torch.numel(x)),
    "transposed": lambda x: norm(x * x.t().shape[-1]),
    "transposed_by_name": lambda x: norm(x * x.transpose(0, 1).size(-1)),
    "permuted": lambda x: norm(x * x.permute(1, 0).shape[1]),
    "reshaped": lambda x: norm(x.view(2, -1, 8)[0] * 2),
    "rows": lambda x: norm(sum(row for row in x)),  # type: ignore[arg-type,misc]
    "first_row": lambda x: norm(x[0] + 1),
    "made": lambda x: norm(x + torch.ones(x.shape)),
    "caught": lambda x: norm(x * _size_or(x, 5)),
}


def _size_or(x: torch.Tensor, usual: int) -> int:
    try:
        return x.shape[0]
    except Exception:
        return usual


@pytest.mark.parametrize("function", ASKING.values(), ids=ASKING)
def test_asking_for_rows_takes_symbols(function: Function) -> None:
    assert fusion.by_stand_ins(request(function, torch.randn(4, 8))) is None
    fused = warpnorm.fuse(function)
    for rows in (4, 6, 2, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fused(x), function(x))


SILENT: dict[str, Function] = {
    "last": lambda x, w: F.layer_norm(x * w, (x.shape[-1],)) * x.size(-1) ** -0.5,
    "last_by_number": lambda x, w: norm(x + w) * x.shape[x.ndim - 1] + x.size(dim=x.dim() - 1),
    "number_of_sizes": lambda x, w: norm(x * len(x.shape) + w),
    "like": lambda x, w: norm(torch.where(x > 0, torch.zeros_like(x), torch.full_like(x, 2.0)) + w),
    "unsqueezed": lambda x, w: norm(x + w.unsqueeze(0)),
    "scalar": lambda x, w: norm(x + torch.tensor(2.0) * w),
    "in_place": lambda x, w: norm((x * w).add_(w).mul_(2)),
    "autocast": lambda x, w: _under_autocast(x, w),
}


def _under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return norm(x * w)


@pytest.mark.parametrize("function", SILENT.values(), ids=SILENT)
def test_silent_functions_need_no_symbols(function: Function) -> None:
    asked = request(function, torch.randn(4, 8), torch.randn(8))
    assert fusion.by_stand_ins(asked) is not None
    fused = warpnorm.fuse(function)
    for rows in (4, 8, 6, 2):
        x, w = torch.randn(rows, 8), torch.randn(8)
        torch.testing.assert_close(fused(x, w), function(x, w))


@pytest.mark.parametrize(
    ("served", "wrong"),
    [
        ([((4, 8), (4, 8)), ((5, 8), (5, 8)), ((8, 8), (8, 8))], [((5, 8), (7, 8)), ((8, 8), (4, 8))]),
        ([((8, 8), (8, 8)), ((5, 8), (5, 8))], [((5, 8), (8, 8))]),
        ([((7, 7, 8), (7, 8)), ((2, 3, 8), (3, 8)), ((3, 2, 8), (2, 8))], [((2, 3, 8), (2, 8))]),
        ([((4, 8), (8,)), ((5, 8), (8,))], [((4, 8), (4,))]),
    ],
)
def test_sizes_that_meet_have_to_be_alike(served: Sequence[Shapes], wrong: Sequence[Shapes]) -> None:
    function = lambda x, y: norm(x * y)  # noqa: E731
    fused = warpnorm.fuse(function)
    for shapes in served:
        given = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(fused(*given), function(*given))
    for shapes in wrong:
        with pytest.raises(RuntimeError, match=r"size|broadcast"):
            fused(*[torch.randn(shape) for shape in shapes])
    for shapes in served:
        given = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(fused(*given), function(*given))


HELD: dict[str, tuple[Function, Shapes, Shapes]] = {  # what is served, and what PyTorch refuses
    "instance_norm": (lambda x: F.instance_norm(x), [(2, 16, 8, 8), (3, 12, 8, 8), (2, 8, 8, 8), (8, 8, 8, 8)], []),
    "instance_norm_1d": (lambda x: F.instance_norm(x * 2), [(2, 4, 8), (2, 6, 8), (4, 4, 8), (3, 3, 8)], []),
    "group_norm": (lambda x: F.group_norm(x, 4), [(2, 8, 5), (3, 8, 5), (2, 16, 5), (2, 4, 5)], [(2, 10, 5)]),
    "layer_norm": (lambda x: F.layer_norm(x, (3, 8)), [(4, 3, 8), (2, 3, 8), (3, 3, 8)], [(4, 5, 8), (4, 2, 8)]),
    "normalized_dim": (
        lambda x: warpnorm.layer_norm(x, normalized_dim=1),
        [(4, 3, 8), (4, 5, 8), (5, 5, 8), (2, 3, 8)],
        [],
    ),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(4, 3, 8), (4, 5, 8), (3, 3, 8)], []),
    "no_samples": (lambda x: F.group_norm(x, 4), [(0, 8, 5), (2, 8, 5), (0, 4, 5)], []),
}


@pytest.mark.parametrize("route", ["auto", "native"])
@pytest.mark.parametrize("name", HELD)
def test_sizes_that_a_norm_looks_at_are_held(name: str, route: str) -> None:
    """The channels of an image are rows to the recorder, and a number to the norm."""
    function, served, refused = HELD[name]
    if route == "native" and not routing.has_compiler():
        pytest.skip("no compiler")
    fused = warpnorm.fuse(function)
    with settings.override(route=route):
        for shape in (*served, *reversed(served)):
            x = torch.randn(shape, requires_grad=True)
            output = fused(x)
            torch.testing.assert_close(output, function(x), rtol=1e-4, atol=1e-5)
            grad = torch.randn_like(output)
            found, expected = (torch.autograd.grad(y, x, grad)[0] for y in (output, function(x)))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        for shape in refused:
            with pytest.raises((RuntimeError, ValueError)):
                fused(torch.randn(shape))


def test_nothing_is_logged_where_sizes_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match=r"size|broadcast"):
        warpnorm.fuse(lambda x, r: norm(x + r))(torch.randn(3, 64), torch.randn(4, 64))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "function",
    [lambda x, m: norm(x) + (m + m), lambda x, m: norm(x) * (m + True), lambda x, m: norm(x + torch.add(m, m)) + m * m],
)
def test_a_sum_of_truths_is_an_or(function: Function) -> None:
    x, m = torch.randn(4, 2048), torch.randn(4, 2048) > 0
    torch.testing.assert_close(warpnorm.fuse(function)(x, m), function(x, m), rtol=1e-4, atol=1e-5)


def _without_grad(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = q * 2
    return norm(x) * scale


@pytest.mark.parametrize(
    ("function", "has_gradient"),
    [
        (lambda x, q: norm(x + q.detach()), False),
        (_without_grad, False),
        (lambda x, q: norm(x * q.detach()) + q, True),
        (lambda x, q: norm(x) * (q > 0), False),
    ],
    ids=["detached", "no_grad", "both", "compared"],
)
def test_what_no_gradient_reaches_gets_none(function: Function, has_gradient: bool) -> None:
    """An optimizer takes zeros for a gradient, and moves what decays."""
    for rows in (3, 5):
        x, q = torch.randn(rows, 2048, requires_grad=True), torch.randn(2048, requires_grad=True)
        warpnorm.fuse(function)(x, q).sum().backward()
        assert (q.grad is not None) == has_gradient
        assert x.grad is not None
        expected = torch.autograd.grad(function(x, q).sum(), (x, q), allow_unused=True)
        torch.testing.assert_close(x.grad, expected[0], rtol=1e-3, atol=1e-3)
        if has_gradient:
            torch.testing.assert_close(q.grad, expected[1], rtol=1e-3, atol=1e-3)
