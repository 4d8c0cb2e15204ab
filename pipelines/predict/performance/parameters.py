"""Fitted parameters of the performance model: one shared value each, with offsets for specific setups.

log value = log shared + sum of the offsets of a setup's labels. A label is a level of the hierarchy and its value, such
as `family=trtllm-torch` or `gpu=h100_sxm`. Offsets are shrunk towards 0 in the fit, so that a label with few
measurements stays near the shared value; an unknown label has offset 0. `offline=...` marks a benchmark that drives
the engine in its own process, without a server: published full loads are offline, sized setups never are. The file is
written by scripts/published_fit and records what it was fitted on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "parameters.json"


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior belief about a parameter.

    Attributes:
        value: shared value.
        spread: standard deviation of its logarithm.
        low: physical bound.
        high: physical bound.
        levels: labels that may differ from the shared value, with the standard deviation of their (log) offset.
        about: description.
    """

    value: float
    spread: float
    low: float
    high: float
    levels: Mapping[str, float]
    about: str


PRIORS: dict[str, Prior] = {
    "e_c": Prior(
        0.6, 0.3, 0.05, 1.0,
        {
            "engine": 0.15, "family": 0.3, "gpu": 0.2, "form": 0.2, "arch": 0.2,
            "version": 0.15, "kind": 0.3, "offline": 0.1,
        },
        "of peak FLOP/s, linears",
    ),
    "e_m": Prior(
        0.8, 0.1, 0.1, 1.0,
        {"engine": 0.08, "family": 0.1, "gpu": 0.08, "form": 0.1, "kind": 0.1},
        "of memory bandwidth, weights",
    ),
    "e_a": Prior(
        0.4, 0.5, 0.02, 1.0,
        {"engine": 0.3, "family": 0.3, "arch": 0.3, "version": 0.15, "offline": 0.2},
        "of peak 16-bit FLOP/s, attention of prompts",
    ),
    "e_k": Prior(
        0.8, 0.3, 0.05, 1.0,
        {"engine": 0.2, "family": 0.3, "gpu": 0.2, "form": 0.2, "version": 0.15, "offline": 0.15},
        "of memory bandwidth, KV cache",
    ),
    "e_d": Prior(
        0.03, 1.0, 0.002, 1.0,
        {"engine": 0.5, "family": 0.6, "arch": 0.3},
        "of peak 16-bit FLOP/s, attention of decoding requests",
    ),
    "e_l": Prior(
        0.5, 0.4, 0.05, 1.0,
        {"engine": 0.2, "link": 0.4, "family": 0.3},
        "of the link between GPUs",
    ),
    "a": Prior(
        1e-05, 0.7, 1e-06, 3e-05,
        {"engine": 0.4, "family": 0.5, "link": 0.5},
        "seconds of latency per all-reduce",
    ),
    "c_act": Prior(
        8.0, 0.7, 0.5, 100.0,
        {"engine": 0.3, "family": 0.4, "version": 0.2, "offline": 0.3},
        "times activations are read or written per layer",
    ),
    "knee": Prior(
        3.0, 0.2, 1.5, 8.0,
        {},
        "p of the smooth maximum of compute and memory",
    ),
    "t0": Prior(
        0.001, 1.0, 1e-05, 0.02,
        {"engine": 0.6, "family": 0.7, "version": 0.3, "offline": 0.6},
        "seconds per iteration",
    ),
    "t_layer": Prior(
        3.5e-05, 0.7, 1e-06, 0.0005,
        {"engine": 0.4, "family": 0.5, "version": 0.2, "offline": 0.3},
        "seconds per layer and iteration",
    ),
    "t_seq": Prior(
        1.5e-05, 1.0, 1e-07, 0.0005,
        {"engine": 0.6, "family": 1.0, "version": 0.4, "offline": 0.6},
        "seconds per request and iteration",
    ),
    "t_prefill": Prior(
        0.0003, 1.0, 1e-06, 0.03,
        {"engine": 0.6, "family": 0.8, "offline": 0.5},
        "seconds per prompt",
    ),
    "sparse_compute": Prior(
        1.27, 0.2, 1.0, 2.0,
        {},
        "FLOP/s with 2:4 sparsity over dense ones",
    ),
    "sparse_knee": Prior(
        1.75, 0.2, 1.2, 8.0,
        {},
        "p of the smooth maximum with 2:4 sparsity, whose kernels hide less of their reads",
    ),
    "kv_share": Prior(
        0.9, 0.1, 0.3, 1.3,
        {"family": 0.15, "version": 0.08, "offline": 0.1},
        "of the KV pool that the memory model predicts",
    ),
    "slots": Prior(
        1024.0, 0.5, 32.0, 8192.0,
        {"family": 0.5, "version": 0.3},
        "most requests together, at full load",
    ),
    "overhead_s": Prior(
        0.008, 1.0, 0.0001, 0.5,
        {"family": 1.0},
        "seconds of network and tokenizer in TTFT",
    ),
    "client_delay": Prior(
        0.008, 1.0, 0.0001, 0.5,
        {"family": 1.0},
        "seconds from a response to the user's next request",
    ),
}  # fmt: skip
"""Priors: the ranges that fits of published data gave, within what physics allows (no efficiency above 1)."""
EXPECTED = {
    ("e_c", "family=nim"): (-0.08, 0.06),
    ("t_seq", "family=nim"): (math.log(7.0), 0.3),
    ("overhead_s", "family=nim"): (math.log(0.1), 0.4),
    ("client_delay", "family=nim"): (math.log(0.25), 0.3),
}
"""Priors of offsets (logarithm: mean, standard deviation) that differ from 0 with the spread of their level.

NIM has one measured configuration, so what it cannot determine is set here. Compute efficiency: fits of such loops
gave 0.46 to 0.72; a queue shorter than modelled would be mistaken for a higher one. Seconds per request and iteration:
Triton servers of 2024 took 0.1 to 0.25 ms, TensorRT-LLM itself takes a seventh; 1.8.0 is in between. Overhead: an 8B
model at 16 bit on A100 answers a whole prompt of 500 tokens in 48 ms (docs.nvidia.com/nim/
llama-3-1-nemotron-safety-guard-8b/1.10.1/performance.md), nearly all of it for the prompt itself, so the 80 ms of
other servers do not apply to NIM. Client delay: per user (`published.closed_loop`), 0.6 to 3 ms by Little's law.
"""


@dataclass(frozen=True)
class Parameters:
    """Parameter values of the model.

    Attributes:
        shared: shared values by name.
        offsets: by name and label, added to the logarithm.
        document: the whole file, with intervals, fitted data and errors.
    """

    shared: Mapping[str, float]
    offsets: Mapping[str, Mapping[str, float]]
    document: Mapping[str, Any]

    @classmethod
    def prior(cls) -> Parameters:
        """Return the priors alone, with nothing fitted."""
        return cls({name: prior.value for name, prior in PRIORS.items()}, {}, {})

    @classmethod
    def load(cls, path: Path | None = None) -> Parameters:
        """Read a file of scripts/published_fit; None means the bundled one."""
        return _load(path or FILE)

    def values(self, labels: Iterable[str]) -> dict[str, float]:
        """Return every parameter for a setup, within its bounds."""
        names = tuple(labels)
        found = {}
        for name, prior in PRIORS.items():
            offsets = self.offsets.get(name, {})
            logarithm = math.log(self.shared[name]) + sum(offsets.get(label, 0.0) for label in names)
            found[name] = min(prior.high, max(prior.low, math.exp(logarithm)))
        return found

    def knows(self, label: str) -> bool:
        """Return whether the measurements included this label."""
        return label in self.document.get("labels", {})


@cache
def _load(path: Path) -> Parameters:
    if not path.is_file():
        return Parameters.prior()
    document = json.loads(path.read_text(encoding="utf-8"))
    shared = {name: entry["value"] for name, entry in document["parameters"].items()}
    offsets = {name: entry["offsets"] for name, entry in document["parameters"].items()}
    return Parameters(shared, offsets, document)
