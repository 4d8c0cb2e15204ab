"""The weights that training changes, and the forward pass that sees them as the written model will have them.

A linear computes with its weight plus its low-rank branch, zeros of 2:4 sparsity kept, narrowed to the type that is
written and rounded as the format will round it. Gradients pass straight through the rounding.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.unified import fused_with
from pipelines.compress.config import QuantSettings
from pipelines.compress.model_folder import ModelFolder, ModelWeights, TensorWriter, pick_dtype, torch_dtype
from pipelines.compress.sharding import collected, load_weights, owners, shard
from pipelines.compress.sparsegpt import LINEARS
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.traced import nearest_e2m1
from pipelines.domain.formats import (
    FORMATS,
    FP4_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AT_BUILD,
    INT4_WEIGHTS,
    INT8_AT_BUILD,
    WeightKind,
)

# Weights as formats round them, for training that computes with what will be served.
#
# Only formats that round a weight by what it is alone can be known before they are applied (`FormatSpec.rounds_alone`).
# Each function computes in float32 what the exporter, or the engine build where that quantizes, makes of 16-bit
# weights; a test holds them against the checkpoints.
#
# Shapes: O output and I input channels.

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_LEAST = 2.0**-9

Round = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Weights [O, I], the largest absolute weight of all linears that share a scale, and the group size -> rounded."""


class StraightThrough(torch.autograd.Function):
    """Applies a function whose gradient is taken to be 1."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what the function makes of the weight."""
        return function(weight)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on as it is."""
        return gradient, None


def rounder(rounding: QuantSettings) -> Round:
    """Return the function that rounds as a format does."""
    return _ROUND[FORMATS[rounding.qformat].weights]


def _at_build(bits: int, weight: torch.Tensor, _largest: torch.Tensor, _group: int) -> torch.Tensor:
    """Round as `checkpoint.read.quantize_weight_only`; the scale is stored in the weights' type."""
    bound, values = 2 ** (bits - 1), weight.float()
    scale = values.abs().amax(dim=1, keepdim=True) / bound
    scaled = values / _not_zero(scale)
    codes = torch.copysign(torch.floor(scaled.abs() + 0.5), scaled).clamp(-bound, bound - 1)
    rounded: torch.Tensor = codes * scale.to(weight.dtype).float()
    return rounded


def _int4_groups(weight: torch.Tensor, _largest: torch.Tensor, group: int) -> torch.Tensor:
    """Round as ModelOpt's `pack_int4_in_uint8`, with the scale from the largest weight of each group."""
    values = _groups(weight, group)
    scale = values.abs().amax(dim=-1, keepdim=True) / 7
    codes = (values / _not_zero(scale)).round().clamp(-8, 7)
    return (codes * scale).reshape(weight.shape)


def _fp8(weight: torch.Tensor, largest: torch.Tensor, _group: int) -> torch.Tensor:
    """Round as ModelOpt's `to_quantized_weight` for FP8, with one scale for the tensor."""
    scale = largest.float() / E4M3_MAX
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _fp4(weight: torch.Tensor, largest: torch.Tensor, group: int) -> torch.Tensor:
    """Round as ModelOpt's `NVFP4QTensor`: an E4M3 scale for each group, under a scale of the tensor."""
    values, second = _groups(weight, group), largest.float() / (E2M1_MAX * E4M3_MAX)
    scale = _not_zero(values.abs().amax(dim=-1, keepdim=True) / (E2M1_MAX * second)).clamp(E4M3_LEAST, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() * second
    scaled = values / scale
    return (torch.copysign(nearest_e2m1(scaled.abs()), scaled) * scale).reshape(weight.shape)


def _groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.float().reshape(weight.shape[0], -1, group)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


_ROUND: dict[WeightKind, Round] = {
    INT8_AT_BUILD: partial(_at_build, 8),
    INT4_AT_BUILD: partial(_at_build, 4),
    INT4_WEIGHTS: _int4_groups,
    FP8_WEIGHTS: _fp8,
    FP4_WEIGHTS: _fp4,
}

Finished = Mapping[str, Callable[[], torch.Tensor]]
"""Name -> how to have that weight whole; where processes hold parts of it, all must ask for it."""


class TrainedWeights:
    """A model while it is trained.

    Attributes:
        model: to train; with low-rank branches, peft's.
    """

    def __init__(self, model: torch.nn.Module, source: ModelFolder, spec: RecoverySpec) -> None:
        """Choose what is trained, and let the linears of all layers compute with weights as they will be written.

        Raises:
            UserError: the model cannot be trained with low rank as it is asked for.
        """
        self._named, self._rounding = owners(model), spec.rounding
        self._source, self._sharded = source, spec.recover.sharding == "full"
        names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        names = [name for name in names if ".layers." in f".{name}"]
        self._pruned = {name for name in names if spec.sparse and name.endswith(LINEARS)}
        self.model, self._peft = model.requires_grad_(True), None
        if spec.recover.lora_rank is not None:
            from pipelines.compress import peft_door

            self._peft = peft_door
            self.model = peft_door.with_adapters(model, spec.recover)
        self._linears = {name: model.get_submodule(name) for name in names}  # peft has put others in their places
        if self._rounding is not None:
            stored, exported = ModelWeights(source), torch_dtype(pick_dtype(source, self._rounding.dtype))
            self._types = {name: (stored.dtype(f"{name}.weight"), exported) for name in names}
            self._round = rounder(self._rounding)
            self._group = FORMATS[self._rounding.qformat].weights.group_size(self._rounding.group_size)
        if self._rounding is not None or (self._peft and self._pruned):
            for name, module in self._linears.items():
                module.forward = partial(self._forward, name)

    def computed(self, name: str) -> torch.Tensor:
        """Return the weight [O, I] that a linear of a layer computes with, e.g. "model.layers.0.mlp.up_proj"."""
        whole = self._whole(name)
        if self._rounding is None:
            return whole
        rounded: torch.Tensor = StraightThrough.apply(whole, partial(self._rounded, name))  # type: ignore[no-untyped-call]
        return rounded

    def _whole(self, name: str) -> torch.Tensor:
        """Return a weight with its branch and the zeros of a sparse model, in float32."""
        weight: torch.Tensor = self._own(f"{name}.weight")
        if not self._peft:
            return weight
        with torch.autocast(weight.device.type, enabled=False):  # it would multiply the matrices in 16 bit
            delta: torch.Tensor | None = self._peft.delta(self._linears[name])
        if delta is None:
            return weight
        return (weight + delta) * (weight != 0) if name in self._pruned else weight + delta

    def _own(self, name: str) -> Any:
        """Return a weight itself, without the branch beside it; if it is sharded, whole while its layer computes."""
        module, own = self._named[name]
        return getattr(module, own)

    def _rounded(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        assert self._rounding is not None  # or it is not needed
        half = self._narrowed(name, weight)
        largest = half.abs().amax()
        if FORMATS[self._rounding.qformat].weights in (FP8_WEIGHTS, FP4_WEIGHTS):
            # q, k and v share a scale of the tensor, and gate and up
            for partner in (other for other in fused_with(name) if other != name and other in self._linears):
                largest = torch.maximum(largest, self._narrowed(partner, self._whole(partner)).abs().amax())
        return self._round(half, largest, self._group)

    def _narrowed(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as it is read back from the file and converted for quantizing."""
        stored, exported = self._types[name]
        return weight.detach().to(stored).to(exported)

    def _forward(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = self._own(f"{name}.bias") if f"{name}.bias" in self._named else None
        return torch.nn.functional.linear(inputs, self.computed(name), bias)

    def shard(self, device: str) -> None:
        """Read the weights of an empty model, of which this process then holds its part."""
        shard(self.model, self._named, self._source, device)

    def load(self, checkpoint: Path) -> None:
        """Read trained weights as the Trainer has saved them."""
        if self._sharded:
            load_weights(self.model, checkpoint)
            return
        if self._peft:
            self._peft.load(self.model, checkpoint)
            return
        for file in checkpoint.glob("*.safetensors"):
            self.model.load_state_dict(load_file(file), strict=False)  # tied weights are stored once

    def zeros(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the trained weights of a sparse model that must keep their zeros, and where they are not zero."""
        weights = [self._own(f"{name}.weight") for name in self._pruned]
        return [(weight, weight.detach() != 0) for weight in weights if weight.requires_grad]

    def finished(self) -> Finished:
        """Return the trained weights, branches added and zeros kept."""
        return {name: partial(self._finished, name) for name in self._named}

    @torch.no_grad()
    def _finished(self, name: str) -> torch.Tensor:
        linear, _, kind = name.rpartition(".")
        return collected(self._whole(linear) if kind == "weight" and linear in self._linears else self._own(name))


def write_like(trained: Finished, source: ModelFolder, out_dir: Path) -> None:
    """Write trained weights into files of the same names, tensors and types as before."""
    for path in source.weight_files:
        header = read_header(path)
        with safe_open(path, framework="pt") as shard:
            layout = {name: info.spec for name, info in header.items()}
            writer = TensorWriter.create(out_dir, {path.name: layout}, shard.metadata())
            for name in header:
                stored = shard.get_tensor(name)
                weight = trained[name]().to("cpu", stored.dtype) if name in trained else stored
                writer.write(path.name, name, iter([weight.contiguous()]))
            writer.sync()


def help_to_write(trained: Finished, source: ModelFolder) -> None:
    """Give the process that writes this one's part of each weight, in the order of `write_like`."""
    for path in source.weight_files:
        for name in read_header(path):
            if name in trained:
                trained[name]()
