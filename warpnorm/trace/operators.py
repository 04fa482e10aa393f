"""The one table of what a prologue or an epilogue may hold: aten operator -> Triton expression.
`{0}`, `{1}` stand for the arguments. One more operator is one more row here and one more test case."""

from warpnorm.errors import OperatorError

TRITON: dict[str, str] = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.neg.default": "-{0}",
}


def check(operator: str) -> None:
    if operator not in TRITON:
        raise OperatorError(f"{operator} is not among the operators that can be fused: {', '.join(sorted(TRITON))}")
