"""The modules of the norms by channel against those of `torch.nn`: PyTorch's own samples, the state that they keep, lazy
ones, and that whatever can be done to one can be done to the other, with the same result."""

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleErrorEnum, ModuleInfo, module_db

import warpnorm
from cpu.truth import DTYPES, name_of, random
from warpnorm import functional

BATCH = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
INSTANCE = ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")
MODULES = (*BATCH, *INSTANCE, "GroupNorm")
LAZY = tuple(f"Lazy{name}" for name in (*BATCH, *INSTANCE))
SHAPES = {"1d": (3, 4, 5), "2d": (3, 4, 5, 2), "3d": (3, 4, 2, 3, 2), "rm": (3, 4, 5, 2)}
by_module = pytest.mark.parametrize("name", MODULES)
by_lazy = pytest.mark.parametrize("name", LAZY)
by_mode = pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])


def input_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> torch.Tensor:
    return random(SHAPES[name[-2:]], dtype, seed)


@dataclass(frozen=True)
class Case:
    name: str
    module: str
    why: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def dtype(self) -> torch.dtype:
        return self.arguments.get("dtype", torch.float32)

    def build(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Ours and PyTorch's, in a state that is not the one they begin with, nor that of any other case."""
        sizes = (2, 4) if self.module == "GroupNorm" else (4,)
        ours, theirs = (getattr(home, self.module)(*sizes, **self.arguments) for home in (warpnorm.nn, torch.nn))
        for module in (ours, theirs):
            spoil(module)
        return ours, theirs


def spoil(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(module.state_dict().items()):
            if tensor.is_floating_point():
                values = random(tensor.shape, tensor.dtype, seed)
                tensor.copy_(values.abs() + 0.5 if "var" in name else values)


def cases() -> Iterator[Case]:
    for module in MODULES:
        is_grouped = module == "GroupNorm"
        yield Case(module, module, "the default")
        yield Case(f"{module}_eps", module, "eps reaches the function", {"eps": 0.5})
        yield Case(f"{module}_affine", module, "with parameters", {"affine": True})
        yield Case(f"{module}_no_affine", module, "without", {"affine": False})
        yield Case(f"{module}_no_bias", module, "a weight alone", {"affine": True, "bias": False})
        for dtype in (DTYPES[0], *DTYPES[2:]):
            yield Case(f"{module}_{name_of(dtype)}", module, "of this dtype", {"dtype": dtype, "affine": True})
        if not is_grouped:
            yield Case(f"{module}_tracking", module, "running statistics", {"track_running_stats": True})
            yield Case(f"{module}_not_tracking", module, "none", {"track_running_stats": False})
            yield Case(f"{module}_momentum", module, "momentum", {"track_running_stats": True, "momentum": 0.7})
            yield Case(f"{module}_cumulative", module, "no momentum", {"track_running_stats": True, "momentum": None})


CASES = list(cases())
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(module: torch.nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradients of the input and of every parameter, and the state after it."""
    leaf = input.detach().clone().requires_grad_()
    output = module(leaf)
    gradients = torch.autograd.grad(output.pow(3).sum(), [leaf, *module.parameters()])
    return [output, *gradients, *(tensor.clone() for tensor in module.state_dict().values())]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def is_by_running(module: torch.nn.Module) -> bool:
    """Instances in evaluation: by batch norm, whose sums run in another order than PyTorch's."""
    is_instance = isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
    return is_instance and module.track_running_stats and not module.training


def assert_as_pytorchs(ours: torch.nn.Module, theirs: torch.nn.Module, input: torch.Tensor) -> None:
    found, expected = run(ours, input), run(theirs, input)
    if not is_by_running(ours):
        assert_equal(found, expected)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)


@by_mode
@by_case
def test_three_steps_are_pytorchs(case: Case, is_training: bool) -> None:
    """Outputs, gradients, running statistics and the count of batches."""
    ours, theirs = (module.train(is_training) for module in case.build())
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for step in range(3):
        assert_as_pytorchs(ours, theirs, input_of(case.module, case.dtype, seed=step))
    if case.module in BATCH and "running_mean" in before:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(before[name], ours.state_dict()[name]) == (not is_training), name


@by_case
def test_training_and_evaluation_in_turn(case: Case) -> None:
    ours, theirs = case.build()
    for step, is_training in enumerate((True, False, True, True, False)):
        ours.train(is_training)
        theirs.train(is_training)
        assert_as_pytorchs(ours, theirs, input_of(case.module, case.dtype, seed=step))


@pytest.mark.parametrize("name", [*BATCH, *INSTANCE])
@by_mode
def test_tracking_may_be_switched_off_later(name: str, is_training: bool) -> None:
    ours, theirs = (module.train(is_training) for module in Case(name, name, "", {"track_running_stats": True}).build())
    ours.track_running_stats = theirs.track_running_stats = False
    before = ours.running_mean.clone()
    assert_as_pytorchs(ours, theirs, input_of(name))
    if name in BATCH:
        assert torch.equal(ours.running_mean, before)


def infos() -> dict[str, ModuleInfo]:
    return {info.module_cls.__name__: info for info in module_db if info.module_cls.__name__ in (*MODULES, *LAZY)}


@pytest.mark.filterwarnings("ignore:input's size at dim")
@by_module
@by_mode
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_samples(dtype: torch.dtype, is_training: bool, name: str) -> None:
    """PyTorch's own, single samples without a batch dimension and empty batches among them."""
    info = infos()[name]
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=is_training)
    assert len(found) >= 3
    for sample in found:
        constructed = sample.constructor_input
        keywords = constructed.kwargs | {"dtype": dtype}
        ours, theirs = (
            getattr(home, name)(*constructed.args, **keywords).train(is_training) for home in (warpnorm.nn, torch.nn)
        )
        assert_as_pytorchs(ours, theirs, sample.forward_input.args[0])


def test_error_samples() -> None:
    """The type and the words of PyTorch's errors."""
    count = 0
    for name, info in infos().items():
        if info.module_error_inputs_func is None:
            continue
        for error in info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        ):
            build, call = (error.module_error_input.constructor_input, error.module_error_input.forward_input)
            if error.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
                with pytest.raises(error.error_type, match=error.error_regex):
                    getattr(warpnorm.nn, name)(*build.args, **build.kwargs)
            else:
                module = getattr(warpnorm.nn, name)(*build.args, **build.kwargs)
                with pytest.raises(error.error_type, match=error.error_regex):
                    module(*call.args, **call.kwargs)
            count += 1
    assert count >= 8


@by_case
def test_is_pytorchs_in_every_attribute(case: Case) -> None:
    ours, theirs = case.build()
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert vars(ours).keys() == vars(theirs).keys()
    for name in ("eps", "momentum", "affine", "track_running_stats", "num_features", "num_groups", "num_channels"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)


@pytest.mark.parametrize("name", [*MODULES, *LAZY])
def test_signatures_are_pytorchs(name: str) -> None:
    ours, theirs = (getattr(home, name) for home in (warpnorm.nn, torch.nn))
    assert inspect.signature(ours.__init__) == inspect.signature(theirs.__init__)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)
    assert ours.__doc__
    assert ours.__module__ == "warpnorm.nn"


@pytest.mark.parametrize("name", MODULES)
def test_is_run_by_the_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by PyTorch's own forward."""
    function = {"Bat": "batch_norm", "Ins": "instance_norm", "Gro": "group_norm"}[name[:3]]
    monkeypatch.setattr(functional, function, lambda input, *_: input * 0 + 42)
    module = getattr(warpnorm.nn, name)(*((2, 4) if name == "GroupNorm" else (4,)))
    assert (module(input_of(name)) == 42).all()
    if name in INSTANCE:
        assert (module(input_of(name)[0]) == 42).all()


@by_case
def test_state_dict_goes_both_ways(case: Case) -> None:
    ours, theirs = case.build()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.train(), theirs.train()
    ours(input_of(case.module, case.dtype))
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for tensor in target.state_dict().values():
                tensor.fill_(77)
        result = target.load_state_dict(source.state_dict(), strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_equal(list(target.state_dict().values()), list(source.state_dict().values()))
    assert_as_pytorchs(ours, theirs, input_of(case.module, case.dtype))


@pytest.mark.parametrize("name", BATCH)
def test_state_without_a_count_is_taken(name: str) -> None:
    """Checkpoints of PyTorch before 0.4.1, which had none."""
    state = {key: value for key, value in getattr(torch.nn, name)(4).state_dict().items() if "tracked" not in key}
    module = getattr(warpnorm.nn, name)(4)
    module.load_state_dict(state)
    assert module.num_batches_tracked == 0


@by_case
def test_copies_are_independent_and_equal(case: Case) -> None:
    module, _ = case.build()
    input = input_of(case.module, case.dtype)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    before = [tensor.clone() for tensor in module.state_dict().values()]
    copies = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False))
    expected = run(copy.deepcopy(module), input)
    for copied in copies:
        assert type(copied) is type(module)
        assert_equal(run(copied, input), expected)
        with torch.no_grad():
            for tensor in copied.state_dict().values():
                tensor.fill_(77)
    assert_equal(list(module.state_dict().values()), before)


@by_lazy
@by_mode
def test_lazy_ones_become_ours(name: str, is_training: bool) -> None:
    arguments = {"affine": True, "track_running_stats": True}
    ours, theirs = (getattr(home, name)(**arguments).train(is_training) for home in (warpnorm.nn, torch.nn))
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert pickle.loads(pickle.dumps(ours)).has_uninitialized_params()
    input = input_of(name)
    torch.testing.assert_close(ours(input), theirs(input), rtol=0, atol=0 if is_training else 1e-6)
    assert type(ours) is getattr(warpnorm.nn, name.removeprefix("Lazy"))
    assert ours.num_features == 4
    assert repr(ours) == repr(theirs)
    assert_equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))
    assert_as_pytorchs(ours, theirs, input)
    loaded = getattr(warpnorm.nn, name)(**arguments)
    loaded.load_state_dict(theirs.state_dict())
    assert_equal(list(loaded.state_dict().values()), list(theirs.state_dict().values()))


@pytest.mark.parametrize("name", BATCH)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_refused_leaves_no_trace(name: str, momentum: float | None) -> None:
    module = getattr(warpnorm.nn, name)(4, momentum=momentum)
    module(input_of(name))
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    single = torch.ones([1, 4, *(1 for _ in input_of(name).shape[2:])])
    for refused in (single, input_of(name)[:, :3], input_of(name).to(torch.int32)):
        with pytest.raises(warpnorm.InputError, match=r"^batch_norm: "):
            module(refused)
    assert_equal(list(module.state_dict().values()), list(before.values()))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", [*BATCH, "SyncBatchNorm", "BatchNormReLU2d", "SyncBatchNormReLU2d"])
def test_a_batch_that_cannot_be_counted_leaves_no_trace(name: str, momentum: float | None) -> None:
    """Inside `torch.func`, whose gradients may write nothing from outside, and of buffers made in inference mode: running
    statistics had been averaged before the counter refused."""
    x = input_of(name if name in BATCH else "BatchNorm2d")
    module = getattr(warpnorm.nn, name)(4, momentum=momentum)
    with torch.inference_mode():
        of_inference = getattr(warpnorm.nn, name)(4, momentum=momentum, affine=False)
    for one, call in ((module, torch.func.grad(lambda x: module(x).sum())), (of_inference, of_inference)):
        before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"captured Tensor|inference tensor"):
            call(x)
        assert_equal(list(one.state_dict().values()), list(before.values()))
    torch.func.grad(lambda x: module.eval()(x).sum())(x)  # where nothing is counted


@by_module
def test_refuses_other_dimensions_as_pytorch_does(name: str) -> None:
    module, theirs = (
        getattr(home, name)(*((2, 4) if name == "GroupNorm" else (4,))) for home in (warpnorm.nn, torch.nn)
    )
    refused = torch.ones(4) if name == "GroupNorm" else torch.ones(1, 2, 3, 4, 5, 6)
    with pytest.raises((ValueError, RuntimeError)) as expected:
        theirs(refused)
    with pytest.raises(type(expected.value)):
        module(refused)


@pytest.mark.parametrize("name", INSTANCE)
def test_instances_say_what_does_not_match(name: str) -> None:
    input = input_of(name)
    with pytest.raises(ValueError, match="to match num_features"):
        getattr(warpnorm.nn, name)(5, affine=True)(input)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = getattr(warpnorm.nn, name)(5)(input)
    assert "does not match num_features" in str(caught[0].message)
    assert torch.equal(output, getattr(warpnorm.nn, name)(4)(input))


@pytest.mark.parametrize("name", MODULES)
def test_is_built_on_a_device_and_moved(name: str) -> None:
    sizes = (2, 4) if name == "GroupNorm" else (4,)
    built = getattr(warpnorm.nn, name)(*sizes, affine=True, device="meta", dtype=torch.float64)
    assert built(input_of(name).to("meta", torch.float64)).is_meta
    ours = built.to_empty(device="cpu").to(torch.bfloat16)
    ours.reset_parameters()
    theirs = getattr(torch.nn, name)(*sizes, affine=True, dtype=torch.bfloat16)
    assert_as_pytorchs(ours, theirs, input_of(name, torch.bfloat16))


@pytest.mark.parametrize("name", ["BatchNorm2d", "InstanceNorm2d", "GroupNorm"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_stands_in_a_model(name: str, memory_format: torch.memory_format) -> None:
    """Trained for three steps beside PyTorch's, it ends with the same weights, in either memory format."""
    states = []
    for home in (torch.nn, warpnorm.nn):
        torch.manual_seed(0)
        norm = getattr(home, name)(*((2, 4) if name == "GroupNorm" else (4,)))
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm, torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 3))
        model = model.to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(random((2, 3, 8, 8), seed=step).to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        states.append(list(model.state_dict().values()))
    for mine, its in zip(*states, strict=True):
        torch.testing.assert_close(mine, its)


def test_compiles_whole() -> None:
    ours, theirs = Case("BatchNorm2d", "BatchNorm2d", "").build()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for step in range(2):
        torch.testing.assert_close(compiled(input_of("2d", seed=step)), theirs(input_of("2d", seed=step)))
    assert_equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_is_converted_to_sync_batch_norm() -> None:
    model = torch.nn.Sequential(warpnorm.nn.BatchNorm2d(4))
    assert isinstance(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)[0], torch.nn.SyncBatchNorm)
