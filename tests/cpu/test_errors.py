"""Every refusal: its class, its one sentence, and that nothing was written. When tensors overlap is in
`test_overlap.py`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cpu.truth import FUNCTIONS, PYTORCH, random
from warpnorm import InputError, InputTypeError, WarpnormError

by_norm = pytest.mark.parametrize("norm", FUNCTIONS)
BUILT_IN = (RuntimeError, ValueError, TypeError)
Keywords = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """`change` gets the keywords of a good call, (4, 8) normalized over 8, and returns those to replace."""

    name: str
    change: Callable[[Keywords], Keywords]
    error: type[WarpnormError]
    given: str
    allowed: str
    why: str
    norms: tuple[str, ...] = ("layer_norm", "rms_norm")
    is_taken_by: tuple[str, ...] = ()  # PyTorch's functions that take it


def good(norm: str) -> Keywords:
    keywords: Keywords = {"input": random((4, 8)), "normalized_shape": (8,), "weight": random((8,), seed=1)}
    return keywords | ({"bias": random((8,), seed=2)} if norm == "layer_norm" else {})


def put(**keywords: Any) -> Callable[[Keywords], Keywords]:
    return lambda _: keywords


def cast(name: str, dtype: torch.dtype) -> Callable[[Keywords], Keywords]:
    return lambda k: {name: k[name].to(dtype)}


DTYPES = "float64, float32, float16 or bfloat16"
RMS, LAYER = ("rms_norm",), ("layer_norm",)
REFUSALS = [
    Refusal("input_list", put(input=[1.0] * 8), InputTypeError, "list", "a tensor", "not a tensor"),
    Refusal("input_none", put(input=None), InputTypeError, "NoneType", "a tensor", "a forgotten argument"),
    Refusal("input_int", cast("input", torch.int64), InputError, "torch.int64", DTYPES, "no statistics in integers"),
    Refusal("input_bool", cast("input", torch.bool), InputError, "torch.bool", DTYPES, "nor in truth values"),
    Refusal("input_float8", cast("input", torch.float8_e4m3fn), InputError, "float8_e4m3fn", DTYPES, "a storage type"),
    Refusal(
        "input_complex",
        cast("input", torch.complex64),
        InputError,
        "torch.complex64",
        DTYPES,
        "PyTorch's rms_norm alone takes it",
        is_taken_by=RMS,
    ),
    Refusal(
        "input_complex_alone",
        lambda k: {"input": k["input"].to(torch.complex64), "weight": None},
        InputError,
        "torch.complex64",
        DTYPES,
        "without a weight of another dtype it could slip through to PyTorch's operator",
        is_taken_by=RMS,
    ),
    Refusal(
        "input_int_no_rows",
        lambda k: {"input": k["input"][:0].to(torch.int32)},
        InputError,
        "torch.int32",
        DTYPES,
        "no elements, but still no statistics",
    ),
    Refusal("shape_missing", put(normalized_shape=None), InputTypeError, "neither", "normalized_dim", "one is needed"),
    Refusal("shape_and_dim", put(normalized_dim=-1), InputTypeError, "both", "normalized_dim", "which one counts?"),
    Refusal("shape_wrong", put(normalized_shape=(4,)), InputError, "(4,)", "(4, 8)", "not how the input ends"),
    Refusal("shape_too_long", put(normalized_shape=(1, 4, 8)), InputError, "(1, 4, 8)", "(4, 8)", "more dimensions"),
    Refusal("shape_empty", put(normalized_shape=()), InputError, "empty", "at least one", "no dimension to share"),
    Refusal("shape_negative", put(normalized_shape=(-1,)), InputError, "(-1,)", "(4, 8)", "-1 is no size here"),
    Refusal("shape_float", put(normalized_shape=8.0), InputTypeError, "8.0", "sequence of ints", "a size is an int"),
    Refusal("shape_floats", put(normalized_shape=(8.0,)), InputTypeError, "8.0", "sequence of ints", "in brackets too"),
    Refusal(
        "shape_str", put(normalized_shape="8"), InputTypeError, "'8'", "sequence of ints", "a sequence, but of what"
    ),
    Refusal(
        "dim_high", put(normalized_shape=None, normalized_dim=2), InputError, "is 2", "-2 to 1", "one past the end"
    ),
    Refusal(
        "dim_low", put(normalized_shape=None, normalized_dim=-3), InputError, "-3", "-2 to 1", "one before the first"
    ),
    Refusal(
        "dim_float", put(normalized_shape=None, normalized_dim=1.0), InputTypeError, "float", "an int", "no rounding"
    ),
    Refusal(
        "dim_bool", put(normalized_shape=None, normalized_dim=True), InputTypeError, "bool", "an int", "True is not 1"
    ),
    Refusal("weight_shape", put(weight=torch.ones(4)), InputError, "(4,)", "(8,)", "another width"),
    Refusal("weight_row", put(weight=torch.ones(1, 8)), InputError, "(1, 8)", "(8,)", "broadcast is not equal"),
    Refusal("weight_one", put(weight=torch.ones(1)), InputError, "(1,)", "(8,)", "one number has no dimensions"),
    Refusal(
        "weight_int", cast("weight", torch.int64), InputError, "torch.int64", DTYPES, "not a parameter", is_taken_by=RMS
    ),
    Refusal(
        "weight_complex",
        cast("weight", torch.complex64),
        InputError,
        "torch.complex64",
        DTYPES,
        "PyTorch's rms_norm drops the imaginary part",
        is_taken_by=RMS,
    ),
    Refusal("weight_list", put(weight=[1.0] * 8), InputTypeError, "list", "a tensor or a number", "not a tensor"),
    Refusal("weight_bool", put(weight=True), InputTypeError, "bool", "a tensor or a number", "a misplaced flag"),
    Refusal("weight_complex_number", put(weight=1j), InputTypeError, "complex", "a tensor or a number", "not real"),
    Refusal("weight_device", lambda k: {"weight": k["weight"].to("meta")}, InputError, "meta", "cpu", "elsewhere"),
    Refusal("bias_shape", put(bias=torch.ones(4)), InputError, "(4,)", "(8,)", "another width", LAYER),
    Refusal("bias_scalar", put(bias=torch.tensor(1.0)), InputError, "()", "(8,)", "only a weight may be one", LAYER),
    Refusal("bias_number", put(bias=1.0), InputTypeError, "float", "a tensor", "only a weight may be one", LAYER),
    Refusal("bias_int", cast("bias", torch.int64), InputError, "torch.int64", DTYPES, "not a parameter", LAYER),
    Refusal("bias_device", lambda k: {"bias": k["bias"].to("meta")}, InputError, "meta", "cpu", "elsewhere", LAYER),
    Refusal("eps_none", put(eps=None), InputTypeError, "NoneType", "a float", "rms_norm alone has a default", LAYER),
    Refusal("eps_str", put(eps="1e-5"), InputTypeError, "str", "a float", "as read from a file"),
    Refusal("eps_complex", put(eps=1j), InputTypeError, "complex", "a float", "not real"),
    Refusal("eps_tensor", put(eps=torch.ones(8)), InputTypeError, "Tensor", "a float", "arguments in the wrong order"),
    Refusal("offset_str", put(weight_offset="1"), InputTypeError, "str", "a float", "as read from a file"),
    Refusal(
        "offset_bool", put(weight_offset=True), InputTypeError, "bool", "a float", "a flag elsewhere, a number here"
    ),
    Refusal("offset_none", put(weight_offset=None), InputTypeError, "NoneType", "a float", "falsy, but no number"),
    Refusal("offset_empty", put(weight_offset=""), InputTypeError, "str", "a float", "falsy, but no number"),
    Refusal(
        "offset_tensor", put(weight_offset=torch.ones(8)), InputTypeError, "Tensor", "a float", "has no truth value"
    ),
    Refusal(
        "offset_alone", put(weight=None, weight_offset=1.0), InputError, "1.0", "no weight", "nothing to add it to"
    ),
]
FOR_EACH = [(refusal, norm) for refusal in REFUSALS for norm in refusal.norms]


def assert_refused(norm: str, keywords: Keywords, error: type[WarpnormError], *said: str) -> WarpnormError:
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
    return caught.value


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize(("refusal", "norm"), FOR_EACH, ids=lambda p: getattr(p, "name", p))
def test_is_refused_in_one_sentence_and_writes_nothing(refusal: Refusal, norm: str) -> None:
    keywords = good(norm) | refusal.change(good(norm))
    assert_refused(norm, keywords, refusal.error, refusal.given, refusal.allowed)
    assert_refused(norm, keywords | {"out": poisoned(4, 8)}, refusal.error)


@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore:Casting complex")
@pytest.mark.parametrize(("refusal", "norm"), FOR_EACH, ids=lambda p: getattr(p, "name", p))
def test_error_is_of_the_kind_that_pytorch_raises(refusal: Refusal, norm: str) -> None:
    keywords = good(norm) | refusal.change(good(norm))
    if keywords.keys() - good(norm).keys() - {"eps"}:
        assert issubclass(refusal.error, BUILT_IN)
    elif norm in refusal.is_taken_by:
        assert isinstance(PYTORCH[norm](**keywords), torch.Tensor), refusal.why
    else:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            PYTORCH[norm](**keywords)
        kinds = tuple(kind for kind in BUILT_IN if isinstance(caught.value, kind))
        assert kinds
        assert issubclass(refusal.error, kinds)


def test_classes_are_what_users_of_pytorch_catch() -> None:
    assert issubclass(InputError, RuntimeError)
    assert issubclass(InputError, ValueError)
    assert issubclass(InputTypeError, TypeError)
    assert issubclass(InputError, WarpnormError)
    assert issubclass(InputTypeError, WarpnormError)


@dataclass(frozen=True)
class Doubtful:
    name: str
    keywords: Keywords
    why: str


DOUBTFUL = [
    Doubtful("eps_bool", {"eps": True}, "PyTorch takes it as 1.0"),
    Doubtful("eps_scalar", {"eps": torch.tensor(0.1)}, "PyTorch takes a tensor without dimensions"),
    Doubtful("eps_numpy", {"eps": np.float32(0.1)}, "a number of another library"),
    Doubtful("eps_int", {"eps": 1}, "a number that is no float"),
    Doubtful("shape_numpy", {"normalized_shape": [np.int64(8)]}, "an int of another library"),
    Doubtful("shape_scalar", {"normalized_shape": [torch.tensor(8)]}, "PyTorch takes a tensor without dimensions"),
]


@by_norm
@pytest.mark.parametrize("case", DOUBTFUL, ids=lambda case: case.name)
def test_argument_is_taken_or_refused_whatever_else_is_passed(case: Doubtful, norm: str) -> None:
    """What PyTorch accepts the functions accept, and the same way next to a keyword of their own."""
    keywords = good(norm) | case.keywords
    expected = PYTORCH[norm](**keywords)
    assert torch.equal(FUNCTIONS[norm](**keywords), expected)
    assert torch.equal(FUNCTIONS[norm](**keywords, return_stats=True)[0], expected)


@dataclass(frozen=True)
class BadOut:
    """`change` gets the keywords of a good call and adds `out`; it may move the other tensors."""

    name: str
    change: Callable[[Keywords], Keywords]
    given: str
    allowed: str
    why: str
    error: type[WarpnormError] = InputError
    norms: tuple[str, ...] = ("layer_norm", "rms_norm")


def in_one_buffer(input_at: int, out_at: int, stride: int = 8) -> Callable[[Keywords], Keywords]:
    """Input and out are (4, 8) windows of one buffer."""

    def change(keywords: Keywords) -> Keywords:
        buffer = random((100,), seed=5)
        views = [buffer.as_strided((4, 8), (stride, 1), at) for at in (input_at, out_at)]
        return {"input": views[0], "out": views[1]}

    return change


def over_parameter(name: str) -> Callable[[Keywords], Keywords]:
    def change(keywords: Keywords) -> Keywords:
        buffer = random((4, 8), seed=5)
        return {name: buffer[2], "out": buffer}

    return change


def over_foreign_memory(keywords: Keywords) -> Keywords:
    memory = np.arange(40, dtype=np.float32)
    return {"input": torch.from_numpy(memory[:32]).view(4, 8), "out": torch.from_numpy(memory[4:36]).view(4, 8)}


def transposed_onto_itself(keywords: Keywords) -> Keywords:
    square = random((8, 8))
    return {"input": square, "out": square.t()}


BAD_OUTS = [
    BadOut("list", put(out=[0.0]), "list", "a tensor", "not a tensor", InputTypeError),
    BadOut("shape", put(out=poisoned(4, 7)), "(4, 7)", "(4, 8)", "too narrow"),
    BadOut("broadcast", put(out=poisoned(2, 4, 8)), "(2, 4, 8)", "(4, 8)", "would fit by broadcasting"),
    BadOut("flat", put(out=poisoned(32)), "(32,)", "(4, 8)", "as many elements, another shape"),
    BadOut("dtype", put(out=poisoned(4, 8, dtype=torch.float64)), "torch.float64", "torch.float32", "no hidden cast"),
    BadOut("device", put(out=torch.empty(4, 8, device="meta")), "meta", "cpu", "elsewhere"),
    BadOut("expanded", put(out=torch.zeros(1, 8).expand(4, 8)), "(0, 1)", "share memory", "rows over each other"),
    BadOut("windows", put(out=torch.zeros(40).as_strided((4, 8), (4, 1))), "(4, 1)", "share memory", "rows half over"),
    BadOut("shifted_columns", in_one_buffer(0, 1), "overlaps input", "input itself", "read after it was written"),
    BadOut("shifted_rows", in_one_buffer(0, 8), "overlaps input", "input itself", "by a whole row"),
    BadOut("shifted_back", in_one_buffer(16, 0), "overlaps input", "input itself", "the other way"),
    BadOut("packed_shifted", in_one_buffer(4, 0, stride=24), "overlaps input", "input itself", "slices that meet"),
    BadOut("transposed", transposed_onto_itself, "overlaps input", "input itself", "same memory, another order"),
    BadOut("foreign_memory", over_foreign_memory, "overlaps input", "input itself", "two storages over one array"),
    BadOut("over_weight", over_parameter("weight"), "overlaps weight", "apart", "the weight would be overwritten"),
    BadOut("over_bias", over_parameter("bias"), "overlaps bias", "apart", "and so would the bias", norms=LAYER),
    BadOut(
        "input_gradient",
        lambda k: {"input": k["input"].requires_grad_(), "out": poisoned(4, 8)},
        "gradient",
        "torch.no_grad()",
        "out= is not recorded",
    ),
    BadOut(
        "weight_gradient",
        lambda k: {"weight": k["weight"].requires_grad_(), "out": poisoned(4, 8)},
        "gradient",
        "torch.no_grad()",
        "for the weight either",
    ),
    BadOut(
        "bias_gradient",
        lambda k: {"bias": k["bias"].requires_grad_(), "out": poisoned(4, 8)},
        "gradient",
        "torch.no_grad()",
        "nor for the bias",
        norms=LAYER,
    ),
    BadOut("out_gradient", put(out=poisoned(4, 8).requires_grad_()), "gradient", "torch.no_grad()", "a leaf in place"),
]


@pytest.mark.parametrize(
    ("case", "norm"), [(case, norm) for case in BAD_OUTS for norm in case.norms], ids=lambda p: getattr(p, "name", p)
)
def test_out_is_refused_and_left_alone(case: BadOut, norm: str) -> None:
    keywords = good(norm) | case.change(good(norm))
    assert_refused(norm, keywords, case.error, case.given, case.allowed)
    assert_refused(norm, keywords | {"return_stats": True}, case.error)


@by_norm
@pytest.mark.parametrize(("input_at", "out_at"), [(0, 8), (8, 0), (0, 16), (16, 8)])
def test_out_beside_the_input_in_a_packed_tensor_is_taken(input_at: int, out_at: int, norm: str) -> None:
    """The ranges of the two interleave, their elements do not."""
    keywords = good(norm) | in_one_buffer(input_at, out_at, stride=24)({})
    out = keywords.pop("out")
    expected = FUNCTIONS[norm](**keywords)
    assert torch.equal(FUNCTIONS[norm](**keywords, out=out), expected)
