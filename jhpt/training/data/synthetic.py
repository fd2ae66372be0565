"""Synthetic images with a class each, for models of images: what they show is learnable, and costs no download.

    pixel = MIDDLE + CONTRAST (picture[class] + noise N(0, 1)) / sqrt(1 + noise^2),   rounded to 0 ... 255

The picture of a class is made of cells of `CELL` x `CELL` equal pixels, each colour normally distributed.  Every image
draws its class and its noise from a counter-based generator (Philox) that its number and the run's seed give alone, so
that a run resumes bit for bit and every process draws only its own rows.

A row is int32 [H W C + 1]: the pixels, row by row, and the class.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.families.vgg import VGGConfig

CELL = 4
"""Pixels on a side of the cells of a picture, so that a maximum over 2 x 2 pixels leaves it recognisable."""

MIDDLE, CONTRAST = 127.5, 42.0
"""Mean and standard deviation of pixels: three deviations are about the range of a byte."""

PICTURES, IMAGES = 0, 1
"""Numbers of the uses of a seed."""


@dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """Images by index; the first one has the number `first`.

    size, colours: pixels on a side, and numbers in a pixel.  noise: its deviation relative to that of pictures.
    """

    seed: int
    first: int
    count: int
    size: int
    colours: int
    classes: int
    noise: float

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [size size colours + 1]."""
        if not 0 <= index < self.count:
            raise IndexError(f"image {index} of {self.count}")
        draw = _generator(self.seed, IMAGES, self.first + index)
        number = int(draw.integers(self.classes))
        noise = draw.standard_normal(self._pictures.shape[1:], np.float32)
        image = (self._pictures[number] + self.noise * noise) / math.sqrt(1 + self.noise**2)
        pixels = np.clip(np.rint(MIDDLE + CONTRAST * image), 0, 255)
        return np.append(pixels.astype(np.int32).ravel(), np.int32(number))

    @cached_property
    def _pictures(self) -> np.ndarray:
        """Of all classes, float32 [classes, size, size, colours]."""
        cells = -(-self.size // CELL)
        draw = _generator(self.seed, PICTURES, 0)
        coarse = draw.standard_normal((self.classes, cells, cells, self.colours), np.float32)
        return coarse.repeat(CELL, 1).repeat(CELL, 2)[:, : self.size, : self.size]


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Images for training and held-out ones.  key: identifies their content."""

    train: SyntheticImages
    validation: SyntheticImages
    key: str

    @property
    def summary(self) -> str:
        """How much there is, in words."""
        return f"{len(self.train):,} training and {len(self.validation):,} held-out images"


def synthetic_images(config: Config) -> ImageRows:
    """The images that a configuration of a model of images describes; the last ones are held out.

    Raises:
      InputError: none is left to train on.
    """
    model, data = config.model, config.data
    assert isinstance(model, VGGConfig)
    held = int(data.images * data.validation_fraction)
    shape = {"size": model.image_size, "colours": model.colours, "classes": model.num_classes}
    described = {"seed": config.seed, "noise": data.noise, **shape}
    train, validation = (
        SyntheticImages(
            first=first,
            count=count,
            seed=config.seed,
            size=model.image_size,
            colours=model.colours,
            classes=model.num_classes,
            noise=data.noise,
        )
        for first, count in ((0, data.images - held), (data.images - held, held))
    )
    key = json.dumps([described, len(train), len(validation)], sort_keys=True)
    if not len(train):
        raise InputError(f"data.images={data.images} leaves none to train on; raise it")
    return ImageRows(train=train, validation=validation, key=hashlib.blake2b(key.encode(), digest_size=16).hexdigest())


def _generator(seed: int, use: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, use], np.uint64), counter=(0, 0, 0, number)))
