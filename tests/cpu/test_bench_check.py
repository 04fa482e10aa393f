"""What is measured is checked first, also where something is dropped out; and what is ready-made is measured."""

import pytest
import torch
import torch.nn.functional as F

from warpnorm.bench.cases import BACKWARD, DROPOUT, DROPOUT_ADD_RMS, FORWARD, BenchCase, add_rms_norm, all_cases
from warpnorm.bench.check import Forward, Subject, is_right
from warpnorm.fuse import fuse

MODULES = {
    "add_rms_norm", "add_layer_norm", "dropout_add_rms_norm", "gated_rms_norm", "ada_layer_norm", "add_batch_norm_relu",
    "group_norm_silu", "qk_norm", "rms_norm_float8",
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_ready_made_module_has_a_row(device: str) -> None:
    assert {case.workload.name for case in all_cases(device, is_quick=False)} >= MODULES


def another_rate(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(F.dropout(x, 2 * DROPOUT), residual, weight)


def not_scaled(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(F.dropout(x, DROPOUT) * (1 - DROPOUT), residual, weight)


def another_mask(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = F.dropout(x, DROPOUT) + residual
    return add_rms_norm(F.dropout(x, DROPOUT), residual, weight)[0], h


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("wrong", [another_rate, not_scaled, another_mask], ids=lambda f: f.__name__)
def test_what_is_dropped_out_is_checked(wrong: Forward, direction: str) -> None:
    torch.manual_seed(0)
    case = BenchCase(DROPOUT_ADD_RMS, direction, (64, 1024), torch.float32, "small")
    subject, dtype = Subject(case, "cpu"), torch.float32
    eager = subject.error(DROPOUT_ADD_RMS.function)
    assert eager < 1e-6
    assert is_right(subject.error(fuse(DROPOUT_ADD_RMS.function)), eager, dtype)
    assert not is_right(subject.error(wrong), eager, dtype)
