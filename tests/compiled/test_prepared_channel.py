"""Everything that a call of a norm by channel prepares, also in evaluation, compiles for a GPU that is not here: the
interpreter does not see what only a compiler refuses."""

import pytest
import torch

from warpnorm import norms, pipeline
from warpnorm.norms import Norm
from warpnorm.plan import device as devices
from warpnorm.problem import FULL, Call, View
from warpnorm.reference import Affine, FixedAffine, Itself

LAYOUTS = {
    "nc": torch.empty(13, 20),
    "nchw": torch.empty(3, 16, 4, 8),
    "channels_last": torch.empty(3, 16, 40, 40).to(memory_format=torch.channels_last),
    "long_lines": torch.empty(2, 2, 5000),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("norm", "groups"), [(norms.BATCH_NORM, 0), (norms.FIXED_NORM, 0), (norms.GROUP_NORM, 2), (norms.TRACKED_NORM, 1)]
)
def test_prepared(norm: Norm, groups: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "of", lambda _: devices.KNOWN["sm_90"])
    input = LAYOUTS[layout]
    spatial = input.ndim - 2
    is_fixed = norm is norms.FIXED_NORM
    epilogue = FixedAffine(1e-5, True, True) if is_fixed else Affine(True, True)
    count = 4 if is_fixed else 2
    mask = (False, True, *[False] * spatial)
    call = Call(norm, 1, 1e-5, Itself(), epilogue, (FULL, *[mask] * count), (input.dtype,), groups=groups)
    view = View(tuple(input.shape), input.stride(), input.dtype, True)
    parameter = View((input.shape[1], *[1] * spatial), (1,) * (spatial + 1), torch.float32, True)
    views = (view, *[parameter] * count, view)
    cuda = torch.device("cuda", 0)
    prepare = (
        pipeline.prepare_forward.__wrapped__,
        pipeline.prepare_backward.__wrapped__,
    )  # nothing stays in their caches
    forward = prepare[0](call, views, cuda, None)
    backward = prepare[1](call, views, cuda, (0,), (0, count - 1, count), None)
    assert forward.kernel.compiled is not None
    assert backward.kernel.compiled is not None
