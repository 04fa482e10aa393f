"""Checks that run on several ranks: processes on this machine that share one gloo process group. One start serves all checks
of a file, which every rank runs in their order; what a rank raises is told apart by check."""

import datetime
import importlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Check = Callable[[int, int], None]  # of a rank and the number of ranks
WORLDS = (2, 4)  # numbers of ranks
SOME_WORLDS = WORLDS if os.environ.get("WARPNORM_TEST_ALL") == "1" else WORLDS[:1]
TIMEOUT = 30  # seconds that a collective may take
# Imported once, by the server that ranks are forked from: PyTorch's compiler alone takes each of them seconds
PRELOADED = [
    "pytest", "accuracy", "warpnorm", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo",
    "torch._functorch.aot_autograd", "torch.distributed._functional_collectives",
]  # fmt: skip
SILENT = "did not come to an end"


def run(checks: Sequence[Check], ranks: int, folder: Path, timeout: float = TIMEOUT) -> dict[str, str]:
    """What went wrong in each check, on any rank; nothing where a check passed on all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    names = [(check.__module__, check.__name__) for check in checks]
    processes = [context.Process(target=_main, args=(rank, ranks, folder, names, timeout)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout * 4)
    codes = []
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
        codes.append(process.exitcode)
    return {name: _told(name, ranks, folder, codes) for _, name in names}


def _told(name: str, ranks: int, folder: Path, codes: Sequence[int | None]) -> str:
    found = []
    for rank in range(ranks):
        lines = (folder / f"{rank}.jsonl").read_text().splitlines() if (folder / f"{rank}.jsonl").exists() else []
        told = dict(map(json.loads, lines)).get(name, f"{SILENT}; the process ended with {codes[rank]}")
        found += [f"rank {rank} of {ranks}: {told}"] if told else []
    return "\n".join(found)


def _main(rank: int, ranks: int, folder: Path, names: Sequence[tuple[str, str]], timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    with (folder / f"{rank}.jsonl").open("w") as told:
        for module, name in names:
            torch.manual_seed(0)
            found = ""
            try:
                getattr(importlib.import_module(module), name)(rank, ranks)
            except BaseException:
                found = traceback.format_exc()
            print(json.dumps([name, found]), file=told, flush=True)
    dist.destroy_process_group()


def collectives(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many collectives it took: as gloo counts them, so that nothing sees through calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    return result, sum(event.name.startswith("gloo:") for event in profile.events() or ())
