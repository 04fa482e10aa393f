"""What all generated C has in common: values, addresses, and where everything stands among the arguments."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from warpnorm.codegen import expressions
from warpnorm.codegen.pointwise import graphs_of, loaded
from warpnorm.cpu import build
from warpnorm.problem import (
    COLUMN,
    FULL,
    NUMBER,
    ROW,
    SCALAR,
    TILES,
    BackwardProblem,
    ForwardProblem,
    Graph,
    Literal,
    Node,
    Operand,
    Problem,
    Stride,
    Value,
)
from warpnorm.trace.operators import C, is_cast

TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "uint16_t",
    torch.bfloat16: "uint16_t",
    torch.float8_e4m3fn: "uint8_t",
    torch.float8_e5m2: "uint8_t",
    torch.bool: "uint8_t",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
NARROW = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
WRAPPED = ("add", "sub", "mul", "neg", "abs")  # integers may be too large afterwards
BLOCK = 1024  # columns whose sum is taken in the dtype of computation


@cache
def too_large() -> int:
    """What is too large for a float8_e4m3fn is NaN up to PyTorch 2.12, and the largest number from then on."""
    return int(torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).view(torch.uint8))


def can_write(problem: Problem) -> bool:
    """Whether there is C for all dtypes of a problem."""
    tensors = [*problem.operands, *problem.results]
    if isinstance(problem, BackwardProblem):
        tensors += [*problem.grad_outputs, *problem.gradients]
    graphs = graphs_of(problem)
    return all(tensor.dtype in TYPES for tensor in tensors) and all(
        node.dtype in TYPES for graph in graphs for node in graph.nodes
    )


def is_across(problem: Problem) -> bool:
    lead = next((o for o in problem.operands if o.axes == FULL), None)
    return lead is not None and lead.col_strides[-1].literal != 1 and problem.cols_class > 1


def renamed(graph: Graph, prefix: str) -> Graph:
    """Several graphs in one body must not name two values alike."""
    names = {node.name: prefix + node.name for node in graph.nodes}

    def of(value: Value) -> Value:
        return names.get(value, value) if isinstance(value, str) else value

    nodes = tuple(replace(node, name=names[node.name], args=tuple(map(of, node.args))) for node in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple(map(of, graph.outputs)))


def laid_out(lines: Sequence[str]) -> str:
    """The text, with what is inside of braces moved in."""
    depth, found = 0, []
    for line in lines:
        depth -= line.startswith("}")
        found.append(line if line.startswith("#") else "    " * depth + line)
        depth += line.count("{") - line.count("}") + line.startswith("}")
    return "\n".join(found) + "\n"


class Writer:
    """What both directions share. Numbers that a function is called with: rows, columns, pieces of a row, lines between
    them, groups, then the sizes of axes, strides, and integers among the operands."""

    HEAD = 5

    def __init__(self, problem: ForwardProblem | BackwardProblem) -> None:
        self.problem = problem
        self.is_double = problem.compute == torch.float64
        self.type, self.suffix = ("double", "d") if self.is_double else ("float", "f")
        self.wide = "long double" if self.is_double else "double"
        self.block = BLOCK // 8 if self.is_double else BLOCK
        # Sums beside each other, four vectors of each kind: one alone would wait for every addition, more than that do not
        # stay in registers
        self.lanes = build.vector_bytes()
        self.tile = build.vector_bytes() // 2
        self.loaded = loaded(problem)
        self.prologue = renamed(problem.prologue, "c_")
        self.sizes = len(problem.size_divisors)
        self.lines: list[str] = []
        self.arrays: list[str] = []

    # Values

    def literal(self, value: Literal, is_float: bool) -> str:
        number = value.value
        if not is_float:
            return f"((int64_t){int(number)}ll)"
        number = float(number)
        if number != number:
            return f"(({self.type})NAN)"
        if number in (float("inf"), -float("inf")):
            return f"(({self.type}){'-' if number < 0 else ''}INFINITY)"
        return f"(({self.type}){number!r})"

    def code(self, graph: Graph) -> list[str]:
        dtypes = expressions.dtypes_of(graph, self.problem)
        return [f"const {self.type_of(dtypes[n.name])} {n.name} = {self.expression(n, dtypes)};" for n in graph.nodes]

    def type_of(self, dtype: torch.dtype) -> str:
        """Inside: floating ones in the dtype of computation, integers as wide as they come, booleans."""
        return self.type if dtype.is_floating_point else "int32_t" if dtype == torch.bool else "int64_t"

    def expression(self, node: Node, dtypes: dict[str, torch.dtype]) -> str:
        if is_cast(node.operator):
            return self.cast(node, dtypes)
        if node.operator == "keep":
            seed, offset, threshold, scale, stream = node.args
            assert isinstance(scale, Literal)
            is_kept = f"keep({seed}, {offset}, drawn * cols + col, {threshold}u, {stream}u)"
            return f"({is_kept} ? {self.literal(scale, True)} : 0)"
        if node.operator == "bitwise_not" and node.dtype == torch.bool:
            return f"({node.args[0]} == 0)"
        own = [dtypes[arg] for arg in node.args if isinstance(arg, str)]
        common = expressions.common_dtype(node, own, self.problem.compute)
        is_float = common.is_floating_point
        args = []
        for k, arg in enumerate(node.args):
            is_condition = node.operator == "where" and k == 0
            if not isinstance(arg, str):
                args.append(self.literal(arg, is_float))
            elif is_condition or dtypes[arg] == common:
                args.append(arg)
            else:
                args.append(f"(({self.type_of(common)}){arg})")
        whole = "{}"
        if not is_float and node.operator in WRAPPED:
            whole = self.wrap(common)
            args = args if node.operator == "abs" else [f"((uint64_t){arg})" for arg in args]
        return whole.format(C[node.operator].format(*args, s=self.suffix if is_float else "i"))

    def wrap(self, dtype: torch.dtype) -> str:
        """Integers are computed in 64 bits, without a sign, and wrap around in their own: C does not say what becomes of
        signed ones that are too large, and compilers take it that there are none."""
        return f"((int64_t)({TYPES[dtype]})({{}}))"

    def cast(self, node: Node, dtypes: dict[str, torch.dtype]) -> str:
        (arg,) = node.args
        source = dtypes[arg] if isinstance(arg, str) else self.problem.compute
        text = arg if isinstance(arg, str) else self.literal(arg, True)
        target = node.dtype
        if target == torch.bool:
            return f"({text} != 0)"
        if not target.is_floating_point:
            return f"((int64_t)({TYPES[target]})({'(int64_t)' * source.is_floating_point}{text}))"
        if source.is_floating_point and target in NARROW:
            return f"round_{NARROW[target]}_{self.suffix}({text})"
        if source.is_floating_point and target == torch.float32 and self.is_double:
            return f"round_fp32_d({text})"
        if target in NARROW:
            return f"round_{NARROW[target]}_{self.suffix}((float){text})"
        return f"(({self.type}){'(float)' * (target == torch.float32)}{text})"

    # Addresses

    def size(self, k: int) -> str:
        return f"n[{self.HEAD + k}]"

    def stride(self, slot: int) -> str:
        return f"n[{self.HEAD + self.sizes + slot}]"

    def indices(self, offset: str, axes: int, first: int) -> list[str]:
        """The index along each axis, from the offset into all of them; the last axis runs fastest."""
        found, rest = [], offset
        for size in range(first + axes - 2, first - 1, -1):
            found.append(f"({rest} % {self.size(size)})")
            rest = f"({rest} / {self.size(size)})"
        return [rest, *reversed(found)]

    def row_offset(self, operand: Operand, line: str = "line") -> str:
        terms = self.terms(self.indices(line, len(operand.row_strides), 0), operand.row_strides)
        return " + ".join(terms) or "0"

    def terms(self, indices: Sequence[str], strides: Sequence[Stride]) -> list[str]:
        found = []
        for index, stride in zip(indices, strides, strict=True):
            if stride.literal is None:
                found.append(f"{index} * {self.stride(stride.slot)}")
            elif stride.literal == 1:
                found.append(index)
        return found

    def col_offset(self, operand: Operand) -> str:
        """Of the outer axes of columns, which `outer` counts together."""
        strides = operand.col_strides[:-1]
        if not strides:
            return "0"
        first = len(operand.row_strides) - 1
        return " + ".join(self.terms(self.indices("outer", len(strides), first), strides)) or "0"

    def at(self, name: str, operand: Operand) -> str:
        """Where the element `j` of the innermost axis lies."""
        inner = operand.col_strides[-1]
        step = "" if inner.literal == 0 else " + j" if inner.literal == 1 else f" + j * {self.stride(inner.slot)}"
        return f"{name}_at{step}"

    def load(self, name: str, operand: Operand, place: str, is_alone: bool = False) -> str:
        """`is_alone`: a number that is not part of a block."""
        value = f"{name}_p[{place}]"
        if self.is_staged(operand) and not is_alone:
            value = f"{name}_stage[j - stage]"
        elif operand.dtype in NARROW:
            value = f"load_{NARROW[operand.dtype]}({value})"
        return f"const {self.type_of(operand.dtype)} {name} = ({self.type_of(operand.dtype)}){value};"

    def store(self, name: str, operand: Operand, value: str, place: str = "") -> str:
        if self.is_staged(operand):
            return f"{name}_stage[j - stage] = (float){value};"
        if operand.dtype in NARROW:
            value = f"store_{NARROW[operand.dtype]}((float){value})"
        elif operand.dtype == torch.bool:
            value = f"{value} != 0"
        elif not operand.dtype.is_floating_point:
            value = f"({TYPES[operand.dtype]})(int64_t){value}"
        return f"{name}_p[{place or self.at(name, operand)}] = ({TYPES[operand.dtype]})({value});"

    def is_staged(self, operand: Operand) -> bool:
        """Whether blocks of it, of numbers that lie side by side, are converted before they are used, or after: the compiler
        does not vectorize the instruction for that."""
        return operand.dtype == torch.float16 and self.is_dense(operand)

    def is_dense(self, operand: Operand) -> bool:
        return operand.axes in (*TILES, COLUMN) and [s.literal for s in operand.col_strides[-1:]] == [1]

    def stage(self, tensors: Sequence[tuple[str, Operand]], first: str, count: str, size: int) -> None:
        """`count` numbers from `first` on."""
        staged = [name for name, operand in tensors if self.is_staged(operand)]
        self.add(f"const int64_t stage = {first};", "(void)stage;")
        for name in staged:
            self.add(
                f"float {name}_stage[{size}];", f"stage_fp16({name}_stage, {name}_p + {name}_at + stage, {count});"
            )

    def open_stage(self, written: Sequence[tuple[str, Operand]], size: int) -> None:
        self.add(*(f"float {name}_stage[{size}];" for name, operand in written if self.is_staged(operand)))

    def close_stage(self, written: Sequence[tuple[str, Operand]], count: str) -> None:
        for name, operand in written:
            if self.is_staged(operand):
                self.add(f"unstage_fp16({name}_p + {name}_at + stage, {name}_stage, {count});")

    # Structure

    def add(self, *lines: str) -> None:
        self.lines += lines

    @property
    def reads_c(self) -> str | None:
        """The operand that c is itself, one number beside the other, so that nothing has to be kept of it."""
        (result,) = self.problem.prologue.outputs
        for _, name, operand in self.loaded:
            is_dense = (
                operand.col_strides[-1:] and operand.col_strides[-1].literal == 1 and len(operand.col_strides) == 1
            )
            if name == result and operand.dtype == self.problem.compute and operand.axes in TILES and is_dense:
                return name
        return None

    def declare(self, tensors: Sequence[tuple[str, Operand, int]], is_read: bool) -> None:
        for name, operand, place in tensors:
            if operand.axes != NUMBER:
                kind = TYPES[operand.dtype]
                self.add(f"{'const ' * is_read}{kind} *{name}_p = ({'const ' * is_read}{kind} *)p[{place}];")

    def begin(self, name: str) -> None:
        if not self.lines and self.problem.cols_class == 1:
            # the gradient of a lone column is a product minus its own mean: zero if the product is rounded both times
            self.add('#pragma GCC optimize("fp-contract=off")')
        if "#include" not in "".join(self.lines):
            self.add(f"#define TOO_LARGE {too_large()}u", '#include "pointwise.h"', "")
        self.add(
            f"int {name}(void **p, const int64_t *n, const double *r, int64_t part, int64_t parts) {{",
            f"const int64_t rows = n[0], cols = {self.cols}, pieces = n[2], inner_rows = n[3], groups = n[4];",
            "(void)pieces; (void)inner_rows; (void)groups;",
        )
        self.declare([(name, operand, i) for i, name, operand in self.loaded], True)
        numbers = [k for k, operand in enumerate(self.problem.operands) if operand.axes == NUMBER]
        reals = [k for k in numbers if self.problem.operands[k].dtype.is_floating_point]
        whole = [k for k in numbers if k not in reals]
        for k, name, operand in self.loaded:
            if k in reals and operand.axes == NUMBER:
                self.add(f"const {self.type} {name} = ({self.type})r[{4 + reals.index(k)}];")
            elif operand.axes == NUMBER:
                self.add(f"const int64_t {name} = {self.stride(self.strides + whole.index(k))};")
            elif operand.axes == SCALAR:
                self.add(self.load(name, operand, "0"))

    @property
    def cols(self) -> str:
        """A number where rows are short and of one of few widths, which loops fit then. A channel's columns are often the
        samples of a batch, of which there may be any number."""
        problem = self.problem
        is_fixed = problem.is_filled and problem.cols_class <= BLOCK and not problem.norm.is_by_channel
        return str(problem.width) if is_fixed else "n[1]"

    @property
    def strides(self) -> int:
        tensors = [*self.problem.operands, *self.problem.results]
        if isinstance(self.problem, BackwardProblem):
            tensors += [*self.problem.grad_outputs, *self.problem.gradients]
        slots = [s.slot for t in tensors for s in (*t.row_strides, *t.col_strides) if s.literal is None]
        return max(slots, default=-1) + 1

    def value(self, output: Value) -> str:
        return output if isinstance(output, str) else self.literal(output, isinstance(output.value, float))

    def c_lines(self, keeps: bool) -> tuple[list[str], tuple[str, ...]]:
        """How c comes about the first time, and what that reads."""
        graph = self.prologue
        lines = [*self.code(graph), f"const {self.type} c = {self.value(graph.outputs[0])};"]
        if keeps:
            lines += [f"kept_{name}[kept + col] = {name};" for name in self.kept_values]
        return lines, graph.used_inputs

    @property
    def kept_values(self) -> tuple[str, ...]:
        """Values of the first walk that the second one reads."""
        return () if self.reads_c else ("c",)

    def c_again(self) -> tuple[list[str], tuple[str, ...]]:
        name = self.reads_c
        if name is not None:
            return [f"const {self.type} c = {name};"], (name,)
        return [f"const {self.type} c = kept_c[kept + col];"], ()

    def xhat(self) -> str:
        norm = self.problem.norm
        if not norm.is_computed:
            return f"const {self.type} xhat = c;"
        apart = "(c - mean)" if norm.is_centered else "c"
        if isinstance(self.problem, ForwardProblem) and not self.problem.is_half:
            # what is rounded off of a row's statistic would be the same error in all its elements
            apart = f"({apart} - mean_rest)" if norm.is_centered else apart
            if not self.is_double:
                return f"const float apart = {apart}, xhat = apart * rstd + apart * rstd_rest;"
        return f"const {self.type} xhat = {apart} * rstd;"

    def finish_statistics(self) -> None:
        """From mean_w and variance_w of a row: what is rounded of them, and is averaged into running ones."""
        norm = self.problem.norm
        assert isinstance(self.problem, ForwardProblem)
        root = "sqrtl" if self.is_double else "sqrt"
        self.add("const double mean_d = (double)mean_w, variance_d = (double)variance_w;")
        self.add(f"const {self.wide} rstd_w = 1 / {root}(variance_w + ({self.wide})eps);", "(void)variance_d;")
        self.add(f"const {self.type} mean = ({self.type})mean_d, rstd = ({self.type})rstd_w;")
        self.add("mean_p[row] = mean;", "rstd_p[row] = rstd;")
        if norm.keeps_variance:
            self.add(f"variance_p[row] = ({self.type})variance_d;")
        for k, (name, dtype) in enumerate(zip(("mean_d", "variance_d"), self.problem.running, strict=False)):
            operand = Operand(dtype, ROW, (), (), True)
            before = f"running{k}_p[row]"
            before = f"load_{NARROW[dtype]}({before})" if dtype in NARROW else before
            self.add(f"const double running{k} = (double){before};")
            value = f"(running{k} * r[1] + {name} * r[{2 + k}])"
            self.add(self.store(f"running{k}", operand, value, "row"))

    def declare_statistics(self, first: int) -> None:
        assert isinstance(self.problem, ForwardProblem)
        names = self.problem.norm.statistics
        for k, name in enumerate(names):
            self.add(f"{self.type} *{name}_p = ({self.type} *)p[{first + k}];")
        for k, dtype in enumerate(self.problem.running):
            self.add(f"{TYPES[dtype]} *running{k}_p = ({TYPES[dtype]} *)p[{first + len(names) + k}];")
        self.add(f"const {self.type} eps = ({self.type})r[0];", "(void)eps;")

    def array(self, name: str, count: str, is_zero: bool = False) -> None:
        """Memory until the end of the function, which says so if there is none."""
        size = f"(size_t)({count}), sizeof({self.type})"
        asked = f"calloc({size})" if is_zero else f"malloc({size.replace(', ', ' * ')})"
        freed = " ".join(f"free({before});" for before in self.arrays)
        self.add(f"{self.type} *{name} = ({self.type} *){asked};", f"if (!{name}) {{ {freed} return 1; }}")
        self.arrays.append(name)

    def end(self) -> None:
        self.add(*(f"free({name});" for name in self.arrays), "return 0;", "}")
        self.arrays.clear()
