"""Building blocks of the cases: models, formats, features, and changes to a deployment."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.domain.adapter import Adapter
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import describe
from pipelines.rules.record import DeploymentFacts
from pipelines.settings.features import MultimodalSettings
from tests.support.build_options import of_options
from triton_repo.config import TritonSettings

LLAMA = ModelShape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False)
SMALL_LLAMA = replace(LLAMA, num_hidden_layers=16, hidden_size=2048, intermediate_size=8192)
GEMMA = ModelShape("GemmaForCausalLM", 18, 2048, 8, 1, 256, 16384, 256000, 8192, True)
GEMMA2 = replace(GEMMA, architecture="Gemma2ForCausalLM")
GEMMA3 = replace(GEMMA, architecture="Gemma3ForCausalLM", sliding_window=512, global_every=6, num_key_value_heads=1)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", sliding_window=4096, max_position_embeddings=32768)
QWEN3 = replace(LLAMA, architecture="Qwen3ForCausalLM")
MIXTRAL = replace(LLAMA, architecture="MixtralForCausalLM", num_experts=8, num_experts_per_token=2)
GPT_OSS = replace(MIXTRAL, architecture="GptOssForCausalLM", sliding_window=128, global_every=2)
FP8, NVFP4, AWQ, SQ, W4A8 = QFormat.FP8, QFormat.NVFP4, QFormat.INT4_AWQ, QFormat.INT8_SQ, QFormat.W4A8_AWQ
LLAVA = MultimodalSettings(model_type="llava", path=Path("llava"), visual_tokens=576)
ADAPTER = Adapter("/a", 8, ("q_proj",), {"q_proj": (4096, 4096)})
SERVED = {"lora_plugin": "auto", "lora_target_modules": ("attn_q",)}
EAGLE = {"speculative_decoding_mode": "eagle", "max_draft_len": 63, "max_batch_size": 64}
LOOKAHEAD = {"lookahead_window_size": 7, "lookahead_ngram_size": 7, "lookahead_verification_set_size": 7}


def deployment(
    *, build: dict[str, Any] | None = None, triton: dict[str, Any] | None = None, **given: Any
) -> DeploymentFacts:
    """Return a deployment with the defaults of trtllm-build and of the repository, with some values changed."""
    if "engine" in given:
        engine = describe(given.pop("engine"))
        given |= {name: getattr(engine, name) for name in ("needs_gpu", "writes_engine", "on_device")}
    return DeploymentFacts(build=of_options(**(build or {})), triton=TritonSettings(**(triton or {})), **given)


@dataclass(frozen=True)
class Case:
    """One case: `broken` breaks the rule with `match` in the message; merged with `fixed`, it keeps the rule."""

    broken: dict[str, Any]
    match: str
    fixed: dict[str, Any]

    def nearest(self) -> DeploymentFacts:
        """Return the nearest deployment that keeps the rule; nested groups are merged."""
        merged = dict(self.broken)
        for key, value in self.fixed.items():
            merged[key] = {**merged.get(key, {}), **value} if key in ("build", "triton") else value
        return deployment(**merged)


def kv(reuse: bool = True, **given: Any) -> dict[str, Any]:
    return {"kv_reuse": reuse, **given}
