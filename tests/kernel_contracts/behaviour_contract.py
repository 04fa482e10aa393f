"""Contracts on how the kernels behave: repeatable, batch-invariant, compiled once, differentiable twice, computing only
the gradients that are needed, writing only where they should, and taking every keyword of the functions."""

import threading

import pytest
import torch

import warpnorm
from kernel_contracts.running import NORMS, call_for, operands_for, ours, run
from warpnorm import pipeline
from warpnorm.errors import InputError
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.plan.plan import LONG_ROW, ROW, Plan
from warpnorm.problem import FULL, NUMBER, Call, View
from warpnorm.reference import Affine, Itself

WIDTHS = (37, 256, 8_201)  # unaligned, aligned, walked


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", WIDTHS)
def test_same_inputs_same_bits(cols: int, norm: Norm, device: str) -> None:
    operands = operands_for(norm, torch.randn(5, cols, device=device), 1)
    grad = torch.randn(5, cols, device=device)
    first = run(ours, norm, 1, operands, grad)
    for _ in range(2):
        again = run(ours, norm, 1, operands, grad)
        assert again.output.equal(first.output)
        assert all(a.equal(b) for a, b in zip(again.gradients, first.gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", WIDTHS)
def test_a_row_does_not_know_its_neighbours(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    operands = operands_for(norm, torch.randn(9, cols, device=device).to(dtype), 1)
    whole = ours(norm, 1, *operands)
    for rows in (1, 2, 3, 8):
        assert ours(norm, 1, operands[0][:rows], *operands[1:]).equal(whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [33, 34, 100, 127, 300, 1_002, 1_004])
def test_a_row_does_not_know_where_it_begins(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    """At a multiple of 2, 4, 8 or 16 bytes; and its gradient does not either."""
    operands = operands_for(norm, torch.randn(5, cols, device=device).to(dtype), 1)
    grad = torch.randn(5, cols, device=device).to(dtype)
    whole = run(ours, norm, 1, operands, grad)
    for row in range(5):
        alone = run(ours, norm, 1, [operands[0][row : row + 1], *operands[1:]], grad[row : row + 1])
        assert alone.output.equal(whole.output[row : row + 1])
        assert alone.gradients[0].equal(whole.gradients[0][row : row + 1])


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_no_recompile_when_only_the_row_count_changes(norm: Norm, device: str) -> None:
    from warpnorm.codegen import bind

    def kernels() -> int:
        return sum(len(step.built) for step in (bind.forward, bind.backward, bind.backward_sums, bind._column_sum))

    def call(*shape: int) -> None:
        operands = operands_for(norm, torch.randn(*shape, device=device), 1)
        run(ours, norm, 1, operands, torch.ones(shape, device=device))

    call(3, 72)
    before = kernels()
    for shape in ((1, 72), (2, 72), (16, 72), (1000, 72), (72,), (2, 3, 72), (1, 1, 72)):
        call(*shape)
    assert kernels() == before
    call(3, 73)
    assert kernels() > before, "the count must see a compile where there is one"


def test_several_threads_trace_and_compile_once(device: str) -> None:
    from warpnorm.codegen import bind

    input = torch.randn(4, 88, device=device)
    before = len(bind.forward.built)
    barrier = threading.Barrier(4)
    found = []
    epilogue = Affine(True, False, weight_offset=0.123)  # traced by nobody yet
    call = Call(RMS_NORM, 1, 1e-5, Itself(), epilogue, (FULL, NUMBER), (input.dtype,))

    def first_call() -> None:
        barrier.wait()
        found.append(pipeline.forward(call, (input, 2.0)))

    threads = [threading.Thread(target=first_call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.nn.functional.rms_norm(input, (88,), eps=1e-5) * 2.123
    assert len(found) == 4
    for (output,), _ in found:
        torch.testing.assert_close(output, expected)
    assert len(bind.forward.built) == before + 1


def test_checkpointing_and_hooks(device: str) -> None:
    """Saved tensors are unpacked once, and the first trace of a formula does not meet the caller's hooks."""
    from torch.utils.checkpoint import checkpoint

    input = torch.randn(4, 48, device=device, requires_grad=True)
    weight = torch.randn(48, device=device, requires_grad=True)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return warpnorm.rms_norm(x, (48,), weight, weight_offset=0.321)

    with torch.autograd.graph.save_on_cpu():
        hooked = torch.autograd.grad(norm(input).pow(2).sum(), (input, weight))
    plain = torch.autograd.grad(norm(input).pow(2).sum(), (input, weight))
    again = torch.autograd.grad(checkpoint(norm, input, use_reentrant=False).pow(2).sum(), (input, weight))
    for results in (hooked, again):
        assert all(a.equal(b) for a, b in zip(results, plain, strict=True))


def test_writing_into_out_is_known_to_autograd(device: str) -> None:
    factor = torch.randn(4, 8, device=device, requires_grad=True)
    out = torch.randn(4, 8, device=device)
    product = (factor * out).sum()
    warpnorm.layer_norm(torch.randn(4, 8, device=device), (8,), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_negated_views(device: str) -> None:
    negated = torch.randn(4, 8, dtype=torch.complex64, device=device).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(warpnorm.layer_norm(negated, (8,)), torch.nn.functional.layer_norm(negated, (8,)))
    leaf = torch.randn(4, 8, device=device, requires_grad=True)
    found = torch.autograd.grad(warpnorm.rms_norm(leaf, (8,)), leaf, negated)
    torch.testing.assert_close(found, torch.autograd.grad(torch.nn.functional.rms_norm(leaf, (8,)), leaf, negated))


def test_expanded_parameters(device: str) -> None:
    input = torch.randn(4, 8, device=device)
    one = torch.tensor([2.0], device=device, requires_grad=True)
    output = warpnorm.layer_norm(input, (8,), one.expand(8), one.expand(8))
    expected = torch.nn.functional.layer_norm(input, (8,), one.expand(8), one.expand(8))
    torch.testing.assert_close(output, expected)
    grad = torch.randn(4, 8, device=device)
    torch.testing.assert_close(torch.autograd.grad(output, one, grad), torch.autograd.grad(expected, one, grad))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_gradcheck_and_gradgradcheck(norm: Norm, device: str) -> None:
    operands = operands_for(norm, torch.randn(2, 2, 3, dtype=torch.float64, device=device), 2)
    leaves = [operand.requires_grad_() for operand in operands]
    assert torch.autograd.gradcheck(lambda *o: ours(norm, 2, *o), leaves)
    assert torch.autograd.gradgradcheck(lambda *o: ours(norm, 2, *o), leaves)


def test_third_derivative(device: str) -> None:
    """Double backward is itself differentiable."""
    input = torch.randn(2, 5, dtype=torch.float64, device=device, requires_grad=True)

    def second(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(ours(RMS_NORM, 1, x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(second, input)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("cols", [64, 8_201])
def test_only_the_gradients_that_are_needed(cols: int, wanted: tuple[int, ...], device: str) -> None:
    operands = operands_for(LAYER_NORM, torch.randn(6, cols, device=device), 1)
    grad = torch.randn(6, cols, device=device)
    every = run(ours, LAYER_NORM, 1, operands, grad).gradients
    leaves = [operand.detach().requires_grad_(i in wanted) for i, operand in enumerate(operands)]
    output = ours(LAYER_NORM, 1, *leaves)
    gradients = torch.autograd.grad(output, [leaves[i] for i in wanted], grad)
    for i, gradient in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(gradient, every[i])
    call = call_for(LAYER_NORM, 1, *operands)
    views = tuple(View.of(t) for t in (*operands, grad))
    launch = pipeline.prepare_backward(call, views, grad.device, (0,), wanted, None)
    assert launch.problem.wanted == wanted
    assert (launch.column_sum is not None) == (wanted != (0,))
    assert (launch.sums_kernel is not None) == (0 in wanted and launch.plan.pattern == LONG_ROW)


@pytest.mark.parametrize(
    "plan", [Plan(ROW, 4, 64, 2), Plan(ROW, 1, 64, 2, programs=2, stages=2), Plan(LONG_ROW, 1, 16, 1)], ids=str
)
def test_nothing_is_written_outside_the_output(plan: Plan, device: str) -> None:
    buffer = torch.full((11, 60), 7.0, device=device)
    input = torch.randn(9, 50, device=device)
    out = buffer[1:10, 5:55]
    pipeline.forward(call_for(RMS_NORM, 1, input), (input,), out=out, plan=plan)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(input, (50,), eps=1e-5))
    out.fill_(7.0)
    assert (buffer == 7.0).all()


@pytest.mark.parametrize("cols", [64, 8_201])
def test_out_may_be_the_input(cols: int, device: str) -> None:
    for function in (warpnorm.layer_norm, warpnorm.rms_norm):
        input = torch.randn(5, cols, device=device)
        expected = function(input, (cols,))
        assert function(input, (cols,), out=input) is input
        assert input.equal(expected)
    leaf = torch.randn(5, cols, device=device, requires_grad=True)
    with pytest.raises(InputError, match="gradient"):
        warpnorm.layer_norm(leaf, (cols,), out=torch.empty(5, cols, device=device))


def test_out_in_a_packed_tensor(device: str) -> None:
    packed = torch.randn(6, 3, 16, device=device)
    expected = warpnorm.rms_norm(packed[:, 0].clone(), (16,))
    others = packed[:, 1:].clone()
    warpnorm.rms_norm(packed[:, 0], (16,), out=packed[:, 0])
    assert packed[:, 0].equal(expected)
    assert packed[:, 1:].equal(others)


@pytest.mark.parametrize("cols", [48, 8_201])
def test_statistics(cols: int, device: str) -> None:
    input = torch.randn(3, 4, cols, device=device).to(torch.bfloat16)
    output, mean, rstd = warpnorm.layer_norm(input, (cols,), return_stats=True)
    wide = input.double()
    assert mean.shape == rstd.shape == (3, 4, 1)
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), wide.mean(-1, keepdim=True), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        rstd.double(), (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt(), atol=0, rtol=1e-6
    )
    assert output.equal(warpnorm.layer_norm(input, (cols,)))
    output, rstd = warpnorm.rms_norm(input, (cols,), return_stats=True, eps=1e-3)
    torch.testing.assert_close(rstd.double(), (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("cols", [48, 8_201])
def test_scalar_weights(cols: int, device: str) -> None:
    """A number, a tensor without dimensions, and a full weight of the same value agree; the scalar has a gradient."""
    input = torch.randn(6, cols, device=device, requires_grad=True)
    grad = torch.randn(6, cols, device=device)
    scalar = torch.tensor(1.75, device=device, requires_grad=True)
    full = torch.full((cols,), 1.75, device=device, requires_grad=True)
    for function in (warpnorm.layer_norm, warpnorm.rms_norm):
        by_number = function(input, (cols,), 1.75, weight_offset=0.5)
        by_scalar = function(input, (cols,), scalar, weight_offset=0.5)
        by_full = function(input, (cols,), full, weight_offset=0.5)
        torch.testing.assert_close(by_number, by_full, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(by_scalar, by_full, rtol=1e-6, atol=1e-6)
        of_number = torch.autograd.grad(by_number, input, grad)[0]
        of_scalar = torch.autograd.grad(by_scalar, (input, scalar), grad)
        of_full = torch.autograd.grad(by_full, (input, full), grad)
        torch.testing.assert_close(of_number, of_full[0])
        torch.testing.assert_close(of_scalar[0], of_full[0])
        torch.testing.assert_close(of_scalar[1].double(), of_full[1].double().sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("input_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_of_another_dtype(input_dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    input = torch.randn(5, 40).to(device, input_dtype).requires_grad_()
    weight, bias = (torch.randn(40).to(device, weight_dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(5, 40).to(device, input_dtype)
    output = warpnorm.layer_norm(input, (40,), weight, bias)
    gradients = torch.autograd.grad(output, (input, weight, bias), grad)
    wide = [t.detach().double().requires_grad_() for t in (input, weight, bias)]
    exact = torch.nn.functional.layer_norm(wide[0], (40,), wide[1], wide[2])
    exact_gradients = torch.autograd.grad(exact, wide, grad.double())
    for ours_, truth_, dtype in zip(
        (output, *gradients),
        (exact, *exact_gradients),
        (input_dtype, input_dtype, weight_dtype, weight_dtype),
        strict=True,
    ):
        assert ours_.dtype == dtype
        narrowest = max((dtype, torch.float32 if torch.float64 not in (input_dtype, weight_dtype) else dtype),
                        key=lambda d: torch.finfo(d).eps)  # fmt: skip
        tolerance = 4 * torch.finfo(narrowest).eps
        torch.testing.assert_close(ours_.double(), truth_, rtol=tolerance, atol=tolerance * truth_.abs().max().item())


def test_default_eps_of_rms_norm_is_pytorchs(device: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        input = torch.full((2, 16), 1e-4, dtype=dtype, device=device)
        torch.testing.assert_close(warpnorm.rms_norm(input, (16,)), torch.nn.functional.rms_norm(input, (16,)))


def test_normalized_dim(device: str) -> None:
    input = torch.randn(2, 3, 4, 5, device=device)
    for dim in (-1, -2, -3, -4, 0, 1, 2, 3):
        assert warpnorm.layer_norm(input, normalized_dim=dim).equal(warpnorm.layer_norm(input, input.shape[dim:]))
        assert warpnorm.rms_norm(input, normalized_dim=dim).equal(warpnorm.rms_norm(input, input.shape[dim:]))


def test_empty_inputs(device: str) -> None:
    for shape in ((0, 16), (3, 0, 16), (4, 0)):
        input = torch.randn(shape, device=device, requires_grad=True)
        weight = torch.randn(shape[-1:], device=device, requires_grad=True)
        output = warpnorm.layer_norm(input, shape[-1:], weight)
        assert output.shape == input.shape
        gradients = torch.autograd.grad(output.sum(), (input, weight))
        assert gradients[0].shape == input.shape
        assert gradients[1].equal(torch.zeros_like(weight))


def test_saved_for_backward_is_the_operands_and_two_numbers_a_row(device: str) -> None:
    operands = operands_for(LAYER_NORM, torch.randn(6, 64, device=device), 1)
    leaves = [operand.requires_grad_() for operand in operands]
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(LAYER_NORM, 1, *leaves)
    own = {leaf.data_ptr() for leaf in leaves}
    extra = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert sum(tensor.numel() for tensor in extra) == 2 * 6
    assert all(tensor.dtype == torch.float32 for tensor in extra)


@pytest.mark.parametrize("cols", WIDTHS)
def test_weights_learn_from_tensors_of_inference_mode(cols: int, device: str) -> None:
    """As PyTorch's rms_norm does, at the first call and later: a head behind a frozen model."""
    with torch.inference_mode():
        features = torch.randn(5, cols, device=device)
    weight, other = (torch.ones(cols, device=device, requires_grad=True) for _ in range(2))
    for _ in range(3):
        warpnorm.rms_norm(features, (cols,), weight).square().sum().backward()
        warpnorm.rms_norm(features.clone(), (cols,), other).square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, other.grad)
