"""Measure how much cheaper our scoring is than lm-eval's own `hf` model, on the same questions.

    python -m scripts.measure_scoring WORK_FOLDER [QUESTIONS_PER_SUBJECT ROUNDS]

Two models, tiny_gemma and one with Gemma's architecture (768 x 12, vocabulary 256,000, random weights), are asked
mini_mmlu's questions with five worked examples, in bf16 and in float32. Each measurement is a process of its own, in
turn. Prints processor seconds of asking, without loading, and the memory that the process takes beyond what its imports
do; medians of the rounds, and how far apart the two sides' log probabilities are. For our side also the operations of
its matrix products (linears, head and attention; multiplications and additions), and how many of them a processor
second makes, beside one large matrix product in the same arithmetic and process. Memory is shown as a multiple of the
weights in bf16, too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.measure_fidelity import ROOT, build, make_model

THREADS = 2
MEASURE = """
import json, resource, sys, time
from pathlib import Path

def imported(words):
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines()
                    if line.startswith(words)).split()[1])

def count_operations(session, model):
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    scorer, made = session._scorer, {"operations": 0}
    infer = scorer._infer
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    def counted(piece, past, start, flat):
        (batch, width), rows = piece.shape, max(1, len(flat))
        read = (past.lengths.max(initial=0) + start) * width + width * (width + 1) / 2
        made["operations"] += 2 * batch * width * (shape.linear_params - mlp)  # the last MLP runs on some rows only
        made["operations"] += 2 * rows * (mlp + shape.vocab_size * shape.hidden_size)
        made["operations"] += 4 * batch * read * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
        return infer(piece, past, start, flat)
    scorer._infer = counted
    return made

def one_product(precision, size=2048, times=5):
    left = opset13.parameter([size, size], openvino.Type.f32)
    right = opset13.constant(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32))
    graph = openvino.Model([opset13.matmul(left, right, False, True)], [left], "product")
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": OF_THEM}
    request = openvino.Core().compile_model(graph, "CPU", settings).create_infer_request()
    values, rates = np.ones((size, size), dtype=np.float32), []
    for _ in range(times):
        start = time.process_time()
        request.infer({0: values}, share_inputs=True, share_outputs=True)
        rates.append(2 * size**3 / (time.process_time() - start))
    return max(rates)

side, folder, model, precision, limit = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
import numpy as np, torch, transformers, lm_eval.evaluator, openvino, openvino_genai
from openvino import opset13
from lm_eval.models.huggingface import HFLM
from eval.adapter import EngineLM, load_tokenizer
from eval.harness import _tamed
from eval.spec import EvalSpec
from eval.tasks.load import load_tasks
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SilentProgress
from pipelines.engines.registry import open_engine

torch.set_num_threads(OF_THEM)
with _tamed():
    tasks = load_tasks(EvalSpec(task="mini_mmlu", max_length=2048, limit=limit))
    before = imported("VmRSS")
    if side == "hf":
        dtype = {"bf16": "bfloat16", "f32": "float32"}[precision]
        lm = HFLM(pretrained=str(model), dtype=dtype, device="cpu", batch_size=8, max_length=2048)
    else:
        session = open_engine("openvino", inference_precision=precision, num_threads=OF_THEM).open(folder)
        lm = EngineLM(session, load_tokenizer(model), 2048, SilentProgress())
        session.loglikelihood([([2, 3], [4])], SilentProgress())
        made = count_operations(session, model)
    loaded, start = time.perf_counter(), time.process_time()
    raw = lm_eval.evaluator.evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=1)
    taken, wall = time.process_time() - start, time.perf_counter() - loaded
scores = {f"{name}/{row['doc_id']}": [score for score, _ in row["filtered_resps"]]
          for name, rows in raw["samples"].items() for row in rows}
memory = imported("VmHWM") - before
work = {} if side == "hf" else {"operations": made["operations"], "of_one_product": one_product(precision)}
print(json.dumps({"cpu": taken, "wall": wall, "memory": memory, "scores": scores, **work}))
""".replace("OF_THEM", str(THREADS))


def measured(side: str, engine: Path, model: Path, precision: str, limit: int) -> dict[str, Any]:
    """Ask the questions in a process of its own."""
    words = [sys.executable, "-c", MEASURE, side, str(engine), str(model), precision, str(limit)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Build the engines, then measure both sides alternately and print the table."""
    work = Path(sys.argv[1]).absolute()
    limit, rounds = (int(word) for word in (sys.argv[2:] + ["4", "3"][len(sys.argv) - 2 :])[:2])
    models = {"tiny_gemma": ROOT / "pipelines/bundled/models/tiny_gemma", "gemma_768x12": work / "gemma_768x12"}
    make_model(models["gemma_768x12"], 768, 12)
    sys.stdout.write(
        "model         side    dtype  CPU s  wall s  memory GiB  of the weights  ratio  largest difference\n"
    )
    for name, folder in models.items():
        engine = build(work, folder, "none")
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        places = [(side, precision) for side in ("ours", "hf") for precision in ("bf16", "f32")]
        found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in places}
        for _ in range(rounds):
            for key in places:
                found[key].append(measured(key[0], engine, folder, key[1], limit))
        for side, precision in places:
            key = side, precision
            cpu, wall, memory = (
                statistics.median(one[field] for one in found[key]) for field in ("cpu", "wall", "memory")
            )
            of_weights = memory * 1024 / weights
            ours = statistics.median(one["cpu"] for one in found["ours", "bf16"])
            far = _far(found[key][0]["scores"], found["hf", "f32"][0]["scores"])
            taken = f"{name:<13} {side:<7} {precision:<5} {cpu:6.1f}  {wall:6.1f}  {memory / 2**20:10.2f}"
            sys.stdout.write(f"{taken}  {of_weights:14.1f}  {cpu / ours:5.1f}  {far:.2g}{_rate(found[key])}\n")
            sys.stdout.flush()


def _rate(found: list[dict[str, Any]]) -> str:
    """Return the operations of our side, and its rate beside that of one product."""
    if "operations" not in found[0]:
        return ""
    count = found[0]["operations"]
    rate, alone = (
        statistics.median(values)
        for values in ([count / one["cpu"] for one in found], [one["of_one_product"] for one in found])
    )
    return f"  {count / 1e9:.0f} G operations, {rate / 1e9:.1f} G per CPU s; one product {alone / 1e9:.1f}"


def _far(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    return max(abs(a - b) for key, scores in theirs.items() for a, b in zip(ours[key], scores, strict=True))


if __name__ == "__main__":
    main()
