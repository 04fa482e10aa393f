"""The command line: `warpnorm demo`, `bench`, `explain` and `check`, also as `python -m warpnorm`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from warpnorm.bench import cases, inside, report, rivals
from warpnorm.bench.demo import run_demo
from warpnorm.bench.run import Run, default_device, device_name, run_cases
from warpnorm.plan import device as devices
from warpnorm.version import VERSION

INTERRUPTED = 130
DTYPES = tuple(cases.DTYPE_NAMES.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        return parsed.run(parsed, console)
    except ValueError as error:
        console.print(f"warpnorm: {error}", style="red")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warpnorm", description="Normalization for PyTorch.")
    parser.add_argument("--version", action="version", version=f"warpnorm {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="check every norm and dtype here, and time it against eager PyTorch")
    demo.set_defaults(run=_demo)
    bench = commands.add_parser("bench", help="measure the norms against what people use today")
    bench.add_argument(
        "--only", metavar="WORD", nargs="+", help="cases whose name holds every word: 'rms backward 4096'"
    )
    bench.add_argument("--rivals", metavar="NAME", nargs="*", help=f"of {', '.join(r.name for r in rivals.ALL)}")
    bench.add_argument("--shape", metavar="SIZE", nargs="*", help="of these shapes alone: 4096x4096")
    bench.add_argument("--dtype", nargs="*", choices=DTYPES, help="of these dtypes alone")
    bench.add_argument("--quick", action="store_true", help="an eighth of the size, a fifth of the time")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write the results here")
    bench.add_argument(
        "--resume", action="store_true", help="keep what that file has from the same code on this machine"
    )
    bench.add_argument(
        "--fail-below", metavar="RATIO", type=float, help="fail where our speed over the best rival's is less"
    )
    bench.set_defaults(run=_bench)
    explain = commands.add_parser(
        "explain", help="show what a norm becomes: graph, plan and why, source, launches, bytes"
    )
    explain.add_argument("norm", choices=inside.WORKLOADS, metavar="NORM", help=f"one of {', '.join(inside.WORKLOADS)}")
    explain.add_argument("--shape", metavar="SIZE", default="8192x4096", help="8192x4096, or 8x64x56x56 of images")
    explain.add_argument("--dtype", choices=DTYPES, default="bf16")
    explain.add_argument("--layout", choices=("nchw", "nhwc"), default="nchw", help="how images lie in memory")
    explain.add_argument("--backward", action="store_true", help="also what becomes of its gradients")
    explain.add_argument("--target", choices=devices.KNOWN, help="the GPU to plan for, which need not be here")
    explain.add_argument("--asm", action="store_true", help="also compile, and count what is in the code")
    explain.set_defaults(run=_explain)
    check = commands.add_parser("check", help="what is installed and works here: a page to paste into a bug report")
    check.set_defaults(run=_check)
    return parser


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    return _status(run_demo(console), console)


def _bench(parsed: argparse.Namespace, console: Console) -> int:
    device = default_device()
    selected = _selected(parsed, cases.all_cases(device, parsed.quick))
    if parsed.resume and not parsed.json:
        raise ValueError("--resume needs --json, the file that has what is done")
    before = report.read_json(parsed.json, device_name(device)) if parsed.resume else {}
    seconds = 0.05 if parsed.quick else 0.25
    keep = (lambda run: report.write_json(run, parsed.json)) if parsed.json else (lambda run: None)
    run = run_cases(selected, rivals.chosen(parsed.rivals), device, console, seconds, before, keep)
    keep(run)
    report.print_bench(run, console)
    slow = []
    if parsed.fail_below is not None:
        ratios = [(result.case.name, report.over_best(result)) for result in run.results]
        slow = [(name, ratio) for name, ratio in ratios if ratio is not None and ratio < parsed.fail_below]
        for name, ratio in slow:
            console.print(f"slow: {name}: {ratio:.2f} of the best rival's speed", style="red")
    return _status(run, console) or int(bool(slow))


def _explain(parsed: argparse.Namespace, console: Console) -> int:
    shape = _shape(parsed.shape)
    found = inside.explained(
        parsed.norm, shape, parsed.dtype, parsed.layout, parsed.backward, parsed.target, parsed.asm
    )
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(parsed: argparse.Namespace, console: Console) -> int:
    is_right = True
    for name, found, is_fine in inside.findings():
        console.print(
            f"{name:14s} {found}", markup=False, highlight=False, soft_wrap=True, style=None if is_fine else "red"
        )
        is_right &= is_fine
    return 0 if is_right else 1


def _selected(parsed: argparse.Namespace, every: Sequence[cases.BenchCase]) -> list[cases.BenchCase]:
    """The cases that hold every word, and one of the shapes and dtypes that were given."""
    words = [word for argument in parsed.only or () for word in argument.split()]
    shapes = [_shape(text) for text in parsed.shape or ()]
    found = [case for case in every if all(word in case.name for word in words)]
    if not found:
        raise ValueError(f"no case holds every one of the words {', '.join(words)}")
    found = [case for case in found if not parsed.dtype or cases.DTYPE_NAMES[case.dtype] in parsed.dtype]
    if not found:
        raise ValueError(f"no such case has a dtype of {', '.join(parsed.dtype)}")
    known = sorted({case.size.replace(" ", "") for case in found})
    found = [case for case in found if not shapes or case.shape in shapes]
    if not found:
        raise ValueError(f"no such case has a shape of {', '.join(parsed.shape)}; there are {', '.join(known)}")
    return found


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().replace(" ", "").split("x")
    if not all(size.isdigit() for size in sizes):
        raise ValueError(f"{text!r} is no shape; one is written like 4096x4096")
    return tuple(map(int, sizes))


def _status(run: Run, console: Console) -> int:
    if run.is_interrupted:
        console.print("interrupted: what is above was finished")
        return INTERRUPTED
    for name in run.wrong:
        console.print(f"wrong: {name}", style="red")
    return 1 if run.wrong else 0
