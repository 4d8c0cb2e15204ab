"""Faults of deployments, each planted in one stage of a copy, with the answer that a diagnosis must give.

A fault of an engine is built into it: the engine of a damaged checkpoint, whose description then claims to be of the
clean one, or a graph whose nodes were changed afterwards.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from safetensors.torch import load_file, save_file

from eval.diagnose.result import Place
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from tests.support.diagnosed import LIMITS, Places, Recipe

Tensors = dict[str, torch.Tensor]
LAYER = "transformer.layers.{}."
LLAMA, GEMMA = Recipe("llama"), Recipe("gemma")
FP8, SQ = Recipe("llama", QFormat.FP8), Recipe("llama", QFormat.INT8_SQ)
AWQ, W4A8 = Recipe("llama", QFormat.INT4_AWQ), Recipe("llama", QFormat.W4A8_AWQ)
NVFP4, KV8 = Recipe("llama", QFormat.NVFP4), Recipe("llama", QFormat.FP8, KvFormat.INT8)
SPLIT = Recipe("llama", QFormat.FP8, tp=2)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and where a diagnosis must find it.

    Attributes:
        name: what is wrong.
        recipe: deployment that it is planted in.
        stage: that must be accused.
        layer: that must be named; None for what belongs to no layer.
        tensor: part of the name of the tensor, entry or setting that must be named.
        plant: changes the copy.
    """

    name: str
    recipe: Recipe
    stage: Place
    layer: int | None
    tensor: str
    plant: Callable[[Places], None]

    @property
    def served(self) -> bool:
        """Whether servers must run to find it."""
        return self.stage in (Place.TRITON, Place.OPENAI)


def change(folder: Path, edit: Callable[[Tensors], None], rank: int = 0) -> None:
    """Edit the tensors of a checkpoint."""
    file = folder / f"rank{rank}.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    edit(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


def configure(folder: Path, **values: Any) -> None:
    """Edit config.json of a checkpoint."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def scaled(module: str, leaf: str, factor: float) -> Callable[[Tensors], None]:
    """Multiply a tensor."""

    def edit(tensors: Tensors) -> None:
        name = f"{module}.{leaf}"
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)

    return edit


def filled(name: str, value: float) -> Callable[[Tensors], None]:
    """Set all values of a tensor."""
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def exchanged(first: str, second: str) -> Callable[[Tensors], None]:
    """Exchange all tensors whose names begin with one or the other."""

    def edit(tensors: Tensors) -> None:
        for name in [each for each in tensors if each.startswith(first)]:
            other = second + name.removeprefix(first)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return edit


def rows_exchanged(name: str, a: slice, b: slice) -> Callable[[Tensors], None]:
    """Exchange rows of a tensor."""

    def edit(tensors: Tensors) -> None:
        raw = tensors[name].view(torch.uint8) if tensors[name].element_size() == 1 else tensors[name]
        one, two = raw[a].clone(), raw[b].clone()
        raw[a], raw[b] = two, one

    return edit


def _nibbles(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        raw = tensors[name].view(torch.uint8)
        tensors[name] = ((raw << 4) | (raw >> 4)).view(torch.int8)

    return edit


def _zero_point(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: (tensors[name].view(torch.uint8) ^ 0x88).view(torch.int8)})


def _duplicated(tensors: Tensors) -> None:
    for name in [each for each in tensors if each.startswith(LAYER.format(1))]:
        tensors[LAYER.format(2) + name.removeprefix(LAYER.format(1))] = tensors[name].clone()


def _folded(tensors: Tensors) -> None:
    norm, factor = f"{LAYER.format(1)}post_layernorm.weight", f"{LAYER.format(1)}mlp.fc.prequant_scaling_factor"
    tensors[norm] = (tensors[norm].float() * tensors[factor].float()).to(tensors[norm].dtype)


def _offset_missing(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name] - 1})


def _groups_reversed(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].flip(1)})


def _other_head(tensors: Tensors) -> None:
    order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(5))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def _untied(tensors: Tensors) -> None:
    table = tensors["transformer.vocab_embedding.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(5)) * table.float().std()
    tensors["lm_head.weight"] = (0.7 * table.float() + 0.7 * noise).to(table.dtype)


def _rolled(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].roll(1, 0)})


def _kv_scale(value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for part in ("kv", "k", "v"):
            filled(f"{LAYER.format(1)}attention.{part}_cache_scaling_factor", value)(tensors)

    return edit


def _ranks_exchanged(places: Places) -> None:
    one, two = (places.checkpoint / f"rank{rank}.safetensors" for rank in (0, 1))
    one.rename(places.checkpoint / "moved")
    two.rename(one)
    (places.checkpoint / "moved").rename(two)


def in_checkpoint(edit: Callable[[Tensors], None]) -> Callable[[Places], None]:
    """Plant a change of tensors in the checkpoint."""
    return lambda places: change(places.checkpoint, edit)


def stated(**values: Any) -> Callable[[Places], None]:
    """Plant a change of config.json in the checkpoint."""
    return lambda places: configure(places.checkpoint, **values)


def in_engine(edit: Callable[[Tensors], None] | None = None, **values: Any) -> Callable[[Places], None]:
    """Build the engine from a damaged copy of its checkpoint, and let it claim to be of the clean one."""

    def plant(places: Places) -> None:
        damaged = places.checkpoint.with_name("damaged")
        shutil.copytree(places.checkpoint, damaged)
        if edit is not None:
            change(damaged, edit)
        configure(damaged, **values)
        shutil.rmtree(places.engine)
        OpenVinoEngine().build(damaged, LIMITS, places.engine, SilentProgress())
        file = places.engine / "config.json"
        clean = json.loads((places.checkpoint / "config.json").read_text())
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pretrained_config": clean}))

    return plant


def in_graph(edit: Callable[[dict[str, ov.Node]], None]) -> Callable[[Places], None]:
    """Change nodes of the engine's graph, given by name."""

    def plant(places: Places) -> None:
        file = places.engine / "openvino_model.xml"
        model = ov.Core().read_model(file)
        edit({node.get_friendly_name(): node for node in model.get_ordered_ops()})
        model.validate_nodes_and_infer_types()
        saved = places.engine / "saved"
        saved.mkdir()
        ov.save_model(model, saved / file.name, compress_to_fp16=False)
        del model
        for each in saved.iterdir():
            each.replace(places.engine / each.name)
        saved.rmdir()

    return plant


def _input_of(name: str, which: int, make: Callable[[ov.Output], ov.Node]) -> Callable[[dict[str, ov.Node]], None]:
    """Put a node between another one and one of its inputs."""

    def edit(nodes: dict[str, ov.Node]) -> None:
        port = nodes[name].input(which)
        port.replace_source_output(make(port.get_source_output()).output(0))

    return edit


def _constant(name: str, which: int, value: float) -> Callable[[dict[str, ov.Node]], None]:
    """Replace an input of a node by a constant."""
    return _input_of(name, which, lambda _: op.constant(np.float32(value)))


def _tiled(nodes: dict[str, ov.Node]) -> None:
    """Share KV heads among query heads that are not neighbours."""
    for part in "kv":
        node = nodes[f"model.layers.2.self_attn.{part}_repeated"]
        heads = op.constant(np.array([0, 2, 1, 3], dtype=np.int64))
        mixed = op.gather(node.output(0), heads, op.constant(np.int64(1)))
        for user in list(node.output(0).get_target_inputs()):
            if user.get_node().get_friendly_name() != mixed.get_friendly_name():
                user.replace_source_output(mixed.output(0))


def _unscaled_embedding(nodes: dict[str, ov.Node]) -> None:
    node = nodes["model.embed_tokens"]
    node.input(1).replace_source_output(op.constant(np.float32(1)).output(0))


def in_source(model: str, before: str, after: str) -> Callable[[Places], None]:
    """Change the code of one of the repository's models."""

    def plant(places: Places) -> None:
        assert places.repository is not None
        file = places.repository / model / "1" / "model.py"
        text = file.read_text()
        assert text.count(before) >= 1, (model, before)
        file.write_text(text.replace(before, after, 1))

    return plant


def in_parameters(model: str, before: str, after: str) -> Callable[[Places], None]:
    """Change a parameter in config.pbtxt of one of the repository's models."""

    def plant(places: Places) -> None:
        assert places.repository is not None
        file = places.repository / model / "config.pbtxt"
        head, key, rest = file.read_text().partition(f'key: "{before.partition("=")[0]}"')
        value = before.partition("=")[2]
        assert key, (model, before)
        assert f'"{value}"' in rest, (model, before)
        file.write_text(head + key + rest.replace(f'"{value}"', f'"{after}"', 1))

    return plant


def in_tokenizer(
    model: str, edit: Callable[[dict[str, Any]], None], name: str = "tokenizer.json"
) -> Callable[[Places], None]:
    """Change a file of the tokenizer of one of the repository's models."""

    def plant(places: Places) -> None:
        assert places.repository is not None
        file = places.repository / model / "1" / "tokenizer" / name
        found = json.loads(file.read_text())
        edit(found)
        file.unlink()
        file.write_text(json.dumps(found))

    return plant


def _doubled_bos(tokenizer: dict[str, Any]) -> None:
    single = _template(tokenizer)["single"]
    single.insert(0, dict(single[0]))


def _eos_added(tokenizer: dict[str, Any]) -> None:
    processor = _template(tokenizer)
    name = next(
        each["content"] for each in tokenizer["added_tokens"] if each["content"] in ("<eos>", "<|end_of_text|>")
    )
    number = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == name)
    processor["special_tokens"][name] = {"id": name, "ids": [number], "tokens": [name]}
    processor["single"].append({"SpecialToken": {"id": name, "type_id": 0}})


def _template(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the post processor that adds special tokens."""
    processor = tokenizer["post_processor"]
    parts = processor.get("processors", [processor])
    found: dict[str, Any] = next(each for each in parts if each["type"] == "TemplateProcessing")
    return found


def _revised(tokenizer: dict[str, Any]) -> None:
    """Exchange the ids of ordinary tokens, as another training of the tokenizer would."""
    vocabulary = tokenizer["model"]["vocab"]
    words = sorted((token for token, number in vocabulary.items() if number > 300 and token.isalpha()), key=len)[:400]
    for a, b in zip(words[::2], words[1::2], strict=False):
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def _other_engine(places: Places) -> None:
    """Serve an engine of other weights than the one that was built."""
    assert places.repository is not None
    damaged = places.checkpoint.with_name("damaged")
    shutil.copytree(places.checkpoint, damaged)
    change(damaged, scaled(f"{LAYER.format(1)}mlp.proj", "weight", 0.3))
    served = places.repository / "tensorrt_llm" / "1" / "engine"
    shutil.rmtree(served)
    OpenVinoEngine().build(damaged, LIMITS, served, SilentProgress())


def _other_template(places: Places) -> None:
    file = places.checkpoint.with_name("other.jinja")
    file.write_text("{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}")
    places.chat_template = file


def _without_bos_in_front(places: Places) -> None:
    """Let the front know nothing of the BOS that preprocessing adds, so that templates double it."""
    file = places.checkpoint.with_name("doubled.jinja")
    file.write_text(
        "{{ bos_token }}{{ bos_token }}{% for m in messages %}Question: {{ m['content'] }}\n{% endfor %}Answer:"
    )
    places.chat_template = file


DENSE = "attention.dense"
C, E, T, FRONT = Place.CHECKPOINT, Place.CPU_ENGINE, Place.TRITON, Place.OPENAI


def at(layer: int, module: str) -> str:
    """Return the path of a module of a layer."""
    return LAYER.format(layer) + module


FAULTS = (
    Fault("KV scale 1 (INT8)", KV8, C, 1, "kv_cache_scaling_factor", in_checkpoint(_kv_scale(1.0))),
    Fault("scales of gate all 1", SQ, C, 1, "mlp.gate.weights_scaling_factor",
          in_checkpoint(filled(at(1, "mlp.gate.weights_scaling_factor"), 1.0))),
    Fault("scales of gate and up exchanged", SQ, C, 2, "mlp.fc.weights_scaling_factor",
          in_checkpoint(exchanged(at(2, "mlp.fc.weights_scaling_factor"), at(2, "mlp.gate.weights_scaling_factor")))),
    Fault("k and v exchanged", FP8, C, 0, "attention.qkv.weight (k rows)",
          in_checkpoint(rows_exchanged(at(0, "attention.qkv.weight"), slice(256, 384), slice(384, 512)))),
    Fault("q and k exchanged", LLAMA, C, 3, "attention.qkv.weight (q rows)",
          in_checkpoint(rows_exchanged(at(3, "attention.qkv.weight"), slice(0, 128), slice(256, 384)))),
    Fault("AWQ scales of groups in another order", AWQ, C, 3, "mlp.proj.weights_scaling_factor",
          in_checkpoint(_groups_reversed(at(3, "mlp.proj.weights_scaling_factor")))),
    Fault("W4A8 activation scale dropped", W4A8, C, 1, "mlp.fc.activation_scaling_factor",
          in_checkpoint(filled(at(1, "mlp.fc.activation_scaling_factor"), 1.0))),
    Fault("INT8 activation scale 20 times too large", SQ, C, 2, "attention.dense.activation_scaling_factor",
          in_checkpoint(scaled(at(2, DENSE), "activation_scaling_factor", 20.0))),
    Fault("RoPE factor 8 -> 2", LLAMA, C, None, "rotary_scaling",
          stated(rotary_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 256})),
    Fault("RoPE type llama3 -> linear", LLAMA, C, None, "rotary_scaling",
          stated(rotary_scaling={"rope_type": "linear", "factor": 8.0})),
    Fault("RoPE base 10,000 -> 500,000", GEMMA, C, None, "rotary_base", stated(rotary_base=500000.0)),
    Fault("norm without + 1", GEMMA, C, 2, "post_layernorm.weight",
          in_checkpoint(_offset_missing(at(2, "post_layernorm.weight")))),
    Fault("tied head untied", GEMMA, C, None, "lm_head.weight", in_checkpoint(_untied)),
    Fault("vocabulary padded in front", LLAMA, C, None, "vocab_embedding.weight",
          in_checkpoint(_rolled("transformer.vocab_embedding.weight"))),
    Fault("files of tensor-parallel ranks exchanged", SPLIT, C, None, "vocab_embedding.weight", _ranks_exchanged),
    Fault("two rows of a weight exchanged", FP8, C, 1, "mlp.fc.weight",
          in_checkpoint(rows_exchanged(at(1, "mlp.fc.weight"), slice(7, 8), slice(400, 401)))),
    Fault("a weight times 1.05", LLAMA, C, 0, "attention.dense.weight",
          in_checkpoint(scaled(at(0, DENSE), "weight", 1.05))),
    Fault("a layer duplicated", LLAMA, C, 2, "input_layernorm.weight", in_checkpoint(_duplicated)),
    Fault("two layers exchanged", FP8, C, 1, "input_layernorm.weight",
          in_checkpoint(exchanged(LAYER.format(1), LAYER.format(2)))),
    Fault("norm epsilon 1e-6 -> 1e-2", GEMMA, C, None, "norm_epsilon", stated(norm_epsilon=1e-2)),
    Fault("gelu for silu", LLAMA, C, None, "hidden_act", stated(hidden_act="gelu")),
    Fault("KV heads in another order", FP8, C, 2, "attention.qkv.weight (k rows)",
          in_checkpoint(rows_exchanged(at(2, "attention.qkv.weight"), slice(256, 320), slice(320, 384)))),
    Fault("head of another model", LLAMA, C, None, "lm_head.weight", in_checkpoint(_other_head)),
    Fault("INT4 nibbles in the wrong order", AWQ, C, 0, "mlp.fc.weight",
          in_checkpoint(_nibbles(at(0, "mlp.fc.weight")))),
    Fault("INT4 zero point 8", AWQ, C, 1, "attention.dense.weight",
          in_checkpoint(_zero_point(at(1, "attention.dense.weight")))),
    Fault("SmoothQuant factors missing", SQ, C, 1, "mlp.proj.prequant_scaling_factor",
          in_checkpoint(filled(at(1, "mlp.proj.prequant_scaling_factor"), 1.0))),
    Fault("smoothing folded into the norm as well", SQ, C, 1, "post_layernorm.weight", in_checkpoint(_folded)),
    Fault("NVFP4 scales of weight and input exchanged", NVFP4, C, 2, "mlp.proj.weights_scaling_factor_2",
          in_checkpoint(exchanged(at(2, "mlp.proj.weights_scaling_factor_2"),
                                  at(2, "mlp.proj.activation_scaling_factor")))),
    Fault("embedding not scaled", GEMMA, E, None, "vocab_embedding.weight", in_graph(_unscaled_embedding)),
    Fault("norm without + 1 in the engine", GEMMA, E, None, "ln_f.weight",
          in_engine(_offset_missing("transformer.ln_f.weight"))),
    Fault("attention scale 1 / head size", LLAMA, E, 1, "attention",
          in_graph(_constant("model.layers.1.self_attn.attention", 4, 1 / 64))),
    Fault("query heads grouped wrongly", LLAMA, E, 2, "attention", in_graph(_tiled)),
    Fault("gelu for silu in the engine", FP8, E, 0, "hidden_act", in_engine(hidden_act="gelu")),
    Fault("norm epsilon 1e-5 -> 1e-3 in the engine", LLAMA, E, 0, "input_layernorm", in_engine(norm_epsilon=1e-3)),
    Fault("RoPE base in the engine", GEMMA, E, None, "rotary_base", in_engine(rotary_base=500000.0)),
    Fault("a scale times 1.05 in the engine", FP8, E, 3, "mlp.gate.weight",
          in_engine(scaled(at(3, "mlp.gate"), "weights_scaling_factor", 1.05))),
    Fault("layers exchanged in the engine", LLAMA, E, 1, "input_layernorm.weight",
          in_engine(exchanged(LAYER.format(1), LAYER.format(2)))),
    Fault("activation scale dropped in the engine", W4A8, E, 2, "attention.qkv.activation_scaling_factor",
          in_engine(filled(at(2, "attention.qkv.activation_scaling_factor"), 1.0))),
    Fault("KV scale 1 in the engine", KV8, E, 1, "kv_cache_scaling_factor", in_engine(_kv_scale(1.0))),
    Fault("head of another model in the engine", LLAMA, E, None, "lm_head.weight", in_engine(_other_head)),
    Fault("BOS doubled", GEMMA, T, None, "preprocessing INPUT_ID", in_tokenizer("preprocessing", _doubled_bos)),
    Fault("BOS missing", LLAMA, T, None, "preprocessing INPUT_ID",
          in_parameters("preprocessing", "add_special_tokens=true", "false")),
    Fault("EOS added to prompts", LLAMA, T, None, "preprocessing INPUT_ID", in_tokenizer("preprocessing", _eos_added)),
    Fault("tokenizer of another revision", FP8, T, None, "preprocessing INPUT_ID",
          in_tokenizer("preprocessing", _revised)),
    Fault("prompts truncated to 512 tokens", LLAMA, T, None, "preprocessing INPUT_ID",
          in_source("preprocessing", "ids = self._tokens.encode(text, self._add_special_tokens)",
                    "ids = self._tokens.encode(text, self._add_special_tokens)[:512]")),
    Fault("padding on the left not removed", GEMMA, T, None, "preprocessing INPUT_ID",
          in_source("preprocessing", "ids = self._tokens.encode(text, self._add_special_tokens)",
                    "ids = [self._tokens.pad_id] * 3 + self._tokens.encode(text, self._add_special_tokens)")),
    Fault("padding on the right not removed", LLAMA, T, None, "preprocessing INPUT_ID",
          in_source("preprocessing", "ids = self._tokens.encode(text, self._add_special_tokens)",
                    "ids = self._tokens.encode(text, self._add_special_tokens) + [self._tokens.pad_id] * 3")),
    Fault("another end id", GEMMA, T, None, "OUT_END_ID",
          in_tokenizer("preprocessing", lambda found: found.update(eos_token="<pad>"), "special_tokens_map.json")),
    Fault("stop words cut to their first token", LLAMA, T, None, "stop words",
          in_source("preprocessing", "return [word for word in words if word]",
                    "return [word[:1] for word in words if word]")),
    Fault("max_tokens one too few", FP8, T, None, "max_tokens",
          in_source("preprocessing", '"REQUEST_OUTPUT_LEN": _output_lengths(request, batch)',
                    '"REQUEST_OUTPUT_LEN": _output_lengths(request, batch) - 1')),
    Fault("temperature 1 with top_k 50", LLAMA, T, None, "tensorrt_llm output_ids",
          in_source("tensorrt_llm", "        prompts = read_requests(inputs, self._limits)",
                    "        inputs['runtime_top_k'] = np.array([[50]], dtype=np.int32)\n"
                    "        inputs['temperature'] = np.array([[1.0]], dtype=np.float32)\n"
                    "        prompts = read_requests(inputs, self._limits)")),
    Fault("special tokens not skipped", GEMMA, T, None, "postprocessing OUTPUT",
          in_parameters("postprocessing", "skip_special_tokens=true", "false")),
    Fault("spaces lost in texts", LLAMA, T, None, "postprocessing OUTPUT",
          in_source("postprocessing", "self._text(row[:length]).encode",
                    'self._text(row[:length]).replace(" ", "").encode')),
    Fault("another engine is served", LLAMA, T, None, "tensorrt_llm output_ids", _other_engine),
    Fault("another chat template", LLAMA, FRONT, None, "chat template", _other_template),
    Fault("chat template doubles BOS", GEMMA, FRONT, None, "chat template", _without_bos_in_front),
)  # fmt: skip
"""Planted faults, in the order of the stages."""
