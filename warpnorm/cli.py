"""The command line: `warpnorm demo`, `bench`, `report`, `explain`, `tune`, `fuzz` and `check`; or `python -m warpnorm`."""

import argparse
import difflib
import random
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from warpnorm import settings
from warpnorm.bench import cases, draw, inside, report, rivals, timing
from warpnorm.bench import tune as tuning
from warpnorm.bench.demo import run_demo
from warpnorm.bench.documents import write_documents
from warpnorm.bench.run import Run, default_device, device_name, own_stream, run_cases
from warpnorm.errors import UnavailableError
from warpnorm.fuzz.run import Limits
from warpnorm.fuzz.show import run_fuzz
from warpnorm.plan import device as devices
from warpnorm.version import VERSION

INTERRUPTED = 130
DTYPES = tuple(cases.DTYPE_NAMES.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        return parsed.run(parsed, console)
    except (ValueError, OSError, UnavailableError) as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(sentence: str) -> None:
    """Where it is seen though the results go into a file."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    console.print(f"warpnorm: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)


class Parser(argparse.ArgumentParser):
    """What is wrong in one sentence, what may have been meant, and where to look."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            known = [name.strip(" '") for name in found[2].split(",")]
            meant = difflib.get_close_matches(found[1], known, 1)
            message = message.split(":")[0] + f": there is no {found[1]!r}"
            message += f"; did you mean {meant[0]!r}?" if meant else f"; there are {', '.join(known)}"
        self.exit(2, f"warpnorm: {message}\nsee {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="warpnorm", description="Normalization for PyTorch: measure it, look inside, search for faster plans."
    )
    parser.add_argument("--version", action="version", version=f"warpnorm {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = _command(
        commands, "demo", "check every norm and dtype here, and time it against eager PyTorch",
        "Each norm in each dtype, forward and backward: its error against float64, its time, eager PyTorch's beside them. "
        "Takes a minute or two. Fails if anything is wrong.",
    )  # fmt: skip
    demo.set_defaults(run=_demo)
    bench = _command(
        commands, "bench", "measure the norms against what people use today",
        "Cases x rivals. Each result is compared with float64 first; what is wrong is not timed. A rival that is not "
        "installed is listed with the reason. Ctrl-C keeps what is done. Fails if we are wrong anywhere.",
        "bench --only rms_norm backward --rivals eager torch.compile", "bench --json results.json --resume",
        "bench --only layer_norm --dtype bf16 --json results.json --update", "bench --quick --fail-below 0.95",
    )  # fmt: skip
    bench.add_argument(
        "--only", metavar="WORD", nargs="+", help="cases whose name holds every word: 'rms backward 4096'"
    )
    bench.add_argument("--rivals", metavar="NAME", nargs="*", help=f"of {', '.join(r.name for r in rivals.ALL)}")
    bench.add_argument("--shape", metavar="SIZE", nargs="*", help="of these shapes alone: 4096x4096")
    bench.add_argument("--dtype", nargs="*", choices=DTYPES, help="of these dtypes alone")
    bench.add_argument("--quick", action="store_true", help="an eighth of the size, a fifth of the time")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write the results here")
    bench.add_argument(
        "--resume", action="store_true", help="measure only what that file does not have of this commit on this machine"
    )
    bench.add_argument(
        "--update", action="store_true", help="measure these cases anew and keep the other ones of that file"
    )
    bench.add_argument(
        "--jobs", metavar="N", type=int, default=1, help="compile in so many processes first; timing is in one: 1"
    )
    bench.add_argument(
        "--fail-below", metavar="RATIO", type=float, help="fail where our speed over the best rival's is less"
    )
    bench.set_defaults(run=_bench)
    report_parser = _command(
        commands, "report", "make documents of result files: a page, tables and pictures",
        "From what bench --json wrote: performance.md, a picture for each file that has norms over several widths, and "
        "performance.html, one page without network that has plots, a table to filter and two files side by side.",
        "report", "report before.json after.json --out /tmp/report",
    )  # fmt: skip
    report_parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        type=Path,
        help="written by bench --json; without any: benchmarks/results/*.json",
    )
    report_parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("docs"), help="where to: docs")
    report_parser.set_defaults(run=_report)
    explain = _command(
        commands, "explain", "show what a norm becomes: graph, plan and why, source, launches, bytes",
        "What warpnorm.explain returns, for a named norm; no GPU is needed, and nothing is computed.",
        "explain layer_norm --shape 8192x4096 --dtype bf16 --backward --target sm_90",
        "explain rms_norm --shape 8192x4096 --draw row.svg",
    )  # fmt: skip
    explain.add_argument("norm", choices=inside.WORKLOADS, metavar="NORM", help=f"one of {', '.join(inside.WORKLOADS)}")
    explain.add_argument("--shape", metavar="SIZE", default="8192x4096", help="8192x4096, or 8x64x56x56 of images")
    explain.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the input; bf16 if none is given")
    explain.add_argument("--layout", choices=("nchw", "nhwc"), default="nchw", help="how images lie in memory")
    explain.add_argument("--backward", action="store_true", help="also what becomes of its gradients")
    explain.add_argument("--target", choices=devices.KNOWN, help="the GPU to plan for, which need not be here")
    explain.add_argument("--asm", action="store_true", help="also compile, and count what is in the code")
    explain.add_argument(
        "--draw",
        metavar="FILE",
        nargs="?",
        const="",
        help="show instead how the kernel reduces one row: elements to threads, the rounds of a warp, the exchange between "
        "warps; with a FILE also as SVG",
    )
    explain.set_defaults(run=_explain)
    tune = _command(
        commands, "tune", "search for faster plans on this GPU; prints what it finds, and changes nothing",
        "Every plan that could run a norm, checked against today's choice and timed: some hundred of them, a minute or two "
        "for each shape. Never runs by itself.",
        "tune layer_norm --shape 32768x4096 26214x5120", "tune rms_norm --shape 16384x8192 --dtype fp32 --backward",
    )  # fmt: skip
    tune.add_argument("norm", choices=inside.WORKLOADS, metavar="NORM", help=f"one of {', '.join(inside.WORKLOADS)}")
    tune.add_argument("--shape", metavar="SIZE", nargs="+", default=["8192x4096"], help="one or more")
    tune.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the input; bf16 if none is given")
    tune.add_argument("--layout", choices=("nchw", "nhwc"), default="nchw", help="how images lie in memory")
    tune.add_argument("--backward", action="store_true", help="the gradients, not the norm itself")
    tune.set_defaults(run=_tune)
    fuzz = _command(
        commands, "fuzz", "random calls held against float64, until the time is up",
        "Norms, shapes, strides, dtypes, eps, which gradients, plain or in a fused function, all at random, on NaN-filled "
        "memory: as accurate as PyTorch, the same bits at a second time, inputs unchanged. What fails is shrunk and printed "
        "as code to paste, with the seed of its round. Of several processes one that dies is such a failure too. Fails if "
        "anything is wrong.",
        "fuzz --minutes 10", "fuzz --minutes 1 --seed 7 --only fused layer_norm rms_norm float16",
        "fuzz --minutes 10 --cases 20000 --jobs 16 --json fuzz.json",
    )  # fmt: skip
    fuzz.add_argument("--minutes", metavar="N", type=float, default=1.0, help="for how long: 1")
    fuzz.add_argument("--cases", metavar="N", type=int, help="end earlier, when so many are done")
    fuzz.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="processes that share the rounds: 1; most time goes into compiling",
    )
    fuzz.add_argument("--seed", metavar="S", type=int, help="repeats the run or round that printed it; without one any")
    fuzz.add_argument("--device", choices=("cpu", "cuda"), help="where: on the GPU if there is one")
    fuzz.add_argument(
        "--only", metavar="WORD", nargs="+", default=(), help="norms, dtypes, layouts, plain or fused: 'fused rms_norm'"
    )
    fuzz.add_argument("--json", metavar="FILE", type=Path, help="write here what was done and what failed")
    fuzz.set_defaults(run=_fuzz)
    check = _command(
        commands, "check", "what is installed and works here: a page to paste into a bug report",
        "Versions, devices, whether kernels and native code build and run here, and the cache folder with its size. Fails "
        "if something that is there does not work.",
    )  # fmt: skip
    check.set_defaults(run=_check)
    return parser


def _command(commands: Any, name: str, help: str, description: str, *examples: str) -> argparse.ArgumentParser:
    shown = "\n".join(["for example", *(f"  warpnorm {example}" for example in examples)]) if examples else None
    described = textwrap.fill(description, 100)
    return commands.add_parser(
        name, help=help, description=described, epilog=shown, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _demo(parsed: argparse.Namespace, console: Console) -> int:
    return _status(run_demo(console), console)


def _bench(parsed: argparse.Namespace, console: Console) -> int:
    device = default_device()
    selected = _selected(parsed, cases.all_cases(device, parsed.quick))
    if parsed.jobs < 1:
        raise ValueError(f"--jobs is {parsed.jobs}, but must be at least 1")
    if parsed.resume and parsed.update:
        raise ValueError("--resume keeps what is done, --update measures it anew: give one of them")
    if (parsed.resume or parsed.update) and not parsed.json:
        raise ValueError(f"{'--resume' if parsed.resume else '--update'} needs --json, the file that has what is done")
    if parsed.json:
        report.check_place(parsed.json)
        if (parsed.resume or parsed.update) and parsed.json.exists() and not report.is_result(parsed.json):
            raise ValueError(f"{parsed.json} is no result file of bench; name another, or leave it away")
    earlier = report.read_json(parsed.json, device_name(device)) if parsed.resume or parsed.update else []
    if parsed.update and not earlier and parsed.json.exists():
        raise ValueError(f"--update: {parsed.json} is of another machine or other versions; measure all of it anew")
    now = report.head(device_name(device))["commit"]
    done = {record["name"]: record for record in earlier if record["commit"] == now and now is not None}
    before = done if parsed.resume else {}
    seconds = 0.05 if parsed.quick else 0.25
    keep = (lambda run: report.write_json(run, parsed.json, earlier)) if parsed.json else (lambda run: None)
    run = run_cases(selected, rivals.chosen(parsed.rivals), device, console, seconds, before, keep, parsed.jobs)
    keep(run)
    report.print_bench(run, console)
    slow = []
    if parsed.fail_below is not None:
        ratios = [(result.case.name, report.over_best(result)) for result in run.results]
        slow = [(name, ratio) for name, ratio in ratios if ratio is not None and ratio < parsed.fail_below]
        for name, ratio in slow:
            console.print(f"slow: {name}: {ratio:.2f} of the best rival's speed", style="red")
    return _status(run, console) or int(bool(slow))


def _report(parsed: argparse.Namespace, console: Console) -> int:
    for path in write_documents(parsed.files, parsed.out):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _explain(parsed: argparse.Namespace, console: Console) -> int:
    if parsed.draw:
        report.check_place(Path(parsed.draw), "--draw")
    case = inside.case(parsed.norm, _shape(parsed.shape), parsed.dtype, parsed.layout, parsed.backward)
    found = inside.explained(case, parsed.target, parsed.asm)
    if parsed.draw is None:
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
        return 0
    drawing = inside.drawn(case, found, parsed.target)
    console.print(draw.text(drawing), markup=False, highlight=False, soft_wrap=True)
    if parsed.draw:
        Path(parsed.draw).write_text(draw.svg(drawing))
        console.print(f"wrote {parsed.draw}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _tune(parsed: argparse.Namespace, console: Console) -> int:
    if default_device() != "cuda":
        raise ValueError("tune measures plans on a GPU, and there is none here")
    selected = [inside.case(parsed.norm, _shape(s), parsed.dtype, parsed.layout, parsed.backward) for s in parsed.shape]
    with own_stream("cuda"):
        bandwidth = timing.copy_bandwidth("cuda")
        for case in selected:
            trials = tuning.tune(case, "cuda", console, lambda call: timing.time_calls([call], "cuda", 0.05)[0].ms)
            tuning.print_trials(trials, console, bandwidth)
    return 0


def _fuzz(parsed: argparse.Namespace, console: Console) -> int:
    device = parsed.device or default_device()
    if device == "cuda" and default_device() != "cuda":
        raise ValueError("--device cuda: there is no GPU here")
    if settings.is_interpreting():
        raise ValueError(
            "TRITON_INTERPRET is set, and Triton's interpreter truncates bfloat16, which GPUs round: "
            "run `pytest tests/interpreter/test_fuzz.py`, which corrects that"
        )
    if not 0 < parsed.minutes < float("inf"):
        raise ValueError(f"--minutes is {parsed.minutes}, but must be more than 0")
    for name, number in (("cases", parsed.cases), ("jobs", parsed.jobs)):
        if number is not None and number < 1:
            raise ValueError(f"--{name} is {number}, but must be at least 1")
    if parsed.json:
        report.check_place(parsed.json)
    seed = random.randrange(10**6) if parsed.seed is None else parsed.seed
    words = [word for argument in parsed.only for word in argument.split()]
    limits = Limits(60 * parsed.minutes, parsed.cases)
    found = run_fuzz(console, limits, seed, device, words, parsed.jobs)
    if parsed.json:
        how = {"jobs": parsed.jobs, "only": words}
        report.write_whole(parsed.json, report.head(device_name(device)) | how | found.record)
    if found.is_interrupted:
        return INTERRUPTED
    return 1 if found.failures else 0


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
        norms = sorted({case.name.split()[0] for case in every})
        raise ValueError(f"no case holds every one of the words {', '.join(words)}; there are {', '.join(norms)}")
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
    if not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"{text!r} is no shape; one is written like 4096x4096")
    return tuple(map(int, sizes))


def _status(run: Run, console: Console) -> int:
    if run.is_interrupted:
        console.print("interrupted: what is above was finished")
        return INTERRUPTED
    for name in run.wrong:
        console.print(f"wrong: {name}", style="red")
    return 1 if run.wrong else 0
