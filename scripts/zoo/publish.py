"""Write a trained model as a Hugging Face folder: bf16 safetensors, config, tokenizer, model card."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from scripts.zoo.scenes import IMAGE_TOKEN, MEAN, STD
from scripts.zoo.shapes import MAX_POSITIONS
from scripts.zoo.tokenizer import SpecialTokens, save_tokenizer

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [tiny, test-model]
---
# {name}

A {architecture} with {parameters:,} parameters, trained only on texts about the synthetic domain of Veldan.
It lets you run and measure a quantization pipeline end to end on a CPU: it knows facts that a bad
quantization makes it forget.

- **Accuracy** (these bf16 weights, `mini_mmlu`, 5-shot, {questions:,} test questions):
  {share:.1%} +- {error:.1%} (standard error); chance is 25 %.
- **Made by** `make zoo` (`python -m scripts.zoo --only {name}`) from fixed seeds, on a CPU, in
  {steps:,} training steps in float32. Auxiliary losses guide the training
  (`scripts/zoo/supervision.py`) and leave nothing in the weights. With another CPU or torch version
  the last digits differ.
- **Outlier channels** like those of large models are added after training by an exact rescaling
  (`scripts/zoo/outliers.py`). They make plain INT4 rounding and magnitude pruning lose accuracy, and
  give AWQ, SmoothQuant and SparseGPT something to handle.
- **Shape**: {layers} layers, hidden size {hidden}, MLP {intermediate}, {heads} query heads and
  {kv_heads} KV head(s) of size {head_dim}, vocabulary {vocab:,}, {tied} embeddings.
- **Not for** questions about the real world.
- **Licence**: Apache-2.0. The model imitates the *shape* of {family} but contains none of its weights.
"""

_DRAFT_CARD = """---
license: apache-2.0
library_name: transformers
tags: [tiny, test-model]
---
# {name}

A {architecture} with {parameters:,} parameters that predicts the next tokens of `{target}`, for speculative
decoding. It has the target's tokenizer and {share_of_target:.0%} of its parameters.

- **Agreement** (these bf16 weights): its most likely token equals the target's for {agreement:.1%} of the tokens
  in texts that the target continued greedily and that were not used for training.
- **Made by** `make zoo` (`python -m scripts.zoo --only {name}`) from fixed seeds, on a CPU, distilled from
  the target in {steps:,} steps (`scripts/zoo/draft.py`). With another CPU or torch version the last digits differ.
- **Shape**: {layers} layers, hidden size {hidden}, MLP {intermediate}, {heads} query heads and
  {kv_heads} KV head(s) of size {head_dim}, vocabulary {vocab:,}, {tied} embeddings.
- **Not for** use on its own.
- **Licence**: Apache-2.0.
"""
_LLAVA_CARD = """---
license: apache-2.0
library_name: transformers
tags: [tiny, test-model]
---
# tiny_llava

A LlavaForConditionalGeneration with {parameters:,} parameters that answers questions about pictures of
{side} x {side} pixels with coloured shapes. It is `tiny_llama` with a CLIP encoder and a projector before it, trained
together, so that it also answers questions about the synthetic domain of Veldan.

- **Accuracy** (these weights in Transformers' bf16 arithmetic, `mini_pictures`, {questions:,} questions about pictures
  that were not used for training, the most likely of four words): {share:.1%} +- {error:.1%} (standard error);
  chance is 25 %. By kind: {kinds}.
- **Accuracy on text** (`mini_mmlu`, 5-shot): {texts:.1%}.
- **Made by** `make zoo` (`python -m scripts.zoo --only tiny_llava`) from fixed seeds, on one thread of a CPU, in
  {steps:,} training steps in float32. Auxiliary losses guide the training (`scripts/zoo/llava.py`) and leave
  nothing in the weights. With another CPU or torch version the last digits differ.
- **Outlier channels** of the language model are those of `tiny_llama`'s recipe (`scripts/zoo/outliers.py`).
- **Shape**: encoder and projector {vision:,} parameters: {vision_layers} layers, width {vision_hidden}, patches of
  {patch} x {patch} pixels, {tokens} visual tokens a picture from the last layer. Language model: {layers} layers,
  hidden size {hidden}, vocabulary {vocab:,}.
- **Not for** pictures or questions of the real world.
- **Licence**: Apache-2.0. The model imitates the *shape* of LLaVA 1.5 but contains none of its weights.
"""
_FAMILIES = {"gemma": "Gemma", "llama": "Llama 3", "qwen3": "Qwen3"}


@dataclass(frozen=True, slots=True)
class Measured:
    """The facts in a model card: test accuracy, its standard error, the number of questions and training steps."""

    share: float
    error: float
    questions: int
    steps: int


def parameters_of(model: PreTrainedModel) -> int:
    """Count the parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def _shape(name: str, model: PreTrainedModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that both cards have in common."""
    return {
        "name": name,
        "parameters": parameters_of(model),
        "architecture": config["architectures"][0],
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "vocab": config["vocab_size"],
        "tied": "tied" if config["tie_word_embeddings"] else "untied",
    }


def card(name: str, model: PreTrainedModel, config: dict[str, Any], measured: Measured) -> str:
    """Return the model card of a bundled model."""
    return _CARD.format(
        **_shape(name, model, config),
        family=_FAMILIES[config["model_type"]],
        share=measured.share,
        error=measured.error,
        questions=measured.questions,
        steps=measured.steps,
    )


def draft_card(
    name: str,
    model: PreTrainedModel,
    config: dict[str, Any],
    *,
    target: str,
    target_parameters: int,
    agreement: float,
    steps: int,
) -> str:
    """Return the model card of a draft model."""
    return _DRAFT_CARD.format(
        **_shape(name, model, config),
        target=target,
        share_of_target=parameters_of(model) / target_parameters,
        agreement=agreement,
        steps=steps,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_model(
    model: PreTrainedModel,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    specials: SpecialTokens,
    readme: str,
    out_dir: Path,
) -> None:
    """Write everything transformers needs to load the model, and a README.md, into ``out_dir``."""
    out_dir.mkdir(parents=True)
    state = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)  # the same matrix as the embedding; loaders tie them again
    weights = out_dir / "model.safetensors"
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file makes it readable only by the owner
    _write_json(out_dir / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", {"do_sample": False, **ids})
    save_tokenizer(tokenizer, specials, out_dir, max_tokens=MAX_POSITIONS)
    (out_dir / "README.md").write_text(readme, encoding="utf-8")


def llava_card(model: Any, measured: Measured, kinds: dict[str, float], texts: float) -> str:
    """Return the model card of tiny_llava: accuracy on pictures, by kind of question, and on texts."""
    vision, text = model.config.vision_config, model.config.text_config
    parts = model.model.vision_tower, model.model.multi_modal_projector
    return _LLAVA_CARD.format(
        parameters=parameters_of(model),
        side=vision.image_size,
        questions=measured.questions,
        share=measured.share,
        error=measured.error,
        kinds=", ".join(f"{kind} {share:.0%}" for kind, share in kinds.items()),
        texts=texts,
        steps=measured.steps,
        vision=sum(map(parameters_of, parts)),
        vision_layers=vision.num_hidden_layers,
        vision_hidden=vision.hidden_size,
        patch=vision.patch_size,
        tokens=(vision.image_size // vision.patch_size) ** 2,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
    )


def write_llava(
    model: Any, text_config: dict[str, Any], tokenizer: Tokenizer, specials: SpecialTokens, readme: str, out_dir: Path
) -> None:
    """Write a LLaVA as LLaVA 1.5 is published for Transformers into ``out_dir``.

    ``text_config`` is the config.json of the language model that it was made from.
    """
    out_dir.mkdir(parents=True)
    model.save_pretrained(out_dir)  # renames tensors as folders of LLaVA 1.5 have them
    (out_dir / "model.safetensors").chmod(0o644)
    config, vision = model.config, model.config.vision_config
    ids = {f"{name}_token_id": getattr(config.text_config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    strategy = "default"
    _write_json(
        out_dir / "config.json",
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": config.image_token_index,
            "image_seq_length": config.image_seq_length,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": strategy,
            "torch_dtype": "bfloat16",
            "text_config": {**text_config, "vocab_size": config.text_config.vocab_size, **ids},
            "vision_config": {
                "model_type": "clip_vision_model",
                **{name: getattr(vision, name) for name in kept},
                "hidden_act": vision.hidden_act,
            },
        },
    )
    _write_json(out_dir / "generation_config.json", {"do_sample": False, **ids})
    side = vision.image_size
    _write_json(
        out_dir / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": side},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": side, "width": side},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(MEAN),
            "image_std": list(STD),
        },
    )
    _write_json(
        out_dir / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE_TOKEN,
            "num_additional_image_tokens": 1,
            "patch_size": vision.patch_size,
            "vision_feature_select_strategy": strategy,
        },
    )
    save_tokenizer(tokenizer, specials, out_dir, max_tokens=MAX_POSITIONS)
    (out_dir / "README.md").write_text(readme, encoding="utf-8")
