"""The tensors of a gpt-oss folder, with those of each expert under names of their own, in 16 bit or from MXFP4.

The folder holds one tensor for the experts of a layer. Of E experts with O outputs and I inputs:
    gate_up_proj, down_proj             [E, I, O]; a `_bias` of each is [E, O]
    gate_up_proj_blocks, ..._scales     uint8 [E, O, I / 32, 16] and [E, O, I / 32], in place of the weight
Outputs of gate and up alternate. A byte of a block holds two E2M1 codes, the first one in its lower half; the scale of
a block is 2^(scale - 127). Source: Transformers `modeling_gpt_oss.py`, `integrations/mxfp4.py`; OCP MX 1.0.
"""

import re
from math import prod

import torch

from pipelines.compress.model_folder import ModelFolder, ModelWeights
from pipelines.domain.errors import UserError

_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_CODES = torch.cat([_E2M1, -_E2M1])
_BYTES = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], 1).bfloat16().view(torch.int32).reshape(256)
"""The two numbers that a byte holds, in bf16, which holds them and their products with powers of two exactly."""
_BIAS, _BLOCK = 127, 32


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of blocks uint8 [O, B, 16] with scales uint8 [O, B], bf16 [O, 32 B]."""
    numbers = torch.index_select(_BYTES, 0, blocks.reshape(-1).int()).view(torch.bfloat16)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS).bfloat16()
    return numbers.reshape(*scales.shape, _BLOCK).mul_(powers[:, :, None]).reshape(len(blocks), -1)


class ExpertWeights(ModelWeights):
    """Tensors of gpt-oss; an expert's are e.g. "model.layers.0.mlp.experts.3.up_proj.weight" [O, I]."""

    def __init__(self, source: ModelFolder) -> None:
        """Read the headers.

        Raises:
            UserError: a tensor of experts has another number of them than config.json, or blocks do not fit their
                scales.
        """
        super().__init__(source)
        count = source.shape.num_experts
        for name, (_, info) in self._found.items():
            if ".mlp.experts." not in name:
                continue
            if not info.shape or info.shape[0] != count:
                raise self._wrong(name, f"config.json says {count} experts")
            if not name.endswith("_blocks"):
                continue
            scales = name.removesuffix("blocks") + "scales"
            if scales not in self._found:
                raise UserError(f"{self.folder} lacks the tensor '{scales}'.", todo="Download the model again.")
            if len(info.shape) != 4 or info.shape[3] != _BLOCK // 2 or self.shape(scales) != info.shape[:3]:
                raise self._wrong(name, f"its scales are {list(self.shape(scales))}")
            if types := {self._found[each][1].dtype for each in (name, scales)} - {"U8"}:
                raise self._wrong(name, f"MXFP4 has the type U8, and not {types.pop()}")

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `ModelWeights.tensor`; reads no other expert.

        Raises:
            UserError: it contains NaN or infinity, or its file has become shorter.
        """
        stored, expert, rows = self._stored(name)
        if rows is None:
            return super().tensor(name, dtype)
        if not stored.endswith("_blocks"):
            shape = self.shape(stored)[1:]
            values = self._read(stored, [_span(shape, expert)], dtype).reshape(shape)
            return (values.T if len(shape) == 2 else values)[rows].contiguous()
        scales = stored.removesuffix("blocks") + "scales"
        parts = []
        for each in (stored, scales):
            shape = self.shape(each)[1:]
            parts.append(self._values(each, [_span(shape, expert)], torch.uint8).reshape(shape)[rows])
        values = from_mxfp4(*parts).to(dtype)
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(values)):
            raise UserError(
                f"The weight '{stored}' of {self.folder} contains NaN or infinity, in expert {expert}.",
                todo="Download the model again.",
            )
        return values

    def _stored(self, name: str) -> tuple[str, int, slice | None]:
        """Return the tensor of the folder, the number of the expert, and which of its outputs; None is a whole one."""
        if (match := _OF_EXPERT.fullmatch(name)) is None:
            return name, 0, None
        place, expert, part, leaf = match.groups()
        stem = f"{place}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        packed = leaf == "weight" and f"{stem}_blocks" in self._found
        return f"{stem}_blocks" if packed else stem if leaf == "weight" else f"{stem}_bias", int(expert), _ROWS[part]

    def _wrong(self, name: str, why: str) -> UserError:
        return UserError(
            f"The weight '{name}' of {self.folder} has the shape {list(self.shape(name))}; {why}.",
            todo="Download the model again: config.json and weights are not of one model.",
        )


def _span(shape: tuple[int, ...], expert: int) -> tuple[int, int]:
    return expert * prod(shape), (expert + 1) * prod(shape)
