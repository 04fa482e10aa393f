"""What LayerNorm and RMSNorm would reach on rows of an odd number of halves, if they were read and written by vectors of
sixteen bytes as they lie in memory (`odd_kernels.py`). The package moves each half alone there.
`python benchmarks/experiments/odd_rows.py` says whether that would pay, beside what the package reaches today. Needs a GPU.

Not measured yet. For an H200 the compiler makes 18 to 24 instructions an element of forward and 22 to 29 of backward, as
many as of rows that are aligned, where the package reaches 88 to 91 % of copy speed; here it is 49 to 67."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from odd_kernels import team_odd_backward_kernel, team_odd_forward_kernel

import warpnorm
from warpnorm.bench import timing

COLS, EPS = 50257, 1e-5
ROWS = (1 << 27) // COLS
Tensors = tuple[torch.Tensor, ...]
Way = tuple[int, int, int, int]  # columns and warps of a program, programs of a multiprocessor, and stages
FORWARD: tuple[Way, ...] = ((2048, 2, 8, 3), (2048, 2, 6, 3), (4096, 4, 4, 3), (4096, 4, 3, 3), (2048, 4, 4, 3))
BACKWARD: tuple[Way, ...] = ((1024, 2, 8, 3), (2048, 4, 4, 3), (2048, 2, 4, 3), (2048, 4, 3, 3), (1024, 2, 6, 3))


def room_for(rows: int, cols: int, device: str) -> torch.Tensor:
    """Whose last vector is whole too."""
    whole = torch.empty(-(-rows * cols // 8) * 8, dtype=torch.bfloat16, device=device)
    return whole[: rows * cols].view(rows, cols)


def words(tensor: torch.Tensor) -> torch.Tensor:
    count = -(-tensor.numel() // 8) * 4
    whole = torch.empty(0, dtype=torch.bfloat16, device=tensor.device).set_(tensor.untyped_storage())
    return whole.view(torch.int32)[:count]


def teams_of(way: Way, cols: int, units: int) -> tuple[int, int]:
    """How many, a multiple of eight, and how many programs each has: the last has room for a shift."""
    splits = -(-(cols + 7) // way[0])
    teams = units * way[2] // splits // 8 * 8
    if teams == 0:
        raise ValueError(f"{way} has fewer than eight teams")
    return teams, splits


def options(way: Way, is_here: bool) -> dict[str, object]:
    registers = min(65536 // (32 * way[1] * way[2]) // 8 * 8, 255)
    of_gpu = {"maxnreg": registers, "launch_cooperative_grid": True}
    return {"num_warps": way[1], "num_stages": 1} | (of_gpu if is_here else {})


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, way: Way, units: int
) -> Callable[[], None]:
    (rows, cols), is_here = x.shape, x.is_cuda
    teams, splits = teams_of(way, cols, units)
    mailbox = torch.zeros(teams * 4 * splits, dtype=torch.int64, device=x.device)
    return partial(
        team_odd_forward_kernel[(teams, splits)], words(x), words(y), y, weight, weight if bias is None else bias, mailbox,
        rows, cols, EPS, words(x).numel() // 4, IS_CENTERED=bias is not None, VECTORS=way[0] // 8, SPLITS=splits,
        STAGES=way[3], HAS_ASM=is_here, **options(way, is_here),
    )  # fmt: skip


def backward(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor,
    dx: torch.Tensor, way: Way, units: int,
) -> Callable[[], Tensors]:  # fmt: skip
    """Gives the gradients of weight and bias; their partial sums are added by PyTorch."""
    (rows, cols), is_here = x.shape, x.is_cuda
    teams, splits = teams_of(way, cols, units)
    mailbox = torch.zeros(teams * 4 * splits, dtype=torch.int64, device=x.device)
    partials = torch.empty(2, teams, cols, dtype=torch.float32, device=x.device)

    def run() -> Tensors:
        team_odd_backward_kernel[(teams, splits)](
            words(x), words(dy), words(dx), dx, weight, partials[0], partials[1], rstd if mean is None else mean, rstd,
            mailbox, rows, cols, words(x).numel() // 4, IS_CENTERED=mean is not None, VECTORS=way[0] // 8, SPLITS=splits,
            STAGES=way[3], HAS_ASM=is_here, **options(way, is_here),
        )  # fmt: skip
        return tuple(partials[: 1 if mean is None else 2].sum(1))

    return run


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def main() -> None:
    units = torch.cuda.get_device_properties(0).multi_processor_count
    copy = timing.copy_bandwidth("cuda")
    made = [room_for(ROWS, COLS, "cuda").normal_() for _ in range(2)]
    (x, dy), results = made, [room_for(ROWS, COLS, "cuda") for _ in range(2)]
    weight, bias = (torch.randn(COLS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name, function in (("layer_norm", F.layer_norm), ("rms_norm", F.rms_norm)):
        parameters = (weight, bias) if name == "layer_norm" else (weight,)
        wide = [t.detach().float().requires_grad_() for t in (x, *parameters)]
        true = function(wide[0], (COLS,), *wide[1:], eps=EPS)
        gradients = torch.autograd.grad(true, wide, dy.float())
        of_x = wide[0].detach()
        mean = of_x.mean(1) if name == "layer_norm" else None
        rstd = ((of_x.var(1, correction=0) if mean is not None else of_x.square().mean(1)) + EPS).rsqrt()
        ours = partial(getattr(warpnorm, name), x, (COLS,), *parameters, eps=EPS)
        leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
        output = getattr(warpnorm, name)(leaves[0], (COLS,), *leaves[1:], eps=EPS)
        back = partial(torch.autograd.grad, output, leaves, dy, retain_graph=True)
        for direction, call, tensors in (("forward", ours, 2), ("backward", back, 3)):
            ms = timing.time_calls([call], "cuda", 0.1)[0].ms
            print(f"{name} {direction}: today {ms * 1e3:.0f} us, {tensors * x.nbytes / copy / ms * 1e5:.0f} %")
        for way in FORWARD:
            results[0].fill_(float("nan"))
            run = forward(x, weight, bias if mean is not None else None, results[0], way, units)
            run()
            ms = timing.time_calls([run], "cuda", 0.1)[0].ms
            print(
                f"  forward {way}: {ms * 1e3:.0f} us, {2 * x.nbytes / copy / ms * 1e5:.0f} %, {error(results[0], true):.1e}"
            )
        for way in BACKWARD:
            results[1].fill_(float("nan"))
            run_back = backward(x, dy, weight, mean, rstd, results[1], way, units)
            found = (results[1], *run_back())
            off = max(map(error, found, gradients))
            ms = timing.time_calls([run_back], "cuda", 0.1)[0].ms
            print(f"  backward {way}: {ms * 1e3:.0f} us, {3 * x.nbytes / copy / ms * 1e5:.0f} %, {off:.1e}")


if __name__ == "__main__":
    main()
