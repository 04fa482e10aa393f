"""Contract: as accurate as PyTorch in the same dtype, whatever the layout, the dtype and the values."""

import pytest
import torch

import warpnorm
from cases import CASES, DTYPES, Case
from kernel_contracts.running import NORMS, check_accuracy, gradient_for, operands_for, ours, run
from warpnorm.norms import LAYER_NORM, Norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts(case: Case, norm: Norm, dtype: torch.dtype, device: str) -> None:
    check_accuracy(norm, case.col_dims, lambda seed: case.make(dtype, device, seed))


VALUES = {
    "far_from_zero": lambda x: x * 0.1 + 1e4,  # 1e4 + small noise: E[x^2] - E[x]^2 would be noise alone
    "constant_rows": lambda x: x[:, :1].expand_as(x).contiguous(),  # the variance is zero
    "huge": lambda x: x * 3e16,  # the sum of squares near the end of float32; past it PyTorch overflows too
    "tiny": lambda x: x * 1e-18,  # squares below the smallest float32
    "first_columns_apart": lambda x: torch.cat(
        (x[:, :16] + 100, x[:, 16:]), 1
    ),  # a pivot among them is far from the mean
    "mixed_scales": lambda x: x * torch.logspace(-6, 6, x.shape[0], dtype=x.dtype, device=x.device)[:, None],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [200, 2_048, 8_201])  # one tile, a wide one, and a team or a walk
@pytest.mark.parametrize("values", VALUES)
def test_values(values: str, cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    def make(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return VALUES[values](torch.randn(7, cols, generator=generator, dtype=torch.float64)).to(device, dtype)

    check_accuracy(norm, 1, make)


@pytest.mark.parametrize("cols", [200, 8_201])
def test_float16_sums_do_not_overflow(cols: int, device: str) -> None:
    for norm in NORMS:  # every square is past the end of float16
        check_accuracy(norm, 1, lambda _: (torch.randn(3, cols) * 6e3).to(device, torch.float16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [24, 8_201])
def test_nan_and_inf_stay_in_their_row(cols: int, norm: Norm, bad: float, device: str) -> None:
    clean = torch.randn(6, cols, device=device)
    dirty = clean.clone()
    dirty[2, cols // 2] = bad
    grad = gradient_for(clean)
    results = [run(ours, norm, 1, operands_for(norm, input, 1), grad) for input in (clean, dirty)]
    others = [0, 1, 3, 4, 5]
    assert results[1].output[others].equal(results[0].output[others])
    assert results[1].gradients[0][others].equal(results[0].gradients[0][others])
    if norm is LAYER_NORM or bad != bad:  # x / rms of an Inf is 0 elsewhere in the row, as in PyTorch
        assert results[1].output[2].isnan().all()
    else:
        assert results[1].output[2].isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [24, 8_201])
def test_statistics_of_a_row_with_nan_are_nan(cols: int, dtype: torch.dtype, device: str) -> None:
    input = torch.randn(3, cols).to(device, dtype)
    input[1, 5] = float("nan")
    _, mean, rstd = warpnorm.layer_norm(input, (cols,), return_stats=True)
    for statistic in (mean, rstd, warpnorm.rms_norm(input, (cols,), return_stats=True)[1]):
        assert statistic.view(-1).isnan().tolist() == [False, True, False]
