"""The functions and modules on DTensors: what is sharded stays sharded, no input is gathered, gradients of parameters are
reduced once; with `SequenceParallel` and FSDP2. Placements that cannot work are refused in one sentence."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ranks
import warpnorm
from accuracy import assert_no_further
from warpnorm import library, nn, settings
from warpnorm.errors import InputError


def mesh_of(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world,))


def check(
    ours: Callable[..., Any], theirs: Callable[..., Any], world: int, tensors: list[torch.Tensor], placements: list[Any],
    forward: int, backward: int,
) -> list[Any]:  # fmt: skip
    """Values, gradients and placements of a function of DTensors, and how many collectives it takes; its outputs. Errors are
    those of all values together."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = mesh_of(world)
    placed = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    made, counted = ranks.collectives(lambda: ours(*placed))
    outputs = list(made) if isinstance(made, tuple) else [made]
    assert counted == forward, f"{counted} collectives forward"
    assert all(isinstance(output, DTensor) and output.placements == placed[0].placements for output in outputs)
    grads = [torch.randn(output.shape) for output in outputs]
    of_outputs = [distribute_tensor(g, mesh, o.placements) for g, o in zip(grads, outputs, strict=True)]
    _, counted = ranks.collectives(lambda: torch.autograd.backward(outputs, of_outputs))
    assert counted == backward, f"{counted} collectives backward"
    found = [output.full_tensor() for output in outputs]
    for tensor in placed:
        assert tensor.grad.placements == tensor.placements
        found.append(tensor.grad.full_tensor())
    expected = []
    for dtype in (torch.float64, torch.float32):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in tensors]
        alone = theirs(*leaves)
        alone = list(alone) if isinstance(alone, tuple) else [alone]
        torch.autograd.backward(alone, [g.to(dtype) for g in grads])
        expected.append([*alone, *(leaf.grad for leaf in leaves)])
    for k, (mine, true, torchs) in enumerate(zip(found, *expected, strict=True)):
        assert_no_further(f"{k}", mine, true, torchs)
    return outputs


def layer(function: Any) -> Any:
    return lambda x, weight, bias: function(x, x.shape[-1:], weight, bias)


def rms(function: Any) -> Any:
    return lambda x, weight: function(x, x.shape[-1:], weight, 1e-6)


LAYER, RMS = (layer(warpnorm.layer_norm), layer(F.layer_norm)), (rms(warpnorm.rms_norm), rms(F.rms_norm))


def rows(rank: int, world: int) -> None:
    """Sharded on batch or sequence, evenly or not: nothing forward, one sum for each parameter backward."""
    from torch.distributed.tensor import Replicate, Shard

    same = Replicate()
    for route, cols in (("auto", 24), ("native", 1280)):
        x, weight, bias = torch.randn(4, 5, cols), torch.randn(cols), torch.randn(cols)
        with settings.override(route=route):
            for placement in (Shard(0), Shard(1), Shard(-2)):
                check(*LAYER, world, [x, weight, bias], [placement, same, same], 0, 2)
            check(*RMS, world, [x, weight], [Shard(1), same], 0, 1)
            check(*RMS, world, [x, weight], [same, same], 0, 0)


def hidden(rank: int, world: int) -> None:
    """Sharded on what is normalized: one small message each way, and parameters stay sharded."""
    from torch.distributed.tensor import Shard

    for route, cols in (("auto", 22), ("native", 2054)):
        x, weight, bias = torch.randn(4, 5, cols), torch.randn(cols), torch.randn(cols)
        with settings.override(route=route):
            check(*LAYER, world, [x, weight, bias], [Shard(2), Shard(0), Shard(0)], 1, 1)
            check(*RMS, world, [x, weight], [Shard(2), Shard(0)], 1, 1)


def by_channel(rank: int, world: int) -> None:
    """A sharded batch is one batch to batch_norm, many samples to the others; sharded channels need nobody."""
    from torch.distributed.tensor import Replicate, Shard

    x, weight, bias = torch.randn(5, 8, 6, 4), torch.randn(8), torch.randn(8)
    both = [Replicate(), Replicate()]

    def batch(function: Any) -> Any:
        return lambda x, w, b: function(x, None, None, w, b, True)

    check(batch(warpnorm.batch_norm), batch(F.batch_norm), world, [x, weight, bias], [Shard(0), *both], 1, 3)
    check(batch(warpnorm.batch_norm), batch(F.batch_norm), world, [x, weight, bias], [Shard(2), *both], 1, 3)
    check(
        batch(warpnorm.batch_norm), batch(F.batch_norm), world, [x, weight, bias], [Shard(1), Shard(0), Shard(0)], 0, 0
    )
    check(lambda x, w, b: warpnorm.group_norm(x, 4, w, b), lambda x, w, b: F.group_norm(x, 4, w, b),
          world, [x, weight, bias], [Shard(0), *both], 0, 2)  # fmt: skip
    check(lambda x, w, b: warpnorm.instance_norm(x, None, None, w, b), lambda x, w, b: F.instance_norm(x, None, None, w, b),
          world, [x, weight, bias], [Shard(1), Shard(0), Shard(0)], 0, 0)  # fmt: skip


def running(rank: int, world: int) -> None:
    """BatchNorm of a sharded batch averages the statistics of the whole batch."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

    mesh = mesh_of(world)
    ours, theirs = nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    distribute_module(ours, mesh)
    x = torch.randn(6, 3, 4, 4)
    exact = copy.deepcopy(theirs).double()
    for is_training in (True, False):
        output = ours.train(is_training)(distribute_tensor(x, mesh, [Shard(0)]))
        right, torchs = exact.train(is_training)(x.double()), theirs.train(is_training)(x)
        assert_no_further("output", output.full_tensor(), right, torchs)
        assert isinstance(ours.running_mean, DTensor)
        for name in ("running_mean", "running_var"):
            mine, true, of_torch = (getattr(module, name) for module in (ours, exact, theirs))
            assert_no_further(name, mine.full_tensor(), true, of_torch)


class Model(torch.nn.Module):
    def __init__(self, kinds: Any) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.first, self.last = kinds.LayerNorm(16), kinds.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(F.relu(self.up(self.first(x)))))


def models() -> tuple[Model, Model, Model]:
    """PyTorch's in float64 and in float32, and ours."""
    torch.manual_seed(3)
    theirs, ours = Model(torch.nn), Model(nn)
    ours.load_state_dict(theirs.state_dict())
    return copy.deepcopy(theirs).double(), theirs, ours


def assert_same_parameters(ours: Model, exact: Model, theirs: Model) -> None:
    for (name, mine), true, torchs in zip(
        ours.named_parameters(), exact.parameters(), theirs.parameters(), strict=True
    ):
        assert_no_further(name, mine.full_tensor(), true, torchs)


def sequence_parallel(rank: int, world: int) -> None:
    """Norms on a part of the sequence between two linear layers that are split: as `parallelize_module` plans it."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    exact, theirs, ours = models()
    mesh = mesh_of(world)
    parallelize_module(
        ours, mesh,
        {
            "first": SequenceParallel(),
            "last": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )  # fmt: skip
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (exact, theirs, ours)]
    for _ in range(3):
        x = torch.randn(2, 8, 16)
        y = ours(distribute_tensor(x, mesh, [Shard(1)]))
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(1),)
        outputs = exact(x.double()), theirs(x), y
        assert_no_further("output", y.full_tensor(), *outputs[:2])
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            output.pow(3).mean().backward()
            optimizer.step()
    assert_same_parameters(ours, exact, theirs)


def fully_sharded(rank: int, world: int) -> None:
    """FSDP2: parameters are sharded between the steps."""
    from torch.distributed.fsdp import fully_shard

    exact, theirs, ours = models()
    mesh = mesh_of(world)
    for module in (ours.first, ours.last, ours):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (exact, theirs, ours)]
    for _ in range(3):
        x = torch.randn(2 * world, 5, 16)
        parts = x.double(), x, x[2 * rank : 2 * rank + 2]
        for model, optimizer, part in zip((exact, theirs, ours), optimizers, parts, strict=True):
            optimizer.zero_grad()
            model(part).pow(3).mean().backward()
            optimizer.step()
    assert_same_parameters(ours, exact, theirs)


def mixed_precision(rank: int, world: int) -> None:
    """A fused module that FSDP2 shards alone, and whose parameters and inputs it casts: as accurate as PyTorch's norm is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, low = mesh_of(world), torch.bfloat16
    norm = nn.AddRMSNorm(1280, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().clone()
    fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32))
    x, residual, grad = torch.randn(3, 4, 1280).to(low).float()  # the same on all ranks
    y, h = norm(x, residual)
    assert (y.dtype, h.dtype) == (low, low)
    y.backward(grad.to(low))
    found = [y, norm.weight.grad.full_tensor()]
    expected = []
    for dtype in (torch.float64, low):
        leaf = weight.to(low).to(dtype).requires_grad_()
        theirs = F.rms_norm((x.to(low) + residual.to(low)).to(dtype), (1280,), leaf, 1e-6)
        theirs.backward(grad.to(dtype))
        expected.append([theirs, leaf.grad])
    for name, mine, true, torchs in zip(("output", "weight"), found, *expected, strict=True):
        assert_no_further(name, mine.to(low), true, torchs)


@warpnorm.fuse
def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    h = residual + F.silu(x)
    return F.layer_norm(h, h.shape[-1:], weight, bias), h


@warpnorm.fuse
def modulated(x: torch.Tensor, modulation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    shift, scale = modulation.chunk(2, -1)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6) * (1 + scale[:, None]) + shift[:, None]


def operators(rank: int, world: int) -> None:
    """Called themselves, as exported programs do: rules registered with PyTorch keep shards, and know texts apart."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def text(col_dims: int) -> str:
        flags = (True, False, 0.0, ("full", "column"), (torch.float32,) * 2, torch.float32, 0, False)
        return library._affine_text("rms_norm", col_dims, 1e-6, *flags)

    def whole_samples(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[1:], table, 1e-6)

    def direct(col_dims: int) -> Any:
        return lambda x, weight: torch.ops.warpnorm.norm([x, weight], [], text(col_dims))[0]

    same = Replicate()
    for route, cols in (("auto", 12), ("native", 1280)):
        x, weight, table = torch.randn(4, 6, cols), torch.randn(cols), torch.randn(6, cols)
        with settings.override(route=route):
            check(direct(1), RMS[1], world, [x, weight], [Shard(1), same], 0, 1)
            check(direct(1), RMS[1], world, [x, weight], [Shard(0), same], 0, 1)
            check(direct(2), whole_samples, world, [x, table], [Shard(0), same], 0, 1)
    placed = [distribute_tensor(x, mesh_of(world), [Shard(1)]), distribute_tensor(table, mesh_of(world), [same])]
    with pytest.raises(InputError, match=r"placed as \(Shard\(dim=1\)\), but an operator has whole rows only"):
        direct(2)(*placed)
    placed[1] = distribute_tensor(weight, mesh_of(world), [same])
    rstd = torch.ops.warpnorm.norm(placed, [], text(1))[1]
    assert rstd.placements == (Shard(1),)
    torch.testing.assert_close(rstd.full_tensor(), torch.rsqrt(x.square().mean(-1) + 1e-6))


def fused(rank: int, world: int) -> None:
    """By the kernels on what lies here, or by PyTorch's operators, with the collectives of a norm alone."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    same, plain = Replicate(), (add_norm.__wrapped__, modulated.__wrapped__)
    for route, cols in (("auto", 24), ("native", 512)):
        x, residual, weight, bias = (torch.randn(*rows, cols) for rows in ((4, 5), (4, 5), (), ()))
        modulation = torch.randn(4, 2 * cols)
        with settings.override(route=route):
            for dim in (0, 1):
                args = world, [x, residual, weight, bias], [Shard(dim), Shard(dim), same, same]
                y, _ = check(add_norm, plain[0], *args, 0, 2)
            node = y.grad_fn.next_functions[0][0]
            is_native = route == "native" and y.to_local().numel() > 0  # of 5 the last of 4 ranks has none
            assert ("NormalizationBackward" in type(node).__name__) == is_native
            check(
                add_norm, plain[0], world, [x, residual, weight, bias], [Shard(2), Shard(2), Shard(0), Shard(0)], 1, 1
            )
            check(modulated, plain[1], world, [x, modulation, weight], [Shard(0), Shard(0), same], 0, 1)
            check(modulated, plain[1], world, [x, modulation, weight], [Shard(1), same, same], 0, 3)
    placed = [distribute_tensor(t, mesh_of(world), [p]) for t, p in ((x, Shard(0)), (residual, Shard(1)))]
    placed += [distribute_tensor(t, mesh_of(world), [same]) for t in (weight, bias)]
    torch.testing.assert_close(add_norm(*placed)[1].full_tensor(), plain[0](x, residual, weight, bias)[1])
    if world > 2:  # what is explained does not depend on how many there are
        return
    shown = str(warpnorm.explain(add_norm, *placed))
    assert "as plain PyTorch, because layer_norm: residual as (Shard(dim=1)) and x as (Shard(dim=0)) are split" in shown
    placed[1] = placed[0]
    assert "on what lies here of DTensors that are placed as (Shard(dim=0))" in str(warpnorm.explain(add_norm, *placed))


def fused_batch(rank: int, world: int) -> None:
    """BatchNorm and ReLU in one: the exchange of a batch, and its running statistics."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = mesh_of(world)
    for route in ("auto", "native"):
        ours = nn.BatchNormReLU2d(8)
        distribute_module(ours, mesh)
        x = torch.randn(5, 8, 6, 4)
        placed = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        with settings.override(route=route):
            y, counted = ranks.collectives(lambda ours=ours, placed=placed: ours(placed))
            assert counted == 1
            _, counted = ranks.collectives(lambda y=y: y.backward(y.detach()))
            assert counted == 3
            found = [y, placed.grad, *ours.buffers(), ours.eval()(placed)]
        expected = []
        for dtype in (torch.float64, torch.float32):
            alone, leaf = torch.nn.BatchNorm2d(8, dtype=dtype), x.to(dtype, copy=True).requires_grad_()
            output = F.relu(alone(leaf))
            output.backward(y.detach().full_tensor().to(dtype))
            expected.append([output, leaf.grad, *alone.buffers(), F.relu(alone.eval()(x.to(dtype)))])
        for k, (mine, true, torchs) in enumerate(zip(found, *expected, strict=True)):
            if mine.is_floating_point():
                assert_no_further(f"{k}", mine.full_tensor(), true, torchs)
            else:
                assert mine.full_tensor() == true, "batches are counted"


def packed_heads(rank: int, world: int) -> None:
    """QKNorm brings a tensor of its own, which has to lie beside the others on every rank; no head is gathered."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.func import functional_call

    def ours(x: Any, q_weight: Any, k_weight: Any) -> Any:
        return functional_call(nn.QKNorm(64, 3, 2), {"q_weight": q_weight, "k_weight": k_weight}, (x,))

    def theirs(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = x.split((3, 2, 2), -2)
        return F.rms_norm(q, (64,), q_weight, 1e-6), F.rms_norm(k, (64,), k_weight, 1e-6), v

    for dim in (0, 1):
        tensors = [torch.randn(4, 8, 7, 64), torch.randn(64), torch.randn(64)]
        check(ours, theirs, world, tensors, [Shard(dim), Replicate(), Replicate()], forward=0, backward=2)


class Stack(torch.nn.Module):
    """Functions, which a compiler sees the local part of, and a fused one, which is an operator on DTensors."""

    def __init__(self, cols: int) -> None:
        super().__init__()
        self.first, self.add, self.last = nn.LayerNorm(cols), nn.AddRMSNorm(cols, eps=1e-6), nn.RMSNorm(cols, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self.add(F.silu(self.first(x)), x)
        return self.last(y + h)


def compiled(rank: int, world: int) -> None:
    """One graph, in which norms are our operators on what lies here; as many collectives as without a compiler."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh, seen = mesh_of(world), []

    def keep(graph: Any, inputs: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    x, grad = torch.randn(2, 8, 1280), torch.randn(2, 8, 1280)
    model = distribute_module(Stack(1280), mesh)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    found = []
    with settings.override(route="native"):
        for function in (model, torch.compile(model, backend=backend, fullgraph=True)):
            model.zero_grad()
            leaf = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            output, forward = ranks.collectives(lambda function=function, leaf=leaf: function(leaf))
            of_output = distribute_tensor(grad, mesh, [Shard(1)])
            _, backward = ranks.collectives(lambda output=output, of_output=of_output: output.backward(of_output))
            assert (forward, backward) == (0, 4), function
            assert output.placements == (Shard(1),)
            found.append([t.full_tensor() for t in (output, leaf.grad, *(p.grad for p in model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [graph.count("warpnorm.norm.default") for graph in seen] == [3, 0]
    assert [graph.count("warpnorm.norm_backward.default") for graph in seen] == [0, 3]
    for placement in (Replicate(), Shard(1), Shard(0)):
        check_compiled_batch(mesh, placement)


def check_compiled_batch(mesh: Any, placement: Any) -> None:
    """BatchNorm and ReLU in one, whose running statistics become those of the whole batch, however it is split."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch._dynamo.reset()
    ours, x, grad = nn.BatchNormReLU2d(8), torch.randn(4, 8, 48, 48), torch.randn(4, 8, 48, 48)
    for kept in (ours._parameters, ours._buffers):
        for name, tensor in kept.items():
            own = Shard(0) if placement == Shard(1) and tensor.ndim else Replicate()
            placed = distribute_tensor(tensor.detach(), mesh, [own])
            kept[name] = torch.nn.Parameter(placed) if kept is ours._parameters else placed
    leaf = distribute_tensor(x, mesh, [placement]).requires_grad_()
    with settings.override(route="native"):
        output = torch.compile(ours, backend="aot_eager", fullgraph=True)(leaf)
        output.backward(distribute_tensor(grad, mesh, [placement]))
    found = [output, leaf.grad, ours.weight.grad, ours.running_mean, ours.running_var]
    expected = []
    for dtype in (torch.float64, torch.float32):
        alone, whole = torch.nn.BatchNorm2d(8, dtype=dtype), x.to(dtype, copy=True).requires_grad_()
        right = F.relu(alone(whole))
        right.backward(grad.to(dtype))
        expected.append([right, whole.grad, alone.weight.grad, alone.running_mean, alone.running_var])
    for k, (mine, true, torchs) in enumerate(zip(found, *expected, strict=True)):
        assert_no_further(f"{placement} {k}", mine.full_tensor(), true, torchs)


def refused(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(world)
    x = torch.randn(4, 8, 8, 8)

    def at(*placements: Any) -> Any:
        return distribute_tensor(x, mesh, placements)

    partial = DTensor.from_local(x, mesh, [Partial()])
    with pytest.raises(InputError, match=r"layer_norm: input is placed as \(Partial\(sum\)\), but must be Shard or"):
        warpnorm.layer_norm(partial, (8,))
    with pytest.raises(InputError, match=r"group_norm: input is placed as \(Shard\(dim=1\)\), but a group's channels"):
        warpnorm.group_norm(at(Shard(1)), 4)
    with pytest.raises(InputError, match=r"instance_norm: .* a sample's channel must lie on one rank"):
        warpnorm.instance_norm(at(Shard(3)))
    with pytest.raises(InputError, match=r"instance_norm: .* averaged over all samples"):
        warpnorm.instance_norm(at(Shard(0)), torch.zeros(8), torch.ones(8))
    with pytest.raises(InputError, match=r"rms_norm: input is a DTensor, but weight is not: distribute it too"):
        warpnorm.rms_norm(at(Shard(0)), (8,), torch.ones(8))
    with pytest.raises(InputError, match="out= cannot be used with a DTensor"):
        warpnorm.rms_norm(at(Shard(0)), (8,), out=at(Shard(0)))
    with pytest.raises(InputError, match="return_stats= cannot be used with a DTensor"):
        warpnorm.rms_norm(at(Shard(0)), (8,), return_stats=True)
    with pytest.raises(InputError, match="running_mean is placed as"):
        warpnorm.batch_norm(at(Replicate()), *(distribute_tensor(torch.ones(8), mesh, [Shard(0)]) for _ in range(2)))
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        with pytest.raises(InputError, match="what 2 dimensions of the mesh split; one may"):
            warpnorm.layer_norm(distribute_tensor(x, square, [Shard(3), Shard(2)]), (8, 8))
        both = distribute_tensor(x, square, [Shard(0), Shard(3)])
        weight = distribute_tensor(torch.ones(8), square, [Replicate(), Shard(0)])
        torch.testing.assert_close(warpnorm.layer_norm(both, (8,), weight).full_tensor(), F.layer_norm(x, (8,)))


CHECKS = (
    rows, hidden, by_channel, running, sequence_parallel, fully_sharded, mixed_precision, operators, fused, fused_batch,
    packed_heads, refused, compiled,
)  # fmt: skip


@pytest.fixture(scope="module", params=ranks.SOME_WORLDS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checks = CHECKS if request.param == 2 else CHECKS[:-1]  # what is compiled does not depend on how many there are
    return ranks.run(checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(told: dict[str, str], check: ranks.Check) -> None:
    if check.__name__ in told:
        assert not told[check.__name__], told[check.__name__]
