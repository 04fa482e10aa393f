"""BatchNorm of a batch that ranks hold together, against one process that holds all of it: values, gradients, running
statistics, training, fused forms, collectives, and what happens when a rank dies or does not fit."""

import copy
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
import warpnorm
from accuracy import assert_accurate, assert_no_further, error_of, widen
from warpnorm import parallel, settings
from warpnorm.errors import InputError
from warpnorm.nn import BatchNorm2d, BatchNormReLU2d, LazyBatchNorm2d, SyncBatchNorm, SyncBatchNormReLU2d


@dataclass(frozen=True)
class Case:
    """`sizes` are the samples of rank 0, 1, ..."""

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    why: str
    dtype: torch.dtype = torch.float32
    route: str = "auto"
    is_channels_last: bool = False
    shift: float = 0.0
    has_affine: bool = True


LARGE = (8, 48, 48)
CASES = [
    Case("even", (5, 3, 3), (4, 4, 4, 4), "PyTorch's operators: the batch is small"),
    Case("uneven", (5, 3, 3), (1, 6, 2, 4), "counts are part of what is merged"),
    Case("nothing_first", (5, 3, 3), (0, 6, 0, 4), "a rank without samples takes part"),
    Case("one_value_here", (6,), (1, 4, 1, 3), "one value a channel on some ranks, several in all"),
    Case("vectors", (7,), (30, 1, 50, 3), "(N, C)"),
    Case("native", LARGE, (3, 5, 4, 2), "native code, in pieces", route="native"),
    Case("native_empty", LARGE, (3, 0, 4, 2), "native code beside a rank that has nothing", route="native"),
    Case("channels_last", LARGE, (3, 5, 4, 2), "statistics run across lines", route="native", is_channels_last=True),
    Case("bfloat16", LARGE, (3, 5, 4, 2), "statistics are float32", torch.bfloat16, "native"),
    Case("float64", LARGE, (3, 5, 4, 2), "all of it in float64", torch.float64, "native"),
    Case("shifted", LARGE, (3, 5, 4, 2), "squares would cancel", route="native", shift=1e4),
    Case("mixed", LARGE, (3, 5, 4, 2), "native code on some ranks, PyTorch's operators on others", route="mixed"),
    Case("no_affine", (5, 4), (2, 3, 1, 5), "xhat itself", has_affine=False),
]


def part(rank: int, sizes: tuple[int, ...], world: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]) if rank < world else None)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """(N, C, ...) with a channel in each row."""
    return tensor.detach().transpose(0, 1).flatten(1) if tensor.ndim > 1 else tensor.detach()[None]


def whole(part_of_rank: torch.Tensor, sizes: tuple[int, ...], world: int) -> torch.Tensor:
    parts = [torch.empty(size, *part_of_rank.shape[1:], dtype=part_of_rank.dtype) for size in sizes[:world]]
    largest = max(sizes[:world])
    padded = part_of_rank.detach().contiguous().new_zeros(largest, *part_of_rank.shape[1:])
    padded[: part_of_rank.shape[0]] = part_of_rank.detach()
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    return torch.cat([g[: p.shape[0]] for g, p in zip(gathered, parts, strict=True)])


def one_process(
    case: Case, x: torch.Tensor, grad: torch.Tensor, affine: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output, gradients and running statistics of the whole batch, by PyTorch in a dtype."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in (x, *affine)]
    running = [torch.zeros(x.shape[1], dtype=leaves[-1].dtype), torch.ones(x.shape[1], dtype=leaves[-1].dtype)]
    output = F.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.3)
    output.backward(grad.to(dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), *running]


def by_parts(
    case: Case, x: torch.Tensor, grad: torch.Tensor, sizes: tuple[int, ...], kind: torch.dtype
) -> dict[str, torch.Tensor]:
    """What PyTorch's own SyncBatchNorm has of parts, each with a mean and a variance in the dtype of computation; it runs
    on GPUs only. Of values far from zero these means are what there is to err by."""
    flat = rows(x).to(kind)
    parts = [
        torch.var_mean(part, 1, correction=0)
        for part in flat.split([s * flat.shape[1] // sum(sizes) for s in sizes if s], 1)
    ]
    shares = [s / sum(sizes) for s in sizes if s]
    mean = sum(share * m.double() for share, (_, m) in zip(shares, parts, strict=True))
    variance = sum(
        share * (v.double() + (m.double() - mean).square()) for share, (v, m) in zip(shares, parts, strict=True)
    )
    xhat = (flat - mean.to(kind)[:, None]) * torch.rsqrt(variance + 1e-5).to(kind)[:, None]
    count = flat.shape[1]
    return {
        "grad_weight": (rows(grad).to(kind) * xhat).sum(1), "grad_bias": rows(grad).to(kind).sum(1),
        "running_mean": (0.3 * mean).to(kind), "running_var": (0.7 + 0.3 * variance * count / (count - 1)).to(kind),
    }  # fmt: skip


def check_parity(case: Case, rank: int, world: int) -> None:
    sizes = case.sizes[:world]
    shape = (sum(sizes), *case.shape)
    kind = torch.float64 if case.dtype == torch.float64 else torch.float32
    x = (torch.randn(shape, dtype=kind) * 2 + case.shift).to(case.dtype)
    grad = torch.randn(shape, dtype=kind).to(case.dtype)
    affine = [torch.randn(case.shape[0], dtype=kind) for _ in range(2 * case.has_affine)]
    truth = one_process(case, x, grad, affine, torch.float64)
    torchs = one_process(case, x, grad, affine, case.dtype if case.dtype != torch.bfloat16 else torch.float32)
    torchs[:2] = [t.to(case.dtype) for t in torchs[:2]]

    mine = x[part(rank, sizes, world)].clone()
    if case.is_channels_last:
        mine = mine.to(memory_format=torch.channels_last)
    leaves = [t.detach().clone().requires_grad_() for t in (mine, *affine)]
    if case.is_channels_last:
        leaves[0] = mine.detach().requires_grad_()
    running = [torch.zeros(case.shape[0], dtype=kind), torch.ones(case.shape[0], dtype=kind)]
    output = parallel.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.3)
    assert output.shape == mine.shape
    assert output.dtype == case.dtype
    if case.is_channels_last:
        assert output.is_contiguous(memory_format=torch.channels_last)
    output.backward(grad[part(rank, sizes, world)])
    assert leaves[0].grad is not None
    found = [whole(output, sizes, world), whole(leaves[0].grad, sizes, world)]
    for parameter in leaves[1:]:
        assert parameter.grad is not None
        added = parameter.grad.double()  # a sum over ranks has roundings of its own, which are not ours
        dist.all_reduce(added)
        found.append(added.to(kind))
    found += running
    parts = by_parts(case, x, grad, sizes, kind)
    names = (*("output", "grad_input", "grad_weight", "grad_bias")[: len(found) - 2], "running_mean", "running_var")
    for name, ours, theirs, true in zip(names, found, torchs, truth, strict=True):
        if case.dtype == torch.float64:  # which the truth is, too
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
            continue
        if name not in ("output", "grad_input"):
            assert_no_further(f"{case.name} {name}", ours, true, theirs, parts[name])
            continue
        cols = rows(true).shape[1]
        of_truth = widen(rows(true), cols)
        ours_error, theirs_error = error_of(rows(ours), of_truth), error_of(rows(theirs), of_truth)
        dtype = case.dtype if name in ("output", "grad_input") else torch.float32
        assert_accurate(f"{case.name} {name}", ours_error, theirs_error, dtype)
    bits = torch.cat([b.view(torch.int64 if kind == torch.float64 else torch.int32).long() for b in running])
    of_all = [torch.empty_like(bits) for _ in range(world)]
    dist.all_gather(of_all, bits)
    assert all(torch.equal(bits, other) for other in of_all), "running statistics differ between ranks"


def parity(rank: int, world: int) -> None:
    for case in CASES:
        try:
            route = ("native", "reference")[rank % 2] if case.route == "mixed" else case.route
            with settings.override(route=route):
                check_parity(case, rank, world)
        except Exception as error:
            raise AssertionError(f"{case.name} ({case.why})") from error


class Net(torch.nn.Module):
    """Two convolutions, with BatchNorm alone and with all that can be fused around it."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 6, 3, padding=1), torch.nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.last = BatchNorm2d(6, momentum=momentum), BatchNormReLU2d(6, momentum=momentum)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.head(self.last(self.second(x), x).mean((2, 3)))


def training(rank: int, world: int) -> None:
    """Twenty steps, on uneven parts and on none, equal those of one process, with both ways to average."""
    sizes = (3, 0, 1, 4)[:world]
    for momentum in (0.2, None):
        torch.manual_seed(1)
        alone = Net(momentum).double()
        shared = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        kinds = (shared.norm, shared.last)
        assert tuple(map(type, kinds)) == (SyncBatchNorm, SyncBatchNormReLU2d)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, shared)]
        for _ in range(20):
            x, target = torch.randn(sum(sizes), 2, 5, 5).double(), torch.randint(3, (sum(sizes),))
            for model, optimizer, of_model in zip(
                (alone, shared), optimizers, (slice(None), part(rank, sizes, world)), strict=True
            ):
                optimizer.zero_grad()
                F.cross_entropy(model(x[of_model]), target[of_model], reduction="sum").backward()
                for parameter in model.parameters():
                    if model is shared:
                        dist.all_reduce(parameter.grad)
                    assert parameter.grad is not None
                    parameter.grad /= sum(sizes)
                optimizer.step()
        for (name, ours), theirs in zip(shared.state_dict().items(), alone.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        alone.eval(), shared.eval()
        torch.testing.assert_close(shared(x), alone(x), rtol=1e-9, atol=1e-10)


def collectives(rank: int, world: int) -> None:
    """One forward, one backward, of any kind; none in evaluation, nor backward where the input needs no gradient."""
    small, large = torch.randn(3, 4, 5, 5), torch.randn(4, 8, 48, 48)
    for x in (small, large):
        for norm in (SyncBatchNorm(x.shape[1]), SyncBatchNormReLU2d(x.shape[1])):
            norm(x).sum().backward()  # builds kernels
            leaf = x.clone().requires_grad_()
            output, forward = ranks.collectives(lambda norm=norm, leaf=leaf: norm(leaf))
            _, backward = ranks.collectives(lambda output=output: output.square().sum().backward())
            assert (forward, backward) == (1, 1), norm
            output, forward = ranks.collectives(lambda norm=norm, x=x: norm(x))
            _, backward = ranks.collectives(lambda output=output: output.square().sum().backward())
            assert (forward, backward) == (1, 0), norm
            norm.eval()
            assert ranks.collectives(lambda norm=norm, x=x: norm(x))[1] == 0
            norm.train().requires_grad_(False)
            with torch.no_grad():
                assert ranks.collectives(lambda norm=norm, x=x: norm(x))[1] == 1


def agreement(rank: int, world: int) -> None:
    """One rank needs the gradient of its input, the others do not, or have nothing at all that does: all take part in
    backward, and what is there is that of one process. A rank without gradients is named, and nobody waits for it."""
    for route, shape in (("reference", (2, 3, 5)), ("native", (2, 3, 24))):
        for is_frozen in (False, True):
            x, grad = torch.randn(world * 2, *shape[1:]).double(), torch.randn(world * 2, *shape[1:]).double()
            here, norm = slice(2 * rank, 2 * rank + 2), SyncBatchNorm(3).double()
            alone = torch.nn.BatchNorm1d(3).double()
            norm.requires_grad_(not is_frozen or rank == 0)
            leaf, whole_leaf = x[here].clone().requires_grad_(rank == 0), x.clone().requires_grad_()
            with settings.override(route=route):
                output, forward = ranks.collectives(lambda norm=norm, leaf=leaf: norm(leaf))
                _, backward = ranks.collectives(lambda output=output, grad=grad, here=here: output.backward(grad[here]))
            assert (forward, backward) == (1, 1), (route, is_frozen)
            alone(whole_leaf).backward(grad)
            if rank == 0:
                torch.testing.assert_close(leaf.grad, whole_leaf.grad[here])
            if norm.weight.requires_grad and not is_frozen:
                dist.all_reduce(norm.weight.grad)
                torch.testing.assert_close(norm.weight.grad, alone.weight.grad)
        with settings.override(route=route):
            leaf = torch.randn(shape).requires_grad_()
            with torch.set_grad_enabled(rank == 0):
                output = parallel.batch_norm(leaf, None, None, training=True)
            if rank == 0:
                with pytest.raises(InputError, match="of the group ran forward without gradients"):
                    output.sum().backward()


def fused(rank: int, world: int) -> None:
    """relu(batch_norm(x) + residual) by native code is one split call, and equals one process."""
    sizes = (2, 3, 0, 4)[:world]
    for has_residual in (False, True):
        shape = (sum(sizes), 8, 48, 48)
        x, residual, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
        alone, shared = torch.nn.BatchNorm2d(8).double(), SyncBatchNormReLU2d(8).double()
        torch.nn.init.normal_(alone.weight)
        shared.load_state_dict(alone.state_dict())
        of_rank = part(rank, sizes, world)
        inputs = [x[of_rank].clone().requires_grad_(), residual[of_rank].clone().requires_grad_()][: 1 + has_residual]
        truth = [x.clone().requires_grad_(), residual.clone().requires_grad_()][: 1 + has_residual]
        with settings.override(route="native"):
            output = shared(*inputs)
            assert "SplitNormalization" in type(output.grad_fn).__name__ or not inputs[0].numel()
            output.backward(grad[of_rank])
        expected = F.relu(alone(truth[0]) + truth[1] if has_residual else alone(truth[0]))
        expected.backward(grad)
        torch.testing.assert_close(output, expected[of_rank])
        for ours, theirs in zip(inputs, truth, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad[of_rank])
        for (name, ours), theirs in zip(shared.named_parameters(), alone.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
        for ours, theirs in zip(shared.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def own_function(rank: int, world: int) -> None:
    """`fuse` takes the function too, with whatever stands around it, and a group from outside."""
    group, running = dist.group.WORLD, [torch.zeros(8), torch.ones(8)]

    @warpnorm.fuse
    def block(x: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.silu(x) * gain
        return torch.sigmoid(parallel.batch_norm(h, *running, training=True, group=group)), h

    x, gain = torch.randn(2 * world, 8, 48, 48), torch.rand(8, 1, 1) + 0.5
    mine, own_gain = x[2 * rank : 2 * rank + 2].clone().requires_grad_(), gain.clone().requires_grad_()
    with settings.override(route="native"):
        y, h = block(mine, own_gain)
        (y.sum() + h.square().sum()).backward()
    assert "SplitNormalization" in type(y.grad_fn).__name__
    expected = []
    for dtype in (torch.float64, torch.float32):
        leaf, factor = x.to(dtype, copy=True).requires_grad_(), gain.to(dtype, copy=True).requires_grad_()
        of_all = [torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype)]
        h = F.silu(leaf) * factor
        output = torch.sigmoid(F.batch_norm(h, *of_all, training=True))
        (output.sum() + h.square().sum()).backward()
        here = slice(2 * rank, 2 * rank + 2)
        expected.append([output[here], leaf.grad[here], factor.grad, *of_all])
    added = own_gain.grad.double()
    dist.all_reduce(added)
    found = [y, mine.grad, added.float(), *running]
    for name, ours, true, theirs in zip(("output", "input", "gain", "mean", "variance"), found, *expected, strict=True):
        assert_no_further(name, ours, true, theirs)


def groups(rank: int, world: int) -> None:
    """Pairs of ranks share a batch, and know nothing of other pairs."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    x = torch.randn(world, 3, 4)
    norm = SyncBatchNorm(3, process_group=pairs[rank // 2])
    first = rank // 2 * 2
    expected = F.batch_norm(x[first : first + 2], None, None, training=True)[rank % 2][None]
    torch.testing.assert_close(norm(x[rank : rank + 1]), expected)
    if world > 2:
        with pytest.raises(InputError, match="does not belong"):
            parallel.batch_norm(x, None, None, training=True, group=pairs[1 - rank // 2])


def one_value(rank: int, world: int) -> None:
    """One value in all is refused everywhere, nothing at all is not, and neither changes the running statistics."""
    norm = SyncBatchNorm(3)
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(InputError, match=r"Expected more than 1 value per channel.* on all ranks"):
        norm(torch.randn(int(rank == 0), 3))
    assert norm(torch.randn(0, 3, 2)).shape == (0, 3, 2)
    norm.num_batches_tracked.zero_()
    for name, buffer in norm.state_dict().items():
        assert torch.equal(buffer, before[name]), name


def twice(rank: int, world: int) -> None:
    """Second derivatives, of the kernels and of PyTorch's operators, equal those of one process."""
    for shape, route in (((2, 3, 2), "reference"), ((2, 3, 4), "native")):
        x, grad = (torch.randn(world * shape[0], *shape[1:]).double() for _ in range(2))
        weight = torch.randn(3).double()
        here = slice(rank * shape[0], (rank + 1) * shape[0])
        found = []
        for of_rank, norm in ((here, parallel.batch_norm), (slice(None), F.batch_norm)):
            leaf, factor = x[of_rank].clone().requires_grad_(), weight.clone().requires_grad_()
            with settings.override(route=route):
                output = norm(leaf, None, None, factor, None, training=True)
                (first,) = torch.autograd.grad(output, leaf, grad[of_rank], create_graph=True)
                found.append(torch.autograd.grad(first.pow(3).sum(), (leaf, factor)))
        torch.testing.assert_close(found[0][0], found[1][0][here])
        dist.all_reduce(found[0][1])
        torch.testing.assert_close(*(f[1] for f in found))


def compiled(rank: int, world: int) -> None:
    """One graph, forward and backward, and the running statistics in it, also of fused forms and of a rank with nothing."""
    for kind in (SyncBatchNorm, SyncBatchNormReLU2d):
        for shape in ((8, 3, 5, 5), (8 * (rank == 0), 3, 5, 5)):
            _compiled(kind, torch.randn(shape))
    _compiled(SyncBatchNorm, torch.randn(8, 3, 5, 400 * (1 + rank)))  # where native code would run plain calls


def _compiled(kind: Any, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    eager, traced = kind(3), kind(3)
    graph = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [module(leaf) for module, leaf in zip((eager, graph), inputs, strict=True)]
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(leaf.grad for leaf in inputs))
    for ours, theirs in zip(traced.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def data_parallel(rank: int, world: int) -> None:
    """DistributedDataParallel takes the module on a CPU, which it refuses PyTorch's on."""
    model = torch.nn.parallel.DistributedDataParallel(SyncBatchNorm(3))
    x = torch.randn(world, 4, 3, 5)
    (model(x[rank]).square() * torch.arange(3.0)[:, None]).sum().backward()
    alone = torch.nn.BatchNorm1d(3)
    (alone(x.flatten(0, 1)).square() * torch.arange(3.0)[:, None]).sum().backward()
    torch.testing.assert_close(model.module.weight.grad * world, alone.weight.grad)


CHECKS = (
    parity,
    training,
    collectives,
    agreement,
    fused,
    own_function,
    groups,
    one_value,
    twice,
    data_parallel,
    compiled,
)


@pytest.fixture(scope="module", params=ranks.WORLDS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checks = CHECKS if request.param == 2 else CHECKS[:-1]  # what is compiled does not depend on how many there are
    return ranks.run(checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(told: dict[str, str], check: ranks.Check) -> None:
    if check.__name__ in told:
        assert not told[check.__name__], told[check.__name__]


def test_alone_it_is_batch_norm() -> None:
    x = torch.randn(4, 3, 5)
    norm, theirs = SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    assert torch.equal(norm(x), theirs(x))
    assert torch.equal(norm.running_var, theirs.running_var)
    with pytest.raises(InputError, match=r"\(N, C\)"):
        norm(torch.randn(3))


def test_conversion_keeps_parameters_and_finds_all() -> None:
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(2), torch.nn.Sequential(BatchNormReLU2d(2)), torch.nn.SyncBatchNorm(2)
    )
    model[0].eval()
    before = dict(model.named_parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(m) for m in (converted[0], converted[1][0], converted[2])] == [
        SyncBatchNorm,
        SyncBatchNormReLU2d,
        SyncBatchNorm,
    ]
    assert all(parameter is before[name] for name, parameter in converted.named_parameters())
    assert [m.training for m in converted] == [False, True, True]
    assert SyncBatchNorm.convert_sync_batchnorm(converted)[0] is converted[0]
    with pytest.raises(InputError, match="lazy"):
        SyncBatchNorm.convert_sync_batchnorm(LazyBatchNorm2d())


def dying(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)
    norm = SyncBatchNorm(3)
    with pytest.raises(Exception, match=r"(?i)connection|timed out|closed"):
        norm(torch.randn(4, 3))
    assert_untouched(norm)


def mismatch(rank: int, world: int) -> None:
    norm = SyncBatchNorm(3 + rank)
    try:
        norm(torch.randn(4, 3 + rank))
    except Exception:
        assert_untouched(norm)
    else:
        raise AssertionError("channels that differ were taken")


def assert_untouched(norm: SyncBatchNorm) -> None:
    assert torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
    assert torch.equal(norm.running_var, torch.ones_like(norm.running_var))
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize("check", [dying, mismatch], ids=lambda check: check.__name__)
def test_ends_in_an_error_and_changes_nothing(check: ranks.Check, tmp_path: Path) -> None:
    """Within the group's timeout. Of ranks that differ in channels gloo ends the one that is sent too much."""
    began = time.monotonic()
    told = ranks.run([check], 2, tmp_path, timeout=8)[check.__name__]
    assert time.monotonic() - began < 20
    failed = [line for line in told.splitlines() if line.startswith("rank")]
    assert len(failed) < 2, told
    assert all(ranks.SILENT in line and line.split(":")[0] == "rank 0 of 2" for line in failed), told
