"""Models and GPUs by name: the sizes that decide bytes and seconds.

Models are rows of `models.csv` beside this file, with the source of each; GPUs are the files of conf/hardware, the one
place they are written.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.families import FAMILIES
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB

MODELS = Path(__file__).parent / "models.csv"
HARDWARE = Path(__file__).resolve().parents[3] / "conf" / "hardware"

SAME_SHAPE = {
    "llama-3.3-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-7b-v0.2": "mistral-7b-v0.3",
}
"""Names of models whose sizes are those of another row (a sliding window is not used by TensorRT-LLM's benchmarks)."""
BRIDGED = {"a30": 2, "a100_pcie_40gb": 2, "a100_pcie_80gb": 2, "h100_pcie": 2, "h100_nvl": 2, "h200_nvl": 4}
"""GPUs that an NVLink bridge joins, by the notes of their data sheets; more of them talk over PCIe."""
DECORATION = re.compile(r"(-instruct|-chat|-it|-hf|-base)+$")
"""What people put after a model's name."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only language model, dense or a mixture of experts.

    Attributes:
        name: of the model.
        layers: decoder layers.
        hidden: residual stream width.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: width of one head.
        ffn: width of the MLP (of one expert).
        vocab: rows of the embedding.
        max_positions: longest sequence the model was made for, tokens.
        gated: the MLP has a gate (three linears instead of two).
        tied: the output head is the embedding.
        n_experts: experts per layer; 1 is a dense model.
        experts_per_token: of them that a token uses.
        sliding_window: tokens that windowed layers attend to; 0 is none.
        global_every: each so manieth layer attends to everything; 0: all have the window, where there is one.
        norms: RMS or layer norms per layer, in units of `hidden` weights.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    gated: bool = True
    tied: bool = False
    n_experts: int = 1
    experts_per_token: int = 1
    sliding_window: int = 0
    global_every: int = 0
    norms: int = 2

    @classmethod
    def from_shape(cls, shape: ModelShape, name: str = "") -> ModelSpec:
        """Take the sizes of a model of this project."""
        return cls(
            name=name or shape.family.name,
            layers=shape.num_hidden_layers,
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            ffn=shape.intermediate_size,
            vocab=shape.vocab_size,
            max_positions=shape.max_position_embeddings,
            tied=shape.tie_word_embeddings,
            sliding_window=shape.family.sliding_window,
            global_every=shape.family.global_every,
            norms=shape.norms_per_layer,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """Read a parsed Hugging Face config.json of a gated decoder (Llama, Gemma, Mistral, Mixtral, Qwen).

        Raises:
            UserError: a size is missing.
        """
        if (config.get("architectures") or [None])[0] in FAMILIES:
            return cls.from_shape(ModelShape.from_hf_config(config), name)
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                name=name or str(config.get("_name_or_path") or config.get("model_type") or "model"),
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                ffn=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                max_positions=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                n_experts=int(config.get("num_local_experts") or 1),
                experts_per_token=int(config.get("num_experts_per_tok") or 1),
                sliding_window=_window(config),
                global_every=int(config.get("sliding_window_pattern") or 0),
            )
        except KeyError as missing:
            raise UserError(f"The model configuration has no {missing}; it is not complete.") from None

    @property
    def window_layers(self) -> int:
        """Layers with the sliding window."""
        if not self.sliding_window:
            return 0
        return self.layers - (self.layers // self.global_every if self.global_every else 0)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window per layer, to be repeated over the layers; empty is none."""
        if not self.sliding_window:
            return ()
        every = self.global_every
        return (self.sliding_window,) * (every - 1) + (self.max_positions,) if every else (self.sliding_window,)

    @property
    def attention_params(self) -> int:
        """Weights of q, k, v and the output projection of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_params(self) -> int:
        """Weights of the MLP (of one expert) of one layer."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear of one layer, by TensorRT-LLM name; experts are put together."""
        query, kv, wide = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn * self.n_experts
        mlp = {"mlp.fc": (wide, self.hidden), "mlp.gate": (wide, self.hidden), "mlp.proj": (self.hidden, wide)}
        if not self.gated:
            del mlp["mlp.gate"]
        return {"attention.qkv": (query + 2 * kv, self.hidden), "attention.dense": (self.hidden, query), **mlp}

    @property
    def linear_params(self) -> int:
        """Weights of all linears of all layers (what quantization shrinks), all experts."""
        return self.layers * (self.attention_params + self.n_experts * self.expert_params)

    @property
    def active_params(self) -> int:
        """Weights of the linears that one token uses."""
        return self.layers * (self.attention_params + self.experts_per_token * self.expert_params)

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """All weights. Llama-3-8B: 8,030,261,248; Mixtral 8x7B without its routers: 46,701,744,128."""
        tables = self.head_params * (1 if self.tied else 2)
        return self.linear_params + tables + self.hidden * (self.norms * self.layers + 1)

    # The words of pipelines.domain.model_shape, so that memory is computed in one place.

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return self.layers

    @property
    def hidden_size(self) -> int:
        """Residual stream width."""
        return self.hidden

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self.heads

    @property
    def num_key_value_heads(self) -> int:
        """KV heads."""
        return self.kv_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP that a token goes through: of all its experts together."""
        return self.ffn * self.experts_per_token

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, tokens."""
        return self.max_positions

    @property
    def tie_word_embeddings(self) -> bool:
        """The output head is the embedding."""
        return self.tied

    @property
    def norms_per_layer(self) -> int:
        """Norms of a layer."""
        return self.norms


def _window(config: Mapping[str, Any]) -> int:
    wanted = config.get("use_sliding_window", True)
    return int(config.get("sliding_window") or 0) if wanted else 0


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU by its data sheet. Rates are dense, per GPU.

    Attributes:
        name: of the file in conf/hardware.
        gpu: for people, e.g. "H100-SXM-80GB".
        memory_gb: of its data sheet.
        reported_bytes: memory as the driver counts it: what an engine can take.
        bandwidth: of its memory, bytes/s.
        peak: FLOP/s (or integer operations) by activation type: "16bit", "fp8", "int8", "fp4"; absent is unsupported.
        sparse_multiplier: data-sheet rate with 2:4 sparsity over the dense one.
        nvlink: bytes/s in one direction; 0 is none.
        pcie: bytes/s in one direction.
        gpus_per_server: of the usual server.
        tdp_w: power, W.
        sm: compute capability.
        arch: e.g. "Hopper GH100".
    """

    name: str
    gpu: str
    memory_gb: float
    reported_bytes: float
    bandwidth: float
    peak: Mapping[str, float]
    sparse_multiplier: float
    nvlink: float
    pcie: float
    gpus_per_server: int
    tdp_w: float
    sm: float
    arch: str

    def link(self, ranks: int) -> tuple[str, float]:
        """What joins so many of these GPUs in one server, and its bytes/s in one direction: "nvlink" or "pcie"."""
        if self.nvlink and ranks <= BRIDGED.get(self.name, ranks):
            return "nvlink", self.nvlink
        return "pcie", self.pcie

    @property
    def family(self) -> str:
        """Generation: ampere, ada, hopper or blackwell."""
        return self.arch.split()[0].lower()


def reported_bytes(row: Mapping[str, Any]) -> float:
    """Memory of a row's GPU that nvidia-smi reports: what it has told, else the data sheet's, whose GB are rounded GiB.

    GB200 of 186 GB: 189,471 MiB; RTX PRO 6000 of 96 GB: 97,887 MiB. ECC on GDDR6 takes a sixteenth of it: L40S of
    48 GB: 46,068 MiB. A GeForce has no ECC, and a sixteenth more than is said here. 0 where nothing is known.
    """
    if row.get("reported_gb"):
        return float(row["reported_gb"] * 1e9)
    inline_ecc = (row.get("arch") or "").lower().startswith("ada") or row["name"] == "a10"
    return float((row.get("memory_gb") or 0) * GIB * (15 / 16 if inline_ecc else 0.995))


@cache
def models() -> Mapping[str, ModelSpec]:
    """All models of models.csv by name."""
    with MODELS.open(encoding="utf-8", newline="") as lines:
        return {row["model"]: _model(row) for row in csv.DictReader(lines)}


def _model(row: Mapping[str, str]) -> ModelSpec:
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    return ModelSpec(
        name=row["model"],
        **{size: int(row[size]) for size in sizes},
        max_positions=int(row["max_positions"]),
        gated=row["gated"] == "True",
        tied=row["tied_embeddings"] == "True",
        n_experts=int(row["n_experts"] or 1),
        experts_per_token=int(row["experts_per_token"] or 1),
        sliding_window=int(row["sliding_window"] or 0),
        global_every=int(row["global_every"] or 0),
        norms=4 if row["norm"].startswith("rms4") else 2,
    )


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """All GPUs of conf/hardware by the name of their file."""
    import yaml

    rows = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(HARDWARE.glob("*.yaml"))]
    return {row["name"]: gpu_of(row) for row in rows if row.get("gpu")}


def gpu_of(row: Mapping[str, Any]) -> GpuSpec:
    """The GPU of a row as conf/hardware has them, or of one that the driver has told more of."""
    rates = {"16bit": "fp16_dense_tflops", "fp8": "fp8_dense_tflops", "int8": "int8_dense_tops"}
    rates["fp4"] = "fp4_dense_tflops"
    return GpuSpec(
        name=row["name"],
        gpu=row["gpu"],
        memory_gb=row["memory_gb"],
        reported_bytes=reported_bytes(row),
        bandwidth=row["mem_bw_gb_s"] * 1e9,
        peak={kind: row[key] * 1e12 for kind, key in rates.items() if row[key]},
        sparse_multiplier=row["sparse_multiplier"],
        nvlink=row["nvlink_gb_s_bidir"] / 2 * 1e9,
        pcie=row["pcie_gb_s_per_dir"] * 1e9,
        gpus_per_server=row["gpus_per_server"],
        tdp_w=row["tdp_w"],
        sm=float(row["sm"]),
        arch=row["arch"],
    )


def model_named(text: str) -> ModelSpec:
    """The model of a name as people write it: "llama-3.3-70b", "meta-llama/Llama-3.1-8B-Instruct".

    Raises:
        UserError: it is not known; says the nearest name.
    """
    known = models()
    name = DECORATION.sub("", text.strip().lower().split("/")[-1].removeprefix("meta-"))
    found = known.get(SAME_SHAPE.get(name, name))
    if found is None:
        raise _unknown("model", text, name, [*known, *SAME_SHAPE])
    return found


def gpu_named(text: str) -> GpuSpec:
    """The GPU of a name as people write it: "h100_sxm", "H100-SXM-80GB", "L40S-48GB".

    Raises:
        UserError: it is not known; says the nearest name.
    """
    known: dict[str, GpuSpec] = {}
    for spec in gpus().values():
        memory = f"{spec.memory_gb:.0f}gb"
        known |= {_plain(name): spec for name in (spec.name, spec.gpu, spec.gpu + memory)}
    found = known.get(_plain(text))
    if found is None:
        raise _unknown("GPU", text, text, [name for spec in gpus().values() for name in (spec.gpu, spec.name)])
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _unknown(kind: str, given: str, name: str, known: Iterable[str]) -> UserError:
    names = sorted(known)
    near = did_you_mean(name.lower(), [each.lower() for each in names])
    listed = ", ".join(names)
    return UserError(f"The {kind} '{given}' is not known.", allowed=f"Known: {listed}.", todo=near)
