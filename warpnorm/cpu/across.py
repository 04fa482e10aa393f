"""Norms by channel where memory runs across the lines: channels last. A band is the lines that lie side by side; it is
walked column by column, and the innermost loop is over its lines. Two functions: sums of lines, which `run.py` merges, then
results. Columns come in blocks that stay in L1, so that a block's deviations are from its own mean; blocks merge in double
precision."""

from collections.abc import Sequence

from warpnorm.cpu.writer import Writer, renamed
from warpnorm.problem import ALONG, BY_ROW, COLUMN, TILES, BackwardProblem, ForwardProblem, Operand, Stride

BLOCK_COLS = 16


def forward(problem: ForwardProblem) -> str:
    writer = _Across(problem)
    if problem.norm.is_computed:
        writer.statistics()
    writer.results_of_forward()
    return "\n".join(writer.lines) + "\n"


def backward(problem: BackwardProblem) -> str:
    writer = _Across(problem)
    if problem.has_tasks:
        writer.sums()
    writer.results_of_backward()
    return "\n".join(writer.lines) + "\n"


class _Across(Writer):
    def inner(self, operand: Operand) -> Stride:
        return operand.row_strides[-1]

    def at(self, name: str, operand: Operand) -> str:
        inner = self.inner(operand)
        step = "" if inner.literal == 0 else " + j" if inner.literal == 1 else f" + j * {self.stride(inner.slot)}"
        return f"{name}_at{step}"

    @property
    def reads_c(self) -> str | None:
        (result,) = self.problem.prologue.outputs
        for _, name, operand in self.loaded:
            if name == result and operand.dtype == self.problem.compute and operand.axes in TILES:
                return name if self.inner(operand).literal == 1 else None
        return None

    def outer_offset(self, operand: Operand) -> str:
        """Of a band: along all axes of lines but the last."""
        strides = operand.row_strides[:-1]
        return (" + ".join(self.terms(self.indices("band", len(strides), 0), strides)) if strides else "") or "0"

    def whole_col_offset(self, operand: Operand) -> str:
        strides = operand.col_strides
        first = len(operand.row_strides) - 1
        return " + ".join(self.terms(self.indices("col", len(strides), first), strides)) or "0"

    def open(self, name: str, written: Sequence[tuple[str, Operand]], arrays: Sequence[str]) -> None:
        """The columns of all bands, of which this part has some; `arrays` are handed in after the tensors."""
        self.begin(name)
        first = len(self.problem.operands)
        if isinstance(self.problem, BackwardProblem):
            first += len(self.problem.grad_outputs)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(written)], False)
        first += len(written)
        for k, array in enumerate(arrays):
            kind = "double" if array.startswith("all_") else f"const {self.type}"
            self.add(f"{kind} *{array}_p = ({kind} *)p[{first + k}];")
        row_axes = len(next(o for o in self.problem.operands if o.row_strides).row_strides)
        self.add(f"const int64_t width = {self.size(row_axes - 2) if row_axes > 1 else 'rows'}, bands = rows / width;")
        self.add("const int64_t places = bands * cols, end = places * (part + 1) / parts;")

    def open_band(self, names: Sequence[str], written: Sequence[tuple[str, Operand]] = ()) -> None:
        self.add("for (int64_t place = places * part / parts; place < end;) {")
        self.add("const int64_t band = place / cols, from = place % cols;")
        self.add("const int64_t until = cols - from < end - place ? cols : from + (end - place);")
        self.add("place += until - from;", "const int64_t first_line = band * width;", "(void)first_line;")
        tensors = [(name, o) for _, name, o in self.loaded if name in names and o.axes in BY_ROW]
        for name, operand in (*tensors, *written):
            self.add(f"const int64_t {name}_band = {self.outer_offset(operand)};")

    def walk(
        self, names: Sequence[str], body: Sequence[str], written: Sequence[tuple[str, Operand]] = (),
        limits: tuple[str, str] = ("from", "until"),
    ) -> None:  # fmt: skip
        """Over columns, and over the lines of each."""
        loaded = [(name, o) for _, name, o in self.loaded if name in names and o.axes in (*BY_ROW, COLUMN)]
        self.add(f"for (int64_t col = {limits[0]}; col < {limits[1]}; col++) {{")
        for name, operand in (*loaded, *written):
            base = f"{name}_band + " if operand.axes in BY_ROW else ""
            offset = "0" if operand.axes in ALONG else self.whole_col_offset(operand)
            self.add(f"const int64_t {name}_at = {base}{offset};")
            if operand.axes == COLUMN:
                self.add(self.load(name, operand, f"{name}_at"))
        self.add("#pragma omp simd", "for (int64_t j = 0; j < width; j++) {", "const int64_t drawn = first_line + j;")
        self.add("(void)drawn;")
        self.add(*(self.load(name, o, self.at(name, o)) for name, o in loaded if o.axes != COLUMN))
        self.add(*body, "}", "}")

    def block_arrays(self, *names: str) -> None:
        for name in names:
            self.add(f"{self.type} *{name} = ({self.type} *)calloc((size_t)width, sizeof({self.type}));")

    def statistics(self) -> None:
        """(mean, M2) of the columns of each line that this part has."""
        kind = self.type
        self.open("first", (), ("all_mean", "all_squares"))
        self.block_arrays("sum", "about", "squares", "off")
        if self.reads_c is None:
            self.add(f"{kind} *kept_c = ({kind} *)malloc(sizeof({kind}) * (size_t)(width * {BLOCK_COLS}));")
        lines, names = self.c_lines(True)
        again, names_again = self.c_again()
        self.open_band((*names, *names_again))
        self.add(
            "double *mean = all_mean_p + part * rows + first_line, *m2 = all_squares_p + part * rows + first_line;"
        )
        self.add(f"for (int64_t start = from; start < until; start += {BLOCK_COLS}) {{")
        self.add(f"const int64_t stop = start + {BLOCK_COLS} < until ? start + {BLOCK_COLS} : until;")
        self.add("const double count = (double)(stop - start), before = (double)(start - from), all = before + count;")
        self.add("for (int64_t j = 0; j < width; j++) sum[j] = squares[j] = off[j] = 0;")
        place = "const int64_t kept = (col - start) * width - col + j; (void)kept;"
        self.walk(names, [place, *lines, "sum[j] += c;"], limits=("start", "stop"))
        self.add(
            "#pragma omp simd", f"for (int64_t j = 0; j < width; j++) about[j] = ({kind})((double)sum[j] / count);"
        )
        deviation = [
            f"const {kind} deviation = c - about[j];",
            "squares[j] += deviation * deviation;",
            "off[j] += deviation;",
        ]
        self.walk(names_again, [place, *again, *deviation], limits=("start", "stop"))
        # by Chan's formula; the mean of a block is rounded, and the sum of deviations is what it is off by
        self.add("#pragma omp simd", "for (int64_t j = 0; j < width; j++) {")
        self.add("const double shift = (double)off[j] / count, delta = ((double)about[j] + shift) - mean[j];")
        self.add("m2[j] += (double)squares[j] - shift * (double)off[j] + delta * delta * (before * count / all);")
        self.add("mean[j] += delta * (count / all);", "}", "}", "}")
        self.close("sum", "about", "squares", "off")

    def close(self, *arrays: str) -> None:
        if arrays and self.reads_c is None:
            self.add("free(kept_c);")
        self.add(*(f"free({array});" for array in arrays), "}")

    def xhat(self) -> str:
        if not self.problem.norm.is_computed:
            return f"const {self.type} xhat = c;"
        return f"const {self.type} xhat = (c - mean_p[drawn]) * rstd_p[drawn];"

    def results_of_forward(self) -> None:
        problem = self.problem
        assert isinstance(problem, ForwardProblem)
        outputs = [(f"output{k}", operand) for k, operand in enumerate(problem.outputs)]
        self.open("last", outputs, ("mean", "rstd") if problem.norm.is_computed else ())
        graph = renamed(problem.epilogue, "last_")
        lines, names = self.c_lines(False)
        lines += [self.xhat(), "(void)xhat;", *self.code(graph)]
        lines += [
            self.store(name, operand, self.value(value))
            for (name, operand), value in zip(outputs, graph.outputs, strict=True)
        ]
        names = (*names, *graph.used_inputs)
        self.open_band(names, outputs)
        self.walk(names, lines, outputs)
        self.add("}", "}")

    def sums(self) -> None:
        """What must be summed over the lines before there is a gradient."""
        problem = self.problem
        assert isinstance(problem, BackwardProblem)
        self.open("first", (), ("all_products", "all_plain", "mean", "rstd"))
        graph = renamed(problem.epilogue_vjp, "first_")
        lines, names = self.c_lines(False)
        lines += [self.xhat(), "(void)xhat;", *self.code(graph)]
        lines += [f"const {self.type} grad_xhat = {self.value(graph.outputs[0])};"]
        lines += ["all_products[j] += (double)(grad_xhat * xhat);", "all_plain[j] += (double)grad_xhat;"]
        names = (*names, *graph.used_inputs)
        self.open_band(names)
        self.open_sums(("products", "plain"))
        self.walk(names, lines)
        self.add("}", "}")

    def open_sums(self, names: Sequence[str]) -> None:
        for name in names:
            self.add(f"double *all_{name} = all_{name}_p + part * rows + first_line;")

    def results_of_backward(self) -> None:
        problem = self.problem
        assert isinstance(problem, BackwardProblem)
        written = [(f"gradient{k}", problem.gradients[k]) for k in problem.written]
        along = [f"along{k}" for k in problem.reduced]
        arrays = ("products", "plain") * problem.has_tasks + ("mean", "rstd") * problem.norm.is_computed
        self.open("last", written, (*(f"all_{name}" for name in along), *arrays))
        first, second = renamed(problem.epilogue_vjp, "first_"), renamed(problem.prologue_vjp, "second_")
        lines, names = self.c_lines(False)
        lines += [self.xhat(), "(void)xhat;", *self.code(first)]
        if problem.norm.is_computed:
            lines += [f"const {self.type} rstd = rstd_p[drawn];", "(void)rstd;"]
        if problem.has_tasks:
            lines += [f"const {self.type} products = products_p[drawn], plain = plain_p[drawn];"]
        lines += [f"const {self.type} from_epilogue{k} = {self.value(v)};" for k, v in enumerate(first.outputs)]
        lines += [f"(void)from_epilogue{k};" for k in range(len(first.outputs))]
        lines += [*self.grad_c(), *self.code(second)]
        results = self.results(second)
        for name, operand in written:
            lines.append(self.store(name, operand, results[int(name.removeprefix("gradient"))]))
        lines += [f"all_along{k}[j] += (double){results[k]};" for k in problem.reduced]
        names = (*names, *first.used_inputs, *second.used_inputs)
        self.open_band(names, written)
        self.open_sums(along)
        self.walk(names, lines, written)
        self.add("}", "}")
