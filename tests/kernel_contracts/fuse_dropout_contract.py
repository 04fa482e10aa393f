"""Contract: dropout in a fused function. The mask is drawn inside the kernel from PyTorch's generator, the same again in
backward and in double backward, and nothing of it is kept."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import warpnorm
from kernel_contracts.fuse_contract import COLS, LONG, drawn, layer, rms
from kernel_contracts.fuse_operators_contract import check_fused
from warpnorm import pipeline
from warpnorm.fuse import NOTHING, arrange, draw
from warpnorm.plan.plan import LONG_ROW, ROW, Plan

SIGMAS = 5


@warpnorm.fuse
def dropped(x: torch.Tensor, r: torch.Tensor, p: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    h = F.dropout(x, p)
    return layer(h * torch.sigmoid(r) + r), h


def seeded(function: Callable[..., Any], seed: int = 7) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(seed)
        return function(*args, **kwargs)

    return call


def pair(device: str, shape: tuple[int, ...] = (6, COLS), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [drawn(shape, seed, dtype, device).requires_grad_() for seed in (1, 2)]


R_SHAPES = {"full": (4, 3, COLS), "column": (COLS,), "sample": (4, 1, COLS), "position": (3, COLS), "row": (4, 3, 1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", R_SHAPES)
def test_dropout_backward_draws_the_mask_of_forward(spread: str, dtype: torch.dtype, device: str) -> None:
    """Also where backward walks the rows in another order, to sum by groups."""
    x = drawn((4, 3, COLS), 1, dtype, device).requires_grad_()
    r = drawn(R_SHAPES[spread], 2, dtype, device).requires_grad_()
    y, h = dropped(x, r)
    mask = h != 0
    assert 0 < mask.sum() < mask.numel()
    torch.testing.assert_close(h[mask], x[mask] / 0.7)
    of_x, _ = torch.autograd.grad(y, (x, r), drawn(y.shape, 3, dtype, device))
    assert (of_x != 0).equal(mask)


@pytest.mark.parametrize(
    ("cols", "dtype"), [(COLS, torch.float32), (LONG, torch.float32), (COLS, torch.float64)], ids=str
)
def test_dropout_is_as_accurate_as_a_mask_at_hand(cols: int, dtype: torch.dtype, device: str) -> None:
    shape = (3, cols)
    mask = seeded(dropped)(*pair(device, shape))[1].detach() != 0

    def plain(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x * mask / 0.7
        return layer(h * torch.sigmoid(r) + r), h

    check_fused(seeded(dropped), plain, lambda seed: [drawn(shape, seed + k, dtype, device) for k in (0, 50)])


def test_dropout_after_the_norm(device: str) -> None:
    fused = warpnorm.fuse(lambda x, r: F.dropout(rms(x) * r, 0.6))
    x, r = pair(device)
    y = fused(x, r)
    mask = y != 0
    torch.testing.assert_close(y[mask], (rms(x) * r)[mask] / 0.4)
    assert (torch.autograd.grad(y.sum(), r)[0] != 0).equal(mask)


def test_dropout_repeats_with_a_seed_and_differs_without(device: str) -> None:
    x, r = pair(device, (32, 64))
    torch.manual_seed(5)
    first, second = dropped(x, r)[1], dropped(x, r)[1]
    torch.manual_seed(5)
    assert dropped(x, r)[1].equal(first)
    assert dropped(x, r)[1].equal(second)
    assert not seeded(dropped, 6)(x, r)[1].equal(first)
    assert independent(first != 0, second != 0, 0.3)


def test_dropouts_in_one_function_differ(device: str) -> None:
    @warpnorm.fuse
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = F.dropout(x, 0.3), F.dropout(x, 0.3)
        y = rms(a + b + x)
        return a, b, F.dropout(y, 0.3)

    masks = [t != 0 for t in twice(drawn((32, 64), 0, torch.float32, device))]
    for k in range(3):
        assert independent(masks[k], masks[(k + 1) % 3], 0.3)


def independent(a: torch.Tensor, b: torch.Tensor, p: float) -> bool:
    """Whether two masks agree as often as independent ones."""
    return is_binomial(int((a == b).sum()), a.numel(), p * p + (1 - p) * (1 - p))


def is_binomial(count: int, trials: int, probability: float, sigmas: float = SIGMAS) -> bool:
    return abs(count - trials * probability) <= sigmas * math.sqrt(trials * probability * (1 - probability))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_keep_rate(p: float, device: str) -> None:
    """Of all elements, of every row, of every column, and of neighbours; kept ones make up for dropped ones."""
    rows, cols = 128, 512
    x = torch.ones(rows, cols, device=device)
    h = warpnorm.fuse(lambda x: (lambda h: (rms(h + x), h))(F.dropout(x, p)))(x)[1].double()
    mask = h != 0
    assert is_binomial(int(mask.sum()), rows * cols, 1 - p)
    assert abs(h.mean() - 1) <= SIGMAS * math.sqrt(p / (1 - p) / (rows * cols)) + 1e-6
    if p >= 0.1:
        assert all(is_binomial(count, cols, 1 - p, 6) for count in mask.sum(1).tolist())
        assert all(is_binomial(count, rows, 1 - p, 6) for count in mask.sum(0).tolist())
        assert independent(mask[:, 1:], mask[:, :-1], p)
        assert independent(mask[1:], mask[:-1], p)


def test_dropout_of_nothing(device: str) -> None:
    x, r = pair(device)
    kept = warpnorm.fuse(lambda x, r: (layer(x * torch.sigmoid(r) + r), x * 1.0))
    evaluated = warpnorm.fuse(lambda x, r: (layer(F.dropout(x, 0.5, training=False) * torch.sigmoid(r) + r), x * 1.0))
    state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = state()
    for found in (dropped(x, r, p=0.0), evaluated(x, r)):
        assert all(a.equal(b) for a, b in zip(found, kept(x, r), strict=True))
    assert state().equal(before), "nothing is drawn"


def test_dropout_of_everything(device: str) -> None:
    x, r = pair(device)
    y, h = dropped(x, r, p=1.0)
    assert (h == 0).all()
    torch.testing.assert_close(y, layer(r))
    assert (torch.autograd.grad(y.sum(), x)[0] == 0).all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(COLS)

    @warpnorm.fuse
    def forward(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = r + self.dropout(x)
        return self.norm(h), h


def test_dropout_module_in_training_and_in_evaluation(device: str) -> None:
    block = Block().to(device)
    x, r = pair(device)
    trained = seeded(block)(x, r)
    block.eval()
    torch.testing.assert_close(block(x, r)[1], x + r)
    block.train()
    again = seeded(block)(x, r)
    assert all(a.equal(b) for a, b in zip(trained, again, strict=True))
    assert not again[1].equal((x + r).detach())
    block.dropout.p = 0.0
    torch.testing.assert_close(block(x, r)[1], x + r)


def test_dropout_in_place(device: str) -> None:
    def written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x * 2.0
        F.dropout(h, 0.3, inplace=True)
        return rms(h + x), h

    def new(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(x * 2.0, 0.3)
        return rms(h + x), h

    x, _ = pair(device)
    found, wanted = seeded(warpnorm.fuse(written))(x), seeded(warpnorm.fuse(new))(x)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "plan", [Plan(ROW, 4, 32, 1), Plan(ROW, 1, 32, 1, programs=2), Plan(LONG_ROW, 1, 16, 1)], ids=str
)
def test_dropout_mask_knows_neither_plan_nor_layout_nor_other_rows(plan: Plan, device: str) -> None:
    x, r = (t.detach() for t in pair(device))
    expected = seeded(dropped)(x, r)[1]
    request = dropped.request(NOTHING, (x, r), {})
    call, operands = arrange(dropped.prepare(request), request.tensors)
    torch.manual_seed(7)
    outputs, _ = pipeline.forward(call, (*operands, *draw(x.device)), plan=plan)
    assert outputs[1].equal(expected)
    assert seeded(dropped)(x.t().contiguous().t(), r)[1].equal(expected)
    assert seeded(dropped)(x[:2], r[:2])[1].equal(expected[:2])


def test_dropout_keeps_nothing_of_the_mask(device: str) -> None:
    x, r = pair(device)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dropped(x, r)
    extra = [t for t in kept if t.data_ptr() not in (x.data_ptr(), r.data_ptr())]
    assert sum(t.numel() for t in extra) == 2 * x.shape[0]
    assert all(t.dtype == torch.float32 for t in extra)


def test_dropout_gradcheck_and_gradgradcheck(device: str) -> None:
    leaves = pair(device, (2, 4), torch.float64)
    assert torch.autograd.gradcheck(seeded(dropped), leaves)
    assert torch.autograd.gradgradcheck(seeded(dropped), leaves, fast_mode=True)
