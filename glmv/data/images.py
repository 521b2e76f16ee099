"""From a picture file to the patches that the vision tower reads.

Every mode becomes RGB: transparency over white, 16 bits scaled to 8, EXIF orientation applied, of an animation the
first frame. Then two resizes, as in published trainings: to the pixel budget of the config, and to whole patches by
the checkpoint's own image processor.
"""
# Shapes: N vision patches, P = 3*2*14*14 values per patch, n pictures.

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from glmv.data.errors import DataError

SMALLEST_SIDE = 28
"""One merged token's width: the shortest side a picture may have."""
WIDEST = 200
"""The largest ratio of the sides; what is longer becomes 180 : 1."""
_WHITE = {"F": (1, 255, 65535), "I": (255, 65535)}


def open_rgb(path: Path) -> Image.Image:
    """Read a picture file as RGB, upright.

    Raises:
        DataError: not a picture, or broken.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(ImageOps.exif_transpose(image))
    except Exception as fault:  # decoders of broken files raise whatever they stumble over
        raise DataError(
            f"{path.absolute()}: cannot be read as a picture ({str(fault) or type(fault).__name__}).\n"
            "Replace the file, or take its sample out."
        ) from fault


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB. Transparency goes over white; 16-bit, integer and float pixels are scaled, never clipped."""
    if image.mode.startswith(("I", "F")):
        image = _to_eight_bits(image)
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale by what is white: 65535 in 16-bit modes; elsewhere the least of 1 (floats), 255, 65535 that holds all."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0).clip(min=0)
    whites = _WHITE.get(image.mode, (65535,))
    white = next((white for white in whites if values.max() <= white), values.max())
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8))


def fit_budget(width: int, height: int, *, max_pixels: int, min_pixels: int) -> tuple[int, int]:
    """The size at which a picture enters the image processor.

    Sides shrink or grow by one factor until the area is within the budget; then no side is below 28 and no ratio
    above 200.
    """
    for budget, outside in ((max_pixels, width * height > max_pixels), (min_pixels, width * height < min_pixels)):
        if outside:
            factor = math.sqrt(budget / (width * height))
            width, height = max(1, int(width * factor)), max(1, int(height * factor))
    width, height = max(width, SMALLEST_SIDE), max(height, SMALLEST_SIDE)
    if width > WIDEST * height:
        width = 180 * height
    if height > WIDEST * width:
        height = 180 * width
    return width, height


class PictureReader:
    """Picture files to patches, by the image processor of a Hugging Face directory (its PIL form, on the CPU)."""

    def __init__(self, model_dir: Path, *, max_pixels: int, min_pixels: int) -> None:
        # Imported here: it takes seconds, and text-only data needs none of it.
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        if not (model_dir / "preprocessor_config.json").is_file():
            raise DataError(
                f"{model_dir}: has no preprocessor_config.json.\n"
                "Give data.dataset_param.preprocess_parameters.model_name_or_path a complete Hugging Face directory."
            )
        self.processor = Glm4vImageProcessorPil.from_pretrained(model_dir)
        self.max_pixels, self.min_pixels = max_pixels, min_pixels

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        """Patches of all pictures one after another [N, P] fp32, and their grids [n, 3] int64."""
        images = []
        for path in paths:
            image = open_rgb(path)
            size = fit_budget(*image.size, max_pixels=self.max_pixels, min_pixels=self.min_pixels)
            images.append(image if size == image.size else image.resize(size, Image.Resampling.BICUBIC))
        patches = self.processor(images=images, return_tensors="pt")
        return patches["pixel_values"], patches["image_grid_thw"]

    def tokens(self, image_grid_thw: Tensor) -> list[int]:
        """How many tokens every picture takes in the text."""
        return (image_grid_thw.prod(-1) // self.processor.merge_size**2).tolist()
