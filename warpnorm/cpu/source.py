"""A problem becomes one C function: rows one after another, each in walks over its columns. What a walk reads lies in L1 or
L2 when the next one reads it again. Sums are in double precision, but for short ones in long rows."""

import re
from collections.abc import Sequence

from warpnorm.cpu.writer import LANES, TYPES, Writer, renamed
from warpnorm.problem import ALONG, BY_ROW, COLUMN, FULL, GROUP, SCALAR, TILES, BackwardProblem, ForwardProblem, Operand

FLUSHED = 64  # rows whose sum is taken in the dtype of computation


def forward(problem: ForwardProblem) -> str:
    return _Forward(problem).text()


def backward(problem: BackwardProblem) -> str:
    return _Backward(problem).text()


class _Rows(Writer):
    """Walks along rows."""

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
        is_cheap = not any(f"_{self.suffix}(" in line or "(double)" in line for line in inside)
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


class _Forward(_Rows):
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
        for k, dtype in enumerate(problem.running):
            self.add(f"{TYPES[dtype]} *running{k}_p = ({TYPES[dtype]} *)p[{first + len(norm.statistics) + k}];")
        self.add(f"const {self.type} eps = ({self.type})r[0];", "(void)eps;")
        self.add("const int64_t units = rows / pieces;")
        if norm.is_computed:
            self.keep_c()
        self.add("for (int64_t row = units * part / parts; row < units * (part + 1) / parts; row++) {")
        if norm.is_computed:
            self.statistics()
        lines, names = self.c_again() if norm.is_computed else self.c_lines(False)
        graph = renamed(problem.epilogue, "last_")
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
            self.add(f"{self.wide} total_squares = 0;")
            self.begin_line(names)
            self.walk(names, [*lines, "squares += c * c;"], ["squares"])
            self.add("}")
            self.add("const double rstd_d = 1.0 / sqrt((double)(total_squares / (double)cols) + (double)eps);")
            self.add(f"const {self.type} rstd = ({self.type})rstd_d;")
            self.add(f"const {self.type} rstd_rest = ({self.type})(rstd_d - (double)rstd);", "(void)rstd_rest;")
            self.add("rstd_p[row] = rstd;")
            return
        self.add(f"{self.wide} total_values = 0, total_squares = 0, total_off = 0;", "(void)total_off;")
        self.begin_line(names)
        self.walk(names, [*lines, "values += (double)c;"], ["values"])
        self.add("}")
        self.add("const double count = (double)cols * (double)pieces, about_d = (double)(total_values / count);")
        self.add(f"const {self.type} about = ({self.type})about_d;")
        lines, names = self.c_again()
        lines.append(f"const {self.type} deviation = c - about;")
        # averaged into running ones, a variance is as PyTorch has it
        lines.append(f"squares += {'(double)deviation' if norm.keeps_variance else 'deviation'} * deviation;")
        lines += ["off += deviation;"] * self.is_double
        self.begin_line(names)
        self.walk(names, lines, ["squares", "off"] if self.is_double else ["squares"])
        self.add("}")
        # the deviations are from a rounded mean
        self.add(f"const double shift = {'total_off / count' if self.is_double else 'about_d - (double)about'};")
        self.add("const double mean_d = (double)about + shift;")
        self.add("double variance_d = (double)(total_squares / count) - shift * shift;")
        self.add("variance_d = variance_d < 0 ? 0 : variance_d;")
        self.add("const double rstd_d = 1.0 / sqrt(variance_d + (double)eps);")
        self.add(f"const {self.type} mean = ({self.type})mean_d, rstd = ({self.type})rstd_d;")
        self.add(f"const {self.type} mean_rest = ({self.type})(mean_d - (double)mean);", "(void)mean_rest;")
        self.add(f"const {self.type} rstd_rest = ({self.type})(rstd_d - (double)rstd);", "(void)rstd_rest;")
        self.add("mean_p[row] = mean;", "rstd_p[row] = rstd;")
        if norm.keeps_variance:
            self.add(f"variance_p[row] = ({self.type})variance_d;")
        for k, (name, dtype) in enumerate(zip(("mean_d", "variance_d"), self.problem.running, strict=False)):
            operand = Operand(dtype, FULL, (), (), True)
            self.add(self.load(f"running{k}", operand, "row").replace(f"const {self.type} ", "const double "))
            value = f"(running{k} * r[1] + {name} * r[{2 + k}])"
            self.add(self.store(f"running{k}", operand, value, "row"))


class _Backward(_Rows):
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
        first, second = renamed(problem.epilogue_vjp, "first_"), renamed(problem.prologue_vjp, "second_")
        lines, names = self.c_lines(True)
        if problem.has_tasks:
            terms = ["products", "plain"] if norm.is_centered else ["products"]
            self.add(f"{self.wide} {', '.join(f'total_{term} = 0' for term in terms)};")
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
