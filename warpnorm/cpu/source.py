"""A problem becomes one C function: rows one after another, each in walks over its columns. What a walk reads lies in L1 or
L2 when the next one reads it again. Sums are in double precision, but for short ones in long rows."""

import re
from collections.abc import Sequence

from warpnorm.cpu import build
from warpnorm.cpu.gradients import OfGradients
from warpnorm.cpu.writer import BLOCK, Writer, laid_out, renamed
from warpnorm.problem import ALONG, BY_ROW, COLUMN, GROUP, SCALAR, TILES, BackwardProblem, ForwardProblem, Operand

FLUSHED = 64  # rows whose sum is taken in the dtype of computation
# Columns up to which sums are in double precision at once: LayerNorm fp32 of 64 takes 91 ns, 126 by many sums
NARROW_ROW = 128
# Bytes of rows whose statistics are found together: h = x + r -> RMSNorm fp32, both returned, of 768 takes 389 ns one by
# one, 429 by two, of which 30 KB wait, and of 512 by two 285, by four, of which 40 wait, 294
MOST_IN_L1 = 28 << 10
TOGETHER = 4  # rows that are walked at a time, or half as many where registers are short
# What `writer.py` writes of a dropout, one element at a time
KEEP = re.compile(r"keep\((\w+), (\w+), drawn \* cols \+ col, (\w+), (\w+)\)")


def forward(problem: ForwardProblem) -> str:
    return _Forward(problem).text()


def backward(problem: BackwardProblem) -> str:
    return _Backward(problem).text()


class _Rows(Writer):
    """Walks along rows."""

    kept = "0"  # where what is kept of a row begins
    several = 0  # short rows whose statistics are found together; none, of long ones

    def begin_line(self, names: Sequence[str], written: Sequence[tuple[str, Operand]] = ()) -> None:
        """One piece of a row, or all of it: where its tensors begin, and what is the same along it."""
        if self.problem.has_pieces:
            self.add("for (int64_t piece = 0; piece < pieces; piece++) {")
            self.add("const int64_t unit = row / inner_rows * pieces + piece;")
            self.add("const int64_t line = unit * inner_rows + row % inner_rows;")
            self.add("const int64_t kept = piece * cols;")
        else:
            self.add("{", f"const int64_t line = row, kept = {self.kept};")
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
        written: Sequence[tuple[str, Operand]] = (), waiting: int = 0, pivot: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Over the columns of a line; `sums` are names: the body adds to the variable, which goes to total_ that name. With
        `waiting`, to waiting_ that name, and so many are joined with what there was before; `pivot` gives c, of which the
        first few make the first pivot."""
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
        inside, draws = self.drawn_before([*inside, *body])
        is_staged = any(self.is_staged(operand) for _, operand in (*tensors, *written))
        if not sums and not is_staged and not draws:
            self.add("#pragma omp simd", f"for (int64_t j = 0; j < {last}; j++) {{", *inside, "}", "}")
            return
        # Narrow rows have too few columns for as many sums beside each other
        has_lanes = bool(sums) and not any("(double)" in line for line in inside)
        has_lanes = has_lanes and not (self.several and self.problem.cols_class <= NARROW_ROW)
        if pivot:
            self.add("if (seen + waiting == 0) {" if waiting else "{", "double values = 0;")
            self.add(f"const int64_t few = {last} < 16 ? {last} : 16;")
            self.add("#pragma omp simd reduction(+ : values)", "for (int64_t j = 0; j < few; j++) {")
            self.add("const int64_t col = before + j;", "(void)col;")
            self.add(*(self.load(name, operand, self.at(name, operand), is_alone=True) for name, operand in tensors))
            self.add(*pivot, "values += (double)c;", "}")
            self.add(f"pivot = ({self.type})(values / (double)few);", "}")
        self.add(f"for (int64_t start = 0; start < {last}; start += {self.block}) {{")
        self.add(f"const int64_t stop = start + {self.block} < {last} ? start + {self.block} : {last};")
        if is_staged:
            self.stage(tensors, "start", "stop - start", self.block)
            self.open_stage(written, self.block)
        for k, (seed, offset, stream) in enumerate(draws):
            self.add(f"uint32_t words{k}[{self.block + 8}];")
            first = f"drawn * cols + before + start, stop - start, {stream}"
            self.add(f"const uint32_t *drawn{k} = draw_all(words{k}, {seed}, {offset}, {first});")
        if sums:
            self.add(f"double {', '.join(f'{name} = 0' for name in sums)};")
        if pivot:
            self.add("for (int64_t turn = 0; turn < 2; turn++) {")
        begin = "start"
        if has_lanes and self.several:
            begin = "rest"
            self.add(f"const int64_t rest = stop - (stop - start) % {self.lanes};")
            self.sum_in_lanes(inside, sums, "rest")
        elif has_lanes:
            self.add(f"if (stop - start == {self.block}) {{")
            self.sum_in_lanes(inside, sums, "stop")
            self.add("} else {")
        reduction = f" reduction(+ : {', '.join(sums)})" if sums else ""
        self.add(f"#pragma omp simd{reduction}", f"for (int64_t j = {begin}; j < stop; j++) {{", *inside, "}")
        self.add(*["}"] * (has_lanes and not self.several))
        if pivot:
            self.move_pivot("seen + waiting > 0" if waiting else "start > 0")
        self.close_stage(written, "stop - start")
        self.add(*(f"{'waiting' if waiting else 'total'}_{name} += {name};" for name in sums))
        if waiting:
            self.add("waiting += (double)(stop - start);", f"if (waiting >= {waiting}) {self.join()}")
        self.add("}", "}")

    def move_pivot(self, is_later: str) -> None:
        """The first few values of a row may be far from the others. Then its first block's deviations cancel out: they are
        taken anew, from its mean. Those of later blocks are from the mean of what was before."""
        self.add("const double beside = off / (double)(stop - start);")
        self.add(f"if (turn > 0 || {is_later} || !(2 * off * beside > squares)) break;")
        self.add(f"pivot = ({self.type})((double)pivot + beside);", "off = squares = 0;", "}")

    def drawn_before(self, lines: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Lines that read what was drawn for a whole block, four at once; and what that is drawn from."""
        draws: list[tuple[str, str, str]] = []

        def read(match: re.Match[str]) -> str:
            seed, offset, threshold, stream = match.groups()
            if (seed, offset, stream) not in draws:
                draws.append((seed, offset, stream))
            return f"(drawn{draws.index((seed, offset, stream))}[j - start] >= {threshold})"

        return [KEEP.sub(read, line) for line in lines], draws

    def join(self) -> str:
        state = "&mean_w, &m2, &seen, (double)pivot, waiting_off, waiting_squares, waiting"
        none = "waiting = waiting_off = waiting_squares = 0;"
        return f"{{ join_{self.suffix}({state}); {none} pivot = ({self.type})mean_w; }}"

    def sum_in_lanes(self, inside: Sequence[str], sums: Sequence[str], end: str) -> None:
        """What fills many sums, one beside the other: one alone would wait for every addition before the next."""
        self.add(*(f"{self.type} {name}_lanes[{self.lanes}] = {{0}};" for name in sums))
        self.add(f"for (int64_t i = start; i < {end}; i += {self.lanes}) {{", "#pragma omp simd")
        self.add(f"for (int64_t k = 0; k < {self.lanes}; k++) {{", "const int64_t j = i + k;")
        for line in inside:
            for name in sums:
                line = re.sub(rf"\b{name} \+=", f"{name}_lanes[k] +=", line)
            self.add(line)
        self.add(
            "}",
            "}",
            f"#pragma omp simd reduction(+ : {', '.join(sums)})",
            f"for (int64_t k = 0; k < {self.lanes}; k++) {{",
        )
        self.add(*(f"{name} += (double){name}_lanes[k];" for name in sums), "}")


class _Forward(_Rows):
    problem: ForwardProblem

    def text(self) -> str:
        problem, norm = self.problem, self.problem.norm
        self.begin("forward")
        outputs = [(f"output{k}", operand) for k, operand in enumerate(problem.outputs)]
        first = len(problem.operands)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(outputs)], False)
        first += len(outputs)
        self.declare_statistics(first)
        self.several = self.found_together([*((n, o) for _, n, o in self.loaded), *outputs])
        self.add("const int64_t units = rows / pieces;")
        for name in self.kept_values * norm.is_computed:
            self.array(f"kept_{name}", f"pieces * cols * {max(self.several, 1)}")
        if self.several:
            self.statistics_of_several(self.several)
        else:
            self.add("for (int64_t row = units * part / parts; row < units * (part + 1) / parts; row++) {")
        if norm.is_computed and not self.several:
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
        self.add("}", "}", *["}"] * bool(self.several))
        self.end()
        return laid_out(self.lines)

    def found_together(self, tensors: Sequence[tuple[str, Operand]]) -> int:
        """Of how many rows, which stay in L1 until their results: of one block each, in single precision. One after the
        other, each would wait for its own sums, divisions and root. LayerNorm fp32, nanoseconds a row by one thread, with
        four and with one: 64 columns 91 and 114, 256 128 and 223, 768 234 and 445."""
        problem = self.problem
        tiles = [o for _, o in tensors if o.axes in (*TILES, COLUMN)]
        is_by_row = problem.norm.is_computed and not problem.norm.is_by_channel and not problem.has_pieces
        if not is_by_row or self.is_double or problem.cols_class > BLOCK or any(len(o.col_strides) > 1 for o in tiles):
            return 0
        moved = sum(o.dtype.itemsize for _, o in tensors if o.axes in TILES)
        of_row = problem.width * (moved + len(self.kept_values) * problem.compute.itemsize)
        return next((count for count in (TOGETHER, TOGETHER // 2) if count * of_row <= MOST_IN_L1), 1)

    def statistics_of_several(self, most: int) -> None:
        """All that comes before the walk that writes a row's results."""
        norm = self.problem.norm
        lines, names = self.c_lines(True)
        sums, body = ["squares"], [*lines, "squares += c * c;"]
        if norm.is_centered:
            deviation = "const float deviation = c - pivot;"
            body = [*lines, deviation, "off += deviation;", "squares += deviation * deviation;"]
            sums = ["off", "squares"]
        self.add("const int64_t end_row = units * (part + 1) / parts;", "const double share = 1.0 / (double)cols;")
        self.add(f"for (int64_t base = units * part / parts; base < end_row; base += {most}) {{")
        self.add(f"const int64_t count = end_row - base < {most} ? end_row - base : {most};")
        self.add(*(f"double {name}_of[{most}] = {{0}};" for name in sums), f"float pivot_of[{most}] = {{0}};")
        self.add("for (int64_t which = 0; which < count; which++) {", "const int64_t row = base + which;")
        self.add("float pivot = 0;", *(f"double total_{name} = 0;" for name in sums))
        self.kept = "which * cols"
        self.begin_line(names)
        self.walk(names, body, sums, pivot=lines if norm.is_centered else ())
        self.add("}", *(f"{name}_of[which] = total_{name};" for name in sums), "pivot_of[which] = pivot;", "}")
        of_row = ("mean", "mean_rest", "rstd", "rstd_rest")
        self.add(*(f"float {name}_of[{most}];" for name in of_row))
        self.add("#pragma omp simd", f"for (int64_t which = 0; which < {most}; which++) {{")
        if norm.is_centered:
            self.add("const double shift = off_of[which] * share, mean_d = (double)pivot_of[which] + shift;")
            self.add("const double inside = squares_of[which] - off_of[which] * shift;")
            self.add("const double variance_d = (inside < 0 ? 0 : inside) * share;")
        else:
            self.add("const double mean_d = 0, variance_d = squares_of[which] * share;")
        self.add("const double rstd_d = 1.0 / sqrt(variance_d + (double)eps);")
        for name in ("mean", "rstd"):
            self.add(f"{name}_of[which] = (float){name}_d;")
            self.add(f"{name}_rest_of[which] = (float)({name}_d - (double)(float){name}_d);")
        self.add("}", "for (int64_t which = 0; which < count; which++) {", "const int64_t row = base + which;")
        for name in of_row:
            self.add(f"const float {name} = {name}_of[which];", f"(void){name};")
        self.add(*(f"{name}_p[row] = {name};" for name in norm.statistics))

    def statistics(self) -> None:
        norm = self.problem.norm
        lines, names = self.c_lines(True)
        if not norm.is_centered:
            self.add(f"{self.wide} total_squares = 0;")
            self.begin_line(names)
            self.walk(names, [*lines, "squares += c * c;"], ["squares"])
            self.add("}")
            self.add("const double rstd_w = 1.0 / sqrt((double)(total_squares / (double)cols) + (double)eps);")
            self.add(f"const {self.type} rstd = ({self.type})rstd_w;", self.rest("rstd"))
            self.add("rstd_p[row] = rstd;")
            return
        # One walk: deviations from a pivot, the mean of the first few values and then of all so far
        wide = "double" if norm.keeps_variance else self.type
        self.add(f"{self.wide} mean_w = 0, m2 = 0, waiting_off = 0, waiting_squares = 0;")
        self.add("double seen = 0, waiting = 0;", f"{self.type} pivot = 0;")
        deviation = f"const {wide} deviation = ({wide})c - ({wide})pivot;"
        self.begin_line(names)
        self.walk(
            names, [*lines, deviation, "off += deviation;", "squares += deviation * deviation;"], ["off", "squares"],
            waiting=BLOCK, pivot=lines,
        )  # fmt: skip
        self.add("}")
        self.add(f"if (waiting > 0) {self.join()}")
        self.add(f"const {self.wide} variance_w = m2 / seen;")
        self.finish_statistics()
        self.add(self.rest("mean"), self.rest("rstd"))

    def rest(self, name: str) -> str:
        """What is rounded off of a statistic."""
        return f"const {self.type} {name}_rest = ({self.type})({name}_w - {name}); (void){name}_rest;"


class _Backward(_Rows, OfGradients):
    problem: BackwardProblem

    @property
    def along(self) -> list[int]:
        return [k for k in self.problem.reduced if self.problem.gradients[k].axes in ALONG]

    @property
    def early(self) -> tuple[int, ...]:
        """Which gradients are summed in the first walk: of norms by channel whatever can be, of others the columns' where
        that saves computing the epilogue twice."""
        problem = self.problem
        if problem.norm.is_by_channel:
            return problem.settled_first
        columns = [k for k in problem.settled_first if problem.gradients[k].axes in (COLUMN, GROUP)]
        return tuple(columns) if self.has_costly_epilogue else ()

    def text(self) -> str:
        problem, norm = self.problem, self.problem.norm
        self.begin("backward")
        written = [(f"gradient{k}", problem.gradients[k]) for k in problem.written]
        first = len(problem.operands) + len(problem.grad_outputs)
        self.declare([(name, operand, first + k) for k, (name, operand) in enumerate(written)], False)
        first += len(written)
        for k, name in enumerate(norm.saved):
            self.add(f"const {self.type} *{name}_p = (const {self.type} *)p[{first + k}];", f"(void){name}_p;")
        first += len(norm.saved)
        self.declare_sums(problem.reduced, first)
        by_column = [k for k in problem.reduced if problem.gradients[k].axes in (COLUMN, GROUP)]
        scalars = [k for k in problem.reduced if problem.gradients[k].axes == SCALAR]
        together = self.together(written, by_column)
        for name in self.kept_values:
            self.array(f"kept_{name}", f"pieces * cols * {together}")
        if self.keeps_gradient:
            self.array("kept_gradient", f"pieces * cols * {together}")
        for k in by_column:
            self.array(f"sum{k}", "cols", is_zero=True)
        self.add(*(f"double total_all{k} = 0;" for k in scalars))
        has_groups = any(problem.gradients[k].axes == GROUP for k in by_column)
        if has_groups:  # each has its rows side by side, and one thread
            self.add("const int64_t group_rows = rows / groups;")
            self.add("for (int64_t group = groups * part / parts; group < groups * (part + 1) / parts; group++) {")
            self.add("const int64_t first_row = group * group_rows, end_row = first_row + group_rows;")
        else:
            self.add("const int64_t units = rows / pieces, group = 0;", "(void)group;")
            self.add("const int64_t first_row = units * part / parts, end_row = units * (part + 1) / parts;")
        self.add("int64_t next;", "for (int64_t row = first_row; row < end_row; row = next) {")
        if together > 1:
            self.add(f"if (row + {together} <= end_row) {{", f"next = row + {together};")
            self.rows_together(together, written, by_column)
            self.add("} else {")
        self.add("next = row + 1;")
        self.row(written, by_column, scalars)
        self.add(*["}"] * (together > 1))
        for k in by_column:
            self.flush(k, f"(next - first_row) % {FLUSHED} == 0 || next == end_row")
        self.add("}")
        if has_groups:
            self.add("}")
        for k in scalars:
            if k not in self.early or not norm.is_by_channel:
                self.add(f"partial{k}_p[part] = total_all{k};")
        self.end()
        return laid_out(self.lines)

    def flush(self, k: int, when: str) -> None:
        """Sums over rows: of a few in the dtype of computation, of all in double precision."""
        home = "group" if self.problem.gradients[k].axes == GROUP else "part"
        self.add(f"if ({when}) {{", f"double *all = partial{k}_p + {home} * cols;", "#pragma omp simd")
        self.add(f"for (int64_t j = 0; j < cols; j++) {{ all[j] += (double)sum{k}[j]; sum{k}[j] = 0; }}", "}")

    def together(self, written: Sequence[tuple[str, Operand]], by_column: Sequence[int]) -> int:
        """How many rows are walked at a time: with several, columns and sums over rows are read and written once for all of
        them. LayerNorm of 4096 columns: 1.6 ms with four, 2.8 with one. With registers of 16 bytes, on ARM, 6.9 ms with two,
        8.6 with four and 6.5 with one."""
        problem = self.problem
        tensors = [(name, o) for _, name, o in self.loaded if o.axes in (*TILES, COLUMN)]
        is_simple = all(len(o.col_strides) == 1 and not self.is_staged(o) for _, o in (*tensors, *written))
        others = [k for k in problem.reduced if problem.gradients[k].axes != COLUMN]
        has_sums = any(k not in self.early for k in by_column)
        can = is_simple and has_sums and not others and problem.has_tasks and not problem.norm.is_by_channel
        return (TOGETHER if build.vector_bytes() > 16 else TOGETHER // 2) if can else 1

    def start_row(self) -> None:
        self.add(f"const int64_t number = {self.row_number()};", "(void)number;")
        self.add(*(f"const {self.type} {name} = {name}_p[number];" for name in self.problem.norm.saved))

    def row(self, written: Sequence[tuple[str, Operand]], by_column: Sequence[int], scalars: Sequence[int]) -> None:
        self.start_row()
        if self.problem.has_tasks:
            self.sum_terms(by_column)
        lines, used, results = self.second_walk(written)
        lines += [f"sum{k}[col] += {results[k]};" for k in by_column if k not in self.early]
        scalars, along = ([k for k in of if k not in self.early] for of in (scalars, self.along))
        sums = [f"all{k}" for k in scalars] + [f"along{k}" for k in along]
        lines += [f"all{k} += {results[k]};" for k in scalars] + [f"along{k} += {results[k]};" for k in along]
        self.begin_line(used, written)
        self.add(*(f"double total_along{k} = 0;" for k in along))
        self.walk(used, lines, sums, written)
        self.add(*(f"partial{k}_p[line] = total_along{k};" for k in along))
        self.add("}")

    def rows_together(self, count: int, written: Sequence[tuple[str, Operand]], by_column: Sequence[int]) -> None:
        """The first walk of each of several rows, and one second walk of all."""
        lines, used, results = self.second_walk(written)
        lines, draws = self.drawn_before(lines)
        by_row = [(name, o) for _, name, o in self.loaded if name in used and o.axes in BY_ROW]
        values = [*self.problem.norm.saved, *self.term_names, *(name for name, o in by_row if o.axes in ALONG)]
        places = ["drawn", "kept", *(f"{name}_line" for name, _ in (*by_row, *written))]
        self.add(f"{self.type} {', '.join(f'{name}_of[{count}]' for name in values)};")
        self.add(f"int64_t {', '.join(f'{name}_of[{count}]' for name in places)};", "const int64_t base = row;")
        self.add(f"for (int64_t which = 0; which < {count}; which++) {{", "const int64_t row = base + which;")
        self.kept = "which * cols"
        self.start_row()
        self.sum_terms(by_column)
        self.begin_line(used, written)
        self.kept = "0"
        self.add(*(f"{name}_of[which] = {name};" for name in (*values, *places)), "}", "}")
        columns = [(name, o) for _, name, o in self.loaded if name in used and o.axes == COLUMN]
        late = [k for k in by_column if k not in self.early]
        block = self.block if draws else "cols"
        self.add(f"for (int64_t start = 0; start < cols; start += {block}) {{")
        self.add(f"const int64_t stop = start + {block} < cols ? start + {block} : cols;")
        for k, (seed, offset, stream) in enumerate(draws):
            self.add(f"uint32_t words{k}[{count}][{self.block + 8}];", f"const uint32_t *drawn{k}_of[{count}];")
            first = f"drawn_of[which] * cols + start, stop - start, {stream}"
            self.add(f"for (int64_t which = 0; which < {count}; which++)")
            self.add(f"drawn{k}_of[which] = draw_all(words{k}[which], {seed}, {offset}, {first});")
        self.add("#pragma omp simd", "for (int64_t j = start; j < stop; j++) {", "const int64_t col = j;")
        self.add(*(f"const int64_t {name}_at = 0;" for name, _ in columns))
        self.add(*(self.load(name, operand, self.at(name, operand)) for name, operand in columns))
        self.add(*(f"{self.type} sum_of{k} = 0;" for k in late))
        for which in range(count):
            self.add("{", *(f"const {self.type} {name} = {name}_of[{which}];" for name in values))
            self.add(*(f"const uint32_t *drawn{k} = drawn{k}_of[{which}];" for k in range(len(draws))))
            self.add(
                *(f"const int64_t {name} = {name}_of[{which}];" for name in ("drawn", "kept")),
                "(void)drawn; (void)kept;",
            )
            for name, operand in (*by_row, *written):
                self.add(f"const int64_t {name}_at = {name}_line_of[{which}];", f"(void){name}_at;")
                if operand.axes in TILES and (name, operand) in by_row:
                    self.add(self.load(name, operand, self.at(name, operand)))
            self.add(*lines, *(f"sum_of{k} += {results[k]};" for k in late), "}")
        self.add(*(f"sum{k}[col] += sum_of{k};" for k in late), "}", "}")

    def second_walk(self, written: Sequence[tuple[str, Operand]]) -> tuple[list[str], tuple[str, ...], list[str]]:
        """The body, the names that it reads, and the gradients that it gives."""
        second = self.second
        lines, names = self.c_again() if self.problem.has_tasks else self.c_lines(False)
        lines = [*lines, self.xhat(), "(void)xhat;", *self.code(self.first)]
        lines += [f"const {self.type} from_epilogue{k} = {self.value(v)};" for k, v in enumerate(self.first.outputs)]
        if self.keeps_gradient:
            lines[-len(self.first.outputs)] = f"const {self.type} from_epilogue0 = kept_gradient[kept + col];"
        lines += [f"(void)from_epilogue{k};" for k in range(len(self.first.outputs))]
        lines += self.grad_c()
        lines += self.known(second, self.code(second))
        results = self.results(second)
        for name, operand in written:
            lines.append(self.store(name, operand, results[int(name.removeprefix("gradient"))]))
        return lines, (*names, *self.first.used_inputs, *second.used_inputs), results

    @property
    def term_names(self) -> list[str]:
        return ["products", "plain"] if self.problem.norm.is_centered else ["products"]

    def sum_terms(self, by_column: Sequence[int]) -> None:
        """What must be summed over a row before there is a gradient, and the gradients that can be on the way."""
        norm, terms = self.problem.norm, self.term_names
        lines, names = self.c_lines(True)
        self.add(f"{self.wide} {', '.join(f'total_{term} = 0' for term in terms)};")
        body = [*lines, self.xhat(), "(void)xhat;", *self.code(self.first)]
        if self.keeps_gradient:
            body.append(f"kept_gradient[kept + col] = {self.value(self.first.outputs[0])};")
        body += [f"sum{k}[col] += {self.of_epilogue(k)};" for k in by_column if k in self.early]
        used = (*names, *self.first.used_inputs)
        if norm.is_by_channel:
            self.open_merged()
        self.begin_line(used)
        if norm.is_by_channel:
            sums = [f"summed{k}" for k in range(len(self.sums.summands))]
            self.add(f"double {', '.join(f'total_{name} = 0' for name in sums)};")
            body += [f"{name} += {self.product(of)};" for name, of in zip(sums, self.sums.summands, strict=True)]
            self.walk(used, body, sums)
            self.settle("line", [f"total_{name}" for name in sums])
        else:
            body += [
                f"const {self.type} grad_xhat = {self.value(self.first.outputs[0])};",
                "products += grad_xhat * xhat;",
            ]
            body += ["plain += grad_xhat;"] * norm.is_centered
            self.walk(used, body, terms)
        self.add("}")
        if norm.is_by_channel:
            self.store_merged()
        self.add("const double count = (double)cols * (double)pieces;")
        self.add(*(f"const {self.type} {term} = ({self.type})(total_{term} / count);" for term in terms))

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
