"""What a problem needs of a device: the registers of a value, the bytes that are loaded, the loads in flight."""

from warpnorm.plan.device import Device
from warpnorm.problem import TILES, BackwardProblem, ForwardProblem, Operand, Problem, is_varying, operand_name

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
        if operand_name(i) in prologue or (operand_name(i) in epilogue and o.axes in TILES)
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
