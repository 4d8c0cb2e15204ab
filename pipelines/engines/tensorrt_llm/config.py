"""Settings of trtllm-build: those that are chosen or turned often by name, all others as `build.trtllm={name: value}`.

Source: `options.json`, the table of the program's options. Single values are checked here, combinations by the rules.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import AfterValidator, Field, field_validator

from pipelines.domain.errors import yaml_fault
from pipelines.settings.base import ChoosingGroup, OptionTable, Positive, Ranks, Tokens

Count = Annotated[int, Field(ge=0)]
Switch = Literal["enable", "disable"]

TABLE = Path(__file__).with_name("options.json")
FLAG, LIST = "flag", "list[str]"


@dataclass(frozen=True, slots=True)
class BuildOption:
    """One option of trtllm-build.

    Attributes:
        name: with its dashes, e.g. "--max_batch_size".
        type: "int", "str", "list[str]", "KVCacheType", or "flag", which takes no value.
        default: value if it is not given.
        choices: allowed values; None means any.
        later_choices: those of them that versions after 1.2 added.
        aliases: other spellings, with dashes.
        sentence: what it is for.
    """

    name: str
    type: Literal["int", "str", "flag", "list[str]", "KVCacheType"]
    default: str | int | bool | None
    choices: tuple[str, ...] | None
    later_choices: tuple[str, ...]
    aliases: tuple[str, ...]
    sentence: str

    @property
    def key(self) -> str:
        """The name without dashes."""
        return self.name.removeprefix("--")


def _option(raw: dict[str, Any]) -> BuildOption:
    choices = raw["choices"]
    return BuildOption(
        name=raw["name"],
        type=raw["type"],
        default=raw.get("effective_default", raw["default"]),
        choices=tuple(choices) if choices else None,
        later_choices=tuple(raw.get("later_choices", ())),
        aliases=tuple(raw.get("aliases", ())),
        sentence=raw["help_short"],
    )


OPTIONS = {each.key: each for each in map(_option, json.loads(TABLE.read_text(encoding="utf-8"))["options"])}
"""All options by name, in the order of the program's own help."""

CLASS, ADAPTERS = "the model's class is the checkpoint's architecture", "adapters are served beside the engine"
TIMING = "one is kept for each GPU and version beside the artifacts"
ENCODER, MAMBA = "models with an encoder are not built here", "Mamba models are not built here"
DECIDED = {
    "checkpoint_dir": "it is what the quantize stage wrote",
    "model_config": "the checkpoint has its own, and without a checkpoint the weights would be random",
    "build_config": "a file of its own would replace the limits given here",
    "model_cls_file": CLASS,
    "model_cls_name": CLASS,
    "output_dir": "engines are kept under paths.store",
    "input_timing_cache": TIMING,
    "output_timing_cache": TIMING,
    "strip_plan": "an engine without its weights answers nothing before it is refitted",
    "dry_run": "it makes no engine; `make plan` shows what would run",
    "visualize_network": "a dump would be made only when the engine is not cached; "
    "add it to the command that `make plan` prints",
    "lora_dir": ADAPTERS,
    "lora_ckpt_source": ADAPTERS,
    "max_encoder_input_len": ENCODER,
    "bert_attention_plugin": ENCODER,
    "bert_context_fmha_fp32_acc": ENCODER,
    "mamba_conv1d_plugin": MAMBA,
    "paged_state": MAMBA,
    "nccl_plugin": "trtllm-build sets it: the model's type where there are several ranks",
}
"""Options that are refused, and why: this tool sets them itself, or no model that it builds has a use for them."""

NOT_SPECULATING: dict[str, Any] = {"speculative_decoding_mode": None, "max_draft_len": 0}
"""Values for an engine without speculative decoding."""

OF_A_FORMAT: dict[str, tuple[Any, ...]] = {
    "gemm_plugin": ("fp8", "nvfp4"),
    "gemm_swiglu_plugin": ("fp8",),
    "low_latency_gemm_plugin": ("fp8",),
    "low_latency_gemm_swiglu_plugin": ("fp8",),
    "fp8_rowwise_gemm_plugin": ("auto", "float16", "float32", "bfloat16", "int32"),
    "fuse_fp4_quant": ("enable",),
    "norm_quant_fusion": ("enable",),
    "user_buffer": ("enable",),
    "weight_sparsity": (True,),
}
"""Option -> its values that an engine can only be built with from weights in one format, or 2:4 sparse.

Source: plugin/plugin.py, layers/mlp.py:356 and models/llama/model.py:176 of TensorRT-LLM, which assert. `reduce_fusion`
alone runs in every format, and `use_fp8_context_fmha` is switched off by the builder.
"""

LIMITS_FOR_LOAD = ("max_batch_size", "max_input_len", "max_num_tokens", "max_seq_len")
"""Limits that are chosen for the load where nobody gives them, see `pipelines.predict.performance.limits`."""

TUNED = ("gemm_plugin", "gemm_swiglu_plugin", "multiple_profiles", "reduce_fusion", "user_buffer")
"""Options that are chosen for speed where nobody gives them, see `pipelines.engines.tensorrt_llm.advice`."""

FACTS_ARE_LOGGED = ("info", "verbose", "debug", "trace")
"""Log levels that report sizes and seconds, which become the facts of an engine."""


class NamedOptions(ChoosingGroup):
    """Options of trtllm-build with a setting of their own, and the ranks to split over.

    Attributes:
        max_batch_size: requests that the engine schedules together, at most; null is chosen for the load on a GPU
            whose speed is known, and trtllm-build's 2,048 elsewhere.
        max_input_len: tokens of a prompt, at most; null is chosen likewise, and trtllm-build's 1,024 elsewhere.
            max_seq_len replaces it where padding is removed and attention is fused.
        max_seq_len: tokens of prompt and answer together, at most; null is chosen likewise, and the model's longest
            sequence elsewhere.
        max_num_tokens: tokens of all requests in one iteration, at most; null is chosen likewise, and trtllm-build's
            8,192 elsewhere.
        max_beam_width: beams of beam search, at most.
        opt_num_tokens: tokens per iteration that kernels are tuned for; null is max_batch_size * max_beam_width.
        max_prompt_embedding_table_size: rows of prompt embeddings; above 0 turns on prompt tuning and multimodal
            input.
        tp_size: tensor parallel ranks; trtllm-build reads them from the checkpoint.
        pp_size: pipeline parallel ranks; likewise.
        moe_ep_size: of a mixture: groups of tensor parallel ranks that hold whole experts of their own; the ranks of
            a group share each expert.
        kv_cache_type: layout of the KV cache.
        tokens_per_block: tokens of one block of the paged KV cache; smaller blocks are reused more often.
        gemm_plugin: cuBLASLt matrix products and their type; null is chosen by the tuning, and otherwise off, but
            nvfp4 for NVFP4.
        gemm_swiglu_plugin: matrix product and SwiGLU in one FP8 kernel, on Hopper; null is chosen by the tuning.
        weight_sparsity: let TensorRT choose 2:4 sparse kernels; needs gemm_plugin=disable.
        weight_streaming: keep part of the weights on the host at run time; needs gemm_plugin=disable.
        reduce_fusion: residual add and norm fused after the all-reduce; Llama with tp_size above 1; null is chosen by
            the tuning.
        user_buffer: no copies around the all-reduce; FP8 Llama with reduce_fusion; null is chosen by the tuning.
        speculative_decoding_mode: how the engine checks draft tokens; null turns speculative decoding off.
        max_draft_len: draft tokens that are checked in a step, at most.
        workers: ranks built at the same time, each on a GPU of its own.
        multiple_profiles: several optimization profiles: slower build, faster kernels; not with opt_num_tokens; null
            is chosen by the tuning.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = (*LIMITS_FOR_LOAD, *TUNED)
    LATER: ClassVar[tuple[str, ...]] = ("moe_ep_size",)

    max_batch_size: Annotated[int, Field(ge=1, le=2**16)] = 2048
    max_input_len: Tokens = 1024
    max_seq_len: Tokens | None = None
    max_num_tokens: Tokens = 8192
    max_beam_width: Annotated[int, Field(ge=1, le=1024)] = 1
    opt_num_tokens: Tokens | None = None
    max_prompt_embedding_table_size: Count = 0

    tp_size: Ranks = 1
    pp_size: Ranks = 1
    moe_ep_size: Ranks = 1
    workers: Ranks = 1

    kv_cache_type: Literal["continuous", "paged", "disabled"] = "paged"
    tokens_per_block: Positive = 32

    gemm_plugin: Literal["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"] | None = None
    gemm_swiglu_plugin: Literal["fp8", "disable"] = "disable"
    multiple_profiles: Switch = "disable"
    reduce_fusion: Switch = "disable"
    user_buffer: Switch = "disable"
    weight_sparsity: bool = False
    weight_streaming: bool = False

    speculative_decoding_mode: (
        Literal["draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"] | None
    ) = None
    max_draft_len: Count = 0


def _kind(option: BuildOption) -> Any:
    """Return the type of an option that is no field of its own."""
    literal: Any = Literal
    if option.key == "log_level":
        return Annotated[literal[option.choices], AfterValidator(_tells_facts)]
    if option.type == LIST:
        return Annotated[tuple[literal[option.choices], ...], Field(min_length=1)]
    return literal[option.choices] if option.choices else {"int": Positive, "flag": bool}[option.type]


def _tells_facts(level: str) -> str:
    if level not in FACTS_ARE_LOGGED:
        raise ValueError(f"'{level}' leaves out sizes and seconds: choose one of {', '.join(FACTS_ARE_LOGGED)}")
    return level


OTHERS = [each for each in OPTIONS.values() if each.key not in NamedOptions.model_fields]
TABLE_OF_OTHERS = OptionTable(
    kinds={each.key: _kind(each) for each in OTHERS if each.key not in DECIDED},
    sentences={each.key: f"{each.sentence} Default: {str(each.default).lower()}." for each in OTHERS},
    refused=DECIDED,
)


class BuildSettings(NamedOptions):
    """Options of trtllm-build 1.2.

    Attributes:
        trtllm: all other options by name, as `{moe_plugin: disable}`.
    """

    trtllm: Annotated[dict[str, Any], TABLE_OF_OTHERS] = Field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the value of any option of trtllm-build, given or not."""
        return getattr(self, name) if name in type(self).model_fields else self.trtllm.get(name, OPTIONS[name].default)

    def every(self) -> dict[str, Any]:
        """Return the value of every option and the ranks, as JSON has them."""
        names = [name for name in ("tp_size", "pp_size", *OPTIONS) if name != "model_config"]  # as in stored results
        names += [name for name in self.LATER if self[name] != type(self).model_fields[name].default]
        values = {name: self[name] for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def without(self, names: Iterable[str]) -> Self:
        """Return a copy in which these options have their defaults and do not count as given."""
        names = list(names)
        others = {name: value for name, value in self.trtllm.items() if name not in names}
        return super().without(set(names) & type(self).model_fields.keys()).model_copy(update={"trtllm": others})

    def in_16_bit(self) -> Self:
        """Return the same options without those that belong to quantized or sparse weights."""
        names = [name for name, own in OF_A_FORMAT.items() if self[name] in own]
        if self.weight_sparsity and self.gemm_plugin == "disable":  # 2:4 kernels need it, and dense weights do not
            names.append("gemm_plugin")
        return self.without(names)


def key_of(option: str) -> str:
    """Return the setting of an option: "build.max_batch_size", "build.trtllm.moe_plugin"."""
    return f"build.{option}" if option in BuildSettings.model_fields else f"build.trtllm.{option}"


# Options of the LLM API that have a setting of their own, and all others by name.


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """A setting that is an option of the LLM API.

    Attributes:
        group: of the settings.
        field: of the group.
        words: value of the option -> value of the setting, where they differ; other values are no setting's.
    """

    group: str
    field: str
    words: Mapping[str, str] | None = None

    @property
    def key(self) -> str:
        """The setting as it is typed."""
        return {"kv_cache.dtype": "kv_cache"}.get(f"{self.group}.{self.field}", f"{self.group}.{self.field}")

    def holds(self, value: Any) -> bool:
        """Return whether the setting can have an option's value."""
        return self.words is None or value in self.words

    def value(self, value: Any) -> Any:
        """Return the setting's value for an option's."""
        word = value if self.words is None else self.words[value]
        return tuple(word) if isinstance(word, list) else word


OWN_SETTINGS = {
    "tensor_parallel_size": OwnSetting("build", "tp_size"),
    "pipeline_parallel_size": OwnSetting("build", "pp_size"),
    **{
        name: OwnSetting("build", name)
        for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
    },
    "enable_chunked_prefill": OwnSetting("runtime", "enable_chunked_context"),
    "guided_decoding_backend": OwnSetting("triton", "guided_decoding_backend"),
    "kv_cache_config.enable_block_reuse": OwnSetting("kv_cache", "enable_block_reuse"),
    "kv_cache_config.max_tokens": OwnSetting("triton", "max_tokens_in_paged_kv_cache"),
    "kv_cache_config.max_attention_window": OwnSetting("triton", "max_attention_window_size"),
    "kv_cache_config.free_gpu_memory_fraction": OwnSetting("triton", "kv_cache_free_gpu_mem_fraction"),
    "kv_cache_config.host_cache_size": OwnSetting("triton", "kv_cache_host_memory_bytes"),
    "kv_cache_config.dtype": OwnSetting("kv_cache", "dtype", {"auto": "auto", "fp8": "fp8"}),
    "kv_cache_config.tokens_per_block": OwnSetting("build", "tokens_per_block"),
    "scheduler_config.capacity_scheduler_policy": OwnSetting(
        "triton",
        "batch_scheduler_policy",
        {"GUARANTEED_NO_EVICT": "guaranteed_no_evict", "MAX_UTILIZATION": "max_utilization"},
    ),
}
"""Option of the LLM API -> its setting, in which alone it can be given."""


class LlmApiSettings(ChoosingGroup):
    """Options of TensorRT-LLM's LLM API without a setting of their own; engine=tensorrt_llm_llmapi reads them.

    Attributes:
        tuned: path of one of NVIDIA's tuned files, of which there is a copy here; null is the nearest to model, GPU and
            load with tuning=recommended, and none otherwise. `file` and `extra` win over it.
        file: a YAML file for `trtllm-serve --extra_llm_api_options`, such as those of NVIDIA's examples/configs.
        extra: options by name, as {moe_config: {backend: TRTLLM}}; they win over the file's.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = ("tuned",)

    tuned: str | None = None
    file: Path | None = None
    extra: dict[str, Any] = Field(default_factory=dict)

    @field_validator("file")
    @classmethod
    def _is_a_mapping(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        if not path.is_file():
            raise ValueError(f"'{path}' is not a file: give a YAML file of LLM API options, or null")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"'{path}' is not valid YAML: {yaml_fault(error)}") from None
        if not isinstance(content, dict):
            raise ValueError(f"'{path}' holds a {type(content).__name__}: LLM API options are a mapping")
        return path.absolute()

    @property
    def of_file(self) -> dict[str, Any]:
        """The content of the file; empty without one."""
        if self.file is None:
            return {}
        content: dict[str, Any] = yaml.safe_load(self.file.read_text(encoding="utf-8"))
        return content
