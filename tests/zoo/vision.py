"""Models of images."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import language
from zoo.batches import image_batch, segmentation_batch
from zoo.modules import Classifier, PixelClassifier
from zoo.registry import BLOCKS, WIDTH, entry

VIT = language.LABELS | {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "image_size": 8, "patch_size": 4, "initializer_range": 0.1,
}  # fmt: skip
language.hugging_face("vit", image_batch, Classifier, "ViTForImageClassification", VIT)


class ConvBlock(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(2, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Down and up again; each level on the way up is joined with the same level's output on the way down."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 12)])
        self.bottom = ConvBlock(12, 16)
        self.up = nn.ModuleList([ConvBlock(16 + 12, 12), ConvBlock(12 + 8, 8)])
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


entry("unet", segmentation_batch, PixelClassifier)(UNet)
