"""gpt-oss folders: experts in MXFP4 are read as Transformers reads them, and what does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.checkpoint.verify import verify
from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from tests.contract.compress.conftest import CALIBRATION
from tests.support.small_models import write_random
from tests.support.specs import quant_spec
from tests.support.whole_model import assert_same_files

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def copied(model: Path, out: Path, **options: Any) -> None:
    quantize(model, out, quant_spec(QFormat.NONE), (), CALIBRATION, **options)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_random(tmp_path / "plain", "gpt_oss")


def change(model: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def configure(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pack(tensors: dict[str, Any]) -> None:
    """Replace experts by random MXFP4 codes of every kind, in the layout of the public folders."""
    torch.manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(100, 130, shape, dtype=torch.uint8)


def unpack(tensors: dict[str, Any]) -> None:
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()


@pytest.fixture
def packed(plain: Path) -> Path:
    change(plain, pack)
    configure(plain, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def test_mxfp4_is_what_transformers_makes_of_it(packed: Path, tmp_path: Path) -> None:
    """The checkpoint has the bytes of one of the same model in 16 bit, whose weights Transformers unpacked."""
    copied(packed, tmp_path / "ours")
    change(packed, unpack)
    configure(packed, quantization_config=None)
    copied(packed, tmp_path / "theirs")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert verify(tmp_path / "ours") == []


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), r"lacks the tensor 'model\.layers\.1\.mlp\.experts\.down_proj_scales'"),
        (
            lambda t: t.update({UP: torch.zeros(4, 256, 768, dtype=torch.bfloat16)}),
            r"is in MXFP4 and has 'model.*experts\.gate_up_proj' and '.*gate_up_proj_blocks', two forms",
        ),
        (lambda t: t.pop(f"{UP}_bias"), r"lacks the tensor 'model\.layers\.1\.mlp\.experts\.gate_up_proj_bias' \(1 "),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), r"lacks the tensor 'model\.layers\.0\.self_attn\.sinks'"),
        (lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"][:3]}), r"\[3, .*config\.json says 4 experts"),
        (lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, 2:].contiguous()}), "proj_blocks' .*its scales are"),
        (lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"].short()}), "the type U8, and not I16"),
        (lambda t: t[f"{DOWN}_scales"].fill_(255), r"down_proj_blocks' .*contains NaN or infinity, in expert 0"),
    ],
)  # fmt: skip
def test_a_broken_tensor_of_experts_is_named(
    edit: Callable[[dict[str, Any]], object], message: str, packed: Path, tmp_path: Path
) -> None:
    change(packed, edit)
    with pytest.raises(UserError, match=message):
        copied(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 9.0}, r"swiglu_limit=9\.0\. Transformers computes 7"),
        ({"sliding_window": None}, "sliding_window=null, which gpt-oss does not take"),
        ({"quantization_config": None}, "of type U8, and nothing says how it is quantized; .* an MXFP4 library"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'"),
        ({"num_local_experts": 8}, "config.json says 8 experts"),
        ({"intermediate_size": 160}, r"by config\.json it is \[4, 320[,\]]"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(
    changes: dict[str, Any], message: str, packed: Path, tmp_path: Path
) -> None:
    configure(packed, **changes)
    with pytest.raises(UserError, match=message):
        copied(packed, tmp_path / "out")
