"""ResNet-18, -34 and -50 (He et al. 2016), named as in torchvision's files: also MoCo's encoder.

MoCo v2 (Chen, Fan et al. 2020) on ImageNet is the content network of k-SALSA (section 3.5, Eq. 6).
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, max_pool2d, relu

from agent.models.features.feature_net import FrozenNetwork, depth_of
from agent.models.weights import Origin

Size = Literal["resnet18", "resnet34", "resnet50"]
BLOCKS: Final[dict[str, tuple[int, int, int, int]]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
}
WIDTHS: Final = (64, 128, 256, 512)
SEEN: Final = 224  # pixels a side


def imagenet(images: Tensor) -> Tensor:
    """Images (n, 3, h, w) in [-1, 1] with ImageNet's mean and deviation taken out."""
    mean = torch.tensor([0.485, 0.456, 0.406], device=images.device, dtype=images.dtype)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=images.device, dtype=images.dtype)
    return ((images + 1.0) * 0.5 - mean[:, None, None]) / deviation[:, None, None]


class FrozenNorm(nn.Module):
    """Batch normalisation with the statistics of training: an affine map of each channel, for inference only."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        """Have torch's names, but for the count of batches, which older files lack."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) -> (n, c, h, w)."""
        return batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Make the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = FrozenNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = FrozenNorm(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, width, h / stride, w / stride)."""
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut; the stride is in the 3x3 (the "v1.5" that torchvision and MoCo use)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Make the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = FrozenNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = FrozenNorm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = FrozenNorm(4 * width)
        self.downsample = shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, 4 width, h / stride, w / stride)."""
        y = relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))
        return relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A 1x1 convolution where the identity does not fit."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), FrozenNorm(outputs))


def stages(size: Size) -> list[list[nn.Module]]:
    """The residual blocks of the four stages."""
    block = Bottleneck if size == "resnet50" else Basic
    inputs, out = 64, []
    for level, (width, count) in enumerate(zip(WIDTHS, BLOCKS[size], strict=True)):
        stage: list[nn.Module] = []
        for index in range(count):
            stage.append(block(inputs, width, 2 if level and not index else 1))
            inputs = width * block.expansion
        out.append(stage)
    return out


class ResNet(FrozenNetwork):
    """A residual network without its classifier. Maps are its four stages, the embedding their last mean."""

    def __init__(self, name: str, size: Size, origin: Origin) -> None:
        """Make the layers, without weights that mean anything: they come from a file."""
        super().__init__(name, origin)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenNorm(64)
        self.layer1, self.layer2, self.layer3, self.layer4 = (nn.Sequential(*stage) for stage in stages(size))
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """(n, c_i, 56 / 2^i, 56 / 2^i), of images at 224 pixels."""
        x = imagenet(self.prepared(images, exactly=SEEN))
        x, out = max_pool2d(relu(self.bn1(self.conv1(x))), 3, 2, 1), []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4)[: depth_of(depth, 4)]:
            x = layer(x)
            out.append(x)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """The mean of the last map: (n, 512), of ResNet-50 (n, 2048)."""
        return self.maps(images)[-1].float().mean(dim=(2, 3))
