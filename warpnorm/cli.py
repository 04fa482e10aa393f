"""The command line: `warpnorm demo` and `warpnorm bench`, also as `python -m warpnorm`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from warpnorm.bench import cases, report, rivals
from warpnorm.bench.demo import run_demo
from warpnorm.bench.run import Run, default_device, run_cases
from warpnorm.version import VERSION

INTERRUPTED = 130


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
    bench.add_argument("--quick", action="store_true", help="an eighth of the size, a fifth of the time")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write the results here")
    bench.set_defaults(run=_bench)
    return parser


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    return _status(run_demo(console), console)


def _bench(parsed: argparse.Namespace, console: Console) -> int:
    device = default_device()
    words = [word for argument in parsed.only or () for word in argument.split()]
    selected = [case for case in cases.all_cases(device, parsed.quick) if all(word in case.name for word in words)]
    if not selected:
        raise ValueError(f"no case holds every one of the words {', '.join(words)}")
    run = run_cases(selected, rivals.chosen(parsed.rivals), device, console, 0.05 if parsed.quick else 0.25)
    report.print_bench(run, console)
    if parsed.json:
        report.write_json(run, parsed.json)
    return _status(run, console)


def _status(run: Run, console: Console) -> int:
    if run.is_interrupted:
        console.print("interrupted: what is above was finished")
        return INTERRUPTED
    for name in run.wrong:
        console.print(f"wrong: {name}", style="red")
    return 1 if run.wrong else 0
