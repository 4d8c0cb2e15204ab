"""Measure what fidelity costs on a model with Gemma's architecture, a vocabulary of 256,000 and random weights.

    python -m scripts.measure_fidelity WORK_FOLDER [HIDDEN LAYERS TOKENS]

Prints the memory of the two loaded models, the peak of a comparison, and its seconds and processor seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from eval.fidelity.measure import Side, measure
from eval.fidelity.windows import Windows
from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import LogitsSession
from pipelines.engines.registry import open_engine

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WINDOW = 256_000, 512


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Write random bf16 weights, with the bundled tokenizer."""
    if (folder / "config.json").is_file():
        return
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    config = GemmaConfig(vocab_size=VOCABULARY, torch_dtype="bfloat16", **sizes, **heads)
    GemmaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in (ROOT / "pipelines/bundled/models/tiny_gemma").glob("*token*.json"):
        shutil.copy(path, folder)


def build(work: Path, model: Path, qformat: str) -> Path:
    """Build an engine as a user would and return its folder."""
    words = [f"model.path={model}", f"quant={qformat}", f"paths.store={work / 'artifacts'}"]
    subprocess.run([sys.executable, "-m", "pipelines", "build", *words], cwd=work, check=True)
    return next((work / "artifacts" / "build").glob(f"{model.name}-{qformat}-*"))


def resident(name: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def opened(engine: Path, name: str) -> Side:
    """Open an engine to read texts with."""
    session = open_engine("openvino", inference_precision="f32").open(engine)
    assert isinstance(session, LogitsSession)
    return Side(name, session)


def main() -> None:
    """Build the engines, then compare them; a process of its own makes the model, which takes memory."""
    if sys.argv[1] == "model":
        make_model(Path(sys.argv[2]), *map(int, sys.argv[3:5]))
        return
    work = Path(sys.argv[1]).absolute()
    hidden, layers, tokens = map(int, sys.argv[2:5]) if len(sys.argv) > 2 else (768, 12, 4096)
    model = work / f"gemma_{hidden}x{layers}"
    subprocess.run(
        [sys.executable, "-m", "scripts.measure_fidelity", "model", *map(str, (model, hidden, layers))], check=True
    )
    reference, other = (opened(build(work, model, qformat), qformat) for qformat in ("none", "int8_wo"))
    rows = tuple(tuple((7 * at + 13 * row) % 1900 for at in range(WINDOW)) for row in range(-(-tokens // (WINDOW - 1))))
    loaded = [side.session.teacher_forcing() for side in (reference, other)]
    for each in loaded:
        list(each.slices([rows[0][:32]], 32))
    models, loading = resident("VmRSS"), resident("VmHWM")
    del loaded, each
    Path("/proc/self/clear_refs").write_text("5")
    start, busy = time.monotonic(), time.process_time()
    found = measure(reference, other, [Windows("user", rows, unseen=True)], SilentProgress())
    seconds, busy = time.monotonic() - start, time.process_time() - busy
    sys.stdout.write(
        f"{found.overall.tokens:,} tokens: {seconds:.1f} s, {busy:.1f} s of processor time; mean KL "
        f"{found.overall.kl_mean:.3g}, noise {found.noise.kl_mean:.3g}\n"
        f"two models {models:,.0f} MiB, {loading:,.0f} MiB while they load; peak {resident('VmHWM'):,.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
