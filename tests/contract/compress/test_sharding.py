"""What a process reads of a model of which it holds a part; here the part is the whole, because one process reads."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from pipelines.compress.loading import load_model  # noqa: E402
from pipelines.compress.model_folder import look_at  # noqa: E402
from pipelines.compress.sharding import collected, empty_model, load_sharded  # noqa: E402
from pipelines.domain.errors import UserError  # noqa: E402
from tests.support.small_models import write_model  # noqa: E402
from tests.support.trained import GEMMA, LLAMA  # noqa: E402


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("folder", "dtype"), [(LLAMA, "float32"), (GEMMA, "bfloat16")], ids=["llama", "gemma"])
def test_a_model_read_in_parts_is_the_model(folder: Path, dtype: str) -> None:
    """The output head of Gemma is its embedding."""
    source = look_at(folder)
    whole, parts = load_model(source, dtype, "cpu"), load_sharded(source, dtype, "cpu")
    ours, theirs = (dict(model.named_parameters()) for model in (parts, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(collected(ours[name]), theirs[name]) for name in ours)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids, use_cache=False).logits for model in (parts, whole)))


def test_an_empty_model_takes_no_memory_for_its_weights() -> None:
    model = empty_model(look_at(LLAMA), "float32")
    weights = list(model.parameters())
    assert sum(weight.numel() for weight in weights) == 4_065_536
    assert sum(weight.untyped_storage().nbytes() for weight in weights) == 4 * len(weights)


def test_a_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    source = shutil.copytree(LLAMA, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the tensor 'model.layers.2.mlp.up_proj.weight'"):
        load_sharded(look_at(source), "float32", "cpu")


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen2_tied")
    tensors = load_file(source / "model.safetensors")
    for step, refused in ((0.0, False), (1.0, True)):
        head = tensors["model.embed_tokens.weight"] + step
        save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors", {"format": "pt"})
        if refused:
            with pytest.raises(UserError, match=r"'lm_head.weight' that is not 'model.embed_tokens.weight'"):
                load_sharded(look_at(source), "float32", "cpu")
        else:
            load_sharded(look_at(source), "float32", "cpu")
