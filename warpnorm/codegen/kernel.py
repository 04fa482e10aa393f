"""Something to launch: a kernel compiled for a target (no GPU needed), or an interpreted one."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from warpnorm import version
from warpnorm.errors import UnavailableError
from warpnorm.plan.device import Device
from warpnorm.plan.plan import HELD, ROW, TEAM, Plan

MESSAGE = 400  # characters of the compiler's


class Argument:
    """A kernel's argument as the compiler sees it: its type, and a number that divides it."""

    __slots__ = ("divisor", "type")

    def __init__(self, type: str, divisor: int = 1) -> None:
        self.type, self.divisor = type, divisor


class BoundKernel:
    """One kernel for one target, loaded on the GPU that is current at its first launch."""

    def __init__(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        constants: dict[str, Any],
        plan: Plan,
        device: Device,
        has_fused_multiply_add: bool = True,
    ) -> None:
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.kernel, self.constants = kernel, constants
        self.compiled: Any = None
        self._direct: Callable[..., None] | None = None
        self._is_known = False  # whether there is a direct way
        self.types = tuple(_types(argument) for argument in arguments.values())  # of what is handed over
        if not device.is_interpreter:
            signature = {name: _types(argument) for name, argument in arguments.items()}
            signature |= dict.fromkeys(constants, "constexpr")
            source = (kernel, signature, constants, _attributes(arguments))
            target = (device.backend, device.arch, device.warp_size)
            options = {"num_warps": plan.warps, "enable_fp_fusion": has_fused_multiply_add}
            if plan.pattern == TEAM or (plan.pattern == HELD and plan.splits > 1):
                options["launch_cooperative_grid"] = True  # all programs run at the same time, or the launch fails
            if plan.per_unit and ("launch_cooperative_grid" in options or plan.pattern == ROW):
                options["maxnreg"] = device.registers(plan.per_unit * plan.warps)
            if constants.get("IS_CHAINED"):
                options["launch_pdl"] = True
            self.compiled = _compile(source, target, options)

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """The device of the arguments must be the current one."""
        if self.compiled is None:
            self.kernel[grid](*arguments, **self.constants)
        elif self._direct is not None and not _has_hooks():
            self._direct(grid, arguments)
        else:
            self.compiled[(*grid, 1, 1)[:3]](*arguments, *self.constants.values())
            if not self._is_known:
                self._is_known, self._direct = True, _direct(self.compiled, tuple(self.constants.values()))


def _compile(source: tuple[Any, ...], target: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return triton.compile(ASTSource(*source), target=GPUTarget(*target), options=options)
    except Exception as error:
        if version.numbers(triton.__version__) <= version.KNOWN_TRITON:
            raise
        raise UnavailableError(
            f"Triton {triton.__version__} does not compile {source[0].__name__}: {str(error)[:MESSAGE]}; install "
            f"{version.spelled(version.KNOWN_TRITON)}, or set WARPNORM_ROUTE=reference"
        ) from error


def _has_hooks() -> bool:
    """Whether a profiler wants to be told of launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def _direct(compiled: Any, constants: tuple[Any, ...]) -> Callable[..., None] | None:
    """Triton's own launcher, without what it finds out anew for each launch, and given addresses, which it does not look up;
    of the version whose launcher is known. A launch takes 9 us instead of 25."""
    launcher = compiled.run
    is_known = triton.__version__.startswith("3.6.") and type(launcher).__name__ == "CudaLauncher"
    if not is_known or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, metadata, None, None, None)
    current_device, current_stream = torch.cuda.current_device, torch._C._cuda_getCurrentRawStream

    def run(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        given = [tuple(map(_address, a)) if type(a) is tuple else _address(a) for a in arguments]
        stream = current_stream(current_device())
        launch(*(*grid, 1, 1)[:3], stream, function, *options, *given, *constants)

    return run


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _types(argument: Any) -> Any:
    return tuple(map(_types, argument)) if isinstance(argument, tuple) else argument.type


def _attributes(arguments: dict[str, Any]) -> dict[tuple[int, ...], list[list[Any]]]:
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, argument in enumerate(arguments.values()):
        paths = {(i, k): a for k, a in enumerate(argument)} if isinstance(argument, tuple) else {(i,): argument}
        for path, leaf in paths.items():
            if leaf.divisor > 1:
                attributes[path] = [["tt.divisibility", leaf.divisor]]
    return attributes
