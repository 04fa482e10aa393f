"""Contract of the norms by channel: as accurate as PyTorch in the same dtype, whatever the layout, the dtype and the
values; the memory format stays, and nothing is copied."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import warpnorm
from accuracy import assert_no_further
from cpu.channel_truth import Arguments, groups_of, ours
from kernel_contracts.channel_running import (
    BATCH,
    EVALUATION,
    GROUPS,
    INSTANCE,
    MODES,
    Layout,
    Mode,
    arguments,
    check_accuracy,
    check_sample,
    gradient_for,
    last,
    random,
    run_ours,
    samples,
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = ((F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32))  # of the input, of the parameters

LAYOUTS = (
    Layout("nc", (13, 20), why="a row is a column of memory"),
    Layout("nc_transposed", (20, 13), view=lambda t: t.T, why="[N, C] whose rows lie in one piece"),
    Layout("nc_many", (5, 70), why="more lines than a block has, with a tail"),
    Layout("ncl_odd", (3, 12, 37), why="lines are not 16-byte aligned"),
    Layout("nlc", (3, 9, 16), view=lambda t: t.transpose(1, 2), why="the output of attention"),
    Layout("nchw", (3, 16, 4, 8), why="aligned lines in pieces"),
    Layout("nchw_odd", (3, 15, 5, 7), why="an odd number of everything"),
    Layout("many_lines", (4, 20, 3, 3), why="several blocks of short lines"),
    Layout("channels_last", (4, 16, 3, 6), view=last, why="memory runs across the lines"),
    Layout("channels_last_odd", (3, 15, 5, 7), view=last, why="an odd number of everything"),
    Layout("ncdhw", (2, 12, 3, 2, 5), why="three dimensions of space"),
    Layout("channels_last_3d", (2, 12, 2, 3, 4), view=last, why="and the channel behind them"),
    Layout("sliced_space", (3, 12, 6, 8), view=lambda t: t[:, :, ::2, 1:], why="column axes that do not collapse"),
    Layout("sliced_last", (3, 12, 6, 8), view=lambda t: last(t)[:, :, ::2, 1:], why="the same behind each other"),
    Layout("half_the_channels", (3, 24, 4, 5), view=lambda t: t[:, ::2], why="lines with gaps between them"),
    Layout("half_the_last", (3, 24, 4, 5), view=lambda t: last(t)[:, ::2], why="and where memory runs across them"),
    Layout("transposed", (12, 3, 5, 6), view=lambda t: t.transpose(0, 1), why="samples lie closer than channels"),
    Layout("expanded_batch", (1, 12, 3, 5), view=lambda t: t.expand(3, -1, -1, -1), why="samples share memory"),
    Layout("unaligned", (3, 12, 33), view=lambda t: t[..., 1:], why="the storage offset is not a multiple of 16 bytes"),
    Layout("one_channel", (6, 1, 4, 4), why="the axis of channels vanishes"),
    Layout("one_channel_last", (6, 2, 4, 4), view=lambda t: last(t)[:, :1], why="and neighbouring columns lie apart"),
    Layout("one_sample", (1, 16, 4, 5), why="no row lies in pieces"),
    Layout("one_sample_last", (1, 16, 4, 5), view=last, why="and where memory runs across the lines"),
    Layout("one_position", (5, 16, 1, 1), why="every element is a line of its own"),
    Layout("long_lines", (2, 6, 5, 1801), why="unaligned and past 8192: lines that are walked by blocks, with a tail"),
    Layout("cropped_last", (2, 8, 24, 27), view=lambda t: last(t)[:, :, 1:, 2:], why="a walk over two axes of columns"),
    Layout("long_rows_last", (3, 8, 37, 38), view=last, why="past 4096 where memory runs across the lines"),
    Layout("odd_images", (6, 16, 7, 7), why="samples begin at whole vectors, images do not"),
    Layout("odd_volumes", (5, 3, 3, 1, 5), why="the same, with a dimension of one"),
)  # fmt: skip


def takes(mode: Mode, layout: Layout) -> bool:
    """A lone value has no variance: PyTorch refuses it."""
    is_alone = len(layout.shape) == 2 or layout.name == "one_position"
    return not (is_alone and mode is INSTANCE)


EACH = [
    pytest.param(layout, mode, DTYPES[(i + k) % len(DTYPES)], id=f"{layout}-{mode}")
    for i, layout in enumerate(LAYOUTS)
    for k, mode in enumerate(MODES)
    if takes(mode, layout)
]


@pytest.mark.parametrize(("layout", "mode", "dtypes"), EACH)
def test_channel_layouts(layout: Layout, mode: Mode, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Every mode meets every layout, and every dtype on some of them."""
    check_accuracy(lambda seed: arguments(mode, layout.make(dtypes[0], device, seed), dtypes[1], seed))


NCHW = Layout("nchw", (3, 14, 4, 8), why="memory runs along the lines")
LAST = Layout("channels_last", (3, 14, 5, 7), view=last, why="memory runs across them")
LONG = Layout("long_lines", (2, 8, 4500), why="a walk")
THREE = (NCHW, LAST, LONG)
TWO = (NCHW, LAST)
ODD = Layout("odd_images", (3, 14, 5, 7), why="memory runs across positions")
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


@pytest.mark.parametrize(("mode", "dtype"), [(BATCH, BF16), (INSTANCE, F32)], ids=str)
def test_lines_of_a_crop_in_several_parts(mode: Mode, dtype: torch.dtype, device: str) -> None:
    """More columns than one program takes, along two axes. PyTorch sums those of a strided float32 batch in float64."""

    def make(seed: int) -> Arguments:
        return arguments(mode, random((1, 2, 129, 129), dtype, device, seed)[..., 1:], seed=seed)

    check_accuracy(make)


OPTIONAL = [
    (LAST, True, False),
    (ODD, True, False),
    (ODD, False, False),
    (NCHW, False, True),
    (NCHW, False, False),
    (LAST, False, False),
]


@pytest.mark.parametrize(("layout", "has_weight", "has_bias"), OPTIONAL, ids=str)
@by_mode
def test_channel_parameters_are_optional(
    mode: Mode, layout: Layout, has_weight: bool, has_bias: bool, device: str
) -> None:
    """Without any the channels of a group may be walked as one."""

    def make(seed: int) -> Arguments:
        a = arguments(mode, layout.make(F32, device, seed), seed=seed)
        return replace(a, weight=a.weight if has_weight else None, bias=a.bias if has_bias else None)

    check_accuracy(make)


View = Callable[[torch.Tensor], torch.Tensor]
GRADIENTS: dict[str, tuple[Layout, View]] = {
    "channels_last": (NCHW, last),
    "expanded": (NCHW, lambda g: g[:, :, :1, :1].expand(g.shape)),  # what a mean over space leaves behind
    "sliced": (LAST, lambda g: torch.stack([g, g], -1)[..., 0]),
    "transposed": (LAST, lambda g: g.transpose(0, 1).contiguous().transpose(0, 1)),
}


@pytest.mark.parametrize("mode", [BATCH, EVALUATION, GROUPS, INSTANCE], ids=str)
@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_of_another_layout(what: str, mode: Mode, device: str) -> None:
    """What comes from above need not lie as the input does: its values decide, to rounding."""
    layout, view = GRADIENTS[what]
    a = arguments(mode, layout.make(F32, device))
    grad_output = view(gradient_for(a))
    found, expected = run_ours(a, grad_output), run_ours(a, torch.empty_like(a.input).copy_(grad_output))
    for name, tensor in expected.items():
        # Of a parameter: sums of as many terms, all near one, whose own sum may be near zero
        terms = a.input.numel() // tensor.numel()
        atol = max(1e-6 * tensor.abs().max().item(), 2.0**-24 * terms if terms > 1 else 0.0)
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=atol, msg=name)


@pytest.mark.parametrize("view", [last, lambda g: g[:, :, :1, :1].expand(g.shape)], ids=["channels_last", "expanded"])
def test_gradients_of_odd_images_in_another_layout(view: View, device: str) -> None:
    a = arguments(BATCH, ODD.make(F16, device))
    grad_output = view(gradient_for(a))
    found, expected = run_ours(a, grad_output), run_ours(a, torch.empty_like(a.input).copy_(grad_output))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-3 * tensor.abs().max().item(), msg=name)


VALUES = {
    "far_from_zero": lambda x: x * 0.1 + 1e4,  # 1e4 + small noise: E[x^2] - E[x]^2 would be noise alone
    "huge": lambda x: x * 3e15,  # the sum of squares near the end of float32; past it PyTorch overflows too
    "tiny": lambda x: x * 1e-18,  # squares below the smallest float32
    "mixed_scales": lambda x: x * torch.logspace(-6, 6, x.shape[1], dtype=x.dtype).view(-1, *[1] * (x.ndim - 2)),
}


@pytest.mark.parametrize("layout", THREE, ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS, INSTANCE], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_channel_values(values: str, mode: Mode, layout: Layout, device: str) -> None:
    def make(seed: int) -> Arguments:
        input = layout.view(VALUES[values](random(layout.shape, F64, "cpu", seed))).to(device, F32)
        return arguments(mode, input, seed=seed)

    check_accuracy(make)


NC = Layout("nc", (37, 6), why="no space at all")
EQUAL = [(layout, (F32, F32)) for layout in (*THREE, NC)] + [(NCHW, (F64, F64)), (LONG, (BF16, F32))]


@pytest.mark.parametrize(("layout", "dtypes"), EQUAL, ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS, INSTANCE], ids=str)
def test_a_row_of_equal_values_is_its_bias(
    mode: Mode, layout: Layout, dtypes: tuple[torch.dtype, ...], device: str
) -> None:
    """The variance is zero: whatever the value, and however it is rounded on the way, xhat is exactly zero."""
    if not takes(mode, layout):
        pytest.skip("one value a row: refused")
    input = layout.make(dtypes[0], device)
    groups = groups_of(arguments(mode, input))
    width = input.shape[1] // groups if groups else 1
    first = input[:, ::width].flatten(2)[..., :1] if input.ndim > 2 else input[:, ::width, None]
    values = (first if groups else first[:1]) * 1e3 + 0.1  # one for each row
    values = values.repeat_interleave(width, 1).view(len(values), -1, *[1] * (input.ndim - 2))
    a = arguments(mode, torch.empty_like(input).copy_(values.expand_as(input)), dtypes[1])
    assert a.bias is not None
    bias = a.bias.detach().view(-1, *[1] * (input.ndim - 2)).to(dtypes[0])
    assert ours(a).detach().equal(bias.expand_as(input))


BAD = ((0, 0, float("nan")), (1, 3, float("inf")), (2, 4, -float("inf")))  # sample, channel, value


@pytest.mark.parametrize("layout", THREE, ids=str)
@by_mode
def test_nan_and_inf_stay_in_their_channel_or_group(mode: Mode, layout: Layout, device: str) -> None:
    clean = arguments(mode, layout.make(F32, device))
    groups, channels = groups_of(clean), clean.input.shape[1]
    width = channels // groups if groups else 1
    dirty = clean.input.detach().clone()
    is_touched = torch.zeros(dirty.shape, dtype=torch.bool, device=device)
    for sample, channel, value in BAD[: 2 if layout is LONG else 3]:
        first = channel // width * width
        place = (sample, channel, *[2] * (dirty.ndim - 2))
        dirty[place] = value
        row = (slice(sample, sample + 1) if groups else slice(None), slice(first, first + width))
        is_touched[place if mode is EVALUATION else row] = True
    grad_output = gradient_for(clean)
    found, expected = (run_ours(a, grad_output) for a in (replace(clean, input=dirty.requires_grad_()), clean))
    assert found["output"][is_touched].isfinite().sum() == 0
    for name in ("output", "grad_input"):
        assert found[name][~is_touched].equal(expected[name][~is_touched]), name
    of_channel = is_touched.transpose(0, 1).reshape(channels, -1).any(1)
    assert found["grad_weight"].isfinite().equal(~of_channel)
    assert found["grad_weight"][~of_channel].equal(expected["grad_weight"][~of_channel])
    assert found["grad_bias"].equal(expected["grad_bias"])


@pytest.mark.parametrize("layout", THREE, ids=str)
def test_statistics_by_channel(layout: Layout, device: str) -> None:
    input = layout.make(BF16, device)
    wide = input.double()
    by_group, by_instance = wide.reshape(len(wide), 2, -1), wide.flatten(2)
    by_channel = wide.transpose(0, 1).flatten(1)
    for rows, (output, mean, rstd) in (
        (by_channel, warpnorm.batch_norm(input, None, None, training=True, return_stats=True)),
        (by_group, warpnorm.group_norm(input, 2, return_stats=True)),
        (by_instance, warpnorm.instance_norm(input, return_stats=True)),
    ):
        assert mean.shape == rstd.shape == rows.shape[:-1]
        assert mean.dtype == rstd.dtype == torch.float32
        assert output.dtype == input.dtype
        torch.testing.assert_close(mean.double(), rows.mean(-1), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rstd.double(), (rows.var(-1, correction=0) + 1e-5).rsqrt(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_running_means_far_below_the_deviation(dtype: torch.dtype, device: str) -> None:
    """Of which nothing may be off by more one way than the other."""
    found: list[tuple[torch.Tensor, ...]] = []
    for seed in range(8):
        drawn = torch.randn(2, 8, 3136, generator=torch.Generator().manual_seed(seed), dtype=F64)
        x = (drawn * 6e3).to(dtype).to(device)
        means = [torch.zeros(8, device=device) for _ in range(2)]
        for norm, mean in zip((warpnorm.batch_norm, torch.nn.functional.batch_norm), means, strict=True):
            norm(x, mean, torch.ones(8, device=device), training=True, momentum=1.0)
        found.append((*means, x.double().mean((0, 2))))
    mine, theirs, truth = (torch.cat(part) for part in zip(*found, strict=True))
    assert_no_further("running mean", mine, truth, theirs)


@pytest.mark.parametrize("norm", ["batch_norm", "group_norm", "instance_norm"])
@pytest.mark.parametrize(("kind", "dtype"), [("sample_inputs", F32), ("noncontiguous_inputs", BF16)], ids=str)
def test_opinfo_samples_by_channel(kind: str, dtype: torch.dtype, norm: str, device: str) -> None:
    """PyTorch's own samples, with the running statistics that they leave behind."""
    every = list(samples(norm, kind, device, dtype))
    assert len(every) >= 5
    for a in every:
        check_sample(a)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_memory_format_stays(layout: Layout, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output lies as `empty_like` would; every launch reads the input, and writes the output, where it lies."""
    from warpnorm.codegen.kernel import BoundKernel

    launched: list[set[int]] = []
    launch = BoundKernel.launch

    def watched(self: BoundKernel, grid: tuple[int, ...], *arguments: object) -> None:
        tensors = [t for a in arguments if isinstance(a, tuple) for t in a if isinstance(t, torch.Tensor)]
        launched.append({tensor.data_ptr() for tensor in tensors})
        launch(self, grid, *arguments)

    monkeypatch.setattr(BoundKernel, "launch", watched)
    input = layout.make(F32, device)
    for mode in (EVALUATION, GROUPS):
        a = arguments(mode, input)
        launched.clear()
        output = ours(a)
        assert output.stride() == torch.empty_like(input).stride()
        assert len(launched) <= 3
        assert all(input.data_ptr() in pointers for pointers in launched), "every launch is given the input itself"
        assert output.data_ptr() in launched[-1]


@pytest.mark.parametrize("layout", TWO, ids=str)
@pytest.mark.parametrize("mode", [BATCH, EVALUATION, GROUPS, INSTANCE], ids=str)
def test_gradients_are_written_where_they_lie(mode: Mode, layout: Layout, device: str) -> None:
    a = arguments(mode, layout.make(F32, device))
    found = run_ours(a, last(gradient_for(a)))
    assert found["grad_input"].stride() == a.input.stride()
