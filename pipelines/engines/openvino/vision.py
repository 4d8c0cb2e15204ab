"""LLaVA's encoder and projector as an OpenVINO graph: tiles of pictures in, rows of a prompt table out.

Input: pixel_values [B, 3, S, S], float32. Output: features [B, of a tile, H of the language model], float32. A picture
is one tile in LLaVA 1.5, and several in 1.6, whose rows are arranged by the prompt that names them (`Tiling.rows`).
Weights keep the type of the folder; they are never quantized. Arithmetic: Transformers 5.14 `CLIPVisionModel` up to
the layer that LLaVA takes its features from, `LlavaMultiModalProjector`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.checkpoint.llava import NEWLINE, VisionShape, image_processor, vision_name
from pipelines.checkpoint.pictures import Tiling, decode, tiles_of
from pipelines.checkpoint.tensors import TensorFile, stored_tensors
from pipelines.domain.errors import UserError
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.build import CONFIG_FILE, MODEL_FILE, mark_16_bit_weights, runtime_version, save_graph
from pipelines.engines.openvino.memory import inference_precision
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.pictures import MARK, ROW_BITS, ScoredPictures
from pipelines.host.files import parse_json, small_text

Array = np.ndarray[Any, Any]

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training data, where the folder's processor names no others."""
_TYPES = {"F32": ov.Type.f32, "F16": ov.Type.f16, "BF16": ov.Type.bf16}


class _Weights:
    """The tensors of encoder and projector, by `vision_name`; owns constant buffers until the model is saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffers: list[Array] = []
        self._found = stored_tensors(folder, vision_name)

    def array(self, name: str) -> Array:
        """Return a small tensor in float32.

        Raises:
            UserError: there is none.
        """
        file, stored = self._place(name)
        return file[stored].astype(np.float32)

    def constant(self, name: str) -> ov.Node:
        """Return a matrix in its own type, converted to float32 where it is used."""
        file, stored = self._place(name)
        info = file.header[stored]
        flat = np.ascontiguousarray(file[stored]).reshape(-1).view(np.uint8)
        self._buffers.append(flat)
        constant = op.constant(ov.Tensor(flat, ov.Shape(list(info.shape)), _TYPES[info.dtype]), shared_memory=True)
        return constant if info.dtype == "F32" else op.convert(constant, "f32")

    def linear(self, module: str, x: ov.Node) -> ov.Node:
        """Apply a linear layer with a bias."""
        product = op.matmul(x, self.constant(f"{module}.weight"), transpose_a=False, transpose_b=True)
        return op.add(product, self.array(f"{module}.bias")) if f"{module}.bias" in self._found else product

    def _place(self, name: str) -> tuple[TensorFile, str]:
        if name not in self._found:
            raise UserError(f"{self._folder} has no tensor '{name}'.", todo="Download the model again.")
        file, stored = self._found[name]
        if file.header[stored].dtype not in _TYPES:
            raise UserError(f"{self._folder}: '{stored}' has the type {file.header[stored].dtype}.")
        return file, stored


def build_vision(folder: Path, out_dir: Path) -> dict[str, Any]:
    """Write the engine of a LLaVA folder's encoder: graph, weights, and config.json with how pictures are prepared.

    Returns:
        facts: `engine_bytes`, `visual_tokens`; of LLaVA 1.6, where that is the most, the most `tiles` too.

    Raises:
        UserError: the folder is of another kind, or a tensor is missing.
    """
    shape = VisionShape.read(folder)
    weights = _Weights(folder)
    model = _graph(shape, weights)
    out_dir.mkdir(parents=True, exist_ok=True)
    save_graph(model, out_dir / MODEL_FILE)
    mark_16_bit_weights(out_dir / MODEL_FILE)
    processor = image_processor(folder)
    description = {
        "version": runtime_version(),
        "image_size": shape.image_size,
        "visual_tokens": shape.visual_tokens,
        "hidden_size": shape.output_size,
        "image_token_id": shape.image_token,
        "image_mean": list(processor.get("image_mean", MEAN)),
        "image_std": list(processor.get("image_std", STD)),
    }
    if shape.grids:
        tiles = {"tile_features": shape.tiling.features, "image_grid_pinpoints": shape.grids}
        description |= {**tiles, NEWLINE: weights.array(NEWLINE).tolist()}
    (out_dir / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out_dir.iterdir() if path.is_file())
    tiles = {"tiles": shape.tiling.most_tiles} if shape.grids else {}
    return {"engine_bytes": size, "visual_tokens": shape.visual_tokens, **tiles}


def _graph(shape: VisionShape, weights: _Weights) -> ov.Model:
    side, hidden, tower = shape.image_size, shape.hidden_size, "vision_tower"
    pixels = op.parameter(ov.PartialShape([-1, 3, side, side]), ov.Type.f32)
    pixels.set_friendly_name("pixel_values")
    pixels.get_output_tensor(0).set_names({"pixel_values"})
    kernel, step = weights.constant(f"{tower}.embeddings.patch_embedding.weight"), [shape.patch_size] * 2
    patches = op.convolution(pixels, kernel, step, [0, 0], [0, 0], [1, 1])
    flat = op.reshape(patches, np.array([0, hidden, -1], dtype=np.int64), special_zero=True)
    x = op.transpose(flat, np.array([0, 2, 1], dtype=np.int64))
    batch = op.gather(op.shape_of(x), np.array([0], dtype=np.int64), np.int64(0))
    one = weights.array(f"{tower}.embeddings.class_embedding").reshape(1, 1, hidden)
    first = op.broadcast(op.constant(one), op.concat([batch, np.array([1, hidden], dtype=np.int64)], 0))
    x = op.add(op.concat([first, x], 1), weights.array(f"{tower}.embeddings.position_embedding.weight")[None])
    x = _norm(shape, weights, f"{tower}.pre_layrnorm", x)
    for layer in range(shape.layers):
        name = f"{tower}.encoder.layers.{layer}"
        x = op.add(x, _attention(shape, weights, name, _norm(shape, weights, f"{name}.layer_norm1", x)))
        inner = weights.linear(f"{name}.mlp.fc1", _norm(shape, weights, f"{name}.layer_norm2", x))
        x = op.add(x, weights.linear(f"{name}.mlp.fc2", _act(shape.act, inner)))
    if not shape.keeps_class:
        bounds = (np.array([value], dtype=np.int64) for value in (1, np.iinfo(np.int64).max, 1, 1))
        x = op.slice(x, *bounds)
    inner = _act(shape.projector_act, weights.linear("multi_modal_projector.linear_1", x))
    result = op.result(weights.linear("multi_modal_projector.linear_2", inner))
    result.get_output_tensor(0).set_names({"features"})
    return ov.Model([result], [pixels], "vision")


def _norm(shape: VisionShape, weights: _Weights, name: str, x: ov.Node) -> ov.Node:
    normed = op.mvn(x, np.array([2], dtype=np.int64), True, shape.epsilon, "INSIDE_SQRT")
    return op.add(op.multiply(normed, weights.array(f"{name}.weight")), weights.array(f"{name}.bias"))


def _act(name: str, x: ov.Node) -> ov.Node:
    if name == "quick_gelu":
        return op.multiply(x, op.sigmoid(op.multiply(x, np.float32(1.702))))
    return op.gelu(x, "erf")


def _attention(shape: VisionShape, weights: _Weights, name: str, x: ov.Node) -> ov.Node:
    size = shape.hidden_size // shape.heads
    split = np.array([0, 0, shape.heads, size], dtype=np.int64)
    turned = np.array([0, 2, 1, 3], dtype=np.int64)
    q, k, v = (
        op.transpose(op.reshape(weights.linear(f"{name}.self_attn.{part}_proj", x), split, special_zero=True), turned)
        for part in "qkv"
    )
    attended = op.transpose(op.scaled_dot_product_attention(q, k, v), turned)
    merged = op.reshape(attended, np.array([0, 0, shape.hidden_size], dtype=np.int64), special_zero=True)
    return weights.linear(f"{name}.self_attn.out_proj", merged)


class VisionEncoder:
    """An encoder's engine, loaded."""

    def __init__(self, folder: Path, options: OpenVinoSettings | None = None) -> None:
        """Compile.

        Raises:
            UserError: the folder is no engine of an encoder.
        """
        if not (folder / MODEL_FILE).is_file():
            raise UserError(f"{folder} is not the engine of a vision encoder: it has no {MODEL_FILE}.")
        options = options or OpenVinoSettings()
        chosen: dict[str, Any] = {"INFERENCE_PRECISION_HINT": inference_precision(options)}
        if options.num_threads is not None:
            chosen["INFERENCE_NUM_THREADS"] = options.num_threads
        described = parse_json(small_text(folder / CONFIG_FILE))
        self._tiling, self.hidden_size = Tiling.of(described), int(described["hidden_size"])
        self._newline = np.array(described.get(NEWLINE, []), dtype=np.float32).reshape(-1, self.hidden_size)
        self._mean, self._std = (np.array(described[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        self._model = ov.Core().compile_model(folder / MODEL_FILE, "CPU", chosen)

    def features(self, pixels: Array) -> Array:
        """Return float32 [B, features of a tile, H] of prepared tiles [B, 3, S, S].

        Raises:
            UserError: they have another size, or values that are not finite.
        """
        side = self._tiling.side
        if pixels.shape[1:] != (3, side, side):
            raise UserError(
                f"A picture came as {list(pixels.shape[1:])}.", allowed=f"The encoder takes [3, {side}, {side}]."
            )
        if not np.isfinite(pixels).all():
            raise UserError("A picture has values that are NaN or infinite.")
        return np.array(self._model(np.ascontiguousarray(pixels, dtype=np.float32))["features"])

    def table(self, features: Array) -> Array:
        """Return the rows [N, H] of features [tiles, features of a tile, H]; in LLaVA 1.6, `image_newline` is last."""
        return np.concatenate([features.reshape(-1, self.hidden_size), self._newline])

    def prepared(self, image: bytes) -> Array:
        """Return a picture's file as the encoder takes it, float32 [tiles, 3, S, S]."""
        return tiles_of(decode(image), self._tiling, self._mean, self._std)


class VisualRows:
    """Turns ids of pictures into rows of the prompt table of one inference.

    Attributes:
        at_once: pictures for which the table has room.
    """

    def __init__(self, pictures: ScoredPictures, engine: EngineFolder, options: OpenVinoSettings) -> None:
        """Load the encoder beside an engine.

        Raises:
            UserError: the engine was built without a prompt table.
        """
        self._table_rows = engine.limits.max_prompt_embedding_table_size
        if not self._table_rows:
            raise UserError(
                "The engine was built without a prompt table, so that it takes no pictures.",
                todo="Build it with multimodal=llava.",
            )
        self.at_once = max(1, self._table_rows // pictures.tokens)
        self._pictures, self._vocab_size = pictures, engine.config.vocab_size
        self._encoder = VisionEncoder(pictures.encoder, options)
        self._features: dict[int, Array] = {}

    def __call__(self, ids: Array) -> tuple[Array, Array]:
        """Return token ids that name rows, and the rows [N, H], float32; N is 1 where there is no picture."""
        seen = ids >= MARK
        marks = np.unique(ids[seen])
        if len(marks) > self._table_rows:
            raise UserError(
                f"{len(marks)} visual tokens are scored together; the engine's prompt table has {self._table_rows}.",
                todo="Build with a larger build.max_prompt_embedding_table_size.",
            )
        keys = np.unique(marks - MARK >> ROW_BITS).tolist()
        missing = [key for key in keys if key not in self._features]
        cached = {key: self._features[key] for key in keys if key in self._features}  # of a picture that is cut in two
        if missing:
            tiles = [self._encoder.prepared(self._pictures.image(key)) for key in missing]
            ends = np.cumsum([len(each) for each in tiles])[:-1]
            found = np.split(self._encoder.features(np.concatenate(tiles)), ends)
            cached |= zip(missing, map(self._encoder.table, found), strict=True)
        self._features = cached
        rows = [cached[mark - MARK >> ROW_BITS][mark & (1 << ROW_BITS) - 1] for mark in marks.tolist()]
        table = np.stack(rows) if rows else np.zeros((1, self._encoder.hidden_size), dtype=np.float32)
        places = np.searchsorted(marks, ids) if rows else ids
        return np.ascontiguousarray(np.where(seen, self._vocab_size + places, ids)), table
