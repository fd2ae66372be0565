"""The product's VGG (`jhpt.models.vgg`) with what the networks of this folder have in common."""

from dataclasses import dataclass

from jhpt.models import vgg


@dataclass(frozen=True, kw_only=True)
class VGG(vgg.VGG):
    """Pure functions over `{"embedding": ..., "blocks": {"0": ..., "1": ...}, "head": ...}`."""

    @property
    def alike(self) -> bool:
        """False, because every block has a shape of its own."""
        return self.config.alike

    @property
    def num_blocks(self) -> int:
        """Layers between the first and the last."""
        return self.config.num_layers

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(kind, shape of the kernel) of every layer."""
        return [(layer.kind, layer.kernel) for layer in self.config.table]

    @property
    def size(self) -> int:
        """Pixels on a side of an image."""
        return self.config.image_size

    @property
    def channels(self) -> int:
        """Numbers in a pixel."""
        return self.config.colours

    @property
    def classes(self) -> int:
        """Classes of the images."""
        return self.config.num_classes
