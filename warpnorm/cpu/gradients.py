"""What generated C has in common in backward: sums along lines, which are shared where they are alike, and the way of a
gradient through the epilogue, the norm and the prologue."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from warpnorm.codegen import along
from warpnorm.cpu.writer import Writer, renamed
from warpnorm.problem import BackwardProblem, Graph, Value

# What is better kept than computed twice
COSTLY = {
    "exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "pow", "fmod", "remainder",
}  # fmt: skip
MOST_KEPT = 2  # values of an element: a row of each should stay in L1 or L2


def is_costly(graph: Graph, outputs: Sequence[Value]) -> bool:
    """Whether something costly is needed for these outputs."""
    nodes = {node.name: node for node in graph.nodes}
    waiting, seen = list(outputs), set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and value in nodes and value not in seen:
            seen.add(value)
            waiting += nodes[value].args
    return any(nodes[name].operator in COSTLY for name in seen)


def alike(graph: Graph, other: Graph) -> dict[str, str]:
    """Which values of a graph are computed as values of the other one are, and as which of these."""
    found: dict[tuple[object, ...], str] = {}
    names: dict[str, str] = {}
    for node in (*other.nodes, *graph.nodes):
        args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
        names[node.name] = found.setdefault((node.operator, node.dtype, args), node.name)
    of_other = {node.name for node in other.nodes}
    return {node.name: names[node.name] for node in graph.nodes if names[node.name] in of_other}


class OfGradients(Writer):
    problem: BackwardProblem

    @cached_property
    def second(self) -> Graph:
        return renamed(self.problem.prologue_vjp, "second_")

    @cached_property
    def costly(self) -> dict[str, str]:
        """Values of the gradient of the prologue that take long, and that the prologue has computed before: as which."""
        operators = {node.name: node.operator for node in self.prologue.nodes}
        found = alike(self.second, self.prologue)
        return {name: value for name, value in found.items() if operators[value] in COSTLY}

    @cached_property
    def kept_values(self) -> tuple[str, ...]:
        """With what took long, c takes no time."""
        if not self.problem.has_tasks:
            return ()
        costly = tuple(dict.fromkeys(self.costly.values()))
        if len(costly) > MOST_KEPT or not costly:
            return super().kept_values
        nodes = tuple(replace(n, operator="", args=()) if n.name in costly else n for n in self.prologue.nodes)
        rest = replace(self.prologue, nodes=nodes)
        return (*costly, "c") if is_costly(rest, rest.outputs) else costly

    def c_again(self) -> tuple[list[str], tuple[str, ...]]:
        if "c" in self.kept_values or not self.kept_values:
            return super().c_again()
        lines, names = self.c_lines(False)
        return self.known(self.prologue, lines), names

    def known(self, graph: Graph, lines: Sequence[str]) -> list[str]:
        """The lines of a graph's nodes, where those of values that are kept read them."""
        kept = {name: name for name in self.kept_values} | {
            name: value for name, value in self.costly.items() if value in self.kept_values
        }
        found = list(lines)
        for k, node in enumerate(graph.nodes):
            if node.name in kept:
                found[k] = f"const {self.type} {node.name} = kept_{kept[node.name]}[kept + col];"
        return found

    @cached_property
    def first(self) -> Graph:
        return renamed(self.problem.epilogue_vjp, "first_")

    @property
    def early(self) -> tuple[int, ...]:
        """Which gradients are summed in the first walk."""
        return self.problem.settled_first

    @cached_property
    def has_costly_epilogue(self) -> bool:
        return self.problem.has_tasks and is_costly(self.first, self.first.outputs)

    @cached_property
    def keeps_gradient(self) -> bool:
        """Whether the second walk would compute something costly again for the gradient of xhat alone."""
        problem = self.problem
        if not self.has_costly_epilogue:
            return False
        late = [i for k, i in enumerate(problem.wanted) if k not in self.early and i in problem.wanted_of_epilogue]
        direct = problem.needs_grad_xhat + problem.needs_grad_c
        outputs = [self.first.outputs[direct + problem.wanted_of_epilogue.index(i)] for i in late]
        outputs += self.first.outputs[problem.needs_grad_xhat : direct]
        return not is_costly(self.first, outputs)

    @cached_property
    def sums(self) -> along.Sums:
        """Of a norm by channel: what is summed along its lines."""
        return along.sums(replace(self.problem, epilogue_vjp=self.first))

    def product(self, values: Sequence[Value]) -> str:
        return " * ".join(map(self.value, values)) or "1"

    def settle(self, line: str, totals: Sequence[str]) -> None:
        """From the sums along a line: terms of its row, and gradients."""
        constant = along.constant_along_lines(replace(self.problem, epilogue_vjp=self.first))
        code = zip(self.first.nodes, self.code(self.first), strict=True)
        self.add(*(text for node, text in code if node.name in constant))
        for term, (k, factors) in zip(("products", "plain"), self.sums.terms, strict=True):
            self.add(f"total_{term} += {totals[k]} * {self.product(factors)};")
        for which, (k, factors) in zip(self.problem.merged, self.sums.merged, strict=True):
            self.add(f"merged{which} += {totals[k]} * {self.product(factors)};")
        for which, (k, factors) in zip(self.problem.left_first, self.sums.left, strict=True):
            self.add(f"partial{which}_p[{line}] = {totals[k]} * {self.product(factors)};")

    def open_merged(self) -> None:
        """Gradients that are one number for each row."""
        self.add(*(f"{self.wide} merged{which} = 0;" for which in self.problem.merged))

    def store_merged(self) -> None:
        self.add("{", "const int64_t line = row / inner_rows * pieces * inner_rows + row % inner_rows;", "(void)line;")
        for which in self.problem.merged:
            operand = self.problem.gradients[which]
            value = f"({self.type})merged{which}"
            self.add(self.store(f"gradient{which}", operand, value, self.row_offset(operand)))
        self.add("}")

    def declare_sums(self, which: Sequence[int], first: int) -> None:
        """Gradients that are sums: themselves, or what is left of them to be summed."""
        merged = self.problem.merged if self.problem.norm.is_by_channel else ()
        for place, k in enumerate(which, first):
            if k in merged:
                self.declare([(f"gradient{k}", self.problem.gradients[k], place)], False)
            else:
                self.add(f"double *partial{k}_p = (double *)p[{place}];")

    def of_epilogue(self, which: int) -> str:
        """What the epilogue gives of one of the gradients."""
        problem = self.problem
        first = problem.needs_grad_xhat + problem.needs_grad_c
        return self.value(self.first.outputs[first + problem.wanted_of_epilogue.index(problem.wanted[which])])

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
