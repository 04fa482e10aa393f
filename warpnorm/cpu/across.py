"""Norms by channel where memory runs across the lines: channels last. A band is the lines that lie side by side. Three
functions. `first`: sums along lines, in blocks of columns, and tiles of lines whose sums stay in registers while a block is
walked. `merge`: those of all parts, and of all lines of a row. `last`: results, column by column, along its lines."""

from collections.abc import Sequence

from warpnorm.cpu.gradients import OfGradients
from warpnorm.cpu.writer import Writer, laid_out, renamed
from warpnorm.problem import ALONG, BY_ROW, COLUMN, TILES, BackwardProblem, ForwardProblem, Operand, Stride

# Columns whose sums are joined with those before, at the most, or eight times as many of Kahan's, which lose nothing; and so
# many bytes that all tiles find them in L1, but not fewer than pay: BatchNorm of 4 x 320 x 64 x 64 on ARM takes 8.2 ms and
# backward 12, of 32 x 512 x 7 x 7 2.0 and 2.7; with 64 columns 9.9 and 22, 3.9 and 4.7
BLOCK_COLS, ROOM = 64, 16 * 1024
FEWEST_JOINED, FEWEST_ADDED = 16, 4
STAGE = 1024  # lines whose numbers are converted at a time
OF_LINES = ("line_mean", "line_rstd", "line_rest")  # of forward: and what the mean is rounded off by


def forward(problem: ForwardProblem) -> str:
    writer = _Forward(problem)
    if problem.norm.is_computed:
        writer.statistics()
        writer.merge()
    writer.results()
    return laid_out(writer.lines)


def kept_in(problem: BackwardProblem) -> tuple[int, ...]:
    """Which of the gradients, one at the most, has the gradient of xhat in its memory from the first function to the last,
    where that would take long to compute again. It is not rounded there."""
    can = [k for k in problem.written if problem.gradients[k].dtype == problem.compute]
    return tuple(can[:1]) if _Backward(problem).keeps_gradient else ()


def backward(problem: BackwardProblem) -> str:
    writer = _Backward(problem)
    if problem.has_tasks:
        writer.line_sums()
        writer.merge()
    writer.last()
    return laid_out(writer.lines)


class _Across(Writer):
    """What both directions share."""

    def inner(self, operand: Operand) -> Stride:
        return operand.row_strides[-1]

    def at(self, name: str, operand: Operand) -> str:
        inner = self.inner(operand)
        step = "" if inner.literal == 0 else " + j" if inner.literal == 1 else f" + j * {self.stride(inner.slot)}"
        return f"{name}_at{step}"

    def is_dense(self, operand: Operand) -> bool:
        return operand.axes in TILES and self.inner(operand).literal == 1

    def outer_offset(self, operand: Operand) -> str:
        """Of a band: along all axes of lines but the last."""
        strides = operand.row_strides[:-1]
        return (" + ".join(self.terms(self.indices("band", len(strides), 0), strides)) if strides else "") or "0"

    def whole_col_offset(self, operand: Operand) -> str:
        strides = operand.col_strides
        first = len(operand.row_strides) - 1
        return " + ".join(self.terms(self.indices("col", len(strides), first), strides)) or "0"

    def open(self, name: str, written: Sequence[tuple[str, Operand]], arrays: Sequence[str]) -> int:
        """The columns of all bands, of which a part has some; `arrays` are handed in after the tensors, those named all_
        in double precision. Returns the number of arguments."""
        self.begin(name)
        first = len(self.problem.operands)
        if isinstance(self.problem, BackwardProblem):
            first += len(self.problem.grad_outputs)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(written)], False)
        first += len(written)
        for k, array in enumerate(arrays):
            kind = self.wide if array.startswith("all_") else "double" if array.startswith("partial") else self.type
            self.add(f"{kind} *{array}_p = ({kind} *)p[{first + k}];")
        row_axes = len(next(o for o in self.problem.operands if o.row_strides).row_strides)
        self.add(f"const int64_t width = {self.size(row_axes - 2) if row_axes > 1 else 'rows'}, bands = rows / width;")
        self.add("const int64_t places = bands * cols, end = places * (part + 1) / parts;", "(void)end;")
        return first + len(arrays)

    def open_band(self, names: Sequence[str], written: Sequence[tuple[str, Operand]] = ()) -> None:
        self.add("for (int64_t place = places * part / parts; place < end;) {")
        self.add("const int64_t band = place / cols, from = place % cols;")
        self.add("const int64_t until = cols - from < end - place ? cols : from + (end - place);")
        self.add("place += until - from;", "const int64_t first_line = band * width;", "(void)first_line;")
        tensors = [(name, o) for _, name, o in self.loaded if name in names and o.axes in BY_ROW]
        for name, operand in (*tensors, *written):
            self.add(f"const int64_t {name}_band = {self.outer_offset(operand)};")

    def tensors(self, names: Sequence[str]) -> list[tuple[str, Operand]]:
        return [(name, o) for _, name, o in self.loaded if name in names and o.axes in (*BY_ROW, COLUMN)]

    def column(self, tensors: Sequence[tuple[str, Operand]]) -> None:
        """Where the tensors of a column begin."""
        for name, operand in tensors:
            base = f"{name}_band + " if operand.axes in BY_ROW else ""
            offset = "0" if operand.axes in ALONG else self.whole_col_offset(operand)
            self.add(f"const int64_t {name}_at = {base}{offset};")
            if operand.axes == COLUMN:
                self.add(self.load(name, operand, f"{name}_at"))

    def inside(self, tensors: Sequence[tuple[str, Operand]]) -> list[str]:
        loads = [self.load(name, o, self.at(name, o)) for name, o in tensors if o.axes != COLUMN]
        return ["const int64_t drawn = first_line + j;", "(void)drawn;", *loads]

    def walk(
        self, names: Sequence[str], body: Sequence[str], written: Sequence[tuple[str, Operand]] = (),
        until: str = "until",
    ) -> None:  # fmt: skip
        """Over columns, and over the lines of each."""
        tensors = self.tensors(names)
        self.add(f"for (int64_t col = from; col < {until}; col++) {{")
        self.column((*tensors, *written))
        lines = ["#pragma omp simd", "for (int64_t j = {first}; j < {last}; j++) {{"]
        if any(self.is_staged(operand) for _, operand in (*tensors, *written)):
            self.add(f"for (int64_t start = 0; start < width; start += {STAGE}) {{")
            self.add(f"const int64_t stop = start + {STAGE} < width ? start + {STAGE} : width;")
            self.stage(tensors, "start", "stop - start", STAGE)
            self.open_stage(written, STAGE)
            self.add(*(line.format(first="start", last="stop") for line in lines), *self.inside(tensors), *body, "}")
            self.close_stage(written, "stop - start")
            self.add("}", "}")
            return
        self.add(*(line.format(first="0", last="width") for line in lines), *self.inside(tensors), *body, "}", "}")

    def sum_in_tiles(
        self, names: Sequence[str], body: Sequence[str], sums: Sequence[str], after: Sequence[str],
        written: Sequence[tuple[str, Operand]] = (),
    ) -> None:  # fmt: skip
        """Of each line: the body adds to `sums`, in double precision, which are known at k to what comes after
        a block of columns."""
        tensors = self.tensors(names)
        most = 8 * BLOCK_COLS if self.is_double else BLOCK_COLS
        room = ROOM // self.problem.compute.itemsize // max(1, sum(o.axes in TILES for _, o in tensors))
        self.add(f"int64_t block = {room} / width;")
        fewest = FEWEST_JOINED if isinstance(self.problem, ForwardProblem) else FEWEST_ADDED
        self.add(f"block = block < {fewest} ? {fewest} : block > {most} ? {most} : block;")
        self.add("for (int64_t start = from; start < until; start += block) {")
        self.add("const int64_t stop = start + block < until ? start + block : until;")
        self.add("const double count = (double)(stop - start), before = (double)(start - from);", "(void)before;")
        self.add(
            f"for (int64_t tile = 0; tile < width; tile += {self.tile}) {{", f"if (tile + {self.tile} <= width) {{"
        )
        for limit in (str(self.tile), "width - tile"):
            self.add(*(f"double {name}[{self.tile}] = {{0}};" for name in sums))
            self.add("for (int64_t col = start; col < stop; col++) {")
            self.column((*tensors, *written))
            self.stage(tensors, "tile", limit, self.tile)
            lanes = ["#pragma omp simd", f"for (int64_t k = 0; k < {limit}; k++) {{", "const int64_t j = tile + k;"]
            self.add(*lanes, *self.inside(tensors), *body, "}", "}", *lanes, *after, "}")
            self.add("} else {" if limit == str(self.tile) else "}")
        self.add("}", "}")

    def summing(self, name: str, value: str, at: str = "k") -> list[str]:
        """Where double precision is the computation's too: by Kahan, with what was rounded off before."""
        if not self.is_double:
            return [f"{name}[{at}] += {value};"]
        return [
            f"const double {name}_term = {value} - {name}_rest[{at}], {name}_total = {name}[{at}] + {name}_term;",
            f"{name}_rest[{at}] = ({name}_total - {name}[{at}]) - {name}_term;",
            f"{name}[{at}] = {name}_total;",
        ]

    def open_rows(self) -> None:
        """Of each row: its lines; `line` of each."""
        self.add("const int64_t units = rows / pieces;")
        self.add("for (int64_t row = units * part / parts; row < units * (part + 1) / parts; row++) {")

    def open_lines(self) -> None:
        self.add("for (int64_t piece = 0; piece < pieces; piece++) {")
        self.add("const int64_t line = (row / inner_rows * pieces + piece) * inner_rows + row % inner_rows;")

    def open_parts(self) -> None:
        """Of each line: those that have columns of it, and how many."""
        self.add("const int64_t band = line / width;", "for (int64_t of = 0; of < parts; of++) {")
        self.add("int64_t first = places * of / parts - band * cols, last = places * (of + 1) / parts - band * cols;")
        self.add("first = first < 0 ? 0 : first;", "last = last > cols ? cols : last;", "if (first >= last) continue;")
        self.add("const double count = (double)(last - first);", "const int64_t at = of * rows + line;", "(void)count;")

    def xhat(self, rest: str = "") -> str:
        """`rest`: and minus what its mean is rounded off by."""
        if not self.problem.norm.is_computed:
            return f"const {self.type} xhat = c;"
        return f"const {self.type} xhat = (c - line_mean_p[drawn]{rest}) * line_rstd_p[drawn];"


class _Forward(_Across):
    problem: ForwardProblem

    def statistics(self) -> None:
        """(mean, M2) of the columns of each line that this part has: deviations from a pivot, the first value and then the
        mean of all so far, joined block by block."""
        self.open("first", (), ("all_mean", "all_squares"))
        self.array("pivot", "width")
        lines, names = self.c_lines(False)
        self.open_band(names)
        for name, array in (("mean", "all_mean"), ("m2", "all_squares")):
            self.add(f"{self.wide} *{name} = {array}_p + part * rows + first_line;")
        self.walk(names, [*lines, "pivot[j] = c;"], until="from + 1")
        lines = [*lines, "const double deviation = (double)c - (double)pivot[j];"]
        lines += [*self.summing("off", "deviation"), *self.summing("squares", "deviation * deviation")]
        after = [
            f"{self.wide} of_mean = mean[j], of_m2 = m2[j];",
            "double seen = before;",
            f"join_{self.suffix}(&of_mean, &of_m2, &seen, (double)pivot[j], off[k], squares[k], count);",
            f"mean[j] = of_mean; m2[j] = of_m2; pivot[j] = ({self.type})of_mean;",
        ]
        sums = ("off", "squares", *("off_rest", "squares_rest") * self.is_double)
        self.sum_in_tiles(names, lines, sums, after)
        self.add("}")
        self.end()

    def merge(self) -> None:
        first = self.open("merge", (), ("all_mean", "all_squares", *OF_LINES))
        self.declare_statistics(first)
        self.open_rows()
        self.add(
            f"{self.wide} mean_w = 0, m2 = 0;", f"const {self.wide} all = ({self.wide})cols * ({self.wide})pieces;"
        )
        for total in (
            "mean_w += all_mean_p[at] * (count / all);",
            f"const {self.wide} apart = all_mean_p[at] - mean_w; m2 += all_squares_p[at] + count * apart * apart;",
        ):
            self.open_lines()
            self.open_parts()
            self.add(total, "}", "}")
        self.add(f"const {self.wide} variance_w = m2 / all;")
        self.finish_statistics()
        self.open_lines()
        self.add("line_mean_p[line] = mean;", "line_rstd_p[line] = rstd;")
        self.add(f"line_rest_p[line] = ({self.type})(mean_w - ({self.wide})mean);", "}", "}")
        self.end()

    def results(self) -> None:
        outputs = [(f"output{k}", operand) for k, operand in enumerate(self.problem.outputs)]
        self.open("last", outputs, OF_LINES if self.problem.norm.is_computed else ())
        graph = renamed(self.problem.epilogue, "last_")
        lines, names = self.c_lines(False)
        lines += [self.xhat(" - line_rest_p[drawn]"), "(void)xhat;", *self.code(graph)]
        lines += [
            self.store(name, operand, self.value(value))
            for (name, operand), value in zip(outputs, graph.outputs, strict=True)
        ]
        names = (*names, *graph.used_inputs)
        self.open_band(names, outputs)
        self.walk(names, lines, outputs)
        self.add("}")
        self.end()


class _Backward(_Across, OfGradients):
    problem: BackwardProblem

    @property
    def summed(self) -> list[str]:
        return [f"summed{k}" for k in range(len(self.sums.summands))]

    @property
    def of_lines(self) -> tuple[str, ...]:
        return ("line_mean", "line_rstd") if self.problem.norm.is_computed else ()

    @property
    def kept_in(self) -> list[tuple[str, Operand]]:
        return [(f"gradient{k}", self.problem.gradients[k]) for k in kept_in(self.problem)]

    def line_sums(self) -> None:
        """What must be summed over the lines before there is a gradient, and gradients that are such sums."""
        kept = self.kept_in
        self.open("first", kept, (*(f"all_{name}" for name in self.summed), *self.of_lines))
        lines, names = self.c_lines(False)
        lines += [self.xhat(), "(void)xhat;", *self.code(self.first)]
        lines += [self.store(name, operand, self.value(self.first.outputs[0])) for name, operand in kept]
        summands = zip(self.summed, self.sums.summands, strict=True)
        lines += [f"{name}[k] += {self.product(of)};" for name, of in summands]
        names = (*names, *self.first.used_inputs)
        self.open_band(names, kept)
        self.open_sums(self.summed)
        after = [f"all_{name}[j] += ({self.wide}){name}[k];" for name in self.summed]
        self.sum_in_tiles(names, lines, self.summed, after, kept)
        self.add("}")
        self.end()

    def merge(self) -> None:
        problem = self.problem
        arrays = (*(f"all_{name}" for name in self.summed), "line_products", "line_plain")
        self.declare_sums(problem.settled_first, self.open("merge", (), arrays))
        self.open_rows()
        self.add(f"{self.wide} total_products = 0, total_plain = 0;")
        self.open_merged()
        self.open_lines()
        for _, name, operand in self.loaded:
            if operand.axes in ALONG:
                self.add(self.load(name, operand, self.row_offset(operand)))
        self.add(*(f"{self.wide} {name} = 0;" for name in self.summed))
        self.open_parts()
        self.add(*(f"{name} += all_{name}_p[at];" for name in self.summed), "}")
        self.settle("line", self.summed)
        self.add("}")
        self.store_merged()
        self.add("const double count = (double)cols * (double)pieces;")
        self.open_lines()
        for term in ("products", "plain"):
            self.add(f"line_{term}_p[line] = ({self.type})(total_{term} / count);")
        self.add("}", "}")
        self.end()

    def open_sums(self, names: Sequence[str]) -> None:
        for name in names:
            self.add(f"{self.wide} *all_{name} = all_{name}_p + part * rows + first_line;")

    def last(self) -> None:
        problem = self.problem
        written = [(f"gradient{k}", problem.gradients[k]) for k in problem.written]
        along = [f"partial{k}" for k in problem.left_last]
        terms = ("line_products", "line_plain") if problem.has_tasks else ()
        self.open("last", written, (*along, *terms, *self.of_lines))
        for name in along * self.is_double:
            self.array(f"{name}_rest", "width")
        second = self.second
        lines, names = self.c_lines(False)
        lines += [self.xhat(), "(void)xhat;", *self.code(self.first)]
        if problem.norm.is_computed:
            lines += [f"const {self.type} rstd = line_rstd_p[drawn];", "(void)rstd;"]
        if problem.has_tasks:
            lines += [f"const {self.type} products = line_products_p[drawn], plain = line_plain_p[drawn];"]
        values = [self.value(value) for value in self.first.outputs]
        for name, operand in self.kept_in:
            values[0] = f"{name}_p[{self.at(name, operand)}]"
        lines += [f"const {self.type} from_epilogue{k} = {value};" for k, value in enumerate(values)]
        lines += [f"(void)from_epilogue{k};" for k in range(len(self.first.outputs))]
        lines += [*self.grad_c(), *self.code(second)]
        results = self.results(second)
        for name, operand in written:
            lines.append(self.store(name, operand, results[int(name.removeprefix("gradient"))]))
        for k in problem.left_last:
            lines += self.summing(f"partial{k}", f"(double){results[k]}", "j")
        names = (*names, *self.first.used_inputs, *second.used_inputs)
        self.open_band(names, written)
        self.add(*(f"double *{name} = {name}_p + part * rows + first_line;" for name in along))
        self.add(*(f"for (int64_t j = 0; j < width; j++) {name}_rest[j] = 0;" for name in along * self.is_double))
        self.walk(names, lines, written)
        self.add("}")
        self.end()
