"""Pictures of `preprocessing`: prepared as Transformers' processor does it, and their places in a prompt."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_repo

pytest.importorskip("PIL")
ENCODER = {
    "image_size": 32,
    "visual_tokens": 2,
    "image_token_id": 7,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@pytest.fixture
def module() -> Any:
    place = Path(triton_repo.__file__).parent / "models" / "preprocessing" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures_alone", place)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def pictures(module: Any, tmp_path: Path) -> Any:
    for name, content in (("encoder", ENCODER), ("engine", {"pretrained_config": {"vocab_size": 100}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return module.Pictures(tmp_path / "encoder", tmp_path / "engine", 2)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (50, 33), (33, 50), (31, 97), (200, 40)])
def test_pictures_are_prepared_as_transformers_does(pictures: Any, height: int, width: int) -> None:
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = clip.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
    expected = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
    found = pictures.prepare(image[None])[0]
    assert found.dtype == np.float16
    assert np.abs(found - expected).max() < 2e-3  # of values up to 2.7, in float16


def test_rows_take_the_places_of_pictures(pictures: Any) -> None:
    assert pictures.places([1, 7, 2, 7], 2) == [1, 100, 101, 2, 102, 103]
    assert pictures.places([1, 2], 0) == [1, 2]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 4, 4, 4), r"shape \[1, 4, 4, 4\]"),
        ((4, 4, 3), r"must be \[pictures, height, width, 3\]"),
        ((1, 0, 4, 3), "has the shape"),
        ((3, 4, 4, 3), "Pictures sent: 3; this repository takes 2"),
        ((1, 4097, 4096, 3), "4097 x 4096 pixels; at most 16,777,216"),
    ],
)
def test_what_is_no_picture_is_named(module: Any, pictures: Any, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(module.BadPictureError, match=said):
        pictures.prepare(np.zeros(shape, np.uint8))


def test_pictures_and_places_belong_together(module: Any, pictures: Any) -> None:
    with pytest.raises(module.BadPictureError, match=r"Pictures sent: 2; places for them \(<image>\) in the prompt: 1"):
        pictures.places([7, 1], 2)
