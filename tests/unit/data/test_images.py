"""Pictures of every mode and orientation become the same RGB; broken ones are named."""

import numpy as np
import pytest
from PIL import Image

from glmv.data import DataError
from glmv.data.images import fit_budget, open_rgb, to_rgb

GREY = Image.linear_gradient("L").resize((40, 24))


def sixteen_bits(grey):
    return Image.fromarray(np.asarray(grey, dtype=np.uint16) * 257)


MODES = {
    "L": GREY,
    "RGB": GREY.convert("RGB"),
    "RGBA": GREY.convert("RGBA"),
    "LA": GREY.convert("LA"),
    "P": GREY.convert("P", palette=Image.Palette.ADAPTIVE, colors=256),
    "I": GREY.convert("I"),
    "F": GREY.convert("F"),
    "F_to_1": Image.fromarray(np.asarray(GREY, dtype=np.float32) / 255),
    "I;16": sixteen_bits(GREY),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_grey_picture_is_the_same_in_every_mode(mode):
    rgb = to_rgb(MODES[mode])
    assert rgb.mode == "RGB"
    assert np.array_equal(np.asarray(rgb), np.asarray(GREY.convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "CMYK", "YCbCr", "HSV"])
def test_other_colour_spaces_become_rgb(mode):
    white = to_rgb(Image.new("RGB", (4, 3), "white").convert(mode))
    assert np.asarray(white).tolist() == [[[255, 255, 255]] * 4] * 3


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    Image.fromarray(np.array([[0, 40000, 65535]], dtype=np.uint16)).save(tmp_path / "p.png")
    assert np.asarray(open_rgb(tmp_path / "p.png"))[0, :, 0].tolist() == [0, 156, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode, tmp_path):
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0)).convert("LA" if mode == "LA" else "RGBA")
    if mode == "P":
        image = Image.new("P", (2, 1), 0)
        image.putpalette([255, 0, 0])
        image.info["transparency"] = 0
    image.save(tmp_path / "p.png")
    assert np.asarray(open_rgb(tmp_path / "p.png")).tolist() == [[[255, 255, 255]] * 2]


def test_half_transparent_is_half_white():
    assert to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 51))).getpixel((0, 0)) == (255, 204, 204)


UPRIGHT = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation -> PIL transpose that undoes it


@pytest.mark.parametrize("tag", UPRIGHT)
def test_a_picture_is_turned_as_its_exif_says(tmp_path, tag):
    image = Image.merge("RGB", [GREY, GREY.rotate(180), Image.new("L", GREY.size, 7)])
    exif = Image.Exif()
    exif[0x0112] = tag
    image.save(tmp_path / "p.png", exif=exif)
    turned = image if UPRIGHT[tag] is None else image.transpose(Image.Transpose(UPRIGHT[tag]))
    read = open_rgb(tmp_path / "p.png")
    assert read.size == ((24, 40) if tag >= 5 else (40, 24))
    assert np.array_equal(np.asarray(read), np.asarray(turned))


def test_of_an_animation_the_first_frame_is_read(tmp_path):
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "p.gif", save_all=True, append_images=frames[1:])
    assert open_rgb(tmp_path / "p.gif").getpixel((0, 0)) == (255, 0, 0)


def broken(kind, whole):
    return {"empty": b"", "html": b"<html>not found</html>", "half": whole[: len(whole) // 2], "head": whole[:20]}[kind]


@pytest.mark.parametrize("kind", ["empty", "html", "half", "head"])
@pytest.mark.parametrize("form", ["jpg", "png"])
def test_a_broken_picture_is_named(tmp_path, kind, form):
    path = tmp_path / f"p.{form}"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(broken(kind, path.read_bytes()))
    with pytest.raises(DataError) as caught:
        open_rgb(path)
    assert str(caught.value).startswith(f"{path}: cannot be read as a picture (")


SIZES = {
    "inside": ((100, 80), (100, 80)),
    "too_large": ((400, 200), (193, 96)),
    "too_small": ((10, 20), (28, 45)),
    "thin": ((300, 10), (300, 28)),
    "wide": ((12000, 20), (3359, 28)),
    "too_wide": ((8000, 1), (5040, 28)),
    "too_high": ((1, 10000), (28, 5040)),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_size_is_brought_into_the_budget(case):
    (width, height), size = SIZES[case]
    assert fit_budget(width, height, max_pixels=28 * 28 * 24, min_pixels=1024) == size
