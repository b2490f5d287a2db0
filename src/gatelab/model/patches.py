"""Images as sequences: [CLS], then patches, each of which is one number and is embedded by its pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.model.layer_settings import PatchSettings


class PatchEmbedding(nn.Module):
    """x_0 = e_0 for [CLS], x_t = W p_t + e_t for patches (ViT, Dosovitskiy et al. 2010.11929, equation 1).

    p_t are the P pixels of patch t, scaled from black to white to [-1, 1]; every place t has a learned e_t. We differ
    from the paper in W, which has no bias of its own: e_t holds it.
    """

    def __init__(self, settings: PatchSettings, num_places: int, width: int):
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(width, settings.pixels))
        self.positions = nn.Parameter(torch.empty(num_places, width))

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The embedded sequences, in the dtype of the weights."""
        levels = self.settings.levels
        places = levels ** torch.arange(self.settings.pixels, device=ids.device)
        brightness = (ids[..., None] // places % levels).to(self.weight.dtype)
        pixels = brightness * (2 / (levels - 1)) - 1
        pixels = torch.where((ids == self.settings.cls_id)[..., None], 0.0, pixels)
        return F.linear(pixels, self.weight) + self.positions[: ids.shape[1]]
