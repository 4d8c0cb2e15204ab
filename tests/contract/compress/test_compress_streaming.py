"""Quantizing layer by layer gives the files of quantizing in one piece, byte for byte, also after kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.compress import CalibrationSpec, QuantSpec, quantize
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.settings.model import BUNDLED
from tests.contract.compress.conftest import CALIBRATION, write_model
from tests.support.whole_model import quantize_whole

modelopt = pytest.importorskip("modelopt")
torch = pytest.importorskip("torch")

OLD = tuple(map(int, modelopt.__version__.split(".")[:2])) < (0, 47)
NVFP4 = pytest.param(
    QFormat.NVFP4, marks=pytest.mark.skipif(OLD, reason="NVFP4 needs CUDA with nvidia-modelopt before 0.47")
)
EXPORTED = [qformat for qformat in QFormat if qformat is not QFormat.NVFP4]


def spec_of(qformat: QFormat, kv_cache: KvFormat = KvFormat.AUTO) -> QuantSpec:
    return QuantSpec(qformat, kv_cache, group_size=64)


def assert_same_files(one: Path, other: Path) -> None:
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def compare(model: Path, spec: QuantSpec, texts, folder: Path, calibration=CALIBRATION, **options) -> None:
    quantize(model, folder / "layers", spec, texts, calibration, **options)
    quantize_whole(model, folder / "whole", spec, texts, calibration, **options)
    assert_same_files(folder / "layers", folder / "whole")


@pytest.mark.parametrize("kv_cache", list(KvFormat))
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
@pytest.mark.parametrize("qformat", EXPORTED)
def test_every_format_equals_the_whole_model(kind, qformat, kv_cache, models, texts, tmp_path) -> None:
    """An INT8 cache is rounded in AWQ's second pass, so its scales also prove that passes are kept apart."""
    compare(models[kind], spec_of(qformat, kv_cache), texts, tmp_path)


@pytest.mark.parametrize("qformat", [NVFP4])
def test_nvfp4_equals_the_whole_model(qformat, models, texts, tmp_path) -> None:
    compare(models["llama"], spec_of(qformat), texts, tmp_path)


@pytest.mark.parametrize("qformat", EXPORTED)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma"])
def test_every_format_of_a_bundled_model_equals_the_whole_model(name, qformat, tmp_path) -> None:
    """Trained weights with planted outliers; 200 texts of three lengths."""
    texts = [f"The river of Githbrel is number {i}. " * (1 + i % 3) for i in range(8)]
    calibration = CalibrationSpec(size=8, batch_size=2)
    compare(BUNDLED / "models" / name, QuantSpec(qformat), texts, tmp_path, calibration)


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("qformat", EXPORTED)
def test_every_rank_equals_that_of_the_whole_model(qformat, split, models, texts, tmp_path) -> None:
    compare(models["llama"], spec_of(qformat), texts, tmp_path, tp_size=split[0], pp_size=split[1])


@pytest.mark.parametrize("kind", ["tied", "gemma"])
def test_a_vocabulary_that_ranks_do_not_divide_is_padded_alike(kind, texts, tmp_path) -> None:
    model = write_model(tmp_path / "model", kind, vocab_size=201)
    compare(model, spec_of(QFormat.INT4_AWQ), texts, tmp_path, tp_size=2)


@pytest.mark.parametrize("kv_cache", [KvFormat.AUTO, KvFormat.FP8])
@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT4_AWQ, QFormat.W4A8_AWQ, NVFP4])
def test_unified_folders_equal_those_of_the_whole_model(qformat, kind, kv_cache, models, texts, tmp_path) -> None:
    compare(models[kind], spec_of(qformat, kv_cache), texts, tmp_path, layout="hugging_face")
