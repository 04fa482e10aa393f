"""What the cases of a benchmark need is compiled before the first one is timed, by several processes at once, which leave it
in the caches on disk: warpnorm's, Triton's and PyTorch's."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context

import torch

from warpnorm.bench.cases import BenchCase
from warpnorm.bench.check import Subject
from warpnorm.bench.rivals import OURS, build, chosen
from warpnorm.interrupts import deaf, leave_to_parent


def compile_ahead(
    cases: Sequence[BenchCase], rivals: Sequence[str], device: str, jobs: int, tell: Callable[[int], None]
) -> None:
    """`tell` is told how many cases are done. Whatever fails here fails again, and is told of, when it is to be timed."""
    before = active_children()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_be_alone) as pool:
        try:
            with deaf():
                tasks = [pool.submit(_compile, case, rivals, device) for case in cases]
            for done, _ in enumerate(as_completed(tasks), 1):
                tell(done)
        except KeyboardInterrupt:  # what is left would be waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                if process not in before:
                    process.terminate()
            raise


def _be_alone() -> None:
    """Without more processes and threads of one's own."""
    import torch._inductor.config as config

    leave_to_parent()
    config.compile_threads = 1
    torch.set_num_threads(1)


def _compile(case: BenchCase, rivals: Sequence[str], device: str) -> None:
    try:
        subject = Subject(case, device)
    except Exception:  # out of memory, say
        return
    own = case.workload.rivals
    for rival in (OURS, *(rival for rival in chosen(rivals) if own is None or rival.name in own)):
        try:
            subject.timed(build(rival, case.workload))()
        except Exception:
            continue
