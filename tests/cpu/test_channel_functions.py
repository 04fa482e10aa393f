"""`batch_norm`, `group_norm` and `instance_norm` on the CPU: PyTorch's own samples, memory formats, dtypes, running
statistics, `out`, `return_stats`, inputs without elements, gradients of both orders. Refusals are in
`test_channel_errors.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import warpnorm
from cpu.channel_truth import FUNCTIONS, Arguments, check, ours, pytorch, run, truth
from cpu.truth import DTYPES, assert_accurate, name_of, random
from warpnorm.reference import update_running

MODES = [
    ("batch_norm", True),
    ("batch_norm", False),
    ("group_norm", True),
    ("instance_norm", True),
    ("instance_norm", False),
]
by_mode = pytest.mark.parametrize(
    ("norm", "is_training"), MODES, ids=[f"{norm}-{'training' if mode else 'evaluation'}" for norm, mode in MODES]
)
by_norm = pytest.mark.parametrize("norm", FUNCTIONS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def arguments(
    norm: str,
    is_training: bool = True,
    input: torch.Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,
    requires_grad: bool = True,
) -> Arguments:
    """A call with everything there is, on (3, 4, 5, 2) in 2 groups. The dtypes are those of input, parameters, buffers."""
    if input is None:
        input = random((3, 4, 5, 2), dtypes[0], requires_grad=requires_grad)
    channels = input.shape[1]
    weight, bias = (random((channels,), dtypes[1], seed, requires_grad=requires_grad) for seed in (1, 2))
    if norm == "group_norm":
        return Arguments(norm, input, 2, weight, bias)
    mean, variance = (random((channels,), torch.float64, seed) for seed in (3, 4))
    buffers = mean.to(dtypes[2]), (variance.abs() + 0.5).to(dtypes[2])
    return Arguments(norm, input, 0, weight, bias, *buffers, is_training=is_training, momentum=0.3)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert found.keys() == expected.keys()


def assert_is_pytorchs(a: Arguments) -> None:
    """Output with its strides, gradients and running statistics."""
    mine, theirs = a.copy(), a.copy()
    grad_output = random(a.input.shape, a.input.dtype, seed=9)
    output, expected = ours(mine), pytorch(theirs)
    assert_same_bits(run(mine, output, grad_output), run(theirs, expected, grad_output))
    assert output.dtype == a.input.dtype


OPERATORS: dict[str, list[OpInfo]] = {
    norm: [op for op in op_db if op.name == f"nn.functional.{norm}" and torch.float32 in op.supported_dtypes("cpu")]
    for norm in FUNCTIONS
}
KINDS = ("sample_inputs", "reference_inputs", "noncontiguous_inputs")


def samples(norm: str, kind: str, dtype: torch.dtype) -> Iterator[Arguments]:
    torch.manual_seed(0)
    names = ("groups",) if norm == "group_norm" else ("running_mean", "running_var", "weight", "bias")
    for operator in OPERATORS[norm]:
        method = "sample_inputs" if kind == "noncontiguous_inputs" else kind
        for sample in getattr(operator, method)("cpu", dtype, requires_grad=True):
            given = sample.noncontiguous() if kind == "noncontiguous_inputs" else sample
            keywords = dict(zip(names, given.args, strict=False)) | given.kwargs
            keywords.pop("cudnn_enabled", None)
            flags = [keywords.pop(flag) for flag in ("training", "use_input_stats") if flag in keywords]
            default = norm != "batch_norm"  # PyTorch's, where the sample says nothing
            yield Arguments(norm, given.input, **keywords, is_training=flags[0] if flags else default)


@by_norm
@by_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_bits_of_the_operator(kind: str, dtype: torch.dtype, norm: str) -> None:
    count = 0
    for a in samples(norm, kind, dtype):
        assert_is_pytorchs(a)
        count += 1
    assert count >= 9


@dataclass(frozen=True)
class Layout:
    name: str
    make: Callable[[], torch.Tensor]
    why: str

    def __str__(self) -> str:
        return self.name


def channels_last(*shape: int) -> torch.Tensor:
    return random(shape).to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)


LAYOUTS = [
    Layout("ncl", lambda: random((3, 4, 5)), "of a signal"),
    Layout("nchw", lambda: random((3, 4, 5, 2)), "of images"),
    Layout("ncdhw", lambda: random((2, 4, 3, 5, 2)), "of volumes"),
    Layout("six_dims", lambda: random((2, 4, 2, 3, 1, 2)), "more than any module takes"),
    Layout("channels_last", lambda: channels_last(3, 4, 5, 2), "the memory format stays"),
    Layout("channels_last_3d", lambda: channels_last(2, 4, 3, 5, 2), "the memory format stays"),
    Layout("channels_last_slice", lambda: channels_last(3, 8, 5, 2)[:, 2:6], "channels_last, though not dense"),
    Layout("channels_last_half", lambda: channels_last(3, 8, 5, 2)[:, ::2], "and with gaps between the channels"),
    Layout("channel_slice", lambda: random((3, 8, 5, 2))[:, 2:6], "samples lie apart"),
    Layout("every_other", lambda: random((3, 4, 5, 4))[..., ::2], "positions lie apart"),
    Layout("transposed", lambda: random((4, 3, 5, 2)).transpose(0, 1), "dense in another order, no memory format"),
    Layout("nlc", lambda: random((3, 5, 4)).transpose(1, 2), "the output of attention"),
    Layout("expanded", lambda: random((1, 4, 1, 2)).expand(3, 4, 5, 2), "elements that share memory"),
    Layout("one_channel", lambda: channels_last(3, 2, 5, 2)[:, :1], "any format would do"),
]


def strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@by_mode
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout, norm: str, is_training: bool) -> None:
    """PyTorch's results to the bit, in the strides that its batch norm would give, whichever the norm."""
    input = layout.make()
    a = arguments(norm, is_training, input.requires_grad_())
    a = replace(a, groups=min(a.groups, input.shape[1]))
    mine = a.copy() if layout.name != "expanded" else replace(a, running_mean=None, running_var=None, is_training=True)
    theirs = mine.copy() if layout.name != "expanded" else mine
    output, grad_output = ours(mine), random(input.shape, seed=9)
    assert_same_bits(run(mine, output, grad_output), run(theirs, pytorch(theirs), grad_output))
    assert strides(output) == strides(F.batch_norm(mine.input.detach(), None, None, training=True))
    buffers = mine.copy() if layout.name != "expanded" else mine
    with torch.no_grad():
        assert strides(ours(buffers, return_stats=True)[0]) == strides(output)


@by_dtype
def test_evaluation_of_instances_is_pytorchs(dtype: torch.dtype) -> None:
    """By batch norm, which does not repeat everything for each sample."""
    a = arguments("instance_norm", False, dtypes=(dtype,) * 3, requires_grad=False)
    torch.testing.assert_close(ours(a.copy()), F.instance_norm(**a.keywords))


@pytest.mark.parametrize(("norm", "is_training"), [mode for mode in MODES if mode != ("instance_norm", True)])
@by_dtype
def test_batch_alone_is_two_dimensional(dtype: torch.dtype, norm: str, is_training: bool) -> None:
    assert_is_pytorchs(arguments(norm, is_training, random((6, 4), dtype, requires_grad=True), (dtype,) * 3))


@by_mode
@pytest.mark.parametrize(
    "dtypes", list(product(DTYPES, DTYPES, DTYPES)), ids=lambda dtypes: "-".join(name_of(dtype) for dtype in dtypes)
)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], norm: str, is_training: bool) -> None:
    """Computed in float32, or float64 where anything is; rounded once, into the dtype of what it belongs to."""
    a = arguments(norm, is_training, dtypes=dtypes)
    grad_output = random(a.input.shape, dtypes[0], seed=9)
    is_of_one = norm == "group_norm" or dtypes[1] == dtypes[2]
    if is_of_one and (dtypes[0] == dtypes[1] or (dtypes[0].itemsize == 2 and dtypes[1] == torch.float32)):
        assert_is_pytorchs(a)  # PyTorch takes them
    else:
        check(a, grad_output)
    with torch.no_grad():
        output, *statistics = ours(a.copy(), return_stats=True)
    assert output.dtype == dtypes[0]
    wanted = torch.float64 if torch.float64 in dtypes[:2] else torch.float32
    assert [statistic.dtype for statistic in statistics] == [wanted] * 2


@by_mode
def test_weight_and_bias_of_two_dtypes(norm: str, is_training: bool) -> None:
    """PyTorch would update the running statistics, and only then refuse the bias."""
    a = arguments(norm, is_training)
    check(replace(a, bias=random((4,), torch.float64, 2, requires_grad=True)), random(a.input.shape, seed=9))


@by_mode
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
def test_parameters_are_optional(has_weight: bool, has_bias: bool, norm: str, is_training: bool) -> None:
    a = arguments(norm, is_training)
    a = replace(a, weight=a.weight if has_weight else None, bias=a.bias if has_bias else None)
    assert_is_pytorchs(a)
    check(a, random(a.input.shape, seed=9), out=None)


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, -1.2, 0.5])
@by_dtype
def test_running_statistics_are_pytorchs(dtype: torch.dtype, momentum: float, norm: str) -> None:
    """Over four steps, by the plain call to the bit; next to a keyword of ours in the dtype of computation."""
    a = replace(arguments(norm, dtypes=(dtype,) * 3, requires_grad=False), momentum=momentum)
    plain, checked, theirs = a.copy(), a.copy(), a.copy()
    for step in range(4):
        input = random(a.input.shape, dtype, seed=20 + step)
        exact = truth(replace(checked, input=input), input)
        ours(replace(plain, input=input))
        ours(replace(checked, input=input), return_stats=True)
        pytorch(replace(theirs, input=input))
        for name in ("running_mean", "running_var"):
            assert torch.equal(getattr(plain, name), getattr(theirs, name)), name
            if dtype.itemsize >= 4:
                assert torch.equal(getattr(checked, name), getattr(theirs, name)), name
            assert_accurate(getattr(checked, name), _in_float32(exact[name]), exact[name], 1, name)


def _in_float32(exact: np.ndarray) -> torch.Tensor:
    """What the rule may take for PyTorch's answer: off by two roundings of float32."""
    return torch.from_numpy((exact * (1 + 2 * torch.finfo(torch.float32).eps)).astype(np.float64))


@by_dtype
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, -1.2])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_update_of_running_statistics(norm: str, momentum: float, dtype: torch.dtype) -> None:
    """What follows a kernel, which returns mean and biased variance in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a = replace(arguments(norm, dtypes=(wide, wide, dtype), requires_grad=False), momentum=momentum)
    exact = truth(a, a.input)
    dims = (0, 2, 3) if norm == "batch_norm" else (2, 3)
    variance, mean = torch.var_mean(a.input, dims, correction=0)
    update_running(a.running_mean, a.running_var, mean, variance, 30 if norm == "batch_norm" else 10, momentum)
    for name in ("running_mean", "running_var"):
        found = getattr(a, name)
        assert found.dtype == dtype
        assert_accurate(found, _in_float32(exact[name]), exact[name], 1, name)


def test_no_running_statistics_are_no_update() -> None:
    update_running(None, None, torch.ones(4), torch.ones(4), 10, 0.1)


@by_mode
@by_dtype
def test_stats_are_those_of_the_rows(dtype: torch.dtype, norm: str, is_training: bool) -> None:
    input = (random((3, 4, 5, 2), torch.float64) * 3 + 100).to(dtype).requires_grad_()
    a = arguments(norm, is_training, input, (dtype,) * 3)
    exact = truth(a, input)
    output, *statistics = ours(a.copy(), return_stats=True)
    shapes = {"batch_norm": (4,), "group_norm": (3, 2), "instance_norm": (3, 4)}
    for name, statistic in zip(("mean", "rstd"), statistics, strict=True):
        assert statistic.shape == shapes[norm]
        assert not statistic.requires_grad
        found = statistic[0] if norm == "instance_norm" and not is_training else statistic.reshape(-1)
        assert_accurate(found, _in_float32(exact[name]), exact[name], 1, name)
    assert output.requires_grad
    if dtype.itemsize >= 4:
        assert torch.equal(output, ours(a.copy()))


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_stats_of_evaluation_are_not_the_buffers(norm: str) -> None:
    a = arguments(norm, is_training=False, requires_grad=False)
    _, mean, rstd = ours(a, return_stats=True)
    before = mean.clone(), rstd.clone()
    ours(replace(a, is_training=True))
    assert torch.equal(mean, before[0])
    assert torch.equal(rstd, before[1])


OUTS = [
    Layout("fresh", lambda: torch.empty(3, 4, 5, 2), "as allocated"),
    Layout("channels_last", lambda: torch.empty(3, 5, 2, 4).permute(0, 3, 1, 2), "strides unlike those of the input"),
    Layout("channel_slice", lambda: torch.empty(3, 12, 5, 2)[:, 4:8], "a part of a concatenation: no copy later"),
    Layout("every_other", lambda: torch.empty(3, 4, 5, 4)[..., ::2], "the gaps stay"),
]


@by_mode
@pytest.mark.parametrize("layout", OUTS, ids=str)
def test_out_is_written_and_nothing_else(layout: Layout, norm: str, is_training: bool) -> None:
    a = arguments(norm, is_training, requires_grad=False)
    theirs = a.copy()
    expected = pytorch(theirs)
    for keywords in ({}, {"return_stats": True}):
        mine, out = a.copy(), layout.make()
        memory = torch.as_strided(out, (out.untyped_storage().nbytes() // 4,), (1,), 0).fill_(float("nan"))
        returned = ours(mine, out=out, **keywords)
        assert (returned[0] if keywords else returned) is out
        assert torch.equal(out, expected)
        assert int(memory.isnan().sum()) == memory.numel() - out.numel()
        assert_same_bits(run(mine, out, out), run(theirs, expected, expected))


@by_mode
@by_dtype
def test_out_may_be_the_input(dtype: torch.dtype, norm: str, is_training: bool) -> None:
    a = arguments(norm, is_training, dtypes=(dtype,) * 3, requires_grad=False)
    expected = ours(a.copy(), return_stats=True)
    for view in (lambda t: t, lambda t: t.view_as(t)):
        mine = a.copy()
        found = ours(mine, out=view(mine.input), return_stats=True)
        assert found[0].data_ptr() == mine.input.data_ptr()
        for tensor, wanted in zip((mine.input, *found[1:]), expected, strict=True):
            assert torch.equal(tensor, wanted)


@by_mode
def test_out_is_taken_where_no_gradient_is_recorded(norm: str, is_training: bool) -> None:
    a = arguments(norm, is_training)
    with torch.no_grad():
        expected, out = ours(a.copy()), torch.empty(3, 4, 5, 2)
        assert torch.equal(ours(a.copy(), out=out), expected)
    assert not out.requires_grad


EMPTY = [
    (shape, *mode)
    for shape in ((0, 4), (0, 4, 3), (3, 4, 0), (0, 4, 2, 2), (2, 4, 3, 0))
    for mode in MODES
    if not (mode == ("instance_norm", True) and len(shape) == 2)  # one value per row: refused
]


@pytest.mark.parametrize(("shape", "norm", "is_training"), EMPTY)
def test_nothing_is_normalized_to_nothing(shape: tuple[int, ...], norm: str, is_training: bool) -> None:
    """Parameters get a gradient of zeros, and running statistics stay; PyTorch's instance norm would make them NaN."""
    a = arguments(norm, is_training, torch.empty(shape, requires_grad=True))
    before = a.copy()
    output = ours(a)
    results = run(a, output, torch.empty(shape))
    assert output.shape == results["grad_input"].shape == shape
    assert not results["grad_weight"].any()
    assert not results["grad_bias"].any()
    if norm != "group_norm":
        assert torch.equal(a.running_mean, before.running_mean)
        assert torch.equal(a.running_var, before.running_var)
    with torch.no_grad():
        written, *statistics = ours(a, return_stats=True, out=torch.empty(shape))
    assert written.shape == shape
    wanted = {"batch_norm": (4,), "group_norm": (shape[0], 2), "instance_norm": (shape[0], 4)}
    assert [statistic.shape for statistic in statistics] == [wanted[norm]] * 2


@by_norm
def test_no_channels(norm: str) -> None:
    """PyTorch's batch norm fails on a weight of no elements."""
    a = Arguments(norm, torch.empty(2, 0, 3), 1, *(torch.empty(0, requires_grad=True) for _ in range(2)))
    output = ours(a)
    assert output.shape == (2, 0, 3)
    assert {gradient.shape for gradient in torch.autograd.grad(output.sum(), [a.weight, a.bias])} == {(0,)}


def test_batch_of_one_dimension_and_no_elements() -> None:
    """One of PyTorch's samples."""
    output, mean, rstd = warpnorm.batch_norm(torch.empty(0), None, None, training=True, return_stats=True)
    assert output.shape == mean.shape == rstd.shape == (0,)


@dataclass(frozen=True)
class Derivative:
    name: str
    why: str
    view: Callable[[torch.Tensor], torch.Tensor] = lambda leaf: leaf
    has_parameters: bool = True
    has_running: bool = True
    has_stats: bool = False

    def __str__(self) -> str:
        return self.name


DERIVATIVES = [
    Derivative("plain", "PyTorch's operator"),
    Derivative("no_affine", "the norm by itself", has_parameters=False),
    Derivative("channels_last", "strides", view=lambda leaf: leaf.permute(0, 3, 1, 2)),
    Derivative("no_running", "nothing to update", has_running=False),
    Derivative("with_stats", "the output next to statistics is as differentiable", has_stats=True),
]


@by_mode
@pytest.mark.parametrize("case", DERIVATIVES, ids=str)
def test_first_and_second_derivatives(case: Derivative, norm: str, is_training: bool) -> None:
    leaf = random((2, 2, 2, 2), torch.float64, requires_grad=True)
    a = arguments(norm, is_training, case.view(leaf), (torch.float64,) * 3)
    if not case.has_running and is_training:
        a = replace(a, running_mean=None, running_var=None)
    tensors = [leaf, a.weight, a.bias] if case.has_parameters else [leaf]

    def call(leaf: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
        mean, variance = (None if buffer is None else buffer.clone() for buffer in (a.running_mean, a.running_var))
        given = replace(a, input=case.view(leaf), weight=weight, bias=bias, running_mean=mean, running_var=variance)
        return ours(given, return_stats=True)[0] if case.has_stats else ours(given)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@by_norm
def test_equivalent_spellings(norm: str) -> None:
    """One group is a norm of whole samples, as many groups as channels are instances, one sample's batch is its instance."""
    input = random((3, 4, 5, 2), torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-12}
    if norm == "group_norm":
        torch.testing.assert_close(warpnorm.group_norm(input, 1), warpnorm.layer_norm(input, (4, 5, 2)), **close)
        torch.testing.assert_close(warpnorm.group_norm(input, 4), warpnorm.instance_norm(input), **close)
    else:
        of_batch = warpnorm.batch_norm(input[:1], None, None, training=True)
        torch.testing.assert_close(warpnorm.instance_norm(input)[:1], of_batch, **close)


class Seen(torch.Tensor):
    """Reports the functions that it is passed to."""

    functions: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append((func, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@by_mode
@pytest.mark.parametrize("which", ["input", "weight"])
def test_overrides_see_the_function(which: str, norm: str, is_training: bool) -> None:
    """With PyTorch's arguments, and of our own keywords those that say something."""
    a = arguments(norm, is_training, requires_grad=False)
    expected = ours(a.copy(), return_stats=True)
    Seen.functions.clear()
    found = ours(replace(a, **{which: getattr(a, which).as_subclass(Seen)}), return_stats=True)
    assert Seen.functions[0] == (FUNCTIONS[norm], {"return_stats": True})
    for tensor, wanted in zip(found, expected, strict=True):
        assert torch.equal(tensor.as_subclass(torch.Tensor), wanted)


@by_mode
@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
def test_compiled_calls_take_what_plain_ones_take(half: bool, norm: str, is_training: bool) -> None:
    """Running statistics of another dtype too, which PyTorch would not take."""
    dtypes = (torch.float32, torch.float32, torch.float16 if half else torch.float32)
    a = arguments(norm, is_training, dtypes=dtypes, requires_grad=False)
    mine, theirs = a.copy(), a.copy()
    expected = ours(theirs)
    found = torch.compile(FUNCTIONS[norm], backend="eager", fullgraph=True)(**mine.keywords)
    assert_same_bits(run(mine, found, found), run(theirs, expected, expected))


@by_mode
def test_is_transformed_as_pytorchs(norm: str, is_training: bool) -> None:
    a = replace(
        arguments(norm, is_training, requires_grad=False), running_mean=None, running_var=None, is_training=True
    )
    batch = random((2, *a.input.shape), seed=5)

    def loss(function: Callable[[Arguments], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.func.vmap(torch.func.grad(lambda x: function(replace(a, input=x)).pow(3).sum()))

    torch.testing.assert_close(loss(ours)(batch), loss(pytorch)(batch), rtol=0, atol=0)


@by_mode
def test_on_meta(norm: str, is_training: bool) -> None:
    a = arguments(norm, is_training, requires_grad=False)
    names = ("input", "weight", "bias", "running_mean", "running_var")
    a = replace(a, **{n: t.to("meta") for n in names if (t := getattr(a, n)) is not None})
    out = torch.empty_like(a.input)
    assert ours(a).is_meta
    assert ours(a, out=out) is out
