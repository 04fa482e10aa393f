"""What the examples that train have in common: a step, a bar, and a table of loss, time and memory, one row for each kind of
norms. Of several, each has a process of its own, whose peak of memory is its own."""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NORMS = ("torch", "warpnorm", "fused")
WARM_UP = 3  # steps that are not timed: kernels are built


class Result(NamedTuple):
    norms: str
    first_loss: float
    last_loss: float
    step_ms: float
    peak_mb: float


Build = Callable[[str], torch.nn.Module]  # of a kind of norms
Draw = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]  # inputs and targets


def options(what: str, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS, help="PyTorch's, patched, or fused: all")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of training: {steps}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, whole")
    found = parser.parse_args()
    if found.steps <= WARM_UP:
        parser.error(f"--steps: at least {WARM_UP + 1}, the first {WARM_UP} are not timed")
    return found


def train(norms: str, build: Build, draw: Draw, steps: int, device: str, is_compiled: bool = False) -> Result:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = build(norms).to(device).train()
    if is_compiled:
        model.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, times = [], []
    columns = (TextColumn("{task.description:9s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=Console(stderr=True)) as progress:
        task = progress.add_task(norms, total=steps, loss=float("nan"))
        for _ in range(steps):
            inputs, targets = (t.to(device) for t in draw(generator))
            began = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the GPU
            times.append(time.perf_counter() - began)
            progress.update(task, advance=1, loss=losses[-1])
    timed = sorted(times[WARM_UP:])
    return Result(norms, losses[0], losses[-1], timed[len(timed) // 2] * 1e3, peak_mb(device))


def peak_mb(device: str) -> float:
    """Of the GPU's memory, or of the process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def compare(title: str, build: Build, draw: Draw, asked: argparse.Namespace) -> list[Result]:
    results = []
    for norms in asked.norms:
        work = (train, norms, build, draw, asked.steps, asked.device, asked.compile)
        if len(asked.norms) == 1:
            results.append(train(*work[1:]))
        else:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
                results.append(executor.submit(*work).result())
    how = ", compiled" if asked.compile else ""
    table = Table(title=f"{title}{how}, {asked.steps} steps on {asked.device}", title_justify="left")
    for heading in ("norms", "first loss", "last loss", "step, ms", "peak memory, MB"):
        table.add_column(heading, justify="left" if heading == "norms" else "right")
    for r in results:
        table.add_row(r.norms, f"{r.first_loss:.4f}", f"{r.last_loss:.4f}", f"{r.step_ms:.1f}", f"{r.peak_mb:.0f}")
    Console().print(table)
    return results


def is_right(results: list[Result]) -> bool:
    """They all learn, and the same."""
    first = results[0]
    is_same = all(abs(r.last_loss - first.last_loss) < 0.05 * first.first_loss for r in results)
    return is_same and all(r.last_loss < r.first_loss for r in results)
