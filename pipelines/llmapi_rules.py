"""What engine=tensorrt_llm_llmapi (TensorRT-LLM 1.3 and later, PyTorch backend) cannot do, known beforehand.

Sources: TensorRT-LLM `docs/source/features/quantization.md` (formats, and formats by GPU generation),
`docs/source/legacy/reference/support-matrix.md` (of Gemma it has Gemma 3 only), `tensorrt_llm/llmapi/llm_args.py`
(Medusa, lookahead: "not in (pytorch, _autodeploy)"); ModelOpt 0.47 `quant_utils.py` (INT8 KV scales are not exported).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.build_settings import BuildSettings
from pipelines.domain.errors import Fault
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.settings import Settings

FORMATS = (QFormat.NONE, QFormat.FP8, QFormat.NVFP4, QFormat.INT4_AWQ, QFormat.W4A8_AWQ)
"""What its quantization guide lists of the formats made here."""
HOPPER_AND_OLDER = (QFormat.INT4_AWQ, QFormat.W4A8_AWQ)
REACHED = ("build", "repository", "serve", "benchmark")
LIMITS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
    "tokens_per_block",
    "tp_size",
    "pp_size",
)
"""What of conf/build the LLM API has a place for."""
OF_A_DRAFT = ("speculative_decoding_mode", "max_draft_len")
"""Options that conf/speculative/draft_target.yaml sets for engines; here max_draft_len is an argument of its own."""
DECODING = ("medusa", "redrafter", "lookahead", "eagle")


def check(settings: Settings, shape: ModelShape | None, target: str) -> list[Fault]:
    """Every rule of this flavour.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        target: what is asked for.
    """
    return [*_target(settings, target), *_formats(settings), *_model(settings, shape), *_features(settings)]


def _target(settings: Settings, target: str) -> Iterator[Fault]:
    if target not in REACHED:
        yield Fault(
            f"engine={settings.engine.name} cannot {target}: its model runs only inside TensorRT-LLM.",
            f"It goes with {', '.join(REACHED)}.",
            "Evaluate the same format with engine=openvino, or on the GPU machine with trtllm-eval.",
        )


def _formats(settings: Settings) -> Iterator[Fault]:
    name, qformat, sm = settings.engine.name, settings.quant.qformat, settings.hardware.sm
    known = ", ".join(FORMATS)
    if qformat not in FORMATS:
        yield Fault(
            f"engine={name} has no quant={qformat}: TensorRT-LLM's PyTorch backend does not list it.",
            f"It takes {known}.",
            "Choose one of these, or engine=tensorrt_llm (up to TensorRT-LLM 1.2).",
        )
    if settings.kv_cache.dtype == KvFormat.INT8:
        yield Fault(
            f"engine={name} has no kv_cache=int8: ModelOpt exports no INT8 scales for it.",
            "It takes auto and fp8.",
            "Set kv_cache=fp8.",
        )
    if settings.sparsity.method != "none":
        yield Fault(
            f"engine={name} has no sparsity={settings.sparsity.method}: the PyTorch backend lists no 2:4 format.",
            todo="Leave sparsity off, or take engine=tensorrt_llm.",
        )
    if qformat in HOPPER_AND_OLDER and sm is not None and sm >= 10:
        yield Fault(
            f"engine={name} has no quant={qformat} on {settings.hardware.name} (SM {sm:g}).",
            "The PyTorch backend runs AWQ on Hopper and older.",
            "Choose nvfp4 or fp8.",
        )


def _model(settings: Settings, shape: ModelShape | None) -> Iterator[Fault]:
    if shape is not None and shape.family in ("gemma", "gemma2"):
        yield Fault(
            f"engine={settings.engine.name} cannot serve {shape.architecture}: TensorRT-LLM's PyTorch backend has of "
            "Gemma only Gemma 3.",
            "Gemma 1 and 2 run on TensorRT engines, up to TensorRT-LLM 1.2.",
            "Take a Llama model, or engine=tensorrt_llm.",
        )


def _features(settings: Settings) -> Iterator[Fault]:
    mode = settings.speculative.mode
    read = (*LIMITS, *(OF_A_DRAFT if mode == "draft_target" else ()))
    for option, field in BuildSettings.model_fields.items():
        value = getattr(settings.build, option)
        if option not in read and value != field.default:
            yield Fault(
                f"engine={settings.engine.name} has no build.{option}={value}: it is an option of trtllm-build.",
                f"It reads {', '.join(LIMITS)}.",
                "Leave it out, or take engine=tensorrt_llm.",
            )
    decoding = settings.triton.decoding_mode
    if decoding in DECODING:
        yield Fault(
            f"engine={settings.engine.name} has no triton.decoding_mode={decoding}: it belongs to TensorRT engines.",
            todo="Leave it out, or take engine=tensorrt_llm.",
        )
    beside = {
        "lora": (bool(settings.lora.adapters), "its Triton model has no LoRA inputs"),
        "multimodal": (settings.multimodal.model_type != "none", "its Triton model has no image inputs"),
        "speculative": (
            mode not in ("none", "draft_target"),
            f"of its kinds only draft_target is configured, not {mode}",
        ),
    }
    for group, (wanted, why) in beside.items():
        if wanted:
            yield Fault(
                f"engine={settings.engine.name} has no {group}: {why}.",
                todo=f"Set {group}=none, or engine=tensorrt_llm.",
            )
    if settings.triton.lora_prefetch_dir is not None:
        yield Fault(
            f"engine={settings.engine.name} has no triton.lora_prefetch_dir='{settings.triton.lora_prefetch_dir}': "
            "PeftCacheConfig refuses it as not supported.",
            todo="Leave it out.",
        )
