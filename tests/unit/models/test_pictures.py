"""Pictures: prepared as Transformers' processor does it, and their places in a prompt."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.pictures import BadPictureError, Pictures, Tiling, decode, tiles_of
from pipelines.engines.config import OpenVinoSettings
from triton_repo.parameters import ImageSpec, RepositorySpec, encoders

pytest.importorskip("PIL")
ENCODER = {
    "image_size": 32,
    "visual_tokens": 2,
    "image_token_id": 7,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    for name, content in (("encoder", ENCODER), ("engine", {"pretrained_config": {"vocab_size": 100}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return Pictures(tmp_path / "encoder", tmp_path / "engine", 2)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (50, 33), (33, 50), (31, 97), (200, 40)])
def test_pictures_are_prepared_as_transformers_does(pictures: Pictures, height: int, width: int) -> None:
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = clip.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
    expected = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
    found = pictures.prepare(image[None])[0]
    assert found.dtype == np.float16
    assert np.abs(found - expected).max() < 2e-3  # of values up to 2.7, in float16


def test_rows_take_the_places_of_pictures(pictures: Pictures) -> None:
    assert pictures.places([1, 7, 2, 7], [(9, 9), (8, 80)]) == [1, 100, 101, 2, 102, 103]
    assert pictures.places([1, 2], []) == [1, 2]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 4, 4, 4), r"shape \[1, 4, 4, 4\]"),
        ((4, 4, 3), r"must be \[pictures, height, width, 3\]"),
        ((1, 0, 4, 3), "has the shape"),
        ((3, 4, 4, 3), "Pictures sent: 3; this repository takes 2"),
        ((1, 4097, 4096, 3), "4096 x 4097 pixels; at most 16,777,216"),
        ((1, 301, 3, 3), "3 x 301 pixels; its longer side may be 100 times"),
    ],
)
def test_what_is_no_picture_is_named(pictures: Pictures, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(BadPictureError, match=said):
        pictures.prepare(np.zeros(shape, np.uint8))


def test_pictures_and_places_belong_together(pictures: Pictures) -> None:
    with pytest.raises(BadPictureError, match=r"Pictures sent: 2; places for them \(<image>\) in the prompt: 1"):
        pictures.places([7, 1], [(9, 9), (9, 9)])


def file(kind: str, size: tuple[int, int] = (9, 7), **options: Any) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", size, (200, 10, 30)).save(written, kind, **options)
    return written.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_files_are_decoded_to_rows_of_pixels(kind: str) -> None:
    found = decode(file(kind))
    assert (found.shape, found.dtype) == ((7, 9, 3), np.uint8)
    assert np.abs(found.astype(int) - (200, 10, 30)).max() < 10


def test_a_camera_held_upright_is_turned() -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(file("JPEG", exif=exif)).shape == (9, 7, 3)


def test_grey_of_16_bits_is_divided_and_not_cut() -> None:
    """Pillow alone makes white of everything above 255."""
    from PIL import Image

    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    written = io.BytesIO()
    Image.fromarray(grey).save(written, "PNG")
    assert (decode(written.getvalue()) == (grey >> 8)[..., None]).all()


def animated(kind: str) -> bytes:
    from PIL import Image

    return file(kind, save_all=True, append_images=[Image.new("RGB", (9, 7))])


def begun(width: int, height: int) -> bytes:
    """Return a PNG that ends before its pixels."""
    header = b"IHDR" + struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">II", zlib.crc32(header), 0) + b"IDAT"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no picture", "is none: its 10 bytes are no PNG, JPEG, WEBP"),
        (b"", "is none: its 0 bytes"),
        (file("GIF"), "is none: its .* bytes are no PNG"),
        (file("PNG", (64, 64))[:100], "is damaged: .*"),
        (file("JPEG", (640, 640))[:900], "is damaged: image file is truncated"),
        (file("PNG", (4097, 4096)), "has 4097 x 4096 pixels; at most 16,777,216"),
        (begun(20_000, 20_000), "has more than 16,777,216 pixels, the most that are taken"),
        (animated("PNG"), "is animated; send one frame"),
        (animated("WEBP"), "is animated; send one frame"),
    ],
)
def test_files_that_are_no_picture_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(BadPictureError, match=said):
        decode(content)


REAL = Tiling(336, 576, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)))
SMALL = Tiling(32, 16, ((32, 64), (64, 32), (64, 64), (96, 32), (32, 96)))
SIZES = [(50, 50), (40, 130), (130, 40), (700, 900), (2, 3), (1, 60), (60, 1)]
"""Square, wide, tall, larger than every grid, tiny, one pixel high or wide."""


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    processing = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    square = {"height": 32, "width": 32}
    grids = [list(grid) for grid in SMALL.grids]
    processor = processing.LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=square, image_grid_pinpoints=grids
    )
    image = np.random.default_rng(3).integers(0, 256, (*size, 3)).astype(np.uint8)
    found = tiles_of(image, SMALL, *(np.array(ENCODER[name], np.float32) for name in ("image_mean", "image_std")))
    pillow = pytest.importorskip("PIL.Image").fromarray(image)  # of an array, it would guess what its colours are
    expected = np.asarray(processor(pillow, return_tensors="np")["pixel_values"][0])
    assert len(found) == SMALL.tiles(*size)
    assert found == pytest.approx(expected, abs=1e-6)


def packed(tiling: Tiling, size: tuple[int, int]) -> list[int]:
    """Return the places of features that Transformers packs for a picture, which are its features here."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llava_next.modeling_llava_next")
    side = int(tiling.features**0.5)
    vision = SimpleNamespace(image_size=tiling.side, patch_size=tiling.side // side)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=[list(grid) for grid in tiling.grids])
    count = modeling.image_size_to_num_patches(size, config.image_grid_pinpoints, tiling.side)
    features = torch.arange(count * tiling.features).reshape(count, tiling.features, 1)
    (rows,), _ = modeling.LlavaNextModel.pack_image_features(
        SimpleNamespace(config=config), [features], [size], "default", torch.tensor([-1])
    )
    return [int(row) for row in rows[:, 0]]


@pytest.mark.parametrize("tiling", [REAL, SMALL])
def test_rows_are_those_that_transformers_packs(tiling: Tiling) -> None:
    random = np.random.default_rng(5)
    sizes = [*SIZES, *tiling.grids, *map(tuple, random.integers(1, 1500, (60, 2)).tolist())]
    for size in sizes:
        assert tiling.rows(*size).tolist() == packed(tiling, size), size
        assert len(tiling.rows(*size)) <= tiling.most_tokens
        assert tiling.tiles(*size) <= tiling.most_tiles
    assert REAL.most_tokens == 2928


def test_a_load_and_a_processor_count_the_same_tokens() -> None:
    processing = pytest.importorskip("transformers.models.llava_next.processing_llava_next")
    counting = SimpleNamespace(patch_size=14, num_additional_image_tokens=1)
    counting.image_processor = SimpleNamespace(image_grid_pinpoints=[list(grid) for grid in REAL.grids])
    counting._get_unpadded_features = partial(processing.LlavaNextProcessor._get_unpadded_features, counting)
    for size in (*SIZES, *REAL.grids, (1000, 333), (333, 1000)):
        counted = processing.LlavaNextProcessor._get_number_of_features(counting, *size, 336, 336)
        assert len(REAL.rows(*size)) == counted - 1  # without the class token, as vision_feature_select_strategy has it


def test_pictures_of_one_request_share_the_newline(tmp_path: Path, pictures: Pictures) -> None:
    described = {**ENCODER, "visual_tokens": 88, "tile_features": 16, "image_grid_pinpoints": SMALL.grids}
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(described))
    tiled = Pictures(tmp_path / "encoder", tmp_path / "engine", 2)
    sizes = [(64, 64), (32, 64)]
    placed = tiled.places([7, 1, 7], sizes)
    first, second = SMALL.rows(64, 64, 8 * 16), SMALL.rows(32, 64, 3 * 16)
    assert placed == [*(100 + first).tolist(), 1, *(180 + second).tolist()]
    assert placed[-1] == 100 + 8 * 16  # after the features of five and three tiles
    assert tiled.prepare([np.zeros((*size, 3), np.uint8) for size in sizes]).shape == (8, 3, 32, 32)


def test_the_served_encoder_computes_with_the_engines_settings(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it would not see what `make evaluate` measured."""
    options = {"inference_precision": "f32", "num_threads": 2, "kv_cache_bytes": 2**20}
    spec = RepositorySpec("openvino", "llava", "none", images=ImageSpec("llava", "", 1), options=options)
    assert spec.images is not None
    values = encoders(spec.images, spec)
    module, opened = load("multimodal_encoders"), list[tuple[Path, OpenVinoSettings]]()
    monkeypatch.setattr(module, "VisionEncoder", lambda *given: opened.append(given))
    config = {"parameters": {name: {"string_value": value} for name, value in values.items()}}
    args = {"model_config": json.dumps(config), "model_repository": str(tmp_path / "multimodal_encoders")}
    module.TritonPythonModel().initialize(args)
    expected = OpenVinoSettings(inference_precision="f32", num_threads=2)
    assert opened == [(tmp_path / "multimodal_encoders/1/engine", expected)]
