"""Sizes that only fit on a GPU: every width that a plan is chosen for, and more than 2^31 and 2^32 elements, where offsets
past 32 bits would show. The largest are checked on samples of rows, in float64."""

import pytest
import torch

import warpnorm
from kernel_contracts.limits import BATCHES, Batch, check_batch, check_one_column
from kernel_contracts.running import NORMS, check_accuracy, operands_for, ours, run
from warpnorm.norms import LAYER_NORM, Norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize(
    "cols",
    [
        64,
        96,
        128,
        256,
        512,
        760,
        1024,
        2048,
        3072,
        4096,
        5120,
        8191,
        8192,
        12288,
        16383,
        16384,
        32768,
        65536,
        100_003,
        262_144,
    ],
)
def test_widths(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    rows = max(3, min(700, 2_000_000 // cols))

    def make(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, cols, generator=generator).to(device, dtype)

    check_accuracy(norm, 1, make)


def test_past_a_million_columns(device: str) -> None:
    for cols in (1 << 20, (1 << 20) + 8, 1_500_007):
        for norm in NORMS:
            check_accuracy(norm, 1, lambda seed, cols=cols: torch.randn(2, cols, device=device))


def sample_check(norm: Norm, input: torch.Tensor, output: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> None:
    """Rows at both ends and around every multiple of 2^31 elements."""
    rows, cols = input.shape
    around = [(k << 31) // cols + d for k in range(1, input.numel() // (1 << 31) + 1) for d in (-1, 0, 1)]
    picked = sorted({0, 1, rows - 2, rows - 1, *(r for r in around if 0 <= r < rows)} & set(range(rows)))
    truth = torch.nn.functional.layer_norm if norm is LAYER_NORM else torch.nn.functional.rms_norm
    wide = [operand.double() for operand in operands[1:]]
    expected = truth(input[picked].double(), (cols,), *wide, eps=1e-5)
    torch.testing.assert_close(output[picked].double(), expected, atol=0.02, rtol=0.01)
    assert not output.view(-1)[::65_537].isnan().any()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [((1 << 20) + 1, 2048), ((1 << 25) + 3, 128), (300_007, 16_384), (70_001, 65_536)],  # 2^31, 2^32, 2^32, 2^32
)
def test_more_than_two_to_the_31_elements(rows: int, cols: int, norm: Norm, device: str) -> None:
    input = torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_()
    operands = operands_for(norm, input, 1)
    leaves = [operand.detach().requires_grad_() for operand in operands]
    output = ours(norm, 1, *leaves)
    sample_check(norm, input, output.detach(), operands)
    grad = torch.ones((), dtype=torch.bfloat16, device=device).expand_as(output)  # no memory of its own
    gradients = torch.autograd.grad(output, leaves, grad)
    del output
    picked = [0, rows // 2, rows - 1]
    few = [input[picked].double().requires_grad_(), *(operand.double() for operand in operands[1:])]
    truth = torch.nn.functional.layer_norm if norm is LAYER_NORM else torch.nn.functional.rms_norm
    (expected,) = torch.autograd.grad(truth(few[0], (cols,), *few[1:], eps=1e-5).sum(), few[0])
    torch.testing.assert_close(gradients[0][picked].double(), expected, atol=0.02, rtol=0.01)
    if norm is LAYER_NORM:  # every gradient of the output is one, so the bias collects the number of rows
        assert gradients[2].double().sub(rows).abs().max() <= rows * 2**-8


@pytest.mark.unpoisoned
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_two_to_the_31_rows_of_one_column(norm: Norm, device: str) -> None:
    """Every row, both ways, with an eps by which a lone column has a gradient."""
    check_one_column(norm, (1 << 31) + 5, device)


@pytest.mark.unpoisoned
def test_one_row_past_two_to_the_31_columns(device: str) -> None:
    cols = (1 << 31) + 64
    input = torch.empty(1, cols, dtype=torch.bfloat16, device=device).normal_()
    output, rstd = warpnorm.rms_norm(input, (cols,), return_stats=True)
    blocks = [block.double().square().sum() for block in input.view(-1).split(1 << 26)]
    exact = (torch.stack(blocks).sum() / cols).rsqrt()
    torch.testing.assert_close(rstd.double().view(()), exact, rtol=2e-4, atol=0)  # 2^18 float32 additions a lane
    for start in (0, (1 << 31) - 4, cols - 8):
        expected = input[0, start : start + 8].double() * exact
        torch.testing.assert_close(output[0, start : start + 8].double(), expected, rtol=0.01, atol=1e-3)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_more_than_two_to_the_31_elements_by_channel(batch: Batch, device: str) -> None:
    check_batch(batch, device)


def test_other_streams_and_current_device(device: str) -> None:
    input = torch.randn(512, 1024, device=device)
    expected = torch.nn.functional.layer_norm(input, (1024,))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = warpnorm.layer_norm(input, (1024,))
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(output, expected)


def test_graph_capture(device: str) -> None:
    input = torch.randn(256, 512, device=device, requires_grad=True)
    weight = torch.randn(512, device=device, requires_grad=True)
    grad = torch.randn(256, 512, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        output = warpnorm.rms_norm(input, (512,), weight)
        return output, *torch.autograd.grad(output, (input, weight), grad)

    stream = torch.cuda.Stream()  # autograd of a leaf first used elsewhere would reach out of the capture
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [result.clone() for result in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for result in results:
        result.detach().fill_(float("nan"))
    graph.replay()
    assert all(result.equal(wanted) for result, wanted in zip(results, expected, strict=True))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [4096, 16_384])
def test_thousands_of_rows_are_repeatable_and_batch_invariant(cols: int, norm: Norm, device: str) -> None:
    """Every persistent program walks many rows here, with loads of the next ones in flight."""
    operands = operands_for(norm, torch.randn(4099, cols, device=device).bfloat16(), 1)
    grad = torch.randn(4099, cols, device=device).bfloat16()
    first = run(ours, norm, 1, operands, grad)
    for _ in range(3):
        again = run(ours, norm, 1, operands, grad)
        assert again.output.equal(first.output)
        assert all(a.equal(b) for a, b in zip(again.gradients, first.gradients, strict=True))
    for rows in (1, 100, 2000):
        assert ours(norm, 1, operands[0][:rows], *operands[1:]).equal(first.output[:rows])
