"""What the fit believes of every parameter before it sees a measurement."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior belief about a parameter.

    Attributes:
        value: shared value.
        spread: standard deviation of its logarithm.
        levels: labels that may differ from the shared value, with the standard deviation of their (log) offset.
        about: description.
    """

    value: float
    spread: float
    levels: Mapping[str, float]
    about: str


PRIORS = {
    "e_c": Prior(
        0.6,
        0.3,
        {
            "engine": 0.15,
            "family": 0.3,
            "gpu": 0.2,
            "form": 0.2,
            "arch": 0.2,
            "version": 0.15,
            "kind": 0.3,
            "offline": 0.1,
            "mixture": 0.3,
            "mxfp4": 0.3,
            "served": 0.3,
            "sums": 0.5,
        },
        "of peak FLOP/s, linears",
    ),
    "e_m": Prior(
        0.8,
        0.1,
        {"engine": 0.08, "family": 0.1, "gpu": 0.08, "form": 0.1, "kind": 0.1, "mixture": 0.1, "served": 0.1},
        "of memory bandwidth, weights",
    ),
    "e_a": Prior(
        0.4,
        0.5,
        {"engine": 0.3, "family": 0.3, "arch": 0.3, "version": 0.15, "offline": 0.2, "heads": 0.4, "tiles": 0.5},
        "of peak 16-bit FLOP/s, attention of prompts",
    ),
    "e_k": Prior(
        0.8,
        0.3,
        {
            "engine": 0.2,
            "family": 0.3,
            "gpu": 0.2,
            "form": 0.2,
            "kv8": 0.2,
            "version": 0.15,
            "offline": 0.15,
            "tiles": 0.2,
        },
        "of memory bandwidth, KV cache",
    ),
    "e_d": Prior(
        0.03, 1.0, {"engine": 0.5, "family": 0.6, "arch": 0.3}, "of peak 16-bit FLOP/s, attention of decoding requests"
    ),
    "e_l": Prior(0.5, 0.4, {"engine": 0.2, "link": 0.4, "family": 0.3, "ranks": 0.5}, "of the link between GPUs"),
    "a": Prior(1e-05, 0.7, {"engine": 0.4, "family": 0.5, "link": 0.5}, "seconds of latency per all-reduce"),
    "c_act": Prior(
        8.0,
        0.7,
        {"engine": 0.3, "family": 0.4, "version": 0.2, "offline": 0.3},
        "times activations are read or written per layer",
    ),
    "knee": Prior(3.0, 0.2, {}, "p of the smooth maximum of compute and memory"),
    "t0": Prior(0.001, 1.0, {"engine": 0.6, "family": 0.7, "version": 0.3, "offline": 0.6}, "seconds per iteration"),
    "t_layer": Prior(
        3.5e-05,
        0.7,
        {"engine": 0.4, "family": 0.5, "version": 0.2, "offline": 0.3, "mixture": 0.5, "mixture version": 0.2},
        "seconds per layer and iteration",
    ),
    "t_seq": Prior(
        1.5e-05,
        1.0,
        {"engine": 0.6, "family": 1.0, "version": 0.4, "offline": 0.6},
        "seconds per request and iteration",
    ),
    "kv_share": Prior(
        0.9,
        0.1,
        {"family": 0.15, "version": 0.08, "offline": 0.1, "mixture": 0.1},
        "of the KV pool that memory predicts",
    ),
    "slots": Prior(1024.0, 0.5, {"family": 0.5, "version": 0.3}, "requests together at most, at full load"),
    "overhead_s": Prior(0.008, 1.0, {"family": 1.0}, "seconds of network and tokenizer in TTFT"),
    "client_delay": Prior(0.008, 1.0, {"family": 1.0}, "seconds from a response to the user's next request"),
    "c_expert": Prior(
        0.01, 1e-6, {"mixture": 0.7}, "times the activations of a token's experts are read or written; see mixtures.py"
    ),
    "t_eager": Prior(
        1e-9,
        1e-6,
        {"mixture": 0.7},
        "seconds per layer of an iteration with prompts, without CUDA graph; see mixtures.py",
    ),
    "tile": Prior(
        1.0, 1e-6, {"mixture": 0.5}, "rows of a tile, which the tokens of an expert fill up in part; see mixtures.py"
    ),
}
"""Priors: the ranges that fits of published data gave, within what physics allows."""
EXPECTED = {
    ("c_expert", "mixture=trtllm-torch"): (math.log(200.0), 0.7),
    ("tile", "mixture=trtllm-torch"): (math.log(64.0), 0.5),
    ("t_eager", "mixture=trtllm-torch"): (math.log(1e5), 0.7),
    ("t_layer", "mixture=trtllm-torch"): (math.log(1.3), 0.5),
    ("kv_share", "mixture=trtllm-torch"): (math.log(0.95 / 0.9), 0.1),
    ("a", "link=experts over nvlink"): (math.log(5.0), 0.5),
    ("a", "link=experts over pcie"): (math.log(2.0), 0.5),
    ("e_l", "link=experts over nvlink"): (math.log(0.6), 0.5),
    ("e_l", "link=experts over pcie"): (math.log(0.7), 0.5),
    **{(name, "version=vLLM 0.19.0"): (0.0, 1.5) for name in ("t0", "t_layer", "t_seq")},
    ("e_a", "tiles=vllm"): (math.log(0.45), 0.3),
    ("e_k", "tiles=vllm"): (math.log(0.75), 0.2),
    ("e_k", "kv8=vllm hopper"): (-math.log(2.0), 0.2),
    ("e_c", "family=nim"): (-0.08, 0.06),
    ("t_seq", "family=nim"): (math.log(7.0), 0.3),
    ("overhead_s", "family=nim"): (math.log(0.1), 0.4),
    ("client_delay", "family=nim"): (math.log(0.25), 0.3),
}
"""Priors of offsets (logarithm: mean, standard deviation) that differ from 0 with the spread of their level.

Mixtures: an expert's activations are read and written about twice, its tokens fill tiles of 64 rows, routing adds a
third to the host's time of a layer and 0.1 ms where no CUDA graph is replayed, and collectives of unequal parts use 60
to 70 % of a link and start two to five times as late as all-reduces. NVIDIA's page says that the KV pool takes 95 % of
free memory in many of its runs, where the default is 90.

On Hopper, vLLM reads an 8-bit KV cache in the time of a 16-bit one: of a pool of twice the tokens (rows near its
end show that), ITL is met better with half the efficiency than without, on H100, H200 and B200 (mean error 6.5, 3.1 and
5.1 % against 7.5, 5.1 and 5.7 %).

vLLM outside Hopper and SM 10x: by LLMServingSim's profiles, FlashAttention 2 reaches 0.43 to 0.6 of the 16-bit peak in
prompts, and reads a KV cache at 0.7 to 0.86 of the bandwidth. The sums of kernels that they state are its whole
iterations within 2 %, so the time of the host in 0.19.0 is left to the rows.

NIM has one measured configuration, so what it cannot determine is set here. Compute efficiency: fits of such loops
gave 0.46 to 0.72; a queue shorter than modelled would be mistaken for a higher one. Seconds per request and iteration:
Triton servers of 2024 took 0.1 to 0.25 ms, TensorRT-LLM itself takes a seventh; 1.8.0 is in between. Overhead: an 8B
model at 16 bit on A100 answers a whole prompt of 500 tokens in 48 ms (docs.nvidia.com/nim/
llama-3-1-nemotron-safety-guard-8b/1.10.1/performance.md), nearly all of it for the prompt itself, so the 80 ms of
other servers do not apply to NIM. Client delay: per user (`published.closed_loop`), 0.6 to 3 ms by Little's law.
"""
