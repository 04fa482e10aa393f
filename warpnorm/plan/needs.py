"""What a problem needs of a device: the registers of a value, the bytes that are loaded, the loads in flight."""

from warpnorm.plan.device import Device
from warpnorm.problem import BackwardProblem, ForwardProblem, Operand, Problem, is_varying, operand_name

# Bytes of loads in flight on one multiprocessor that hide the latency of memory while a program reduces. LayerNorm
# backward, 8192 columns: 60 % with 32 KB in flight, 94 with 64, 90 with 96.
IN_FLIGHT_BYTES = 48 * 1024
# Shared memory left for what a reduction needs.
SPARE_SHARED_BYTES = 4 * 1024
# What an element takes an instruction or two for.
QUICK = frozenset({
    "add", "sub", "mul", "neg", "abs", "relu", "maximum", "minimum", "where", "convert",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not",
})  # fmt: skip
# What takes little longer, or is kept (codegen/kept.py), where a row is visited twice.
AGAIN = frozenset({"erf", "sigmoid"})


def kept(problem: BackwardProblem) -> tuple[Operand, ...]:
    """The operands by which the prologue is differentiated, and the epilogue, where they vary by row."""
    prologue, epilogue = problem.prologue_vjp.used_inputs, problem.epilogue_vjp.used_inputs
    return tuple(
        o
        for i, o in enumerate(problem.operands)
        if operand_name(i) in prologue or (operand_name(i) in epilogue and is_varying(o))
    )


def is_quick(problem: ForwardProblem | BackwardProblem) -> bool:
    """Whether what is computed of an element before and after the norm is next to nothing."""
    return all(operator in QUICK for operator in _operators(problem))


def is_quick_again(problem: ForwardProblem | BackwardProblem) -> bool:
    """Whether the prologue takes little to compute a second time, or is kept: an operator of AGAIN, and quick ones."""
    slow = [node.operator for node in problem.prologue.nodes if node.operator not in QUICK]
    return len(slow) <= 1 and AGAIN.issuperset(slow)


def is_quick_after(problem: BackwardProblem) -> bool:
    """Whether what is computed of what stands after the norm is next to nothing."""
    return all(node.operator in QUICK for node in problem.epilogue_vjp.nodes)


def draws(problem: ForwardProblem | BackwardProblem) -> bool:
    """Whether there is a mask of dropout to be drawn, which takes registers for four elements at once."""
    return "keep" in _operators(problem)


def _operators(problem: ForwardProblem | BackwardProblem) -> list[str]:
    epilogue = problem.epilogue_vjp if isinstance(problem, BackwardProblem) else problem.epilogue
    return [node.operator for graph in (problem.prologue, epilogue) for node in graph.nodes]


def moves_vectors(problem: Problem) -> bool:
    """Whether rows are best moved as whole vectors are: where these are smaller than 16 bytes, as rows begin at multiples of
    fewer, plans for elements alone may be faster. Those in brackets. Of 8 bytes, LayerNorm and RMSNorm at 100 and 300: 80
    and 93, 94 and 92 [57 and 76, 67 and 86]; at 12300 91 and 93 [82 and 86], at 16380 88 and 93 [82 and 82], at 20484 85 and
    95 [84 and 87], at 32772 66 and 85 [83 and 84]; backward at 300 87 and 91 [54 and 61], at 652 89 and 95 [72 and 75], at
    1004 97 and 98 [84 and 88], at 4092 96 and 83 [78 and 82], at 8188 75 and 79 [69 and 73]. Of 4 bytes at 50 71 and 68 [31
    and 40], at 250 80 and 93 [79 and 94], at 16378 83 and 91 [76 and 85], at 20482 76 and 93 [83 and 85], at 30522 71 and 77
    [78 and 83], at 32770 63 and 74 [80 and 83]; backward at 1002 85 and 90 [84 and 88], at 4094 73 and 81 [77 and 81], at
    8190 62 and 74 [68 and 72]."""
    if problem.has_vectors or problem.neighbours == 1 or problem.norm.is_by_channel:
        return problem.has_vectors
    cols, is_narrow = problem.cols_class, problem.width <= 24576
    if isinstance(problem, BackwardProblem):
        return cols <= 1024 or (problem.neighbours >= 4 and cols <= 8192)
    is_wide = cols == 32768 and not problem.norm.is_centered and (is_narrow or problem.neighbours >= 4)
    return cols <= 512 or cols == 16384 or is_wide


def stages(device: Device, per_unit: int, stage_bytes: int, in_flight: int = IN_FLIGHT_BYTES) -> int:
    """Enough stages for the bytes in flight, as far as shared memory has room; n of them keep n - 1 in flight."""
    if stage_bytes == 0:  # nothing varies by row and column alike
        return 1
    wanted = min(max(-(-in_flight // (per_unit * stage_bytes)), 1), 3)
    room = (device.shared_bytes // per_unit - SPARE_SHARED_BYTES) // stage_bytes
    return 1 + max(0, min(wanted, room))


def loaded_bytes(operands: tuple[Operand, ...], elements: int) -> int:
    return sum(operand.dtype.itemsize for operand in operands if is_varying(operand)) * elements


def itemsize(problem: Problem) -> int:
    return max((operand.dtype.itemsize for operand in problem.varying), default=4)


def words(problem: Problem) -> int:
    """Registers that one value takes."""
    return problem.compute.itemsize // 4
