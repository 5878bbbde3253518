"""VGG19 (Simonyan & Zisserman 2015, configuration E): the style network of k-SALSA (section 3.5).

Parameters are named as in torchvision's file, so that it loads as it is. Only the convolutions are kept.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from agent.models.features.feature_net import FrozenNetwork, depth_of
from agent.models.features.resnet import imagenet
from agent.models.weights import Origin

LAYERS: Final = ((64, 64), (128, 128), (256, 256, 256, 256), (512, 512, 512, 512), (512, 512, 512, 512))


class Vgg19(FrozenNetwork):
    """The maps relu1_2, relu2_2, relu3_4, relu4_4 and relu5_4; k-SALSA's code compares styles in the first."""

    def __init__(self, origin: Origin, normalised: bool = True, most: int = 256) -> None:
        """Make the layers, without weights that mean anything: they come from a file.

        Args:
            origin: of the file.
            normalised: by ImageNet's mean and deviation, as it was trained. k-SALSA's published code does not.
            most: pixels a side; larger images are averaged down to it, as k-SALSA does at 256.
        """
        super().__init__("vgg19" if normalised else "vgg19-unnormalised", origin)
        self.normalised, self.most = normalised, most
        self.features = nn.Sequential()
        self.blocks: list[list[int]] = []  # where each block's convolutions stand in ``features``
        inputs = 3
        for widths in LAYERS:
            self.blocks.append([])
            for outputs in widths:
                self.blocks[-1].append(len(self.features))
                self.features.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                self.features.append(nn.Identity())  # torchvision counts the ReLU
                inputs = outputs
            self.features.append(nn.Identity())  # and the pooling
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The last map of each block; block i has 1 / 2^i of the image's side."""
        x, out = self.prepared(images, most=self.most), []
        if self.normalised:
            x = imagenet(x)
        for level in range(depth_of(depth, len(self.blocks))):
            if level:
                x = max_pool2d(x, 2)
            for place in self.blocks[level]:
                x = relu(self.features[place](x))
            out.append(x)
        return out
