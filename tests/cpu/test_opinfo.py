"""PyTorch's own samples of the two norms on the CPU."""

import pytest
import torch

from cpu.opinfo_checks import KINDS, check_errors, check_samples, samples, supported_dtypes
from cpu.truth import DTYPES, FUNCTIONS, name_of, ours, pytorch, run, run_pytorch

EACH = [(norm, dtype) for norm in FUNCTIONS for dtype in supported_dtypes(norm, "cpu")]


def test_every_dtype_is_tried() -> None:
    assert {(norm, dtype) for norm in FUNCTIONS for dtype in DTYPES} == set(EACH)


@pytest.mark.parametrize(("norm", "dtype"), EACH, ids=lambda p: p if isinstance(p, str) else name_of(p))
@pytest.mark.parametrize("kind", KINDS)
def test_samples(norm: str, dtype: torch.dtype, kind: str) -> None:
    assert check_samples(norm, kind, "cpu", dtype) >= 12


@pytest.mark.parametrize(("norm", "dtype"), EACH, ids=lambda p: p if isinstance(p, str) else name_of(p))
def test_samples_have_the_bits_of_the_operator(norm: str, dtype: torch.dtype) -> None:
    for a in samples(norm, "reference_inputs", "cpu", dtype):
        grad_output = torch.ones(a.input.shape, dtype=dtype)
        found, expected = run(a, ours(a), grad_output), run_pytorch(a, pytorch, grad_output)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_error_inputs(norm: str) -> None:
    assert check_errors(norm, "cpu") >= 3
