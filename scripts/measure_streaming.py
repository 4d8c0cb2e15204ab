"""Quantize models with the shapes of Gemma 2B, Llama 1B and 8B and random weights, and measure memory and time.

    python scripts/measure_streaming.py WORK_FOLDER [--model gemma_2b|llama_1b|llama_8b] [--layers N]
        [--formats fp8,int4_awq]

For each format it prints the seconds, and the largest resident memory of the quantizing process less that of the same
process after its imports, also as a share of the bytes of the model in bf16; with a GPU, which does the work then, also
the most that was allocated there. All layers have the same shape, so fewer of them (`--layers`) change the time and the
size of the model, but not the peak. Needs disk for the model and for one checkpoint.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "gemma_2b": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 18, "hidden_size": 2048,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384,
        "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "llama_1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 16,
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama_8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 32,
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
MEASURED = """
import json, resource, sys, time
from pathlib import Path

import modelopt.torch.export, modelopt.torch.quantization, torch, transformers
from pipelines.compress.quantizing import quantize
from pipelines.compress.specs import QuantSpec
from pipelines.compress.texts import load_texts
from pipelines.compress.config import CalibrationSettings, QuantSettings
import pipelines.compress.quantizing, pipelines.compress.modelopt_door
from pipelines.domain.formats import QFormat
from pipelines.settings.model import BUNDLED

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

imports, begin = peak(), time.monotonic()
calibration = CalibrationSettings(size=int(sys.argv[4]), batch_size=1)
texts = load_texts(BUNDLED / "corpus.jsonl")
spec = QuantSpec(QuantSettings(qformat=QFormat(sys.argv[3])))
quantize(Path(sys.argv[1]), Path(sys.argv[2]), spec, texts, calibration)
gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
print(json.dumps({"seconds": time.monotonic() - begin, "imports": imports, "peak": peak(), "gpu": gpu}))
"""


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write random bf16 weights in shards of one layer, with the bundled tokenizer."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the weights are others there, but as random
    hidden, inner, layers = int(shape["hidden_size"]), int(shape["intermediate_size"]), int(shape["num_hidden_layers"])
    q, kv = (int(shape[f"num_{kind}_heads"]) * int(shape["head_dim"]) for kind in ("attention", "key_value"))
    linears = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norm = torch.zeros(hidden) if shape["model_type"] == "gemma" else torch.ones(hidden)
    index: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for i in range(layers):
        layer = {
            f"model.layers.{i}.{name}.weight": (torch.randn(size, device=device) * size[1] ** -0.5).bfloat16().cpu()
            for name, size in linears.items()
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[f"model.layers.{i}.{name}.weight"] = norm.bfloat16()
        save(f"model-{i:02}.safetensors", layer)
    tables = ["model.embed_tokens.weight"] + ([] if shape["tie_word_embeddings"] else ["lm_head.weight"])
    for name in tables:
        table = torch.randn(int(shape["vocab_size"]), hidden, device=device) * 0.02
        save(f"{name}.safetensors", {name: table.bfloat16().cpu()})
    save("norm.safetensors", {"model.norm.weight": norm.bfloat16()})
    source = ROOT / "pipelines/bundled/models" / f"tiny_{shape['model_type']}"
    for path in source.glob("*token*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    """Make the model, then quantize it in a process for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="gemma_2b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--formats", default="fp8,int4_awq")
    parser.add_argument("--size", type=int, default=32, help="calibration texts, of up to 512 tokens")
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.model])
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    model = arguments.work.absolute() / f"{arguments.model}_{shape['num_hidden_layers']}_layers"
    make_model(model, shape)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    for qformat in arguments.formats.split(","):
        out = arguments.work.absolute() / "checkpoint"
        shutil.rmtree(out, ignore_errors=True)
        words = [sys.executable, "-c", MEASURED, str(model), str(out), qformat, str(arguments.size)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        result = json.loads(done.stdout.splitlines()[-1])
        above = result["peak"] - result["imports"]
        on_gpu = f"; GPU {result['gpu'] / 2**20:,.0f} MiB" if result["gpu"] is not None else ""
        share = f"above them {above / 2**20:,.0f} MiB, {above / size:.3f} of it"
        sys.stdout.write(
            f"{model.name} {qformat}: {result['seconds']:.0f} s; model {size / 2**20:,.0f} MiB; imports "
            f"{result['imports'] / 2**20:,.0f} MiB, {share}{on_gpu}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
