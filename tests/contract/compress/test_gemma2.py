"""Gemma 2's checkpoint: TensorRT-LLM's model, which no machine runs here, computes from it what Transformers does.

The reader below is the arithmetic of TensorRT-LLM 1.3.0rc3 `models/gemma/model.py`, `layers/attention.py` and
`models/modeling_utils.py` in float32, with the windows that the runtime is told.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.verify import verify
from pipelines.compress.model_folder import look_at
from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from tests.contract.compress.conftest import CALIBRATION
from tests.support.emulated_trtllm.plan import MODEL_MAP, read_checkpoint
from tests.support.small_models import write_random
from tests.support.specs import quant_spec

torch = pytest.importorskip("torch")
from pipelines.compress.loading import load_model  # noqa: E402 - after the skip

CONFIG_GROUP = {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}
"""Fields of `Gemma2ConfigGroup`, without which GemmaConfig does not know a Gemma 2."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("gemma2") / "model", "gemma2")


def written(model: Path, out: Path, qformat: QFormat = QFormat.NONE, **ranks: int) -> Path:
    quantize(model, out, quant_spec(qformat), (), CALIBRATION, **ranks)
    assert verify(out) == []
    return out


class Reader:
    """Logits of a checkpoint of one rank."""

    def __init__(self, folder: Path, windows: tuple[int, ...]) -> None:
        self.checkpoint, self.raw = Checkpoint(folder), read_checkpoint(folder)
        self.windows = windows

    def __call__(self, ids: list[int]) -> np.ndarray:
        table = self.tensor("transformer.vocab_embedding.weight")
        x = table[torch.tensor(ids)] * self.raw["hidden_size"] ** 0.5
        for number in range(self.raw["num_hidden_layers"]):
            layer = f"transformer.layers.{number}"
            attended = self.attention(layer, self.norm(f"{layer}.input_layernorm", x), number)
            x = x + self.norm(f"{layer}.post_layernorm", attended)
            added = self.mlp(layer, self.norm(f"{layer}.pre_feedforward_layernorm", x))
            x = x + self.norm(f"{layer}.post_feedforward_layernorm", added)
        return capped(self.norm("transformer.ln_f", x) @ table.T, self.raw["final_logit_softcapping"]).numpy()

    def attention(self, layer: str, x: Any, number: int) -> Any:
        heads, kv, size = (self.raw[key] for key in ("num_attention_heads", "num_key_value_heads", "head_size"))
        qkv = (x @ self.tensor(f"{layer}.attention.qkv.weight").T).view(len(x), -1, size).transpose(0, 1)
        q, k, v = qkv.split([heads, kv, kv])
        angles = torch.arange(len(x))[:, None] * self.raw["rotary_base"] ** -(torch.arange(0, size, 2) / size)
        turned = [torch.cat([angles.cos(), angles.cos()], 1), torch.cat([angles.sin(), angles.sin()], 1)]
        q, k = (each * turned[0] + torch.cat([-each[..., size // 2 :], each[..., : size // 2]], -1) * turned[1]
                for each in (q, k))  # fmt: skip
        q_scaling = self.raw["query_pre_attn_scalar"] ** 0.5 / size**0.5
        scores = q @ k.repeat_interleave(heads // kv, 0).transpose(1, 2) / (q_scaling * size**0.5)
        apart = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (apart >= 0) & (apart < self.windows[number % len(self.windows)])
        scores = capped(scores, self.raw["attn_logit_softcapping"]).masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(-1) @ v.repeat_interleave(heads // kv, 0)).transpose(0, 1).reshape(len(x), -1)
        return attended @ self.tensor(f"{layer}.attention.dense.weight").T

    def mlp(self, layer: str, x: Any) -> Any:
        """`fc` is what goes through the activation, the tanh form under the name gelu."""
        assert self.raw["hidden_act"] == "gelu"
        fc, gate = (x @ self.tensor(f"{layer}.mlp.{name}.weight").T for name in ("fc", "gate"))
        return (torch.nn.functional.gelu(fc, approximate="tanh") * gate) @ self.tensor(f"{layer}.mlp.proj.weight").T

    def norm(self, name: str, x: Any) -> Any:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.raw["norm_epsilon"])
        return x * root * self.tensor(f"{name}.weight")

    def tensor(self, name: str) -> Any:
        return torch.from_numpy(self.checkpoint.tensor(name).astype(np.float32))


def capped(logits: Any, cap: float | None) -> Any:
    return torch.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize("change", [{}, {"attn_logit_softcapping": None, "final_logit_softcapping": None}])
def test_the_checkpoint_is_read_as_transformers_reads_the_folder(model, change, tmp_path):
    """Soft caps, the scale of queries, windows in every second layer and four norms a layer."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text()) | change
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = written(folder, tmp_path / "checkpoint")
    windows = ModelShape.from_hf_config(config).windows
    assert windows == (32, config["max_position_embeddings"])
    theirs = load_model(look_at(folder), "float32", "cpu")
    assert theirs.config._attn_implementation == ("sdpa" if change else "eager")  # sdpa leaves the cap out
    ids = list(range(2, 82))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
        found = Reader(checkpoint, windows)(ids)
        plain = Reader(checkpoint, (10**6,))(ids)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= 1e-4
    assert np.linalg.norm(plain - expected) / np.linalg.norm(expected) > 1e-2  # windows show


def test_config_json_is_what_gemmaconfig_reads(model, tmp_path):
    raw = read_checkpoint(written(model, tmp_path / "checkpoint", QFormat.INT8_WO, tp_size=2))
    assert raw["architecture"] in MODEL_MAP
    assert {key: raw[key] for key in CONFIG_GROUP} == {
        "query_pre_attn_scalar": 144, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5,
    }  # fmt: skip
    assert (raw["inter_layernorms"], raw["share_embedding_table"], raw["position_embedding_type"]) == (
        *(True, True, "rope_gpt_neox"),
    )
    assert raw["quantization"]["quant_algo"] == "W8A16"
    assert raw["attention_windows"] == [32, raw["max_position_embeddings"]]  # for evaluation; TensorRT-LLM reads none
    assert not raw.keys() & {"sliding_window", "_sliding_window_pattern", "rope_local_base_freq"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping=0. It must be a number above 0"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar=null, which Gemma 2 does not take.*256"),
    ],
)
def test_caps_are_numbers(model, changes, message):
    config = json.loads((model / "config.json").read_text()) | changes
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf_config(config)
