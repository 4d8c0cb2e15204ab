"""Prune a model folder: narrower layers, or fewer of them.

Importance by activations and the loss without a layer: Muralidharan et al., "Compact Language Models via Pruning and
Knowledge Distillation" (2024), sections 2.1 and 2.2. That the norm of an activation is multiplied by the norm of the
weights that read it: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (2023).

Shapes: B sequences, T tokens, I channels of the MLP or of all heads, O outputs, N heads, D channels of a head.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipelines.compress import transformers_door
from pipelines.compress.calibration import (
    CalibrationSet,
    ProgressRecord,
    calibrated_on,
    make_batches,
    new_files_removed,
    run_batch,
    seed_everything,
    stamp,
)
from pipelines.compress.config import CalibrationSettings, PruningSettings
from pipelines.compress.contexts import BATCHES, gpu_memory_named, muted
from pipelines.compress.loading import load_model, load_tokenizer
from pipelines.compress.model_folder import ModelFolder, look_at, own_dtype, pick_device
from pipelines.compress.one_layer import HiddenStates, LayerSource
from pipelines.compress.sparsifying import PrunedFolder
from pipelines.compress.specs import pruned_shape
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SILENT, Progress

MLP, HEADS = "mlp.down_proj", "self_attn.o_proj"
"""Linears that read what is pruned: MLP channels, and the outputs of heads."""
Indexes = dict[str, torch.Tensor]
"""What stays of a layer, int64 and ascending: "mlp" channels, "heads" and "kv_heads"."""


def prune_model(
    model_dir: Path,
    out_dir: Path,
    pruning: PruningSettings,
    texts: Iterable[str],
    calibration: CalibrationSettings,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Remove MLP channels, attention heads or layers of a Hugging Face model.

    A stopped run goes on from the last complete layer, or from the last layer that was dropped.

    Args:
        model_dir: plain Hugging Face folder.
        out_dir: receives a complete Hugging Face folder whose config.json has the smaller sizes; files that do not
            change are hard-linked where possible.
        pruning: the method and the sizes.
        texts: on which importance is observed.
        calibration: how many texts to use and how to cut them.
        device: "cpu", "cuda" or "auto".
        progress: shows layers.

    Returns:
        JSON-serializable facts: sizes, parameters and bytes before and after; for width the heads that stay and the
        share of importance that stays in each layer; for depth the dropped layers in order, and the loss after each.

    Raises:
        UserError: the model cannot be pruned to these sizes, the texts are empty, a value is not finite.
    """
    assert pruning.texts is not None, "checked by the settings"
    source = look_at(model_dir)
    shape = pruned_shape(pruning, source.shape)
    seed_everything()
    device = pick_device(device)
    with muted():
        data = make_batches(texts, load_tokenizer(source), calibration, pruning.texts)
        with new_files_removed(out_dir), gpu_memory_named("pruning", BATCHES):
            identity = {
                "prune": [pruning.model_dump(), device],
                "model": stamp(source),
                "calibration": calibrated_on(calibration, data),
                "tools": [torch.__version__, transformers_door.VERSION],
            }
            record = ProgressRecord(out_dir, identity)
            way = _drop_layers if pruning.method == "depth" else _narrow
            folder = way(source, shape, data, out_dir, record, device, progress)
            sizes, notes = folder.finish(shape), dict(record.notes)
            record.close()
    return {
        "method": pruning.method,
        "device": device,
        "calibration": {"sequences": data.sequences, "tokens": data.tokens},
        "sizes_before": _sizes(source.shape),
        "sizes_after": _sizes(shape),
        **sizes,
        **notes,
    }


def _sizes(shape: ModelShape) -> dict[str, int]:
    return {
        "layers": shape.num_hidden_layers,
        "mlp": shape.intermediate_size,
        "heads": shape.num_attention_heads,
        "kv_heads": shape.num_key_value_heads,
    }


def _narrow(
    source: ModelFolder,
    shape: ModelShape,
    data: CalibrationSet,
    out_dir: Path,
    record: ProgressRecord,
    device: str,
    progress: Progress,
) -> PrunedFolder:
    """Keep the most important channels and heads of every layer, one layer at a time.

    A layer is judged on the outputs of the unpruned layers before it. The share of the squared importance that stays
    is noted for each layer.
    """
    layers = LayerSource(source, own_dtype(source), device)
    folder = PrunedFolder(source, out_dir, [*range(layers.layers)], lambda name, was: _smaller(name, was, shape))
    states = HiddenStates(record.folder, layers, data)
    writer = folder.reopen() if record.layers else folder.create()
    record.announce(layers.layers, progress)
    with progress.task("pruning width", layers.layers - record.layers, "layers") as advance:
        for number in range(record.layers, layers.layers):
            states.prepare(number)
            scores = _layer_scores(layers.load(number).model.layers[0], states, number)
            indexes, shares = _most_important(scores, shape)
            for name, file, new in folder.changed(number):
                weight = layers.weights.tensor(name, layers.weights.dtype(name))
                writer.write(file, new, iter([_part(name, weight, indexes, shape.head_dim)]))
            writer.sync()
            _note(record, indexes, shares, shape)
            record.complete(number + 1)
            advance(1)
    return folder


def _layer_scores(layer: torch.nn.Module, states: HiddenStates, number: int) -> dict[str, torch.Tensor]:
    """Run the layer over all states, and return activation x weight norm of the inputs of both linears, float32 [I].

    The norm of an activation is its root mean square over all tokens.
    """
    squares, tokens = dict[str, torch.Tensor](), dict[str, int]()

    def watch(name: str, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows_ti = inputs[0].detach().flatten(0, -2).float()
        squares[name] = squares.get(name, 0) + rows_ti.square().sum(dim=0)
        tokens[name] = tokens.get(name, 0) + len(rows_ti)

    with torch.no_grad(), ExitStack() as hooks:
        for name in (MLP, HEADS):
            hooks.enter_context(layer.get_submodule(name).register_forward_pre_hook(partial(watch, name)))
        states.write(number + 1, 1, states.outputs(layer, number, 1))
    return {
        name: (total / tokens[name]).sqrt() * layer.get_parameter(f"{name}.weight").float().norm(dim=0)
        for name, total in squares.items()
    }


def _most_important(scores: dict[str, torch.Tensor], shape: ModelShape) -> tuple[Indexes, dict[str, float]]:
    """Return what stays of a layer, and the shares of the squared importance that stay."""
    channels_i = scores[MLP].square()
    heads_n = scores[HEADS].square().reshape(-1, shape.head_dim).sum(dim=1)
    mlp = channels_i.topk(shape.intermediate_size).indices.sort().values
    heads_each = shape.num_attention_heads // shape.num_key_value_heads
    groups = heads_n.reshape(shape.unpruned.num_key_value_heads, -1)
    best = groups.topk(heads_each, dim=1)  # the same number of query heads for each KV head
    kv = best.values.sum(dim=1).topk(shape.num_key_value_heads).indices.sort().values
    heads = (kv[:, None] * groups.shape[1] + best.indices[kv].sort(dim=1).values).flatten()
    shares = {"mlp": channels_i[mlp].sum() / channels_i.sum(), "heads": heads_n[heads].sum() / heads_n.sum()}
    top = {"mlp": mlp, "heads": heads, "kv_heads": kv}
    return {name: index.cpu() for name, index in top.items()}, {name: float(share) for name, share in shares.items()}


def _note(record: ProgressRecord, indexes: Indexes, shares: dict[str, float], shape: ModelShape) -> None:
    """Note for the facts which heads of a layer stay, and the shares, of what is pruned."""
    noted = record.notes.setdefault("importance_kept", {})
    if shape.num_attention_heads < shape.unpruned.num_attention_heads:
        record.notes.setdefault("kept_heads", []).append(indexes["heads"].tolist())
        noted.setdefault("heads", []).append(round(shares["heads"], 6))
    if shape.intermediate_size < shape.unpruned.intermediate_size:
        noted.setdefault("mlp", []).append(round(shares["mlp"], 6))


def _cut(name: str) -> tuple[int, str] | None:
    """Return along which dimension a tensor of a layer is cut, and by what; None if it stays whole."""
    module, _, kind = name.rpartition(".")
    parts = {"gate_proj": "mlp", "up_proj": "mlp", "q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"}
    inputs = {"down_proj": "mlp", "o_proj": "heads"}
    linear = module.rpartition(".")[2]
    if linear in parts:
        return 0, parts[linear]
    return (1, inputs[linear]) if linear in inputs and kind == "weight" else None


def _smaller(name: str, was: tuple[int, ...], shape: ModelShape) -> tuple[int, ...]:
    """Return the shape of a layer's tensor in the narrower model."""
    if (cut := _cut(name)) is None:
        return was
    sizes = {
        "mlp": shape.intermediate_size,
        "heads": shape.num_attention_heads * shape.head_dim,
        "kv_heads": shape.num_key_value_heads * shape.head_dim,
    }
    dim, what = cut
    return (*was[:dim], sizes[what], *was[dim + 1 :])


def _part(name: str, weight: torch.Tensor, indexes: Indexes, head_dim: int) -> torch.Tensor:
    """Return what stays of a weight or a bias."""
    cut = _cut(name)
    assert cut is not None, "only what becomes smaller is cut"
    dim, what = cut
    index = indexes[what]
    if what != "mlp":
        index = (index[:, None] * head_dim + torch.arange(head_dim)).flatten()
    return weight.index_select(dim, index)


def _drop_layers(
    source: ModelFolder,
    shape: ModelShape,
    data: CalibrationSet,
    out_dir: Path,
    record: ProgressRecord,
    device: str,
    progress: Progress,
) -> PrunedFolder:
    """Drop one layer after another, each time the one without which the loss on the texts is lowest.

    The model is in memory as a whole. Notes the dropped layers in order and the loss after each.
    """
    model: Any = load_model(source, own_dtype(source), device)
    layers, kinds = list(model.model.layers), getattr(model.config, "layer_types", None)
    dropped: list[int] = record.notes.setdefault("dropped", [])
    losses: list[float] = record.notes.setdefault("losses", [])
    record.announce(len(layers) - shape.num_hidden_layers, progress)

    def loss(numbers: list[int]) -> float:
        model.model.layers = torch.nn.ModuleList(layers[number] for number in numbers)
        model.config.num_hidden_layers = len(numbers)
        if kinds:
            model.config.layer_types = [kinds[number] for number in numbers]
        return _loss(model, data, device)

    remaining = [number for number in range(len(layers)) if number not in dropped]
    if "loss_before" not in record.notes:
        record.notes["loss_before"] = round(loss(remaining), 6)
    runs = sum(range(shape.num_hidden_layers + 1, len(remaining) + 1))
    with progress.task("dropping layers", runs, "passes") as advance:
        while len(remaining) > shape.num_hidden_layers:
            without = {}
            for number in remaining:
                without[number] = loss([other for other in remaining if other != number])
                advance(1)
            least = min(without, key=lambda number: without[number])
            remaining.remove(least)
            dropped.append(least)
            losses.append(round(without[least], 6))
            record.complete(len(dropped))
    folder = PrunedFolder(source, out_dir, remaining)
    folder.create()
    return folder


@torch.no_grad()
def _loss(model: torch.nn.Module, data: CalibrationSet, device: str) -> float:
    """Return the mean cross entropy of the next token, in nats."""
    total, count = 0.0, 0
    for batch_bt in data.batches:
        if batch_bt.shape[1] < 2:
            continue
        ids = batch_bt.to(device)
        logits = run_batch(model, ids, logits_to_keep=0)[:, :-1].float()
        following = ids[:, 1:].flatten()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), following, reduction="sum"))
        count += following.numel()
    return total / count
