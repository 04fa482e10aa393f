"""Contract: PyTorch's own samples of these operators, forward and gradient, run by the kernels."""

import pytest
import torch

from cpu.opinfo_checks import KINDS, check_errors, check_samples, supported_dtypes
from cpu.truth import FUNCTIONS

EACH = [(norm, dtype) for norm in FUNCTIONS for dtype in supported_dtypes(norm, "cpu")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("norm", "dtype"), EACH, ids=str)
def test_opinfo_samples(norm: str, dtype: torch.dtype, kind: str, device: str) -> None:
    assert check_samples(norm, kind, device, dtype) > 0


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_opinfo_errors(norm: str, device: str) -> None:
    check_errors(norm, device)
