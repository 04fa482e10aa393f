"""The error of a function against float64, forward or backward, on fresh random operands. Nothing wrong is timed."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from warpnorm.bench.cases import FORWARD, NHWC, STEP, BenchCase
from warpnorm.bench.rivals import Forward
from warpnorm.problem import compute_dtype

# float64 of a whole large case would take longer than all the timing, and more memory than there is
CHECKED_SLICES = 512
CHECKED_ELEMENTS = 1 << 25

# By how many roundings of the dtype of computation sums of thousands of values may be off, whatever their order: eager
# PyTorch's BatchNorm backward of 16 x 64 x 28 x 28 fp32 on a CPU, whose sums are float64, is off by 1.9e-7, torch.compile's
# by 4.9e-7. Beside half precision it is nothing
ROUNDINGS_OF_SUMS = 16

# The error of a few hundred elements is luck: as many draws as make these, but no more than MOST_DRAWS
ENOUGH_ELEMENTS = 1 << 16
MOST_DRAWS = 16


def draws(case: BenchCase) -> int:
    return max(1, min(MOST_DRAWS, ENOUGH_ELEMENTS // prod(case.shape)))


class Subject:
    """One case's operands, and one function on them: a callable to time, and results to check."""

    def __init__(self, case: BenchCase, device: str) -> None:
        self.case = case
        workload = case.workload
        self.full = [self._full(device) for _ in range(workload.full - workload.samples)]
        of_samples = (case.shape[0], *[1] * (len(case.shape) - 2), case.shape[-1])
        self.full += [_random(of_samples, case.dtype, device) for _ in range(workload.samples)]
        length = case.shape[workload.parameter_dim]
        dtype = compute_dtype([case.dtype]) if workload.keeps_precision else case.dtype
        of_parameters = workload.parameter_shapes or (lambda width: [(width,)] * workload.parameters)
        self.parameters = [_parameter(shape, dtype, device) for shape in of_parameters(length)]
        self.buffers = [_random((length,), dtype, device).abs() for _ in range(workload.buffers)]
        self.grads = [self._laid_out(_random(shape, case.dtype, device)) for shape in self._output_shapes()]

    def _output_shapes(self) -> list[torch.Size]:
        bare = [tensor.to("meta") for tensor in (*self.full, *self.parameters, *self.buffers)]
        return [output.shape for output in _several(self.case.workload.function(*bare))]

    def _full(self, device: str) -> torch.Tensor:
        return self._laid_out(_random(self.case.shape, self.case.dtype, device))

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if self.case.layout == NHWC else tensor

    def timed(self, forward: Forward) -> Callable[[], Any]:
        """With buffers of its own: nobody sees what another has added to them."""
        buffers = _copies(self.buffers)
        if self.case.direction == FORWARD:
            return lambda: self._forward(forward, buffers)
        if self.case.direction == STEP:
            return self.whole(forward)
        leaves = _leaves([*self.full, *self.parameters])
        outputs = _several(forward(*leaves, *buffers))
        return lambda: torch.autograd.grad(outputs, leaves, self.grads, retain_graph=True)

    def whole(self, forward: Forward) -> Callable[[], Any]:
        """Both directions."""
        leaves, buffers = _leaves([*self.full, *self.parameters]), _copies(self.buffers)
        return lambda: torch.autograd.grad(_several(forward(*leaves, *buffers)), leaves, self.grads)

    def _forward(self, forward: Forward, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return _several(forward(*self.full, *self.parameters, *buffers))

    def error(self, forward: Forward) -> float:
        """The largest relative error of an output or an updated buffer, or of any gradient: norm of the difference over
        norm of the truth."""
        results, truths = self._results(forward)
        return max(_relative(result, truth) for result, truth in zip(results, truths, strict=True))

    def _results(self, forward: Forward) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        workload, picked = self.case.workload, self._picked()
        if workload.is_drawn:
            return self._drawn(forward, picked)
        has_own_vectors = workload.parameter_dim == workload.part_dim

        def of_full(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor.index_select(workload.part_dim, picked) for tensor in tensors]

        def of_vectors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor[picked] for tensor in tensors] if has_own_vectors else list(tensors)

        few, vectors, grads = of_full(self.full), of_vectors(self.parameters), of_full(self.grads)
        wide = _leaves([t.double() for t in (*few, *vectors)])
        wide_buffers = [buffer.double() for buffer in of_vectors(_copies(self.buffers))]
        truths = _several((workload.exact or workload.function)(*wide, *wide_buffers))
        if self.case.direction == FORWARD:
            buffers = _copies(self.buffers)
            outputs = of_full(self._forward(forward, buffers))
            return [*outputs, *of_vectors(buffers)], [*(truth.detach() for truth in truths), *wide_buffers]
        exact = torch.autograd.grad(truths, wide, [g.double() for g in grads])
        of_all = self.timed(forward)()
        whole = of_full(of_all[: len(few)])
        if has_own_vectors:
            return [*whole, *of_vectors(of_all[len(few) :])], list(exact)
        # gradients of what the slices share are sums over all of them: checked on the few
        leaves = _leaves([*map(self._laid_out, few), *self.parameters])
        outputs = _several(forward(*leaves, *_copies(self.buffers)))
        gradients = torch.autograd.grad(outputs, leaves, [self._laid_out(g) for g in grads])
        return [*whole, *gradients], [*exact[: len(few)], *exact]

    def _drawn(self, forward: Forward, picked: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The same where something is dropped out. What was kept is read off the results: forward where the last output is
        not the last tensor, which misses no more than a rounding; backward where the gradient of the first is not zero."""
        few, grads = ([t[picked] for t in tensors] for tensors in (self.full, self.grads))

        def truths(kept: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            wide = _leaves([t.double() for t in (*few, *self.parameters)])
            return wide, _several(self.case.workload.exact(*wide, kept.double()))  # type: ignore[misc]

        if self.case.direction == FORWARD:
            outputs = [output[picked] for output in self._forward(forward, ())]
            return outputs, [truth.detach() for truth in truths(outputs[-1] != few[-1])[1]]
        found: list[torch.Tensor] = []
        right: list[torch.Tensor] = []
        for tensors, of_outputs, part in ((self.full, self.grads, picked), (few, grads, slice(None))):
            leaves = _leaves([*tensors, *self.parameters])
            gradients = torch.autograd.grad(_several(forward(*leaves)), leaves, of_outputs)
            mine = [gradient[part] for gradient in gradients[: len(few)]]
            wide, results = truths(mine[0] != 0)
            exact = torch.autograd.grad(results, wide, [g.double() for g in grads])
            # gradients of what the slices share are sums over all of them: checked on the few
            shared = gradients[len(few) :] if tensors is few else ()
            found += [*mine, *shared]
            right += exact[: len(mine) + len(shared)]
        return found, right

    def _picked(self) -> torch.Tensor:
        """Slices at the start and the end of the input, so that both ends of the grid are looked at."""
        size = self.case.shape[self.case.workload.part_dim]
        elements = CHECKED_ELEMENTS * (4 if self.full[0].is_cuda else 1)  # the error of ten sums would be luck
        fitting = elements // max(prod(self.case.shape) // size, 1)
        half = min(CHECKED_SLICES, fitting, size) // 2 or 1
        picked = torch.cat([torch.arange(half), torch.arange(size - half, size)]).unique()
        return picked.to(self.full[0].device)


def _random(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(tuple(shape), device=device, dtype=torch.float32).to(dtype)


def _parameter(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Of a matrix as large as keeps its results as large as its input."""
    found = _random(shape, dtype, device)
    return found / shape[-1] ** 0.5 if len(shape) > 1 else found


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _several(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _relative(result: torch.Tensor, truth: torch.Tensor) -> float:
    error = ((result.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def is_right(error: float, eager_error: float, dtype: torch.dtype) -> bool:
    """No further from float64 than twice as far as eager PyTorch, but for a rounding of the result and those of its sums:
    whoever is slower for the sake of a digit more than that is compared with all who leave it out."""
    of_sums = ROUNDINGS_OF_SUMS * torch.finfo(compute_dtype([dtype])).eps / 2
    return error <= 2 * eager_error + torch.finfo(dtype).eps / 2 + of_sums
