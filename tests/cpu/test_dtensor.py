"""The functions and modules on DTensors: what is sharded stays sharded, no input is gathered, gradients of parameters are
reduced once; with `SequenceParallel` and FSDP2. Placements that cannot work are refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ranks
import warpnorm
from warpnorm import nn, settings
from warpnorm.errors import InputError

WORLDS = (2, 4)


def mesh_of(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world,))


def check(
    ours: Callable[..., Any], theirs: Callable[..., Any], world: int, tensors: list[torch.Tensor], placements: list[Any],
    forward: int, backward: int,
) -> None:  # fmt: skip
    """Values, gradients and placements of a function of DTensors, and how many collectives it takes."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = mesh_of(world)
    placed = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    whole = [t.clone().requires_grad_() for t in tensors]
    output, counted = ranks.collectives(lambda: ours(*placed))
    assert isinstance(output, DTensor)
    assert output.placements == placed[0].placements
    assert counted == forward, f"{counted} collectives forward"
    expected = theirs(*whole)
    grad = torch.randn_like(expected)
    of_output = distribute_tensor(grad, mesh, output.placements)
    _, counted = ranks.collectives(lambda: output.backward(of_output))
    assert counted == backward, f"{counted} collectives backward"
    expected.backward(grad)
    torch.testing.assert_close(output.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    for tensor, leaf in zip(placed, whole, strict=True):
        assert tensor.grad.placements == tensor.placements
        torch.testing.assert_close(tensor.grad.full_tensor(), leaf.grad, rtol=1e-4, atol=1e-4)


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
    output = ours(distribute_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(output.full_tensor(), theirs(x))
    assert isinstance(ours.running_mean, DTensor)
    torch.testing.assert_close(ours.running_mean.full_tensor(), theirs.running_mean)
    torch.testing.assert_close(ours.running_var.full_tensor(), theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), theirs(x))


class Model(torch.nn.Module):
    def __init__(self, kinds: Any) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.first, self.last = kinds.LayerNorm(16), kinds.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(F.relu(self.up(self.first(x)))))


def models() -> tuple[Model, Model]:
    torch.manual_seed(3)
    theirs, ours = Model(torch.nn), Model(nn)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def sequence_parallel(rank: int, world: int) -> None:
    """Norms on a part of the sequence between two linear layers that are split: as `parallelize_module` plans it."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    theirs, ours = models()
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
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    for _ in range(3):
        x = torch.randn(2, 8, 16)
        y = ours(distribute_tensor(x, mesh, [Shard(1)]))
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(1),)
        expected = theirs(x)
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-5)
        for optimizer, loss in zip(optimizers, (expected.square().mean(), y.square().mean()), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, parameter), of_torch in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), of_torch, rtol=1e-4, atol=1e-5, msg=name)


def fully_sharded(rank: int, world: int) -> None:
    """FSDP2: parameters are sharded between the steps."""
    from torch.distributed.fsdp import fully_shard

    theirs, ours = models()
    mesh = mesh_of(world)
    for module in (ours.first, ours.last, ours):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    for _ in range(3):
        x = torch.randn(2 * world, 5, 16)
        for model, optimizer, part in zip(
            (theirs, ours), optimizers, (slice(None), slice(2 * rank, 2 * rank + 2)), strict=True
        ):
            optimizer.zero_grad()
            model(x[part]).pow(3).mean().backward()
            optimizer.step()
    for (name, parameter), of_torch in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), of_torch, rtol=1e-4, atol=1e-5, msg=name)


def fused(rank: int, world: int) -> None:
    """A fused module on DTensors stays sharded, by PyTorch's operators."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = mesh_of(world)
    module = nn.AddRMSNorm(16, eps=1e-6)
    x, residual = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    expected = module(x, residual)
    distribute_module(module, mesh)
    placed = [distribute_tensor(t, mesh, [Shard(1)]) for t in (x, residual)]
    found, counted = ranks.collectives(lambda: module(*placed))
    assert counted == 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.placements == (Shard(1),)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def compiled(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(world)
    x, weight = torch.randn(2, 8, 16), torch.randn(16)
    found = []
    for function in (warpnorm.rms_norm, torch.compile(warpnorm.rms_norm, backend="aot_eager", fullgraph=True)):
        leaf, factor = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()])
        leaf.requires_grad_(), factor.requires_grad_()
        output = function(leaf, (16,), factor)
        output.pow(3).sum().backward()
        assert output.placements == (Shard(1),)
        found.append([t.full_tensor() for t in (output, leaf.grad, factor.grad)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


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


CHECKS = (rows, hidden, by_channel, running, sequence_parallel, fully_sharded, fused, refused, compiled)


@pytest.fixture(scope="module", params=WORLDS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checks = CHECKS if request.param == 2 else CHECKS[:-1]  # what is compiled does not depend on how many there are
    return ranks.run(checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(told: dict[str, str], check: ranks.Check) -> None:
    if check.__name__ in told:
        assert not told[check.__name__], told[check.__name__]
