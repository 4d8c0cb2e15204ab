"""Measure pictures on the CPU engine: served beside text of as many tokens, and beside optimum-intel.

    python -m scripts.measure_pictures served WORK_FOLDER [--encoder 128x8] [--rounds 3] [--seconds 8]
    python -m scripts.measure_pictures first WORK_FOLDER --encoder 512x12 --optimum PYTHON [--rounds 10]

The model is a random LLaVA in float16: pictures of 336 pixels in patches of 14, so 576 visual tokens, and a Llama of
512 x 12 with the tokenizer of tiny_llava. `served` loads a real tritonserver with 8 users of 600 input and 32 output
tokens, in turns with a new picture in each request and with text alone, both through tensorrt_llm_bls. `first` times
one new picture and 24 tokens of text to the first token: ours through the server, optimum-intel's
OVModelForVisualCausalLM in its own process (PYTHON has it installed), in turns.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.serving.config import ServingSettings
from pipelines.serving.process import TritonServer
from scripts.served import ROOT, loaded

BUNDLED = ROOT / "pipelines/bundled/models/tiny_llava"
SIDE, PATCH, VISUAL, TEXT = 336, 14, 576, 24
OPTIMUM = f"""
import sys, time, torch, openvino
from optimum.intel import OVModelForVisualCausalLM
folder, token = sys.argv[1], int(sys.argv[2])
model = OVModelForVisualCausalLM.from_pretrained(folder, export=True, load_in_8bit=False, trust_remote_code=False)
model.generation_config.eos_token_id = None
print("ready", openvino.__version__, flush=True)
for line in sys.stdin:
    torch.manual_seed(int(line))
    ids = torch.tensor([[1] + [token] * {VISUAL} + torch.randint(10, 500, ({TEXT} - 1,)).tolist()])
    pixels = torch.randn(1, 3, {SIDE}, {SIDE})
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, max_new_tokens=1)
    print(time.perf_counter() - start, flush=True)
"""


def make(folder: Path, hidden: int, layers: int) -> Path:
    """Write the model unless it is there."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    given = json.loads((BUNDLED / "config.json").read_text())
    text: dict[str, Any] = given["text_config"] | {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config: Any = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision), text_config=transformers.LlamaConfig(**text),
        image_token_index=given["image_token_index"], image_seq_length=VISUAL,
    )  # fmt: skip
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.to(torch.float16).save_pretrained(folder)
    for file in (*BUNDLED.glob("*token*.json"), *BUNDLED.glob("*processor*.json")):
        shutil.copy(file, folder)
    for file in folder.glob("*processor*.json"):
        written = file.read_text().replace("48", str(SIDE)).replace('"patch_size": 8', f'"patch_size": {PATCH}')
        file.write_text(written)
    return folder


def common(model: Path) -> list[str]:
    """Return the overrides of every command."""
    return [
        f"model.path={model}", "multimodal=llava", "quant=none", "build.max_seq_len=1024", "build.max_input_len=700",
        "build.max_num_tokens=1024", "triton.bls_instance_count=8",
    ]  # fmt: skip


def repository(work: Path, model: Path) -> Path:
    """Write the repository and return its folder."""
    words = *common(model), f"paths.store={work}/artifacts", f"paths.runs={work}/runs"
    subprocess.run([sys.executable, "-m", "pipelines", "repository", *words], cwd=ROOT, check=True)
    return max((work / "artifacts/repository").iterdir(), key=lambda each: each.stat().st_mtime)


def summary(server: TritonServer, model: Path, seed: int, *words: str) -> dict[str, Any]:
    """Apply one load and return the summary of its window."""
    return loaded(
        *common(model), f"benchmark.url={server.grpc_url}", f"workload.isl={VISUAL + TEXT}", f"workload.seed={seed}",
        "benchmark.model_name=tensorrt_llm_bls", *words,
    )  # fmt: skip


def served(work: Path, model: Path, rounds: int, seconds: float) -> None:
    """Print tokens/s with pictures and with text, and their ratio."""
    load = ("workload.osl=32", "benchmark.concurrency=8", f"benchmark.duration_s={seconds:g}", "benchmark.warmup_s=1")
    with TritonServer(repository(work, model), ServingSettings(), log_file=work / "server.log") as server:
        ratios = []
        for turn in range(rounds):
            rates = {}
            for images in (1, 0) if turn % 2 else (0, 1):
                found = summary(server, model, turn, f"workload.images={images}", *load)
                rates[images] = float(found["output_tokens_per_s"])
            ratios.append(rates[1] / rates[0])
            sys.stdout.write(f"pictures {rates[1]:.1f}, text {rates[0]:.1f} tokens/s, ratio {ratios[-1]:.3f}\n")
            sys.stdout.flush()
    sys.stdout.write(f"median ratio {statistics.median(ratios):.3f}\n")


def first(work: Path, model: Path, rounds: int, optimum: str) -> None:
    """Print the time to the first token of one picture, ours through the server and optimum-intel's."""
    token = json.loads((model / "config.json").read_text())["image_token_index"]
    theirs = subprocess.Popen(
        [optimum, "-c", OPTIMUM, str(model), str(token)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert theirs.stdin is not None
    assert theirs.stdout is not None
    try:
        version = next((line.split()[1] for line in theirs.stdout if line.startswith("ready ")), None)
        if version is None:
            raise SystemExit("optimum-intel did not start.")
        one: tuple[str, ...] = (
            "workload.osl=1",
            "workload.images=1",
            "benchmark.concurrency=1",
            "benchmark.warmup_s=0",
        )
        one += ("benchmark.warmup_requests=1", "benchmark.num_requests=5", "benchmark.min_requests=5")
        with TritonServer(repository(work, model), ServingSettings(), log_file=work / "server.log") as server:
            pairs = []
            for turn in range(rounds):
                own = float(summary(server, model, turn, *one)["ttft_s"]["p50"])
                times = []
                for seed in range(6):
                    theirs.stdin.write(f"{100 * turn + seed}\n")
                    theirs.stdin.flush()
                    times.append(float(theirs.stdout.readline()))
                pairs.append((own, statistics.median(times[1:])))
                sys.stdout.write(f"ours {own:.3f} s, optimum-intel {pairs[-1][1]:.3f} s\n")
                sys.stdout.flush()
        ratio = statistics.median(own / other for own, other in pairs)
        sys.stdout.write(f"OpenVINO {version} there; median ratio ours : theirs {ratio:.2f}\n")
    finally:
        theirs.kill()


def main() -> None:
    """Make the model and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("served", "first"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--encoder", default="128x8", help="hidden size x layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--optimum", default=sys.executable, help="a Python with optimum-intel")
    asked = parser.parse_args()
    work = asked.work.absolute()
    model = make(work / f"llava-{asked.encoder}", *map(int, asked.encoder.split("x")))
    if asked.what == "served":
        served(work, model, asked.rounds, asked.seconds)
    else:
        first(work, model, asked.rounds, asked.optimum)


if __name__ == "__main__":
    main()
