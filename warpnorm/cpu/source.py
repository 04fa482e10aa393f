"""A problem becomes one C function: rows one after another, each in walks over its columns. What a walk reads lies in L1 or
L2 when the next one reads it again. Sums are in double precision, but for short ones in long rows."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from warpnorm.codegen import expressions
from warpnorm.codegen.pointwise import loaded
from warpnorm.problem import (
    ALONG,
    BY_ROW,
    COLUMN,
    FULL,
    GROUP,
    NUMBER,
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
    torch.bool: "uint8_t",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
BLOCK = 1024  # columns whose sum is taken in the dtype of computation
FLUSHED = 64  # rows whose sum is
LANES = 4


def can_write(problem: Problem) -> bool:
    """Whether there is C for a problem: memory runs along its rows, and no dtype is of eight bits but integers'."""
    tensors = [*problem.operands, *problem.results]
    if isinstance(problem, BackwardProblem):
        tensors += [*problem.grad_outputs, *problem.gradients]
    graphs = _graphs(problem)
    return (
        all(tensor.dtype in TYPES for tensor in tensors)
        and all(node.dtype in TYPES for graph in graphs for node in graph.nodes)
        and not (problem.norm.is_by_channel and _is_across(problem))
    )


def _is_across(problem: Problem) -> bool:
    lead = next((o for o in problem.operands if o.axes == FULL), None)
    return lead is not None and lead.col_strides[-1].literal != 1 and problem.cols_class > 1


def forward(problem: ForwardProblem) -> str:
    return _Forward(problem).text()


def backward(problem: BackwardProblem) -> str:
    return _Backward(problem).text()


def _graphs(problem: Problem) -> tuple[Graph, ...]:
    if isinstance(problem, ForwardProblem):
        return problem.prologue, problem.epilogue
    assert isinstance(problem, BackwardProblem)
    return problem.prologue, problem.epilogue_vjp, problem.prologue_vjp


def _renamed(graph: Graph, prefix: str) -> Graph:
    """Several graphs in one body must not name two values alike."""
    names = {node.name: prefix + node.name for node in graph.nodes}

    def of(value: Value) -> Value:
        return names.get(value, value) if isinstance(value, str) else value

    nodes = tuple(replace(node, name=names[node.name], args=tuple(map(of, node.args))) for node in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple(map(of, graph.outputs)))


class _Writer:
    """What both directions share. Numbers that a function is called with: rows, columns, pieces of a row, lines between
    them, groups, then the sizes of axes, strides, and integers among the operands."""

    HEAD = 5

    def __init__(self, problem: ForwardProblem | BackwardProblem) -> None:
        self.problem = problem
        self.is_double = problem.compute == torch.float64
        self.type, self.suffix = ("double", "d") if self.is_double else ("float", "f")
        self.block = BLOCK // 8 if self.is_double else BLOCK
        self.loaded = loaded(problem)
        self.prologue = _renamed(problem.prologue, "c_")
        self.sizes = len(problem.size_divisors)
        self.lines: list[str] = []

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
            return f"keep({seed}, {offset}, drawn * cols + col, {threshold}u, {float(scale.value)!r}f, {stream}u)"
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
        whole = self.wrap(common) if not is_float and node.operator in ("add", "sub", "mul", "neg", "abs") else "{}"
        return whole.format(C[node.operator].format(*args, s=self.suffix if is_float else "i"))

    def wrap(self, dtype: torch.dtype) -> str:
        """Integers are computed in 64 bits, and wrap around in their own."""
        return "{}" if dtype in (torch.int64, torch.bool) else f"(({TYPES[dtype]})({{}}))"

    def cast(self, node: Node, dtypes: dict[str, torch.dtype]) -> str:
        (arg,) = node.args
        source = dtypes[arg] if isinstance(arg, str) else self.problem.compute
        text = arg if isinstance(arg, str) else self.literal(arg, True)
        target = node.dtype
        if target == torch.bool:
            return f"({text} != 0)"
        if not target.is_floating_point:
            return f"((int64_t)({TYPES[target]})({'(int64_t)' * source.is_floating_point}{text}))"
        if source.is_floating_point and target in HALVES:
            return f"round_{HALVES[target]}_{self.suffix}({text})"
        if source.is_floating_point and target == torch.float32 and self.is_double:
            return f"round_fp32_d({text})"
        if target in HALVES:
            return f"round_{HALVES[target]}_{self.suffix}(({self.type}){text})"
        return f"(({self.type}){text})"

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

    def load(self, name: str, operand: Operand, place: str) -> str:
        value = f"{name}_p[{place}]"
        if operand.dtype in HALVES:
            value = f"load_{HALVES[operand.dtype]}({value})"
        return f"const {self.type_of(operand.dtype)} {name} = ({self.type_of(operand.dtype)}){value};"

    def store(self, name: str, operand: Operand, value: str) -> str:
        if operand.dtype in HALVES:
            value = f"store_{HALVES[operand.dtype]}((float){value})"
        elif operand.dtype == torch.bool:
            value = f"{value} != 0"
        elif not operand.dtype.is_floating_point:
            value = f"({TYPES[operand.dtype]})(int64_t){value}"
        return f"{name}_p[{self.at(name, operand)}] = ({TYPES[operand.dtype]})({value});"

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
        if self.problem.cols_class == 1:
            # the gradient of a lone column is a product minus its own mean: zero if the product is rounded both times
            self.add('#pragma GCC optimize("fp-contract=off")')
        self.add(
            '#include "pointwise.h"', "",
            f"void {name}(void **p, const int64_t *n, const double *r, int64_t part, int64_t parts) {{",
            "const int64_t rows = n[0], cols = n[1], pieces = n[2], inner_rows = n[3], groups = n[4];",
            "(void)pieces; (void)inner_rows; (void)groups;",
        )  # fmt: skip
        self.declare([(name, operand, i) for i, name, operand in self.loaded], True)
        ints = floats = 0
        for _, name, operand in self.loaded:
            if operand.axes == NUMBER:
                if operand.dtype.is_floating_point:
                    self.add(f"const {self.type} {name} = ({self.type})r[{4 + floats}];")
                    floats += 1
                else:
                    self.add(f"const int64_t {name} = {self.stride(self.strides + ints)};")
                    ints += 1
            elif operand.axes == SCALAR:
                self.add(self.load(name, operand, "0"))

    @property
    def strides(self) -> int:
        tensors = [*self.problem.operands, *self.problem.results]
        if isinstance(self.problem, BackwardProblem):
            tensors += [*self.problem.grad_outputs, *self.problem.gradients]
        slots = [s.slot for t in tensors for s in (*t.row_strides, *t.col_strides) if s.literal is None]
        return max(slots, default=-1) + 1

    def begin_line(self, names: Sequence[str], written: Sequence[tuple[str, Operand]] = ()) -> None:
        """One piece of a row, or all of it: where its tensors begin, and what is the same along it."""
        if self.problem.has_pieces:
            self.add("for (int64_t piece = 0; piece < pieces; piece++) {")
            self.add("const int64_t unit = row / inner_rows * pieces + piece;")
            self.add("const int64_t line = unit * inner_rows + row % inner_rows;")
            self.add("const int64_t kept = piece * cols;")
        else:
            self.add("{", "const int64_t line = row, kept = 0;")
        drawn = "line" if isinstance(self.problem, ForwardProblem) or self.problem.norm.is_by_channel else "number"
        self.add(f"const int64_t drawn = {drawn};", "(void)line; (void)kept; (void)drawn;")
        for _, name, operand in self.loaded:
            if name in names and operand.axes in BY_ROW:
                self.add(f"const int64_t {name}_line = {self.row_offset(operand)};")
                if operand.axes in ALONG:
                    self.add(self.load(name, operand, f"{name}_line"))
        for name, operand in written:
            self.add(f"const int64_t {name}_line = {self.row_offset(operand)};")

    def walk(
        self, names: Sequence[str], body: Sequence[str], sums: Sequence[str] = (),
        written: Sequence[tuple[str, Operand]] = (),
    ) -> None:  # fmt: skip
        """Over the columns of a line; `sums` are names: the body adds to the variable, which goes to total_ that name."""
        tensors = [
            (name, operand) for _, name, operand in self.loaded if name in names and operand.axes in (*TILES, COLUMN)
        ]
        axes = next((len(o.col_strides) for _, o in (*tensors, *written)), 1)
        row_axes = next((len(o.row_strides) for _, o in (*tensors, *written)), 1)
        last = self.size(row_axes - 1 + axes - 2) if axes > 1 else "cols"
        if axes > 1:
            self.add(f"for (int64_t outer = 0; outer < cols / {last}; outer++) {{")
            self.add(f"const int64_t before = outer * {last};")
        else:
            self.add("{", "const int64_t before = 0;")
        self.add("(void)before;")
        for name, operand in (*tensors, *written):
            base = f"{name}_line + " if operand.axes in BY_ROW else ""
            self.add(f"const int64_t {name}_at = {base}{self.col_offset(operand)};")
        inside = ["const int64_t col = before + j;", "(void)col;"]
        inside += [self.load(name, operand, self.at(name, operand)) for name, operand in tensors]
        inside += body
        if not sums:
            self.add("#pragma omp simd", f"for (int64_t j = 0; j < {last}; j++) {{", *inside, "}", "}")
            return
        is_cheap = not any(f"_{self.suffix}(" in line for line in inside)
        self.add(f"for (int64_t start = 0; start < {last}; start += {self.block}) {{")
        self.add(f"const int64_t stop = start + {self.block} < {last} ? start + {self.block} : {last};")
        self.add(f"double {', '.join(f'{name} = 0' for name in sums)};")
        if is_cheap:
            self.sum_in_lanes(inside, sums)
        self.add(f"#pragma omp simd reduction(+ : {', '.join(sums)})", "for (int64_t j = start; j < stop; j++) {")
        self.add(*inside, "}", *["}"] * is_cheap)
        self.add(*(f"total_{name} += {name};" for name in sums), "}", "}")

    def sum_in_lanes(self, inside: Sequence[str], sums: Sequence[str]) -> None:
        """A whole block in several sums at a time: one alone would wait for every addition before the next."""
        lanes = {name: [f"{name}_{k}" for k in range(LANES)] for name in sums}
        every = [lane for of_name in lanes.values() for lane in of_name]
        self.add(f"if (stop - start == {self.block}) {{", f"{self.type} {', '.join(f'{lane} = 0' for lane in every)};")
        self.add(f"#pragma omp simd reduction(+ : {', '.join(every)})")
        self.add(f"for (int64_t i = start; i < start + {self.block // LANES}; i++) {{")
        for k in range(LANES):
            self.add("{", f"const int64_t j = i + {k * self.block // LANES};")
            for line in inside:
                for name in sums:
                    line = re.sub(rf"\b{name}\b", lanes[name][k], line)
                self.add(line)
            self.add("}")
        self.add(
            "}", *(f"{name} = (double){' + (double)'.join(of_name)};" for name, of_name in lanes.items()), "} else {"
        )

    def value(self, output: Value) -> str:
        return output if isinstance(output, str) else self.literal(output, True)

    def c_lines(self, keeps: bool) -> tuple[list[str], tuple[str, ...]]:
        """How c comes about the first time, and what that reads."""
        graph = self.prologue
        lines = [*self.code(graph), f"const {self.type} c = {self.value(graph.outputs[0])};"]
        if keeps and self.reads_c is None:
            lines.append("kept_c[kept + col] = c;")
        return lines, graph.used_inputs

    def c_again(self) -> tuple[list[str], tuple[str, ...]]:
        name = self.reads_c
        if name is not None:
            return [f"const {self.type} c = {name};"], (name,)
        return [f"const {self.type} c = kept_c[kept + col];"], ()

    def xhat(self) -> str:
        norm = self.problem.norm
        if not norm.is_computed:
            return f"const {self.type} xhat = c;"
        if isinstance(self.problem, ForwardProblem) and not self.is_double and not self.problem.is_half:
            # what is rounded off of a row's statistic would be the same error in all its elements
            value = "(c - mean) - mean_rest" if norm.is_centered else "c"
            return f"const float apart = {value}, xhat = apart * rstd + apart * rstd_rest;"
        return f"const {self.type} xhat = {'(c - mean) * rstd' if norm.is_centered else 'c * rstd'};"

    def keep_c(self) -> None:
        if self.reads_c is None:
            self.add(f"{self.type} *kept_c = ({self.type} *)malloc(sizeof({self.type}) * (size_t)(pieces * cols));")

    def let_go(self) -> None:
        if self.reads_c is None:
            self.add("free(kept_c);")

    def text(self) -> str:
        raise NotImplementedError


class _Forward(_Writer):
    problem: ForwardProblem

    def text(self) -> str:
        problem, norm = self.problem, self.problem.norm
        self.begin("forward")
        outputs = [(f"output{k}", operand) for k, operand in enumerate(problem.outputs)]
        first = len(problem.operands)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(outputs)], False)
        first += len(outputs)
        for k, name in enumerate(norm.statistics):
            self.add(f"{self.type} *{name}_p = ({self.type} *)p[{first + k}];")
        self.add(f"const {self.type} eps = ({self.type})r[0];", "(void)eps;")
        self.add("const int64_t units = rows / pieces;")
        if norm.is_computed:
            self.keep_c()
        self.add("for (int64_t row = units * part / parts; row < units * (part + 1) / parts; row++) {")
        if norm.is_computed:
            self.statistics()
        lines, names = self.c_again() if norm.is_computed else self.c_lines(False)
        graph = _renamed(problem.epilogue, "last_")
        lines += [self.xhat(), "(void)xhat;", *self.code(graph)]
        lines += [
            self.store(name, operand, self.value(value))
            for (name, operand), value in zip(outputs, graph.outputs, strict=True)
        ]
        names = (*names, *graph.used_inputs)
        self.begin_line(names, outputs)
        self.walk(names, lines, written=outputs)
        self.add("}", "}")
        if norm.is_computed:
            self.let_go()
        self.add("}")
        return "\n".join(self.lines) + "\n"

    def statistics(self) -> None:
        norm = self.problem.norm
        lines, names = self.c_lines(True)
        if not norm.is_centered:
            self.add("double total_squares = 0;")
            self.begin_line(names)
            self.walk(names, [*lines, "squares += c * c;"], ["squares"])
            self.add("}")
            self.add("const double rstd_d = 1.0 / sqrt(total_squares / (double)cols + (double)eps);")
            self.add(f"const {self.type} rstd = ({self.type})rstd_d;")
            self.add(f"const {self.type} rstd_rest = ({self.type})(rstd_d - (double)rstd);", "(void)rstd_rest;")
            self.add("rstd_p[row] = rstd;")
            return
        self.add("double total_values = 0, total_squares = 0, total_off = 0;")
        self.begin_line(names)
        self.walk(names, [*lines, "values += c;"], ["values"])
        self.add("}")
        self.add("const double count = (double)cols * (double)pieces;")
        self.add(f"const {self.type} about = ({self.type})(total_values / count);")
        lines, names = self.c_again()
        lines += [f"const {self.type} deviation = c - about;", "squares += deviation * deviation;", "off += deviation;"]
        self.begin_line(names)
        self.walk(names, lines, ["squares", "off"])
        self.add("}")
        # the mean is rounded, and the mean of the deviations is what it is off by
        self.add("const double shift = total_off / count;")
        self.add("double variance_d = total_squares / count - shift * shift;")
        self.add("variance_d = variance_d < 0 ? 0 : variance_d;")
        self.add("const double mean_d = (double)about + shift, rstd_d = 1.0 / sqrt(variance_d + (double)eps);")
        self.add(f"const {self.type} mean = ({self.type})mean_d, rstd = ({self.type})rstd_d;")
        self.add(f"const {self.type} mean_rest = ({self.type})(mean_d - (double)mean);", "(void)mean_rest;")
        self.add(f"const {self.type} rstd_rest = ({self.type})(rstd_d - (double)rstd);", "(void)rstd_rest;")
        self.add("mean_p[row] = mean;", "rstd_p[row] = rstd;")
        if norm.keeps_variance:
            self.add(f"variance_p[row] = ({self.type})variance_d;")


class _Backward(_Writer):
    problem: BackwardProblem

    def text(self) -> str:
        problem, norm = self.problem, self.problem.norm
        self.begin("backward")
        written = [(f"gradient{k}", problem.gradients[k]) for k in problem.written]
        first = len(problem.operands) + len(problem.grad_outputs)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(written)], False)
        first += len(written)
        for k, name in enumerate(norm.statistics):
            self.add(f"const {self.type} *{name}_p = (const {self.type} *)p[{first + k}];", f"(void){name}_p;")
        first += len(norm.statistics)
        for k, which in enumerate(problem.reduced):
            self.add(f"double *partial{which}_p = (double *)p[{first + k}];")
        by_column = [k for k in problem.reduced if problem.gradients[k].axes in (COLUMN, GROUP)]
        scalars = [k for k in problem.reduced if problem.gradients[k].axes == SCALAR]
        self.keep_c()
        for k in by_column:
            self.add(f"{self.type} *sum{k} = ({self.type} *)calloc((size_t)cols, sizeof({self.type}));")
        self.add(*(f"double total_all{k} = 0;" for k in scalars))
        has_groups = any(problem.gradients[k].axes == GROUP for k in by_column)
        if has_groups:  # each has its rows side by side, and one thread
            self.add("const int64_t group_rows = rows / groups;")
            self.add("for (int64_t group = groups * part / parts; group < groups * (part + 1) / parts; group++) {")
            self.add("const int64_t first_row = group * group_rows, end_row = first_row + group_rows;")
        else:
            self.add("const int64_t units = rows / pieces, group = 0;", "(void)group;")
            self.add("const int64_t first_row = units * part / parts, end_row = units * (part + 1) / parts;")
        self.add("for (int64_t row = first_row; row < end_row; row++) {")
        self.row(written, by_column, scalars)
        for k in by_column:
            self.flush(k, f"(row + 1 - first_row) % {FLUSHED} == 0 || row + 1 == end_row")
        self.add("}")
        if has_groups:
            self.add("}")
        for k in scalars:
            self.add(f"partial{k}_p[part] = total_all{k};")
        self.add(*(f"free(sum{k});" for k in by_column))
        self.let_go()
        self.add("}")
        return "\n".join(self.lines) + "\n"

    def flush(self, k: int, when: str) -> None:
        """Sums over rows: of a few in the dtype of computation, of all in double precision."""
        home = "group" if self.problem.gradients[k].axes == GROUP else "part"
        self.add(f"if ({when}) {{", f"double *all = partial{k}_p + {home} * cols;", "#pragma omp simd")
        self.add(f"for (int64_t j = 0; j < cols; j++) {{ all[j] += (double)sum{k}[j]; sum{k}[j] = 0; }}", "}")

    def row(self, written: Sequence[tuple[str, Operand]], by_column: Sequence[int], scalars: Sequence[int]) -> None:
        problem, norm = self.problem, self.problem.norm
        self.add(f"const int64_t number = {self.row_number()};", "(void)number;")
        if norm.is_computed:
            self.add(
                *(f"const {self.type} {name} = {name}_p[number];" for name in norm.statistics if name != "variance")
            )
        first, second = _renamed(problem.epilogue_vjp, "first_"), _renamed(problem.prologue_vjp, "second_")
        lines, names = self.c_lines(True)
        if problem.has_tasks:
            terms = ["products", "plain"] if norm.is_centered else ["products"]
            self.add(f"double {', '.join(f'total_{term} = 0' for term in terms)};")
            body = [*lines, self.xhat(), "(void)xhat;", *self.code(first)]
            body += [f"const {self.type} grad_xhat = {self.value(first.outputs[0])};", "products += grad_xhat * xhat;"]
            body += ["plain += grad_xhat;"] * norm.is_centered
            used = (*names, *first.used_inputs)
            self.begin_line(used)
            self.walk(used, body, terms)
            self.add("}")
            self.add("const double count = (double)cols * (double)pieces;")
            self.add(*(f"const {self.type} {term} = ({self.type})(total_{term} / count);" for term in terms))
            lines, names = self.c_again()
        along = [k for k in problem.reduced if problem.gradients[k].axes in ALONG]
        lines = [*lines, self.xhat(), "(void)xhat;", *self.code(first)]
        lines += [f"const {self.type} from_epilogue{k} = {self.value(v)};" for k, v in enumerate(first.outputs)]
        lines += [f"(void)from_epilogue{k};" for k in range(len(first.outputs))]
        lines += self.grad_c()
        lines += self.code(second)
        used = (*names, *first.used_inputs, *second.used_inputs)
        results = self.results(second)
        for name, operand in written:
            lines.append(self.store(name, operand, results[int(name.removeprefix("gradient"))]))
        lines += [f"sum{k}[col] += {results[k]};" for k in by_column]
        sums = [f"all{k}" for k in scalars] + [f"along{k}" for k in along]
        lines += [f"all{k} += {results[k]};" for k in scalars] + [f"along{k} += {results[k]};" for k in along]
        self.begin_line(used, written)
        self.add(*(f"double total_along{k} = 0;" for k in along))
        self.walk(used, lines, sums, written)
        self.add(*(f"partial{k}_p[line] = total_along{k};" for k in along))
        self.add("}")

    def row_number(self) -> str:
        """Which row of forward a row of backward is, whose row axes may come in another order."""
        order = self.problem.row_order
        if self.problem.norm.is_by_channel or order == tuple(range(len(order))):
            return "row"
        others = " * ".join(self.size(k) for k in range(len(order) - 1))
        sizes = [f"(rows / ({others}))", *(self.size(k) for k in range(len(order) - 1))]
        indices = self.indices("row", len(order), 0)
        number = ""
        for axis in range(len(order)):  # of forward, the slowest first
            k = order.index(axis)
            number = indices[k] if axis == 0 else f"({number}) * {sizes[k]} + {indices[k]}"
        return number

    def grad_c(self) -> list[str]:
        problem, norm = self.problem, self.problem.norm
        direct = int(problem.needs_grad_xhat)
        terms = []
        if problem.needs_grad_xhat:
            value = "from_epilogue0"
            if norm.is_computed:
                shift = " - plain" if norm.is_centered else ""
                value = f"(from_epilogue0{shift} - xhat * products) * rstd"
            terms.append(value)
        if problem.needs_grad_c:
            terms.append(f"from_epilogue{direct}")
        return [f"const {self.type} grad_c = {' + '.join(terms) or '0'};", "(void)grad_c;"]

    def results(self, second: Graph) -> list[str]:
        """The gradient of each wanted operand: what comes through the prologue plus what came through the epilogue."""
        problem = self.problem
        first = problem.needs_grad_xhat + problem.needs_grad_c
        through_prologue = dict(zip(problem.wanted_of_prologue, map(self.value, second.outputs), strict=True))
        through_epilogue = {index: f"from_epilogue{first + k}" for k, index in enumerate(problem.wanted_of_epilogue)}
        found = []
        for index in problem.wanted:
            parts = [by[index] for by in (through_prologue, through_epilogue) if index in by]
            found.append("(" + " + ".join(parts) + ")")
        return found
