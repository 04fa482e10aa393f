"""LayerNorm and RMSNorm over a hidden dimension that ranks share, against one process that has all of it: values, gradients,
training, fused forms, collectives, and what is refused."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
import warpnorm
from accuracy import assert_accurate, assert_no_further, error_of, exact
from warpnorm import parallel, settings
from warpnorm.errors import InputError
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """`cols` are the columns of rank 0, 1, ..."""

    name: str
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    why: str
    dtype: torch.dtype = torch.float32
    route: str = "auto"
    shift: float = 0.0


CASES = [
    Case("even", (20, 10), (8, 8, 8, 8), "PyTorch's operators: rows are small"),
    Case("uneven", (200,), (5, 9, 1, 20), "counts are part of what is merged"),
    Case("nothing", (200,), (5, 0, 7, 0), "a rank without columns takes part"),
    Case("no_rows", (0,), (5, 3, 7, 2), "there is nothing to say, but it is said"),
    Case("native", (2, 9), (700, 1100, 513, 64), "native code", route="native"),
    Case("bfloat16", (2, 9), (768, 768, 768, 768), "statistics are float32", torch.bfloat16, "native"),
    Case("float64", (2, 9), (300, 200, 100, 50), "all of it in float64", torch.float64, "native"),
    Case("shifted", (2, 9), (768, 768, 768, 768), "squares would cancel", route="native", shift=1e4),
]
NORMS = (LAYER_NORM, RMS_NORM)


def check_parity(case: Case, norm: Norm, rank: int, world: int) -> None:
    sizes = case.cols[:world]
    cols = sum(sizes)
    kind = torch.float64 if case.dtype == torch.float64 else torch.float32
    x = (torch.randn(*case.rows, cols, dtype=kind) * 2 + case.shift).to(case.dtype)
    grad = torch.randn(*case.rows, cols, dtype=kind).to(case.dtype)
    parameters = [torch.randn(cols, dtype=kind) for _ in range(1 + norm.is_centered)]
    truth = exact(norm, 1, (x, *parameters), grad, EPS)
    plain: Callable[..., torch.Tensor] = F.layer_norm if norm is LAYER_NORM else F.rms_norm
    shared: Callable[..., torch.Tensor] = parallel.layer_norm if norm is LAYER_NORM else parallel.rms_norm

    def run(function: Callable[..., torch.Tensor], of_rank: slice, dtype: torch.dtype) -> list[torch.Tensor]:
        dtypes = (dtype, *[kind] * len(parameters))
        parts = [t.detach()[..., of_rank].to(d) for t, d in zip((x, *parameters), dtypes, strict=True)]
        leaves = [part.clone().requires_grad_() for part in parts]
        output = function(leaves[0], leaves[0].shape[-1:], *leaves[1:], eps=EPS)
        output.backward(grad[..., of_rank].to(output.dtype))
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    start = sum(sizes[:rank])
    of_rank = slice(start, start + sizes[rank])
    ours = run(shared, of_rank, case.dtype)
    theirs = run(plain, slice(None), kind)
    assert ours[0].dtype == case.dtype
    names = ("output", "grad_input", "grad_weight", "grad_bias")[: len(ours)]
    for name, mine, torchs, true in zip(names, ours, theirs, (truth.output, *truth.gradients), strict=True):
        dtype = case.dtype if name in ("output", "grad_input") else kind
        torchs = torchs.to(dtype)
        if case.route == "auto":  # so few columns that errors of a row are chance: all are taken as one
            assert_no_further(f"{norm.name} {case.name} {name}", whole(mine, sizes), true, torchs)
            continue
        found = error_of(whole(mine, sizes), true)
        assert_accurate(f"{norm.name} {case.name} {name}", found, error_of(torchs, true), dtype)


def whole(part: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """All columns, of which each rank has a part."""
    padded = torch.nn.functional.pad(part, (0, max(sizes) - part.shape[-1]))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], -1)


def parity(rank: int, world: int) -> None:
    for case in CASES:
        for norm in NORMS:
            try:
                with settings.override(route=case.route):
                    check_parity(case, norm, rank, world)
            except Exception as error:
                raise AssertionError(f"{norm.name} {case.name} ({case.why})") from error


class Block(torch.nn.Module):
    """A hidden dimension that is split, two norms of it, and a sum over ranks: `kinds` are of one process or of several."""

    def __init__(self, kinds: Any, inner: int, hidden: int, **group: Any) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(inner, hidden), torch.nn.Linear(hidden, inner, bias=False)
        self.norm, self.last = kinds.LayerNorm(hidden, **group), kinds.RMSNorm(hidden, eps=EPS, **group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.last(F.gelu(self.norm(self.up(x)))))


class Shared(torch.nn.Module):
    """The same, of which this rank has columns of `up`, rows of `down` and parts of the norms."""

    def __init__(self, whole: Block, group: Any) -> None:
        super().__init__()
        hidden = whole.up.out_features
        start, end = parallel.modules.part_of(hidden, group)
        self.up, self.down = torch.nn.Linear(6, end - start), torch.nn.Linear(end - start, 6, bias=False)
        self.up, self.down = self.up.double(), self.down.double()
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight[start:end])
            self.up.bias.copy_(whole.up.bias[start:end])
            self.down.weight.copy_(whole.down.weight[:, start:end])
        self.norm = parallel.LayerNorm.from_whole(whole.norm, group)
        self.last = parallel.RMSNorm.from_whole(whole.last, group)
        self.part = slice(start, end)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddedUp.apply(self.down(self.last(F.gelu(self.norm(self.up(x))))))


class AddedUp(torch.autograd.Function):
    """What ends a tensor parallel block: all have the sum, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def training(rank: int, world: int) -> None:
    """Twenty steps equal those of one process; 10 columns do not divide by 4."""
    torch.manual_seed(2)
    alone = Block(torch.nn, 6, 10).double()
    shared = Shared(alone, dist.group.WORLD)
    torch.manual_seed(3)  # ranks with fewer columns drew less
    assert sum(p.numel() for p in shared.parameters()) < sum(p.numel() for p in alone.parameters())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (alone, shared)]
    for _ in range(20):
        x, target = torch.randn(7, 6).double(), torch.randn(7, 6).double()
        for model, optimizer in zip((alone, shared), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()
    part = shared.part
    for name in ("norm.weight", "norm.bias", "last.weight", "up.weight", "up.bias"):
        torch.testing.assert_close(shared.get_parameter(name), alone.get_parameter(name)[part], msg=name)
    torch.testing.assert_close(shared(x), alone(x))


def collectives(rank: int, world: int) -> None:
    """One forward of a number or two for each row, one backward; none backward where only the weight needs a gradient."""
    for cols in (16, 2048):
        for norm in (parallel.LayerNorm(cols * world), parallel.RMSNorm(cols * world)):
            x = torch.randn(3, 4, cols)
            norm(x).sum().backward()
            leaf = x.clone().requires_grad_()
            output, forward = ranks.collectives(lambda norm=norm, leaf=leaf: norm(leaf))
            _, backward = ranks.collectives(lambda output=output: output.square().sum().backward())
            assert (forward, backward) == (1, 1), norm
            output, forward = ranks.collectives(lambda norm=norm, x=x: norm(x))
            _, backward = ranks.collectives(lambda output=output: output.square().sum().backward())
            assert (forward, backward) == (1, 0), norm


def together(part: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, side by side."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, -1)


def fused(rank: int, world: int) -> None:
    """A residual before, a gate after, and the residual stream returned, in one split call."""
    cols = 1536
    group = dist.group.WORLD

    @warpnorm.fuse
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> Any:
        h = residual + x
        return parallel.rms_norm(h, h.shape[-1:], weight, EPS, group=group) * F.silu(gate), h

    @warpnorm.fuse
    def centred(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> Any:
        h = residual + F.gelu(x)
        return parallel.layer_norm(h, h.shape[-1:], weight, None, EPS, group=group) * (1 + gate), h

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> Any:
        h = residual + x
        return F.rms_norm(h, h.shape[-1:], weight, EPS) * F.silu(gate), h

    def plain_centred(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> Any:
        h = residual + F.gelu(x)
        return F.layer_norm(h, h.shape[-1:], weight, None, EPS) * (1 + gate), h

    part = slice(rank * cols, (rank + 1) * cols)
    for function, by_one in ((block, plain), (centred, plain_centred)):
        whole = [torch.randn(*shape, cols * world) for shape in ((2, 5), (2, 5), (), (2, 1))]
        mine = [t[..., part].clone().requires_grad_() for t in whole]
        exact = [t.double().requires_grad_() for t in whole]
        found = []
        for tensors, of in ((mine, function), (exact, by_one), ([t.requires_grad_() for t in whole], by_one)):
            y, h = of(*tensors)
            if of is function:
                assert "SplitNormalization" in type(y.grad_fn).__name__
            (y.square().sum() + h.pow(3).sum()).backward()
            of_all = together if of is function else torch.Tensor.detach  # of few values chance would decide
            found.append([of_all(t) for t in (y, *(tensor.grad for tensor in tensors))])
        for k, (ours, true, theirs) in enumerate(zip(*found, strict=True)):
            assert_no_further(f"{k}", ours, true, theirs)
        assert "in three steps: ranks of the process group" in str(warpnorm.explain(function, *mine))
        _, forward = ranks.collectives(lambda function=function, mine=mine: function(*mine))
        assert forward == 1


def twice(rank: int, world: int) -> None:
    """Second derivatives equal those of one process."""
    x, grad, weight = (torch.randn(*rows, 4 * world).double() for rows in ((3,), (3,), ()))
    part = slice(4 * rank, 4 * rank + 4)
    for shared, plain in ((parallel.layer_norm, F.layer_norm), (parallel.rms_norm, F.rms_norm)):
        for route in ("reference", "native"):
            found = []
            for function, of_rank in ((shared, part), (plain, slice(None))):
                leaf, factor = x[:, of_rank].clone().requires_grad_(), weight[of_rank].clone().requires_grad_()
                with settings.override(route=route):
                    output = function(leaf, leaf.shape[-1:], factor, eps=EPS)
                    first = torch.autograd.grad(output, leaf, grad[:, of_rank], create_graph=True)[0]
                    found.append(torch.autograd.grad(first.pow(3).sum(), (leaf, factor)))
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs[..., part])


def compiled(rank: int, world: int) -> None:
    """One graph, which has the exchange in it, also where something is fused around it."""
    for norm in (parallel.LayerNorm(6 * world), parallel.LayerNorm(4096), parallel.RMSNorm(4096)):
        _compiled(norm, torch.randn(3, norm.normalized_shape[0]))
    fused = warpnorm.fuse(lambda x: F.silu(parallel.rms_norm(x * 2, x.shape[-1:], eps=EPS)))
    _compiled(fused, torch.randn(3, 2048))


def _compiled(norm: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    graph = torch.compile(norm, backend="aot_eager", fullgraph=True)
    outputs = [function(leaf) for function, leaf in zip((norm, graph), leaves, strict=True)]
    for output in outputs:
        output.pow(3).sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(leaf.grad for leaf in leaves))


def halves(rank: int, world: int) -> None:
    """Of a norm that has all weights; those that are frozen stay so."""
    whole = torch.nn.LayerNorm(8)
    whole.weight.requires_grad_(False)
    part = parallel.LayerNorm.from_whole(whole)
    assert (part.weight.requires_grad, part.bias.requires_grad) == (False, True)
    with pytest.raises(InputError, match="takes a norm over one dimension"):
        parallel.LayerNorm.from_whole(torch.nn.LayerNorm((4, 8)))
    with pytest.raises(InputError, match="takes a norm over one dimension"):
        parallel.RMSNorm.from_whole(torch.nn.Linear(8, 8))


def refused(rank: int, world: int) -> None:
    """Rows that differ in number cannot be rows that are shared."""
    with pytest.raises(InputError, match="normalized_shape is"):
        parallel.layer_norm(torch.randn(3, 5), (4,))
    with pytest.raises(InputError, match="weight has shape"):
        parallel.rms_norm(torch.randn(3, 5), (5,), torch.ones(5 * world))
    with pytest.raises(InputError, match="one int"):
        parallel.LayerNorm((4, 5))


def ended(rank: int, world: int) -> None:
    """Nothing here holds a process group that was destroyed, for its threads would run on."""
    group = dist.new_group()
    held = weakref.ref(group)
    _used(group, 8 * world)
    dist.destroy_process_group(group)
    del group
    assert held() is None


def _used(group: Any, cols: int) -> None:
    """By norms of each kind, alone and fused, with gradients."""
    fused = warpnorm.fuse(lambda x, y: F.silu(parallel.rms_norm(x + y, x.shape[-1:], eps=EPS, group=group)))
    batch, own = (
        warpnorm.nn.SyncBatchNorm(4, process_group=group),
        warpnorm.nn.SyncBatchNormReLU2d(4, process_group=group),
    )
    leaf = torch.randn(3, cols, requires_grad=True)
    parallel.LayerNorm(cols, group=group)(leaf[:, : cols // dist.get_world_size(group)]).sum().backward()
    fused(leaf, leaf.detach()).sum().backward()
    images = leaf.expand(2, 4, 3, cols)
    (batch(images) + own(images, images.detach())).sum().backward()


CHECKS = (parity, training, collectives, fused, twice, refused, halves, ended, compiled)


@pytest.fixture(scope="module", params=ranks.SOME_WORLDS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checks = CHECKS if request.param == 2 else CHECKS[:-1]  # what is compiled does not depend on how many there are
    return ranks.run(checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(told: dict[str, str], check: ranks.Check) -> None:
    if check.__name__ in told:
        assert not told[check.__name__], told[check.__name__]


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_alone_it_is_the_norm(name: str) -> None:
    x = torch.randn(3, 5)
    theirs = getattr(torch.nn, name)(5)
    torch.nn.init.normal_(theirs.weight)
    ours = getattr(parallel, name).from_whole(theirs)
    assert torch.equal(ours(x), theirs(x))
    assert "a part of 5" in repr(ours)


def test_nothing_holds_the_group_of_all() -> None:
    """Fused functions know which one they were captured under, and let it go."""
    import torch.distributed.nn  # noqa: F401  # whose defaults would hold what is there when it is loaded

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        held = weakref.ref(dist.group.WORLD)
        _used(dist.group.WORLD, 8)
    finally:
        dist.destroy_process_group()
    assert held() is None
