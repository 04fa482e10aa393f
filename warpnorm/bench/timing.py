"""What one call takes: on a GPU the device's own time, by replaying a CUDA graph of several calls, the wall time of a plain
call, and memory; on a CPU wall time."""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch


class Timing(NamedTuple):
    """Median milliseconds of one call, and how they were measured."""

    ms: float
    method: str


# Where wall times of the last part of a measurement and of all before differ by more, a machine does something else besides,
# for a second or so: it goes on, for at the most as many parts
DIFFERENT = 0.07
MOST_PARTS = 12


def time_calls(functions: Sequence[Callable[[], Any]], device: str, seconds: float) -> list[Timing]:
    """Each function for about `seconds`, on a CPU longer where times change meanwhile."""
    if device == "cuda":
        return [_device_time(function, seconds) for function in functions]
    for function in functions:
        function()
    samples: list[list[float]] = [[] for _ in functions]
    for part in range(MOST_PARTS):
        new = _wall_times(functions, seconds / 2)
        is_settled = part > 0 and all(
            abs(median(found) / median(before) - 1) < DIFFERENT for found, before in zip(new, samples, strict=True)
        )
        samples = [before + found for before, found in zip(samples, new, strict=True)]
        if is_settled:
            break
    return [Timing(median(found), "wall") for found in samples]


# Of a whole step: rounds in which each has its turn, and calls in each, so that the device does not wait for the host
STEP_ROUNDS, STEP_CALLS = 30, 4


def time_steps(functions: Sequence[Callable[[], Any]], device: str, seconds: float) -> list[Timing]:
    """Each function in turns, on any device, and for longer: they are whole steps of a model."""
    if device != "cuda":
        return time_calls(functions, device, 4 * seconds)
    for function in functions:
        for _ in range(5):
            function()
    samples: list[list[float]] = [[] for _ in functions]
    for turn in range(STEP_ROUNDS):
        turns = list(zip(functions, samples, strict=True))
        for function, found in turns if turn % 2 else reversed(turns):
            found.append(_events(function, STEP_CALLS))
    return [Timing(median(found), "events") for found in samples]


def _wall_times(functions: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """In turns, so that whatever else the machine does meets all alike, and each with fresh memory for its results, which
    for some sizes would hang on who was called before."""
    samples: list[list[float]] = [[] for _ in functions]
    stop = time.perf_counter() + seconds * len(functions)
    while len(samples[0]) < 5 or (time.perf_counter() < stop and len(samples[0]) < 1000):
        turns = list(zip(functions, samples, strict=True))
        for function, found in turns if len(samples[0]) % 2 else reversed(turns):  # nobody always comes first
            _give_memory_back()
            start = time.perf_counter()
            function()
            found.append((time.perf_counter() - start) * 1e3)
    return samples


def _give_memory_back() -> None:
    """What the C library keeps of freed memory goes back to the system, where it is GNU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _device_time(function: Callable[[], Any], seconds: float) -> Timing:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    once = _events(function, 1)
    calls = max(1, min(20, int(20 / max(once, 1e-3))))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                function()
    except RuntimeError:
        torch.cuda.synchronize()
        samples = [_events(function, calls) for _ in range(10)]
        return Timing(median(samples), "events")
    graph.replay()
    repeats = max(5, min(50, int(seconds * 1e3 / max(once * calls, 1e-3))))
    return Timing(median(_events(graph.replay, 1) / calls for _ in range(repeats)), "graph")


def _events(function: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


# Before wall times are taken: a thread that has slept, as autograd's has, takes longer to wake up at first, up to twice
WARM_SECONDS = 0.15
WALL_SAMPLES = 9


def wall_time(function: Callable[[], Any]) -> float:
    """Milliseconds a call takes in a plain loop, as a program that does nothing else would see it."""
    function()
    torch.cuda.synchronize()
    once = _seconds_of(function, 1)
    calls = max(3, min(100, int(0.02 / max(once, 1e-6))))
    stop = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < stop:
        _seconds_of(function, calls)
    return median(_seconds_of(function, calls) / calls for _ in range(WALL_SAMPLES)) * 1e3


def _seconds_of(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes that a call has allocated at once, its results among them. The most of three: autograd's thread may not have let
    go of the last results when a call begins, which then seems to need less."""
    return max(_peak_of_one(function) for _ in range(3))


def _peak_of_one(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    size = 1 << (30 if device == "cuda" else 27)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(2)
    if device == "cuda":
        # not from a graph: there a copy becomes a node of the copy engine, a third slower
        target.copy_(source)
        ms = median(_events(lambda: target.copy_(source), 1) for _ in range(30))
    else:
        ms = time_calls([lambda: target.copy_(source)], device, 0.25)[0].ms
    return 2 * size / ms * 1e3
