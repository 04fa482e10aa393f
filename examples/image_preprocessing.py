"""From bytes to what a network takes, in one kernel: RGB images, as a decoder leaves them, become luma and two colour
differences, and the luma of every image is standardised over all its pixels. Three bytes of a pixel are read once, and
three half-precision numbers are written; the luma itself is never in memory."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import warpnorm

IMAGES, HEIGHT, WIDTH, TOLERANCE = 4, 120, 160, 5e-3


@warpnorm.fuse
def preprocess(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(images, height, width, 3) in uint8 -> Y, U and V, each (images, height, width) in float16."""
    red, green, blue = images[..., 0] / 255, images[..., 1] / 255, images[..., 2] / 255
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    standardised = F.layer_norm(luma, luma.shape[1:], eps=1e-6)
    return standardised.half(), (0.492 * (blue - luma)).half(), (0.877 * (red - luma)).half()


def in_steps(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as one would write it without a norm at hand, in float64."""
    to_yuv = torch.tensor([[0.299, 0.587, 0.114]], dtype=torch.float64, device=images.device)
    pixels = images.double() / 255
    luma = (pixels @ to_yuv.T).squeeze(-1)
    mean, variance = luma.mean((1, 2), keepdim=True), luma.var((1, 2), correction=0, keepdim=True)
    return (luma - mean) / (variance + 1e-6).sqrt(), 0.492 * (pixels[..., 2] - luma), 0.877 * (pixels[..., 0] - luma)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images = torch.randint(256, (IMAGES, HEIGHT, WIDTH, 3), dtype=torch.uint8, device=device)
    images[1] //= 4  # an image in the dark: standardised, it is as bright as the others
    results, expected = preprocess(images), in_steps(images)
    difference = max((a - b).abs().max().item() for a, b in zip(results, expected, strict=True))
    spread = results[0].float().std((1, 2))
    print(f"{IMAGES} images of {HEIGHT} x {WIDTH} on {device}; the luma of each deviates by {spread.tolist()}")
    print(f"largest difference to plain PyTorch in float64: {difference:.1e}")
    lines = warpnorm.explain(preprocess, images).forward.lines()
    print("\n".join(line for line in lines if line.startswith(("launch", "memory"))))
    return 0 if difference < TOLERANCE and results[0].dtype == torch.float16 else 1


if __name__ == "__main__":
    sys.exit(main())
