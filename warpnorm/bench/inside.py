"""Commands to look inside: what a norm becomes, and what works on this machine."""

import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from warpnorm import folder, functional, repeat, routing, settings
from warpnorm.bench import cases
from warpnorm.bench.cases import BACKWARD, DTYPE_NAMES, FORWARD, NHWC, BenchCase, Workload
from warpnorm.bench.draw import Drawing
from warpnorm.bench.rivals import FUNCTIONS
from warpnorm.explain import DEFAULT_TARGET, Explanation, explain_call
from warpnorm.plan import device as devices
from warpnorm.problem import compute_dtype
from warpnorm.version import VERSION

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        cases.LAYER, cases.RMS, cases.BATCH, cases.GROUP, cases.INSTANCE, cases.ADD_RMS, cases.ADD_LAYER,
        cases.SWISH_LAYER, cases.GELU_RMS, cases.GATED_RMS, cases.ADA_LAYER, cases.GROUP_SILU, cases.ADD_BATCH_RELU,
    )
}  # fmt: skip


def case(name: str, shape: tuple[int, ...], dtype: str, layout: str, backward: bool) -> BenchCase:
    """A named workload of a shape, if it has one like it."""
    workload = WORKLOADS[name]
    is_by_channel = workload.parameter_dim == 1
    if is_by_channel and len(shape) < 2:
        raise ValueError(f"{name} needs a shape with channels, such as 8x64x56x56")
    if workload in (cases.GROUP, cases.GROUP_SILU) and shape[1] % cases.NUM_GROUPS:
        raise ValueError(f"{name} has {cases.NUM_GROUPS} groups here, which do not divide {shape[1]} channels")
    if workload.samples and len(shape) < 3:
        raise ValueError(f"{name} needs a shape with samples, such as 32x1024x4096")
    if layout == NHWC and len(shape) != 4:
        raise ValueError(f"channels last is for shapes such as 8x64x56x56, not {'x'.join(map(str, shape))}")
    of_full = next(key for key, value in DTYPE_NAMES.items() if value == dtype)
    direction = BACKWARD if backward else FORWARD
    return BenchCase(workload, direction, shape, of_full, "asked for", layout if is_by_channel else None)


def explained(case: BenchCase, target: str | None, asm: bool) -> Explanation:
    """A workload on tensors that are never filled; with its gradients if the case is backward."""
    workload, shape, of_full = case.workload, case.shape, case.dtype
    of_vectors = compute_dtype([of_full]) if workload.keeps_precision else of_full
    memory = torch.channels_last if case.layout == NHWC else torch.contiguous_format
    try:
        full = [
            torch.empty(shape, dtype=of_full, memory_format=memory) for _ in range(workload.full - workload.samples)
        ]
        of_samples = (shape[0], *[1] * (len(shape) - 2), shape[-1])
        full += [torch.empty(of_samples, dtype=of_full) for _ in range(workload.samples)]
    except (RuntimeError, TypeError):  # TypeError: a size that is no 64-bit number
        raise ValueError(f"a tensor of {case.size} elements is larger than this machine can have") from None
    vectors = [torch.empty(shape[workload.parameter_dim], dtype=of_vectors) for _ in range(workload.parameters)]
    if case.direction == BACKWARD:
        full, vectors = ([tensor.requires_grad_() for tensor in tensors] for tensors in (full, vectors))
    buffers = [torch.zeros(shape[workload.parameter_dim], dtype=of_vectors) for _ in range(workload.buffers)]
    given = (*full, *vectors, *buffers)
    return explain_call(workload.function, given, {}, asm, target, is_alone=workload in FUNCTIONS)


def drawn(case: BenchCase, found: Explanation, target: str | None) -> Drawing:
    """How the kernel of an explanation reduces a row, for the GPU that it was planned for."""
    if not routing.has_triton():
        raise ValueError("--draw needs Triton, which is not installed: the drawing is read off compiled code")
    from warpnorm.codegen import bind, reduction

    is_backward = case.direction == BACKWARD
    direction = found.backward if is_backward else found.forward
    assert direction is not None
    device = devices.KNOWN[target or DEFAULT_TARGET]
    if target is None and torch.cuda.is_available():
        device = devices.of(torch.device("cuda"))
    bound = (bind.backward if is_backward else bind.forward)(direction.problem, direction.plan, device, 0)
    read = reduction.read(bound)
    if read is None:
        raise ValueError(f"--draw: the {direction.plan.pattern} kernel of {case.name} reduces nothing along a row")
    plan = direction.plan
    warps = f"{plan.warps} warp{'s' * (plan.warps > 1)}"
    title = f"{case.name} on {target or found.target}: {plan.pattern}, {warps}"
    return Drawing(title, plan, read, reduction.shuffle_masks(bound))


def findings() -> Iterator[tuple[str, str, bool]]:
    """What there is, what was found, and whether that is as it should be."""
    yield "warpnorm", VERSION, True
    yield "Python", f"{platform.python_version()} on {platform.platform()}", True
    yield "PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads", True
    yield "Triton", _triton(), True
    yield "route", settings.current().route, True
    yield from _native()
    yield from _gpus()
    yield "launcher", *_launcher()
    kept = settings.current().cache_dir
    yield "cache folder", folder.refusal(kept) or _cache(kept), not folder.refusal(kept)


def _triton() -> str:
    if not routing.has_triton():
        return f"{routing.why_no_triton()}: GPUs run PyTorch's own operators"
    import triton

    return str(triton.__version__)


def _launcher() -> tuple[str, bool]:
    """Of calls that were seen before, and whether it is as it should be."""
    from warpnorm.launch import launcher

    wanted = settings.current().launcher
    if wanted == "python":
        return "in Python, as WARPNORM_LAUNCHER says", True
    if wanted == "compiled":
        why = repeat.prepare_launcher()
        return (f"none, but WARPNORM_LAUNCHER asks for a compiled one: {why}", False) if why else ("compiled", True)
    if launcher.library().exists():
        return "compiled", True
    found = launcher.compiler()
    return (
        f"in Python until calls repeat often, then built by {found}"
        if found
        else f"in Python: {launcher.no_compiler()}",
        True,
    )


def _native() -> Iterator[tuple[str, str, bool]]:
    from warpnorm.cpu import build

    if not routing.has_compiler():
        yield "native code", f"none, {routing.why_no_compiler()}: CPUs run PyTorch's own operators", True
        return
    yield "C compiler", f"{build.compiler()}, {build.version()}", True
    yield "native code", *_tried("cpu", "native")


def _gpus() -> Iterator[tuple[str, str, bool]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        yield "GPU", "none", True
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield f"GPU {index}", f"{properties.name}, {memory}, {properties.multi_processor_count} units", True
        if routing.has_triton():
            yield f"kernels on {index}", *_tried(f"cuda:{index}", "kernels")


def _tried(device: str, route: str) -> tuple[str, bool]:
    """layer_norm there, forward and backward, against PyTorch's."""
    x = torch.randn(16, 2048, device=device, requires_grad=True)
    try:
        with settings.override(route=route):
            output = functional.layer_norm(x, 2048)
            found = (output, *torch.autograd.grad(output, x, x.detach()))
        expected = F.layer_norm(x, (2048,))
        for a, b in zip(found, (expected, *torch.autograd.grad(expected, x, x.detach())), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    except Exception as error:  # whatever it is belongs on the page
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
    return "builds and runs, forward and backward", True


def _cache(kept: Path) -> str:
    try:
        sizes = [path.stat().st_size for path in kept.iterdir() if path.is_file()]
    except FileNotFoundError:
        return f"{kept}, not there yet"
    except OSError as error:
        return f"{kept}: {error}"
    return f"{kept}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"
