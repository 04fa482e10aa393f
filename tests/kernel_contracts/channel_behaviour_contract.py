"""Contracts on how the norms by channel behave: repeatable, blind to other samples where no statistic is shared, compiled
once, differentiable twice, computing only what is needed, with running statistics that are PyTorch's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import warpnorm
from cpu.channel_truth import Arguments, ours, pytorch
from kernel_contracts.channel_running import (
    BATCH,
    EVALUATION,
    GROUPS,
    INSTANCE,
    MODES,
    ONE_GROUP,
    Layout,
    Mode,
    arguments,
    call_of,
    check_accuracy,
    gradient_for,
    last,
    random,
    run_ours,
)
from warpnorm import pipeline, repeat, repeat_channels, settings
from warpnorm.errors import InputError
from warpnorm.plan.plan import COLUMN, Plan
from warpnorm.problem import View

NCHW = Layout("nchw", (4, 6, 4, 8), why="memory runs along the lines")
LAST = Layout("channels_last", (4, 6, 5, 7), view=last, why="memory runs across them")
ODD = Layout("odd_images", (4, 6, 5, 7), why="memory runs across positions")
SHORT = Layout("short_rows", (8, 6, 2, 3), view=last, why="rows of few columns side by side")
LONG = Layout("long_lines", (2, 4, 4500), why="a walk")
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


@by_mode
@pytest.mark.parametrize("layout", [NCHW, ODD, LAST, SHORT, LONG], ids=str)
def test_same_inputs_same_bits_by_channel(layout: Layout, mode: Mode, device: str) -> None:
    a = arguments(mode, layout.make(torch.float32, device))
    first, again = (run_ours(a, gradient_for(a)) for _ in range(2))
    for name, result in first.items():
        assert again[name].equal(result), name


NEIGHBOURS = [
    Layout("odd", (5, 6, 5, 7), why="a sample alone is aligned, among others it is not"),
    Layout("channels_last", (5, 6, 4, 8), view=last, why="memory runs across the lines"),
    Layout("many_lines", (5, 16, 300), why="alone they are one block, together they are more"),
    Layout("many_lines_last", (5, 16, 15, 20), view=last, why="and where memory runs across them"),
    Layout("long_lines", (5, 2, 4200), why="a walk"),
]


@pytest.mark.parametrize("mode", [EVALUATION, ONE_GROUP, GROUPS, INSTANCE], ids=str)
@pytest.mark.parametrize("layout", NEIGHBOURS, ids=str)
def test_a_sample_does_not_know_its_neighbours(layout: Layout, mode: Mode, device: str) -> None:
    a = arguments(mode, layout.make(torch.float32, device).detach())
    whole = ours(a).detach()
    for sample in (0, 3):
        alone = torch.empty_like(a.input[sample : sample + 1]).copy_(a.input[sample : sample + 1])
        assert ours(replace(a, input=alone.detach())).equal(whole[sample : sample + 1])
    assert ours(replace(a, input=a.input.detach()[:2])).equal(whole[:2])


def kernels(mode: Mode, samples: int, is_last: bool, device: str, width: int = 3) -> set[object]:
    """All that a call launches, forward and backward."""
    from warpnorm.codegen.kernel import BoundKernel

    input = torch.randn(samples, 6, 4 if width % 2 == 0 else 5, width, device=device)
    input = last(input) if is_last else input
    call, operands = call_of(arguments(mode, input))
    views = tuple(View.of(t) for t in (*operands, input))
    wanted = (0, len(operands) - 2, len(operands) - 1)
    launches = (
        pipeline.prepare_forward(call, views, input.device, None),
        pipeline.prepare_backward(call, views, input.device, (0,), wanted, None),
    )
    found = [value for launch in launches for value in vars(launch).values()]
    found += [kernel for kernel, *_ in getattr(launches[1], "column_sums", ())]
    return {kernel for kernel in found if isinstance(kernel, BoundKernel)}


@pytest.mark.parametrize(
    ("is_last", "width"), [(False, 4), (False, 3), (True, 3)], ids=["nchw", "odd_images", "channels_last"]
)
@by_mode
def test_no_recompile_when_only_the_batch_changes(mode: Mode, is_last: bool, width: int, device: str) -> None:
    """Where samples are columns, as long as their number is below the next power of two; where they are pieces of a row, as
    long as there are several."""
    are_columns = mode.norm == "batch_norm" and (is_last or width == 3)
    batches = (5, 6, 7) if are_columns else (3, 1, 2, 8, 16, 33)
    batches = tuple(n for n in batches if n > 1 or mode.norm != "batch_norm")
    before = kernels(mode, batches[0], is_last, device, width)
    compiled = [n for n in batches if not kernels(mode, n, is_last, device, width) <= before]
    assert not compiled, f"after {batches[0]} samples, those of {compiled} are compiled anew"
    assert not kernels(mode, batches[0], is_last, device, width=64) <= before, "another width is another kernel"


def running(mode: Mode, input: torch.Tensor, momentum: float, dtype: torch.dtype, seed: int) -> Arguments:
    mean, variance = (random((input.shape[1],), dtype, str(input.device), seed + i) for i in (50, 60))
    a = arguments(mode, input, dtype, seed)
    return replace(a, running_mean=mean, running_var=variance.abs() + 0.5, momentum=momentum)


KINDS = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16))


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
@pytest.mark.parametrize(("mode", "layout"), [(BATCH, LAST), (BATCH, SHORT), (INSTANCE, NCHW)], ids=str)
def test_running_statistics_of_training(
    mode: Mode, layout: Layout, momentum: float, dtypes: tuple[torch.dtype, ...], device: str
) -> None:
    check_accuracy(lambda seed: running(mode, layout.make(dtypes[0], device, seed), momentum, dtypes[1], seed))


@pytest.mark.parametrize("momentum", [0.1, 1e-9, 0.0])
@pytest.mark.parametrize(("mode", "layout"), [(BATCH, NCHW), (BATCH, LAST), (BATCH, SHORT), (INSTANCE, NCHW)], ids=str)
def test_float64_is_averaged_into_as_such(mode: Mode, layout: Layout, momentum: float, device: str) -> None:
    """Of a float32 batch: what is new is as close as float32, and nothing is lost of what was there."""
    a = running(mode, layout.make(torch.float32, device), momentum, torch.float32, 0)
    before = [random((a.input.shape[1],), torch.float64, device, seed).abs() + 0.5 for seed in (70, 80)]
    found, full = ([b.clone() for b in before] for _ in range(2))
    ours(replace(a, running_mean=found[0], running_var=found[1]))
    parameters = {"weight": None, "bias": None, "input": a.input.detach().double()}
    pytorch(replace(a, running_mean=full[0], running_var=full[1], **parameters))
    for was, one, other in zip(before, found, full, strict=True):
        assert (one - other).abs().max() <= 2 * momentum * 1e-6 + 4 * torch.finfo(torch.float64).eps
        assert momentum > 0 or one.equal(was)


@pytest.mark.parametrize(
    ("mode", "layout"), [(BATCH, NCHW), (BATCH, SHORT), (INSTANCE, NCHW), (INSTANCE, LAST)], ids=str
)
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_running_variances_of_any_size(scale: float, mode: Mode, layout: Layout, device: str) -> None:
    """A variance far below eps is one too."""
    check_accuracy(
        lambda seed: running(mode, layout.make(torch.float32, device, seed) * scale, 1.0, torch.float32, seed)
    )


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_running_averages_of_a_module(momentum: float | None, device: str) -> None:
    """Of several batches; without a momentum every batch counts as much."""
    mine = warpnorm.nn.BatchNorm2d(6, momentum=momentum).to(device)
    theirs = torch.nn.BatchNorm2d(6, momentum=momentum).to(device)
    for seed in range(3):
        input = NCHW.make(torch.float32, device, seed) * (seed + 1) + seed
        torch.testing.assert_close(mine(input), theirs(input))
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(mine.get_buffer(name), buffer, rtol=1e-6, atol=1e-6)
    input = LAST.make(torch.float32, device, 3)
    torch.testing.assert_close(mine.eval()(input), theirs.eval()(input))


Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # mean, variance, weight


def apart(channels: int, device: str) -> Buffers:
    return torch.full((channels,), 0.5, device=device), torch.full((channels,), 2.0, device=device), None


def in_one_storage(channels: int, device: str) -> Buffers:
    both = torch.cat([t for t in apart(channels, device) if t is not None])
    return both[:channels], both[channels:], None


def strided(channels: int, device: str) -> Buffers:
    mean, variance, _ = apart(channels, device)
    return mean.repeat_interleave(2)[::2], variance.repeat_interleave(2)[::2], None


def also_the_weight(channels: int, device: str) -> Buffers:
    mean, variance, _ = apart(channels, device)
    return mean, variance, variance


@pytest.mark.parametrize("place", [apart, in_one_storage, strided, also_the_weight], ids=lambda f: f.__name__)
def test_running_statistics_wherever_they_lie(place: Callable[[int, str], Buffers], device: str) -> None:
    """Also where they share memory with each other or with what the call reads; autograd is told that they were written."""
    input = torch.randn(4, 6, 5, 7, device=device)
    mean, variance, weight = place(6, device)
    versions = mean._version, variance._version
    expected = [mean.double(), variance.double()]
    output = torch.nn.functional.batch_norm(
        input.double(), *expected, None if weight is None else weight.double(), training=True, momentum=0.3
    )
    found = warpnorm.batch_norm(input, mean, variance, weight, training=True, momentum=0.3)
    torch.testing.assert_close(found, output.float())
    torch.testing.assert_close(mean.double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(variance.double(), expected[1], atol=1e-6, rtol=1e-6)
    assert mean._version > versions[0]
    assert variance._version > versions[1]


@pytest.mark.parametrize("mode", [BATCH, INSTANCE], ids=str)
def test_a_call_that_fails_leaves_the_running_statistics(
    mode: Mode, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = running(mode, NCHW.make(torch.float32, device), 0.5, torch.float32, 0)
    assert a.running_mean is not None
    assert a.running_var is not None
    before = a.running_mean.clone(), a.running_var.clone()
    lone = torch.randn(1, 6, 1, 1, device=device)
    short = torch.randn(5, device=device)
    for refused in (replace(a, bias=short), replace(a, weight=short), replace(a, input=lone)):
        with pytest.raises(InputError):
            ours(refused)
    with pytest.raises(InputError, match="gradient"):
        ours(a, out=torch.empty_like(a.input))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    if mode is BATCH and (device != "cpu" or settings.is_interpreting()):  # a call that was seen before
        for _ in range(3):
            ours(replace(a, running_mean=before[0].clone(), running_var=before[1].clone()))
        with monkeypatch.context() as patch:
            patch.setattr(repeat, "quick", None)
            patch.setattr(repeat_channels.ChannelRepeat, "_empty", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                ours(a)
        assert a.running_mean.equal(before[0])
    monkeypatch.setattr(repeat_channels, "again", lambda *_: None)
    monkeypatch.setattr(pipeline, "normalize", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ours(a)
    assert a.running_mean.equal(before[0])
    assert a.running_var.equal(before[1])


@pytest.mark.parametrize(("mode", "is_last"), [(BATCH, False), (EVALUATION, False), (GROUPS, True)], ids=str)
def test_gradcheck_and_gradgradcheck_by_channel(mode: Mode, is_last: bool, device: str) -> None:
    input = torch.randn(2, 4, 2, 1, dtype=torch.float64, device=device)
    a = arguments(mode, last(input) if is_last else input)
    assert a.weight is not None
    assert a.bias is not None

    def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ours(replace(a, input=input, weight=weight, bias=bias))

    leaves = (a.input, a.weight, a.bias)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("wanted", [("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "bias")], ids=str)
@pytest.mark.parametrize(("mode", "layout"), [(BATCH, NCHW), (GROUPS, LAST), (EVALUATION, LAST)], ids=str)
def test_only_the_gradients_that_are_needed_by_channel(
    mode: Mode, layout: Layout, wanted: tuple[str, ...], device: str
) -> None:
    a = arguments(mode, layout.make(torch.float32, device))
    grad_output = gradient_for(a)
    names = ("input", "weight", "bias")
    some = replace(a, **{n: getattr(a, n).detach().requires_grad_(n in wanted) for n in names})
    found, every = run_ours(some, grad_output), run_ours(a, grad_output)
    assert {name for name in found if name.startswith("grad_")} == {f"grad_{name}" for name in wanted}
    for name in wanted:
        torch.testing.assert_close(found[f"grad_{name}"], every[f"grad_{name}"])
    call, operands = call_of(a)
    first = len(operands) - 2
    which = tuple(i for i, name in ((0, "input"), (first, "weight"), (first + 1, "bias")) if name in wanted)
    views = tuple(View.of(t) for t in (*operands, grad_output))
    launch = pipeline.prepare_backward(call, views, grad_output.device, (0,), which, None)
    assert launch.problem.wanted == which
    assert launch.plan.pattern == COLUMN
    assert launch.problem.has_tasks == ("input" in wanted and mode is not EVALUATION)


@pytest.mark.parametrize("plan", [Plan(COLUMN, 4, 16, 2), Plan(COLUMN, 2, 8, 1, chunks=2)], ids=str)
@pytest.mark.parametrize("mode", [BATCH, EVALUATION, GROUPS], ids=str)
def test_nothing_is_written_outside_the_output_by_channel(mode: Mode, plan: Plan, device: str) -> None:
    buffer = torch.full((4, 8, 7, 9), 7.0, device=device)
    a = arguments(mode, torch.randn(3, 6, 5, 6, device=device))
    out = buffer[:3, 1:7, 1:6, 2:8]
    call, operands = call_of(a)
    pipeline.forward(call, operands, out=out, plan=plan)
    torch.testing.assert_close(out, ours(a).detach())
    out.fill_(7.0)
    assert (buffer == 7.0).all()


@by_mode
def test_out_may_be_the_input_by_channel(mode: Mode, device: str) -> None:
    for layout in (NCHW, LAST):
        a = arguments(mode, layout.make(torch.float32, device))
        with torch.no_grad():
            expected = ours(a)
            other = torch.empty(layout.shape, device=device)
            assert ours(a, out=other) is other  # whichever its memory format
            torch.testing.assert_close(other, expected)
            input = a.input.detach()
            assert ours(replace(a, input=input), out=input) is input
            assert input.equal(expected)


@pytest.mark.parametrize(("mode", "rows", "numbers"), [(BATCH, 6, 2), (GROUPS, 8, 2), (EVALUATION, 0, 0)], ids=str)
def test_saved_for_backward_is_the_operands_and_the_statistics(
    mode: Mode, rows: int, numbers: int, device: str
) -> None:
    """The variance is for running averages alone."""
    a = arguments(mode, NCHW.make(torch.float32, device))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(a)
    own = {t.data_ptr() for t in (a.input, a.weight, a.bias, a.running_mean, a.running_var) if t is not None}
    extra = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert sum(tensor.numel() for tensor in extra) == numbers * rows
