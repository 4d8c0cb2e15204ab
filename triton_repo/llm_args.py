"""Arguments of `tensorrt_llm.LLM` (TensorRT-LLM 1.3 and later, PyTorch backend), typed as the library types them.

Source: `tensorrt_llm/llmapi/llm_args.py` and `tests/unittest/api_stability/references_committed/llm.yaml` of the 1.3
line; a test compares names, types and defaults with a copy of them. Only fields with a setting are here; None leaves a
field out of the file, so that the library's own default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipelines.domain.errors import Fault, UserError
from pipelines.settings.base import Group, Positive

Count = Annotated[int, Field(ge=0)]
DraftWord = Literal["DraftTarget", "Draft_Target"]
OPTIONS = "extra_llm_api_options.yaml"
CHECKPOINT, DRAFT = "checkpoint", "draft"
"""Content of the folder that takes the place of an engine: the arguments, a Hugging Face checkpoint, and optionally a
draft model's checkpoint."""


class KvCacheConfig(Group):
    """`kv_cache_config`: the pool of KV blocks. `dtype` "auto" means the checkpoint's."""

    enable_block_reuse: bool = True
    max_tokens: Positive | None = None
    max_attention_window: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    host_cache_size: Count | None = None
    dtype: Literal["auto", "fp8"] = "auto"
    tokens_per_block: Positive = 32


class SchedulerConfig(Group):
    """`scheduler_config`: which waiting requests may start."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"

    @classmethod
    def of(cls, policy: Literal["guaranteed_no_evict", "max_utilization"]) -> SchedulerConfig:
        """Convert from the name used in a Triton repository."""
        if policy == "max_utilization":
            return cls(capacity_scheduler_policy="MAX_UTILIZATION")
        return cls()


class DraftTargetConfig(Group):
    """`speculative_config` of a draft model; the folder is a Hugging Face checkpoint.

    `decoding_type` is "DraftTarget" up to 1.3.0rc3, whose parser rejects the later word.
    """

    decoding_type: DraftWord = "Draft_Target"
    max_draft_len: Positive
    speculative_model: str


class LlmArgs(Group):
    """The arguments that this project sets."""

    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    max_batch_size: Positive = 2048
    max_input_len: Positive = 1024
    max_seq_len: Positive | None = None
    max_num_tokens: Positive = 8192
    max_beam_width: Positive = 1
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    speculative_config: DraftTargetConfig | None = None

    @model_validator(mode="after")
    def _prompt_fits_an_iteration(self) -> LlmArgs:
        if not self.enable_chunked_prefill and self.max_num_tokens < self.max_input_len:
            raise ValueError(
                f"max_num_tokens={self.max_num_tokens} is less than max_input_len={self.max_input_len} without "
                "enable_chunked_prefill"
            )
        return self

    def to_yaml(self) -> str:
        """Return the file that `trtllm-serve --extra_llm_api_options` and the llmapi model read."""
        import yaml

        text: str = yaml.safe_dump(self.as_dict(), sort_keys=False)
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return every argument that has a value."""
        return self.model_dump(mode="json", exclude_none=True)

    @classmethod
    def from_yaml(cls, text: str, source: str) -> LlmArgs:
        """Read what `to_yaml` wrote.

        Raises:
            UserError: it is not a mapping, or holds an argument that is unknown or out of range.
        """
        import yaml

        try:
            return cls.model_validate(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not valid YAML: {error}.") from None
        except ValidationError as error:
            raise UserError.of([_fault(source, dict(item)) for item in error.errors()]) from None


def _fault(source: str, item: Mapping[str, Any]) -> Fault:
    key = ".".join(str(part) for part in item["loc"]) or "the file"
    said = str(item["msg"])
    return Fault(f"{source}: {key}={item.get('input')!r} is not valid: {said[:1].lower() + said[1:]}.")
