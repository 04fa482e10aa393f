"""The operators that stand for calls in `torch.library`: PyTorch's own checks of them, second derivatives, and the texts
that they are told, which are refused if they say anything but a call."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import warpnorm
from warpnorm import library, routing, settings
from warpnorm.errors import InputError
from warpnorm.fuse import NOTHING, arrange
from warpnorm.launch import call_text
from warpnorm.problem import Call

norm, norm_backward = torch.ops.warpnorm.norm.default, torch.ops.warpnorm.norm_backward.default
CHANNEL = (False, True, False, False)


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    why: str
    dtype: torch.dtype = torch.float32
    numbers: tuple[float, ...] = ()

    def operands(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(shape, dtype=self.dtype, requires_grad=True) for shape in self.shapes]


def text(name: str, axes: Any, dtype: torch.dtype = torch.float32, groups: int = 0, **flags: Any) -> str:
    has_weight = flags.pop("has_weight", len(axes) > 1)
    dtypes = [dtype for a in axes if a != "number"]
    return library.affine_text(name, 1, 1e-5, has_weight, len(axes) > 2, 0.0, axes, dtypes, dtype, groups, **flags)


def captured(function: Any, *args: torch.Tensor) -> Call:
    fused = warpnorm.fuse(function)
    request = fused.request(NOTHING, args, {})
    return arrange(fused.prepare(request), request.tensors)[0]


def fused_text() -> str:
    x = torch.randn(5, 64, requires_grad=True)
    found = captured(lambda x, r, w: (F.layer_norm(x + r, (64,), w).clamp(-1, float("inf")), x + r), x, x.clone(), x[0])
    written = call_text.written(found, (torch.float32,) * 3)
    assert written is not None
    return written


CASES = [
    Case("layer_norm", text("layer_norm", ("full", "column", "column")), ((5, 64), (64,), (64,)), "two statistics"),
    Case("rms_norm", text("rms_norm", ("full", "column"), torch.bfloat16), ((5, 64), (64,)), "16 bits", torch.bfloat16),
    Case("double", text("rms_norm", ("full",), torch.float64), ((5, 64),), "statistics in 64 bits", torch.float64),
    Case("number", text("rms_norm", ("full", "number")), ((5, 64),), "a weight that is no tensor", numbers=(2.0,)),
    Case("batch_norm", text("batch_norm", ("full", CHANNEL)), ((3, 4, 5, 5), (4, 1, 1)), "three statistics"),
    Case("group_norm", text("group_norm", ("full", CHANNEL), groups=2), ((3, 4, 5, 5), (4, 1, 1)), "rows are groups"),
    Case("fixed_norm", text("batch_norm", ("full", CHANNEL, CHANNEL), is_fixed=True, has_weight=False)
         .replace("[1e-05,false,true]", "[1e-05,false,false]"), ((3, 4, 5, 5), (4, 1, 1), (4, 1, 1)), "no statistics"),
    Case("fused", fused_text(), ((5, 64), (5, 64), (64,)), "a sum that is kept instead of its summands"),
]  # fmt: skip


@pytest.fixture(params=["auto", "reference"])
def route(request: pytest.FixtureRequest) -> Any:
    """By native code where there is a compiler, and by PyTorch's operators where there is none."""
    with settings.override(route=request.param):
        yield request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck(case: Case, route: str) -> None:
    operands = case.operands()
    if case.name == "fixed_norm":
        operands[2] = operands[2].detach().abs().requires_grad_()
    opcheck(norm, (operands, list(case.numbers), case.text))
    call, _ = call_text.read(case.text)
    made = norm([o.detach() for o in operands], list(case.numbers), case.text)
    outputs, rows = made[: len(call.outputs)], made[len(call.outputs) :]
    given = list(range(len(outputs)))
    grads = [torch.randn_like(output).requires_grad_() for output in outputs]
    wanted = list(range(len(operands)))
    arguments = (grads, given, operands, list(case.numbers), list(rows), wanted, case.text)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(norm_backward, arguments, test_utils=checks)


def test_second_derivatives() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, dtype=torch.float64, requires_grad=True)
    written = text("layer_norm", ("full", "column"), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: norm([x, w], [], written)[0], (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: norm([x, w], [], written)[0], (x, w))


def test_no_rows() -> None:
    x, w = torch.empty(0, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    y, _, _ = norm([x, w], [], text("layer_norm", ("full", "column")))
    y.sum().backward()
    assert y.shape == (0, 64)
    assert torch.equal(w.grad, torch.zeros(64))  # type: ignore[arg-type]


@pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_was_seen_before(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the first one, by one look-up; other layouts and settings are other calls."""
    operands = [operand.detach() for operand in case.operands()]
    count = len(call_text.read(case.text)[0].outputs)
    first = norm(operands, case.numbers, case.text)
    grads = [torch.randn_like(output) for output in first[:count]]
    rest = list(range(count)), operands, case.numbers, first[count:], list(range(len(operands))), case.text
    gradients = norm_backward(grads, *rest)
    with monkeypatch.context() as patch:
        patch.setattr(library, "_call_of", None)
        again = norm(operands, case.numbers, case.text)
        torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
        if case.name != "fused":  # whose two terms have one gradient
            torch.testing.assert_close(norm_backward(grads, *rest), gradients, rtol=0, atol=0, equal_nan=True)
        with pytest.raises(TypeError):
            norm([operands[0].mT.contiguous().mT, *operands[1:]], case.numbers, case.text)
        with pytest.raises(TypeError), settings.override(route="reference"):
            norm(operands, case.numbers, case.text)
    with pytest.raises(InputError, match="but got"):
        norm(operands, [*case.numbers, 1.0], case.text)


@pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")
def test_plain_calls_never_come_by_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a call that nobody traces went to the operator")

    monkeypatch.setattr(library, "normalize", refuse)
    x = torch.randn(4, 2048, requires_grad=True)
    for _ in range(3):
        warpnorm.layer_norm(x, (2048,)).sum().backward()
        warpnorm.batch_norm(torch.randn(4, 32, 32, 32), None, None, training=True)
        warpnorm.fuse(lambda x: F.rms_norm(x * 2, (2048,)))(x).sum().backward()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_text_says_all_of_a_call(case: Case) -> None:
    call, dtypes = call_text.read(case.text)
    assert call_text.written(call, dtypes) == case.text
    assert call_text.read.__wrapped__(case.text) == (call, dtypes)


def changed(path: tuple[Any, ...], value: Any) -> str:
    whole = json.loads(fused_text())
    place = whole
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(whole)


STEP = ("epilogue", "expression", "steps", 0)
DAMAGED = {
    "nothing": "",
    "no_json": "Call(norm)",
    "no_record": "[1]",
    "other_format": changed(("format",), 0),
    "unknown_norm": changed(("norm",), "softmax"),
    "unknown_field": changed(("more",), 1),
    "eps_of_text": changed(("eps",), "1e-5"),
    "negative_dims": changed(("col_dims",), -1),
    "unknown_axes": changed(("axes", 0), "diagonal"),
    "no_operand": changed(("operands",), ["float32", "float32"]),
    "no_dtype": changed(("outputs", 0), "nn"),
    "unknown_function": changed(("prologue",), {"exec": []}),
    "not_elementwise": changed((*STEP, 1), "aten.sort.default"),
    "writes": changed((*STEP, 1), "aten.mul_.Tensor"),
    "other_namespace": changed((*STEP, 1), "prims.add.default"),
    "no_operator": changed((*STEP, 1), "aten.__class__.default"),
    "unknown_name": changed((*STEP, 2, 0), {"ref": "somewhere"}),
    "unknown_argument": changed((*STEP, 2, 0), {"code": "1"}),
    "number_of_code": changed((*STEP, 2, 0), {"number": "__import__('os')"}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_other_texts_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="this is not the text of a call"):
        norm([torch.randn(5, 64)] * 3, [], DAMAGED[name])


def test_what_is_drawn_has_no_text() -> None:
    call = captured(lambda x: F.layer_norm(F.dropout(x, 0.5), (64,)), torch.randn(5, 64))
    assert call_text.written(call, (torch.float32,)) is None


@pytest.mark.parametrize(
    ("operands", "numbers", "message"),
    [
        ([torch.randn(5, 64).double(), torch.ones(64)], [], "made for float32, float32, but got float64, float32"),
        ([torch.randn(5, 64), torch.ones(64, dtype=torch.complex64)], [], "but got float32, complex64"),
        ([torch.randn(5, 64)], [], "takes 2 tensors and 0 numbers, but got 1 and 0"),
        ([torch.randn(5, 64), torch.ones(64), torch.ones(64)], [], "but got 3 and 0"),
        ([torch.randn(5, 64), torch.ones(64)], [1.0], "but got 2 and 1"),
    ],
    ids=["wider", "complex", "one_less", "one_more", "a_number"],
)
def test_other_operands_are_refused(operands: Any, numbers: Any, message: str) -> None:
    """An exported program may be given anything."""
    with pytest.raises(InputError, match=message):
        norm(operands, numbers, text("rms_norm", ("full", "column")))
