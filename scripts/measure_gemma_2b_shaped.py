"""Build int4_awq and fp8 engines from a model with Gemma 2B's shape and random weights, and measure them.

    python scripts/measure_gemma_2b_shaped.py WORK_FOLDER

Needs about 20 GiB of disk and of memory. Prints seconds and peak memory of every stage from the manifests, then the
engines' output tokens/s, measured alternately over several rounds with a process for each run, as medians and as a
ratio to 16 bit.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("none", "fp8", "int4_awq")
SHAPE = {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 18,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 16384,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(folder: Path) -> None:
    """Write random bf16 weights in shards of one layer, with the bundled tokenizer."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    hidden, inter, q, kv = 2048, 16384, 8 * 256, 256
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    index = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for i in range(18):
        layer = {
            f"model.layers.{i}.{name}.weight": (torch.randn(shape) * shape[1] ** -0.5).bfloat16()
            for name, shape in linears.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer[f"model.layers.{i}.{norm}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
        save(f"model-{i:02}.safetensors", layer)
    embedding = (torch.randn(256000, hidden) * 0.02).bfloat16()
    save("model-18.safetensors", {"model.embed_tokens.weight": embedding})
    save("model-19.safetensors", {"model.norm.weight": torch.zeros(hidden, dtype=torch.bfloat16)})
    for path in (ROOT / "pipelines/bundled/models/tiny_gemma").glob("*token*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def build(work: Path, qformat: str) -> Path:
    """Run the pipeline as a user would and return the engine folder."""
    words = [f"model.path={work / 'gemma_2b_shaped'}", f"quant={qformat}", f"paths.store={work / 'artifacts'}"]
    words += ["calibration.size=4", "calibration.batch_size=1", "build.max_batch_size=8", "build.max_seq_len=2048"]
    if qformat == "int4_awq":
        words.append("quant.awq_alpha_step=0.5")  # three candidates instead of eleven; memory and speed stay the same
    subprocess.run([sys.executable, "-m", "pipelines", "build", *words], cwd=work, check=True)
    return next((work / "artifacts" / "build").glob(f"gemma_2b_shaped-{qformat}-*"))


GENERATE = """
import sys, time, resource
from pathlib import Path
from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import SamplingParams
from pipelines.engines.registry import open_engine

with open_engine("openvino", kv_cache_bytes=96 * 2**20).open(Path(sys.argv[1])) as session:
    prompts = [list(range(10, 42))]
    session.generate(prompts, SamplingParams(2), SilentProgress())
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter()
        (answer,) = session.generate(prompts, SamplingParams(16), SilentProgress())
        print(len(answer.token_ids) / (time.perf_counter() - start), flush=True)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def speed(engine: Path, rounds: int) -> tuple[float, int]:
    """Return median output tokens/s at batch size 1 (32 tokens in, 16 out) and peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(engine), str(rounds)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    *rates, peak = done.stdout.split("\n")[:-1]
    return statistics.median(float(rate) for rate in rates), int(peak.split()[1])


def main() -> None:
    """Build the engines, then measure them alternately."""
    work = Path(sys.argv[1]).absolute()
    make_model(work / "gemma_2b_shaped")
    engines = {qformat: build(work, qformat) for qformat in FORMATS}
    for path in sorted((work / "artifacts").glob("*/*/manifest.json")):
        made = json.loads(path.read_text())
        peak, size = made["peak_memory_bytes"] / 2**30, sum(f["size"] for f in made["files"].values()) / 2**30
        what = f"{made['stage']:10} {made['label']:28}"
        sys.stdout.write(f"{what} {made['seconds']:8.1f} s  peak {peak:5.1f} GiB  {size:5.2f} GiB on disk\n")
    rates: dict[str, list[float]] = {qformat: [] for qformat in FORMATS}
    for _ in range(3):
        for qformat, engine in engines.items():
            rate, peak_bytes = speed(engine, 3)
            rates[qformat].append(rate)
            memory = f"peak {peak_bytes / 2**30:.1f} GiB"
            sys.stdout.write(f"{time.strftime('%X')} {qformat:10} {rate:6.2f} tokens/s  {memory}\n")
    base = statistics.median(rates["none"])
    for qformat, found in rates.items():
        median = statistics.median(found)
        sys.stdout.write(f"{qformat:10} {median:6.2f} output tokens/s, {median / base:.2f} x 16 bit\n")


if __name__ == "__main__":
    main()
