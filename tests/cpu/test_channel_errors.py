"""Every refusal of the norms by channel: its class, its one sentence, and that nothing was written, running statistics least
of all."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from cpu.channel_truth import FUNCTIONS, PYTORCH
from cpu.truth import random
from warpnorm import InputError, InputTypeError, WarpnormError

BATCH, GROUP, INSTANCE = (("batch_norm",), ("group_norm",), ("instance_norm",))
RUNNING = (*BATCH, *INSTANCE)
ALL = (*RUNNING, *GROUP)
by_norm = pytest.mark.parametrize("norm", ALL)
Keywords = dict[str, Any]
Change = Callable[[Keywords], Keywords]


def good(norm: str) -> Keywords:
    """A training call on (3, 4, 5) with everything there is."""
    keywords: Keywords = {"input": random((3, 4, 5)), "weight": random((4,), seed=1), "bias": random((4,), seed=2)}
    if norm == "group_norm":
        return keywords | {"num_groups": 2}
    flag = "training" if norm == "batch_norm" else "use_input_stats"
    buffers = {"running_mean": random((4,), seed=3), "running_var": random((4,), seed=4).abs() + 0.5}
    return keywords | buffers | {flag: True}


@dataclass(frozen=True)
class Refusal:
    """`change` gets the keywords of a good call and returns those to replace. `is_taken_by`: PyTorch's functions that take
    it, for whatever reason."""

    name: str
    change: Change
    error: type[WarpnormError]
    given: str
    allowed: str
    why: str
    norms: tuple[str, ...] = ALL
    is_taken_by: tuple[str, ...] = ()


def put(**keywords: Any) -> Change:
    return lambda _: keywords


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda k: {name: k[name].to(dtype)}


def of_shape(*shape: int) -> Change:
    """An input of another shape, with parameters to match."""

    def change(keywords: Keywords) -> Keywords:
        channels = shape[1] if len(shape) > 1 else 1
        vectors = [name for name in ("weight", "bias", "running_mean", "running_var") if name in keywords]
        return {"input": random(shape)} | {name: torch.ones(channels) for name in vectors}

    return change


def evaluated(**keywords: Any) -> Change:
    return lambda k: {flag: False for flag in ("training", "use_input_stats") if flag in k} | keywords


def both(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    return lambda k: {name: make(k[name])}


DTYPES = "float64, float32, float16 or bfloat16"
MORE = "Expected more than 1"
REFUSALS = [
    Refusal("input_list", put(input=[1.0]), InputTypeError, "list", "a tensor", "not a tensor"),
    Refusal("input_none", put(input=None), InputTypeError, "NoneType", "a tensor", "a forgotten argument"),
    Refusal("input_int", cast("input", torch.int64), InputError, "torch.int64", DTYPES, "no statistics in integers"),
    Refusal("input_complex", cast("input", torch.complex64), InputError, "complex64", DTYPES, "no order"),
    Refusal("input_float8", cast("input", torch.float8_e4m3fn), InputError, "float8_e4m3fn", DTYPES, "a storage type"),
    Refusal(
        "input_int_empty",
        lambda k: {"input": k["input"][:0].to(torch.int32)},
        InputError,
        "torch.int32",
        DTYPES,
        "no elements, but still no statistics",
        is_taken_by=BATCH,
    ),
    Refusal("input_scalar", put(input=torch.tensor(1.0)), InputError, "()", "at least 2 dimensions", "no channels"),
    Refusal("input_vector", put(input=torch.ones(4)), InputError, "(4,)", "at least 2 dimensions", "nor here"),
    Refusal(
        "one_value", of_shape(1, 4), InputError, "(1, 4)", f"{MORE} value per channel when training", "zero", BATCH
    ),
    Refusal("one_position", of_shape(1, 4, 1, 1), InputError, "(1, 4, 1, 1)", MORE, "likewise", BATCH),
    Refusal("one_spatial", of_shape(3, 4, 1), InputError, "(3, 4, 1)", f"{MORE} spatial element", "zero", INSTANCE),
    Refusal("no_spatial", of_shape(3, 4), InputError, "(3, 4)", f"{MORE} spatial element", "zero", INSTANCE),
    Refusal("one_empty_batch", of_shape(0, 4, 1), InputError, "(0, 4, 1)", MORE, "whatever the batch", INSTANCE),
    Refusal(
        "one_of_group",
        lambda k: of_shape(1, 4)(k) | {"num_groups": 4},
        InputError,
        "(1, 4)",
        f"{MORE} value per group",
        "as PyTorch",
        GROUP,
    ),
    Refusal("groups_indivisible", put(num_groups=3), InputError, "is 3", "divide the 4 channels", "uneven", GROUP),
    Refusal("groups_many", put(num_groups=8), InputError, "is 8", "divide the 4 channels", "more than channels", GROUP),
    Refusal("groups_zero", put(num_groups=0), InputError, "is 0", "positive", "no groups", GROUP),
    Refusal("groups_negative", put(num_groups=-2), InputError, "is -2", "positive", "less than none", GROUP),
    Refusal("groups_float", put(num_groups=2.0), InputTypeError, "float", "an int", "a number of groups", GROUP),
    Refusal("groups_bool", put(num_groups=True), InputTypeError, "bool", "an int", "True is not 1", GROUP),
    Refusal("groups_none", put(num_groups=None), InputTypeError, "NoneType", "an int", "forgotten", GROUP),
    Refusal("groups_str", put(num_groups="2"), InputTypeError, "str", "an int", "as read from a file", GROUP),
    *(
        refusal
        for what, norms in (("weight", ALL), ("bias", ALL), ("running_mean", RUNNING), ("running_var", RUNNING))
        for refusal in (
            Refusal(f"{what}_short", put(**{what: torch.ones(3)}), InputError, "(3,)", "(4,)", "not C", norms),
            Refusal(f"{what}_long", put(**{what: torch.ones(12)}), InputError, "(12,)", "(4,)", "N times C", norms),
            Refusal(f"{what}_scalar", put(**{what: torch.tensor(1.0)}), InputError, "()", "(4,)", "no dims", norms),
            Refusal(
                f"{what}_row",
                put(**{what: torch.ones(1, 4)}),
                InputError,
                "(1, 4)",
                "(4,)",
                "PyTorch's batch norm counts elements of parameters, and then has no gradient for them",
                norms,
                is_taken_by=BATCH if what in ("weight", "bias") else (),
            ),
            Refusal(
                f"{what}_int",
                cast(what, torch.int32),
                InputError,
                "torch.int32",
                DTYPES,
                "rounded away",
                norms,
                is_taken_by=INSTANCE if "running" in what else (),
            ),
            Refusal(f"{what}_number", put(**{what: 1.0}), InputTypeError, "float", "a tensor", "no broadcast", norms),
            Refusal(
                f"{what}_meta",
                both(what, lambda t: t.to("meta")),
                InputError,
                "meta",
                "cpu",
                "elsewhere",
                norms,
                is_taken_by=norms,
            ),
        )
    ),
    Refusal(
        "weight_row_evaluated",
        evaluated(weight=torch.ones(1, 4)),
        InputError,
        "(1, 4)",
        "(4,)",
        "where nothing is written",
        RUNNING,
        is_taken_by=BATCH,
    ),
    Refusal(
        "weight_row_alone",
        put(weight=torch.ones(1, 4), running_mean=None, running_var=None),
        InputError,
        "(1, 4)",
        "(4,)",
        "nor here",
        RUNNING,
        is_taken_by=BATCH,
    ),
    Refusal(
        "running_int",
        lambda k: {n: k[n].int() for n in ("running_mean", "running_var")} | {"weight": None, "bias": None},
        InputError,
        "torch.int32",
        DTYPES,
        "PyTorch's instance norm takes them, and rounds",
        RUNNING,
        is_taken_by=INSTANCE,
    ),
    Refusal("channels", put(input=random((3, 6, 5))), InputError, "(4,)", "(6,)", "more than parameters"),
    Refusal("only_mean", put(running_var=None), InputError, "running_var is", "both", "half of it", RUNNING),
    Refusal("only_var", put(running_mean=None), InputError, "running_mean is", "both", "the other half", RUNNING),
    Refusal(
        "no_running",
        evaluated(running_mean=None, running_var=None),
        InputError,
        "running_mean and running_var are None",
        "must be given",
        "nothing to normalize by",
        RUNNING,
    ),
    Refusal(
        "no_mean", evaluated(running_mean=None), InputError, "running_mean is None", "must be given", "half", RUNNING
    ),
    Refusal("no_var", evaluated(running_var=None), InputError, "running_var is None", "must be given", "half", RUNNING),
    Refusal(
        "mean_gradient",
        both("running_mean", lambda t: t.requires_grad_()),
        InputError,
        "running_mean requires a gradient",
        "detach",
        "it has none",
        RUNNING,
    ),
    Refusal(
        "var_gradient",
        lambda k: evaluated()(k) | {"running_var": k["running_var"].requires_grad_()},
        InputError,
        "running_var requires a gradient",
        "detach",
        "in evaluation too",
        RUNNING,
    ),
    Refusal(
        "var_expanded",
        put(running_var=torch.ones(1).expand(4)),
        InputError,
        "strides (0,)",
        "cannot be updated",
        "PyTorch's instance norm refuses it when running_mean is written, its batch norm writes whichever comes last",
        RUNNING,
        is_taken_by=BATCH,
    ),
    Refusal(
        "mean_expanded",
        put(running_mean=torch.zeros(1).expand(4)),
        InputError,
        "strides (0,)",
        "updated",
        "too",
        RUNNING,
        is_taken_by=BATCH,
    ),
    Refusal(
        "momentum_none", put(momentum=None), InputTypeError, "NoneType", "a float", "modules alone take it", RUNNING
    ),
    Refusal("momentum_str", put(momentum="0.1"), InputTypeError, "str", "a float", "as read from a file", RUNNING),
    Refusal(
        "momentum_tensor", put(momentum=torch.ones(4)), InputTypeError, "Tensor", "a float", "wrong order", RUNNING
    ),
    Refusal("training_int", put(training=1), InputTypeError, "training must be a bool", "int", "as PyTorch", BATCH),
    Refusal("training_zero", put(training=0), InputTypeError, "training must be a bool", "int", "falsy", BATCH),
    Refusal("training_tensor", put(training=torch.ones(4)), InputTypeError, "bool", "Tensor", "wrong order", BATCH),
    Refusal("stats_none", put(use_input_stats=None), InputTypeError, "use_input_stats", "bool", "falsy", INSTANCE),
    Refusal("stats_str", put(use_input_stats="no"), InputTypeError, "use_input_stats", "bool", "truthy", INSTANCE),
    Refusal("eps_none", put(eps=None), InputTypeError, "NoneType", "a float", "there is no default for it"),
    Refusal("eps_str", put(eps="1e-5"), InputTypeError, "str", "a float", "as read from a file"),
    Refusal("eps_tensor", put(eps=torch.ones(4)), InputTypeError, "Tensor", "a float", "arguments in the wrong order"),
    Refusal("eps_zero", put(eps=0.0), InputError, "is 0.0", "eps must be positive", "PyTorch refuses it", BATCH),
    Refusal("eps_negative", put(eps=-1.0), InputError, "is -1.0", "eps must be positive", "and this", BATCH),
    Refusal("eps_evaluated", evaluated(eps=-1.0), InputError, "is -1.0", "non-negative", "zero is allowed here", BATCH),
]
FOR_EACH = [(refusal, norm) for refusal in REFUSALS for norm in refusal.norms]


def assert_refused(norm: str, keywords: Keywords, error: type[WarpnormError], *said: str) -> None:
    """The class, the sentence, and that no tensor changed."""
    tensors = [value for value in keywords.values() if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
    before = [_bytes(tensor) for tensor in tensors]
    with pytest.raises(error) as caught:
        FUNCTIONS[norm](**keywords)
    message = str(caught.value)
    assert re.fullmatch(rf"{norm}: [^\n]+[^.\n]", message), message
    assert ". " not in message, f"more than one sentence: {message}"
    assert [part for part in said if part not in message] == [], message
    assert [_bytes(tensor) for tensor in tensors] == before, "something was written"


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


@pytest.mark.parametrize(("refusal", "norm"), FOR_EACH, ids=lambda p: getattr(p, "name", p))
def test_is_refused_in_one_sentence_and_writes_nothing(refusal: Refusal, norm: str) -> None:
    keywords = good(norm) | refusal.change(good(norm))
    assert_refused(norm, keywords, refusal.error, refusal.given, refusal.allowed)
    assert_refused(norm, keywords | {"return_stats": True}, refusal.error, refusal.given, refusal.allowed)
    assert_refused(norm, keywords | {"out": torch.full((3, 4, 5), float("nan"))}, refusal.error)


@pytest.mark.parametrize(("refusal", "norm"), FOR_EACH, ids=lambda p: getattr(p, "name", p))
def test_pytorch_refuses_it_too(refusal: Refusal, norm: str) -> None:
    """Or takes it, where the case says so and why; and its error is of a kind that ours is, but for accidents."""
    keywords = good(norm) | refusal.change(good(norm))
    accidents = (IndexError, ZeroDivisionError, AttributeError)
    try:
        PYTORCH[norm](**keywords)
    except accidents:
        return
    except (RuntimeError, ValueError, TypeError) as error:
        kinds = tuple(kind for kind in (RuntimeError, ValueError, TypeError) if isinstance(error, kind))
        assert issubclass(refusal.error, kinds) or issubclass(refusal.error, InputTypeError)
    else:
        assert norm in refusal.is_taken_by, refusal.why


@by_norm
def test_error_inputs_of_pytorch(norm: str) -> None:
    """group_norm alone has some; the others are given those that fit."""
    count = 0
    for operator in op_db:
        if operator.name != "nn.functional.group_norm" or operator.error_inputs_func is None:
            continue
        for error in operator.error_inputs("cpu"):
            sample = error.sample_input
            keywords = {
                "group_norm": {"num_groups": sample.args[0]},
                "batch_norm": {"running_mean": None, "running_var": None},
            }
            if norm == "group_norm" or sample.input.ndim < 2:
                with pytest.raises(error.error_type, match=f"^{norm}: "):
                    FUNCTIONS[norm](sample.input, **keywords.get(norm, {}))
                count += 1
    assert count == (2 if norm == "group_norm" else 1)


@dataclass(frozen=True)
class Doubtful:
    name: str
    keywords: Keywords
    why: str
    norms: tuple[str, ...] = ALL


DOUBTFUL = [
    Doubtful("eps_bool", {"eps": True}, "PyTorch takes it as 1.0"),
    Doubtful("eps_scalar", {"eps": torch.tensor(0.1)}, "PyTorch takes a tensor without dimensions"),
    Doubtful("eps_numpy", {"eps": np.float32(0.1)}, "a number of another library"),
    Doubtful("eps_int", {"eps": 1}, "a number that is no float"),
    Doubtful("eps_zero", {"eps": 0.0}, "PyTorch's batch norm alone refuses it", (*GROUP, *INSTANCE)),
    Doubtful("eps_negative", {"eps": -1e-3}, "in PyTorch's samples of group norm", (*GROUP, *INSTANCE)),
    Doubtful("momentum_bool", {"momentum": True}, "PyTorch takes it as 1.0", RUNNING),
    Doubtful("momentum_scalar", {"momentum": torch.tensor(0.25)}, "a tensor without dimensions", RUNNING),
    Doubtful("momentum_large", {"momentum": 7.5}, "no average, but a number", RUNNING),
    Doubtful("momentum_nan", {"momentum": float("nan")}, "not a number, but a float", RUNNING),
    Doubtful("groups_numpy", {"num_groups": np.int64(2)}, "an int of another library", GROUP),
    Doubtful("groups_scalar", {"num_groups": torch.tensor(2)}, "a tensor without dimensions", GROUP),
]


@pytest.mark.parametrize(
    ("case", "norm"), [(case, norm) for case in DOUBTFUL for norm in case.norms], ids=lambda p: getattr(p, "name", p)
)
def test_argument_is_taken_whatever_else_is_passed(case: Doubtful, norm: str) -> None:
    """What PyTorch accepts the functions accept, and the same way next to a keyword of their own."""
    results = []
    for call in (
        PYTORCH[norm],
        FUNCTIONS[norm],
        lambda **keywords: FUNCTIONS[norm](**keywords, return_stats=True)[0],
    ):
        keywords = good(norm) | case.keywords
        output = call(**keywords)
        results.append([output, *(keywords[name] for name in ("running_mean", "running_var") if name in keywords)])
    for found in results[1:]:
        for mine, its in zip(found, results[0], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class BadOut:
    """`change` gets the keywords of a good call and adds `out`; it may move the other tensors."""

    name: str
    change: Change
    given: str
    allowed: str
    why: str
    error: type[WarpnormError] = InputError
    norms: tuple[str, ...] = ALL


def in_one_buffer(input_at: int, out_at: int) -> Change:
    """Input and out are (3, 4, 5) windows of one buffer."""

    def change(_: Keywords) -> Keywords:
        buffer = random((100,), seed=5)
        views = [buffer.as_strided((3, 4, 5), (20, 5, 1), at) for at in (input_at, out_at)]
        return {"input": views[0], "out": views[1]}

    return change


def over(name: str) -> Change:
    def change(_: Keywords) -> Keywords:
        buffer = random((3, 4, 5), seed=5).abs()
        return {name: buffer[1, :, 2], "out": buffer}

    return change


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


BAD_OUTS = [
    BadOut("list", put(out=[0.0]), "list", "a tensor", "not a tensor", InputTypeError),
    BadOut("shape", put(out=poisoned(3, 4, 6)), "(3, 4, 6)", "(3, 4, 5)", "too wide"),
    BadOut("dtype", put(out=poisoned(3, 4, 5, dtype=torch.float64)), "float64", "float32", "no hidden cast"),
    BadOut("device", put(out=torch.empty(3, 4, 5, device="meta")), "meta", "cpu", "elsewhere"),
    BadOut("expanded", put(out=torch.zeros(1, 4, 5).expand(3, 4, 5)), "(0, 5, 1)", "share memory", "over each other"),
    BadOut("shifted", in_one_buffer(0, 5), "overlaps input", "input itself", "by a channel"),
    BadOut("shifted_back", in_one_buffer(20, 0), "overlaps input", "input itself", "by a sample, the other way"),
    BadOut("over_weight", over("weight"), "overlaps weight", "apart", "the weight would be overwritten"),
    BadOut("over_bias", over("bias"), "overlaps bias", "apart", "and so would the bias"),
    BadOut("over_mean", over("running_mean"), "overlaps running_mean", "apart", "written twice", norms=RUNNING),
    BadOut("over_var", over("running_var"), "overlaps running_var", "apart", "written twice", norms=RUNNING),
    *(
        BadOut(
            f"{name}_gradient",
            lambda k, name=name: {name: k[name].requires_grad_(), "out": poisoned(3, 4, 5)},
            "gradient",
            "torch.no_grad()",
            "out= is not recorded",
        )
        for name in ("input", "weight", "bias")
    ),
    BadOut("out_gradient", put(out=poisoned(3, 4, 5).requires_grad_()), "gradient", "no_grad()", "a leaf in place"),
]


@pytest.mark.parametrize(
    ("case", "norm"), [(case, norm) for case in BAD_OUTS for norm in case.norms], ids=lambda p: getattr(p, "name", p)
)
def test_out_is_refused_and_nothing_is_written(case: BadOut, norm: str) -> None:
    for mode in ({}, evaluated()(good(norm))):
        keywords = good(norm) | case.change(good(norm)) | mode
        assert_refused(norm, keywords, case.error, case.given, case.allowed)
        assert_refused(norm, keywords | {"return_stats": True}, case.error)


@pytest.mark.parametrize("norm", RUNNING)
def test_buffers_with_a_gradient_are_taken_where_none_is_recorded(norm: str) -> None:
    keywords = good(norm)
    expected = FUNCTIONS[norm](**good(norm))
    keywords["running_mean"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(FUNCTIONS[norm](**keywords), expected)
        assert torch.equal(FUNCTIONS[norm](**keywords, return_stats=True)[0], expected)


@pytest.mark.parametrize("norm", RUNNING)
def test_expanded_buffers_are_taken_where_they_are_read(norm: str) -> None:
    keywords = good(norm) | evaluated()(good(norm)) | {"running_var": torch.full((1,), 2.0).expand(4)}
    expected = FUNCTIONS[norm](**keywords | {"running_var": torch.full((4,), 2.0)})
    torch.testing.assert_close(FUNCTIONS[norm](**keywords), expected)
