"""What is measured, each with its reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # a step is both
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NC, NCHW, NHWC = "nc", "nchw", "nhwc"  # how an input by channel lies in memory

EPS = 1e-5
MOMENTUM = 0.1
NUM_GROUPS = 32
FLOAT8_SCALE = 0.0625
DROPOUT = 0.1


@dataclass(frozen=True)
class Workload:
    """An ordinary PyTorch function of `full` tensors of the case's shape, the last `samples` of which have one row for each
    sample, then of `parameters`, vectors along `parameter_dim`, then of `buffers`, more of them, which it updates and which
    have no gradient.

    `forward_tensors` and `backward_tensors` are how many full-sized tensors must be moved at least; 0 in backward is no
    gradient at all. Slices along
    `part_dim` do not depend on each other, but for the gradients of what they share. Where it `keeps_precision`, vectors
    have the dtype of computation. `exact` is the function in primitive operators, for the truth in float64.

    Parameters that are no vectors have `parameter_shapes`, by the width. `rivals` are those to compare with, where not all
    are. Where it `is_drawn`, the first tensor is dropped out and added to the last, which the last output is; `exact` is
    also given what was kept."""

    name: str
    function: Callable[..., Any]
    full: int
    parameters: int
    forward_tensors: float
    backward_tensors: float
    parameter_dim: int = -1
    part_dim: int = 0
    buffers: int = 0
    keeps_precision: bool = False
    exact: Callable[..., Any] | None = None
    samples: int = 0
    parameter_shapes: Callable[[int], Sequence[tuple[int, ...]]] | None = None
    rivals: tuple[str, ...] | None = None
    is_drawn: bool = False


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, EPS), h


def _add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, EPS), h


def _swish_layer_norm(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(x) * r, x.shape[-1:], weight, bias, EPS)


def _gelu_rms_norm(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.gelu(x + bias), x.shape[-1:], weight, EPS)


def _gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(gate)


def _ada_layer_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], None, None, EPS) * (1 + scale) + shift


def _qk_norm(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads, cols = x.shape[-2] // 3, x.shape[-1:]
    q = F.rms_norm(x[..., :heads, :], cols, q_weight, EPS)
    return q, F.rms_norm(x[..., heads : 2 * heads, :], cols, k_weight, EPS)


def _rms_norm_float8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _scaled_rms_norm(x, weight).to(torch.float8_e4m3fn)


def _scaled_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (_rms_norm(x, weight) / FLOAT8_SCALE).clamp(-448.0, 448.0)


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS)


def _batch_norm_eval(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, MOMENTUM, EPS)


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, NUM_GROUPS, weight, bias, EPS)


def _instance_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x, None, None, weight, bias, True, MOMENTUM, EPS)


def _group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(_group_norm(x, weight, bias))


def _add_batch_norm_relu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
) -> torch.Tensor:
    return F.relu(_batch_norm(x, weight, bias, mean, var) + residual)


def _exact_batch_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor
) -> torch.Tensor:
    rows = x.transpose(0, 1).flatten(1)
    for running, new in ((running_mean, rows.mean(1)), (running_var, rows.var(1))):
        running.lerp_(new.detach(), MOMENTUM)
    xhat = _normalized(rows).view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return _scaled(xhat, weight, bias)


def _exact_group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _scaled(_normalized(x.reshape(x.shape[0], NUM_GROUPS, -1)).view(x.shape), weight, bias)


def _exact_instance_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _scaled(_normalized(x.flatten(2)).view(x.shape), weight, bias)


def _exact_group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(_exact_group_norm(x, weight, bias))


def _exact_add_batch_norm_relu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
) -> torch.Tensor:
    return F.relu(_exact_batch_norm(x, weight, bias, mean, var) + residual)


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    deviation = rows - rows.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)


def _scaled(xhat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    by_channel = (-1, *(1 for _ in xhat.shape[2:]))
    return xhat * weight.view(by_channel) + bias.view(by_channel)


def _dropout_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(F.dropout(x, DROPOUT), residual, weight)


def _exact_dropout_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(x * kept / (1 - DROPOUT), residual, weight)


# Backward of the sum needs no more than the sum, and gives both of its terms the same gradient.
RMS = Workload("rms_norm", _rms_norm, 1, 1, 2, 3)
LAYER = Workload("layer_norm", _layer_norm, 1, 2, 2, 3)
ADD_RMS = Workload("add_rms_norm", add_rms_norm, 2, 1, 4, 4)
ADD_LAYER = Workload("add_layer_norm", _add_layer_norm, 2, 2, 4, 4)
DROPOUT_ADD_RMS = Workload(
    "dropout_add_rms_norm", _dropout_add_rms_norm, 2, 1, 4, 5, exact=_exact_dropout_add_rms_norm, is_drawn=True
)
SWISH_LAYER = Workload("swish_layer_norm", _swish_layer_norm, 2, 2, 3, 5)
GELU_RMS = Workload("gelu_rms_norm", _gelu_rms_norm, 1, 2, 2, 3)
GATED_RMS = Workload("gated_rms_norm", _gated_rms_norm, 2, 1, 3, 5)
ADA_LAYER = Workload("ada_layer_norm", _ada_layer_norm, 3, 0, 2, 3, samples=2)
# Of queries, keys and values two thirds are read and written; backward writes the gradient of all
QK = Workload("qk_norm", _qk_norm, 1, 2, 4 / 3, 7 / 3)
RMS_FLOAT8 = Workload("rms_norm_float8", _rms_norm_float8, 1, 1, 1.5, 0, exact=_scaled_rms_norm)
PLAIN = (RMS, LAYER)
# Parameters and running statistics of BatchNorm are float32 beside half precision, as in mixed precision training
BATCH = Workload(
    "batch_norm", _batch_norm, 1, 2, 2, 3, parameter_dim=1, part_dim=1, buffers=2, keeps_precision=True,
    exact=_exact_batch_norm,
)  # fmt: skip
BATCH_EVAL = Workload(
    "batch_norm_eval", _batch_norm_eval, 1, 2, 2, 3, parameter_dim=1, part_dim=1, buffers=2, keeps_precision=True
)
GROUP = Workload("group_norm", _group_norm, 1, 2, 2, 3, parameter_dim=1, exact=_exact_group_norm)
GROUP_SILU = Workload("group_norm_silu", _group_norm_silu, 1, 2, 2, 3, parameter_dim=1, exact=_exact_group_norm_silu)
ADD_BATCH_RELU = Workload(
    "add_batch_norm_relu", _add_batch_norm_relu, 2, 2, 3, 5, parameter_dim=1, part_dim=1, buffers=2, keeps_precision=True,
    exact=_exact_add_batch_norm_relu,
)  # fmt: skip
INSTANCE = Workload("instance_norm", _instance_norm, 1, 2, 2, 3, parameter_dim=1, exact=_exact_instance_norm)


@dataclass(frozen=True)
class BenchCase:
    workload: Workload
    direction: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    why: str
    layout: str | None = None  # where the shape does not say it

    @property
    def name(self) -> str:
        words = (self.workload.name, self.direction, self.layout, self.size, DTYPE_NAMES[self.dtype])
        return " ".join(filter(None, words))

    @property
    def size(self) -> str:
        return " x ".join(map(str, self.shape))

    @property
    def least_bytes(self) -> int:
        """Every input read once, every output written once; parameters and statistics are small beside them."""
        workload = self.workload
        tensors = workload.forward_tensors if self.direction == FORWARD else workload.backward_tensors
        return round(tensors * prod(self.shape) * self.dtype.itemsize)


def _rows(elements: int, cols: int, dtype: torch.dtype) -> tuple[int, int]:
    return max(elements * 2 // dtype.itemsize // cols, 1), cols


WIDTHS = (
    (128, "the head dimension of QK-norm"),
    (1024, "small models"),
    (2048, "models of one to three billion parameters"),
    (4096, "models of seven billion parameters"),
    (8192, "models of seventy billion parameters"),
    (16384, "the largest models"),
    (32768, "rows wider than any model's"),
    (65536, "rows as wide as a program's registers"),
    (131072, "rows wider than a program's registers"),
    (262144, "twice as wide"),
)


ODD_WIDTHS = (
    (96, "a head dimension that is no power of two"),
    (100, "narrow rows, which begin at multiples of 8 bytes"),
    (127, "narrow and odd"),
    (300, "word vectors"),
    (640, "the second stage of a diffusion U-Net"),
    (768, "BERT and the smallest GPT-2"),
    (4095, "rows that do not start at a whole word"),
    (5120, "models of thirteen billion parameters: no power of two"),
    (30522, "BERT's vocabulary: rows begin at multiples of 4 bytes"),
    (50257, "GPT-2's: wide and odd"),
)
SINGLE_WIDTHS = (4096, 16384, 65536)
# The grid that others report: nothing in it is large
SMALL_BATCHES = (1, 8, 32, 128, 512)
SMALL_WIDTHS = (256, 512, 1024, 2048, 4096)


FUSED = (
    (ADD_RMS, "the residual stream before each norm of a language model"),
    (ADD_LAYER, "the same of a vision transformer"),
    (DROPOUT_ADD_RMS, "the same in training with dropout"),
    (SWISH_LAYER, "a gate and a norm"),
    (GELU_RMS, "an activation with a bias, and a norm"),
    (GATED_RMS, "a norm and a gate, of state space models"),
)


MODULES = (
    (ADA_LAYER, (128, 1024, 1024), "a diffusion transformer: a scale and a shift for each sample"),
    (ADA_LAYER, (32, 1024, 4096), "a large one"),
    (QK, (8192, 96, 128), "queries and keys, packed with values, of 32 heads each"),
    (RMS_FLOAT8, (32768, 4096), "the input of a float8 product"),
    (RMS_FLOAT8, (16384, 8192), "the same of a larger model"),
)


IMAGES = (
    ((64, 256, 56, 56), (NCHW, NHWC), "the first stage of ResNet-50"),
    ((256, 64, 112, 112), (NCHW, NHWC), "its stem: few channels, each of millions of values"),
    ((256, 2048, 7, 7), (NHWC,), "its last stage: many channels, small images"),
    ((65536, 1024), (NC,), "BatchNorm1d of an MLP"),
)
MORE_IMAGES = (
    ((256, 2048, 7, 7), (NCHW,), "its last stage: many channels, small images"),
    ((32, 2048, 7, 7), (NCHW,), "a small batch of it"),
    ((256, 1024, 14, 14), (NCHW,), "the stage before: images that begin at half vectors"),
    ((32, 1024, 14, 14), (NCHW,), "a small batch of it"),
    ((8, 256, 56, 56), (NCHW, NHWC), "a small batch of the first stage"),
    ((256, 256, 56, 56), (NCHW,), "a large one"),
    ((8, 64, 112, 112), (NCHW,), "a small batch of the stem"),
    ((64, 1, 1024, 1024), (NCHW,), "one channel"),
    ((2048, 65536), (NC,), "very many channels"),
)
GROUPED = (((32, 320, 64, 64), (NCHW, NHWC), "the first stage of a diffusion U-Net"),)
ELEMENTS = 1 << 27  # of a row norm in half precision, several times any L2


def grid(elements: int) -> tuple[BenchCase, ...]:
    """Norms and fused forms, in both directions: over the widths of language models, each of 2 x `elements` bytes, and
    over the shapes of image models, made smaller by as much as `elements` are fewer than `ELEMENTS`."""
    return _row_cases(elements) + _channel_cases(ELEMENTS // elements)


def _row_cases(elements: int) -> tuple[BenchCase, ...]:
    half, single = torch.bfloat16, torch.float32
    rows = [(cols, half, why) for cols, why in (*WIDTHS, *ODD_WIDTHS)]
    rows += [(cols, single, "full precision") for cols in SINGLE_WIDTHS]
    plain = tuple(
        BenchCase(workload, direction, _rows(elements, cols, dtype), dtype, why)
        for direction in (FORWARD, BACKWARD)
        for workload in PLAIN
        for cols, dtype, why in rows
    )
    fused = tuple(
        BenchCase(workload, direction, _rows(elements, cols, half), half, f"{what}; {why}")
        for direction in (FORWARD, BACKWARD)
        for workload, what in FUSED
        for cols, why in WIDTHS
        if 1024 <= cols <= 16384
    )
    return plain + fused + _module_cases(ELEMENTS // elements, half)


def _module_cases(divisor: int, *dtypes: torch.dtype) -> tuple[BenchCase, ...]:
    """With fewer samples, or rows."""
    return tuple(
        BenchCase(workload, direction, (max(shape[0] // divisor, 1), *shape[1:]), dtype, why)
        for direction in (FORWARD, BACKWARD)
        for workload, shape, why in MODULES
        for dtype in dtypes
        if direction == FORWARD or workload.backward_tensors
    )


def _channel_cases(divisor: int) -> tuple[BenchCase, ...]:
    return tuple(
        BenchCase(workload, direction, _smaller(shape, divisor), dtype, why, layout)
        for direction in (FORWARD, BACKWARD)
        for workload, shapes, dtypes in (
            (BATCH, IMAGES, (torch.float16, torch.float32)),
            (BATCH, MORE_IMAGES, (torch.float16,)),
            (BATCH_EVAL, (IMAGES[0], IMAGES[3]), (torch.float16,)),
            (ADD_BATCH_RELU, IMAGES[:1], (torch.float16,)),
            (GROUP, GROUPED, (torch.bfloat16,)),
            (GROUP_SILU, GROUPED, (torch.bfloat16,)),
            (INSTANCE, GROUPED, (torch.bfloat16,)),
        )
        for shape, layouts, why in shapes
        for layout in layouts
        for dtype in dtypes
    )


def small_cases() -> tuple[BenchCase, ...]:
    return tuple(
        BenchCase(workload, direction, (batch, cols), dtype, "a small batch")
        for direction in (FORWARD, BACKWARD)
        for workload in PLAIN
        for dtype in (torch.float32, torch.float16)
        for batch in SMALL_BATCHES
        for cols in SMALL_WIDTHS
    )


def _smaller(shape: tuple[int, ...], divisor: int) -> tuple[int, ...]:
    """With as many channels, and the largest of the other dimensions halved until it is."""
    sizes = list(shape)
    while divisor > 1:
        largest = max((dim for dim in range(len(sizes)) if dim != 1), key=lambda dim: sizes[dim])
        sizes[largest] = max(sizes[largest] // 2, 1)
        divisor //= 2
    return tuple(sizes)


LARGE = (4096, 4096), "far larger than any cache"
SMALL = (((64, 1024), "a small batch"), ((8, 64), "nothing but the cost of a call"))
ENCODER = (4096, 768), "eight sentences in an encoder: narrow rows, in a cache"
CPU_MODULES = 8  # times fewer samples, or rows, than on a GPU
CPU_IMAGES = (32, 64, 56, 56), "the second stage of a small ResNet"


def cpu_cases(is_quick: bool) -> tuple[BenchCase, ...]:
    single, half = torch.float32, torch.bfloat16
    divisor = 8 if is_quick else 1
    (shape, why), (images, why_images) = LARGE, CPU_IMAGES
    found = []
    for direction in (FORWARD, BACKWARD):
        for workload in (*PLAIN, *(workload for workload, _ in FUSED)):
            for dtype in (single, half):
                found.append(BenchCase(workload, direction, _smaller(shape, divisor), dtype, why))
        for workload in PLAIN:
            for dtype in (single, half):
                found.append(BenchCase(workload, direction, _smaller(ENCODER[0], divisor), dtype, ENCODER[1]))
        for workload in (BATCH, ADD_BATCH_RELU, GROUP, GROUP_SILU, INSTANCE):
            for layout in (NCHW, NHWC):
                found.append(BenchCase(workload, direction, _smaller(images, divisor), single, why_images, layout))
        for workload in PLAIN:
            for small, why_small in SMALL:
                found.append(BenchCase(workload, direction, small, single, why_small))
    return *found, *_module_cases(CPU_MODULES * divisor, single, half)


def all_cases(device: str, is_quick: bool) -> tuple[BenchCase, ...]:
    from warpnorm.bench import block  # which is made of what is here

    steps = block.cases(device, is_quick)
    if device == "cpu":
        return cpu_cases(is_quick) + steps
    return grid(ELEMENTS >> 3 if is_quick else ELEMENTS) + small_cases() + steps
