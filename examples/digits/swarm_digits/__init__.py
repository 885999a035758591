"""Handwritten digits on a swarm: your own torch modules as a pipeline.

Two paths run side by side through all layers, one over the picture and one over its columns, so two
tensors cross every boundary. The 1,797 pictures of 8 x 8 come with scikit-learn; nothing is
downloaded. What makes it a swarm model is `pipeline` at the end; all else is plain torch.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.model import Pipeline

WIDTH = 32


class Stem(nn.Module):
    """(batch, 8, 8) to (batch, WIDTH, 8, 8) and (batch, 8, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.columns = nn.Linear(8, WIDTH)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.picture(image.unsqueeze(1)), self.columns(image.transpose(1, 2))


class Mixer(nn.Module):
    """Refines both paths and shows each the mean of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.GroupNorm(4, WIDTH), nn.GELU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        )
        self.columns = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, picture: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        seen = columns.mean(dim=1)[:, :, None, None]
        heard = picture.mean(dim=(2, 3))[:, None, :]
        picture = picture + self.dropout(self.picture(picture + seen))
        return picture, columns + self.dropout(self.columns(columns + heard))


class Head(nn.Module):
    """Both paths to the scores of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH * 16 + WIDTH * 8, 10)

    def forward(self, picture: Tensor, columns: Tensor) -> Tensor:
        pooled = F.avg_pool2d(F.gelu(picture), 2).flatten(1)
        return self.scores(torch.cat([pooled, F.gelu(columns).flatten(1)], dim=1))


def digits() -> SimpleNamespace:
    """The pictures and their labels; every sixth is kept for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the digits come with scikit-learn, which is missing", "pip install scikit-learn"
        ) from None
    data = load_digits()
    image, label = (data.images / 16).astype("float32"), data.target.astype("uint8")
    held_out = torch.arange(len(label)).numpy() % 6 == 5
    return SimpleNamespace(
        train={"image": image[~held_out], "label": label[~held_out]},
        validation={"image": image[held_out], "label": label[held_out]},
    )


pipeline = Pipeline(
    layers={"stem": Stem, "mixer1": Mixer, "mixer2": Mixer, "mixer3": Mixer, "head": Head},
    inputs=lambda batch: (batch["image"],),
    loss=lambda outputs, batch: F.cross_entropy(outputs[0], batch["label"].long(), reduction="sum"),
    weight=lambda batch: len(batch["label"]),
    data=digits,
    below={"label": 10},
)
