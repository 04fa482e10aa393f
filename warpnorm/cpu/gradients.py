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


class OfGradients(Writer):
    problem: BackwardProblem

    @cached_property
    def first(self) -> Graph:
        return renamed(self.problem.epilogue_vjp, "first_")

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
