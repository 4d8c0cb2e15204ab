"""What recovery training takes: `python -m scripts.measure_training MODEL_FOLDER [WORDS ...]`.

MODEL_FOLDER is a Hugging Face folder, for example a random one that `scripts/measure_streaming.py` made. Each of WORDS
is one training with its settings, joined by commas ("recover=distill,recover.batch_size=4"); quant is int4_rtn. Each
runs in a process of its own, on the GPU where there is one, and prints the seconds of a step, the tokens trained on in
a second, and the most memory that was reserved on the GPU (or resident, on a CPU) beside what `make plan` says. With
recover.processes (recover.sharding=none or full) it is that of the largest process.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = ("recover.steps=6", "recover.evaluate_every=6", "recover.batch_size=4", "recover.seq_len=256")
DEFAULT = (
    "recover=distill",
    "recover=distill,recover.precision=bfloat16",
    "recover=distill,recover.precision=bfloat16,recover.gradient_checkpointing=true",
    "recover=distill,recover.precision=bfloat16,recover.lora_rank=16",
)


def main(model: Path, trainings: tuple[str, ...]) -> None:
    """Run each training in a process of its own, and print a line for it."""
    for training in trainings:
        words = [sys.executable, "-m", "scripts.measure_training", "--one", str(model), training]
        done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        sys.stdout.write(
            f"{training}: {result['step_s']:.2f} s a step, {result['tokens_s']:,.0f} tokens/s, {result['where']}"
            f" {result['peak'] / 2**30:.1f} GiB, planned {result['planned'] / 2**30:.1f}; loss {result['losses']}\n"
        )
        sys.stdout.flush()


def one(model: Path, training: str) -> None:
    """Train, and print what was found as JSON."""
    import torch

    from pipelines.compress.texts import load_texts
    from pipelines.compress.training_processes import recover
    from pipelines.domain.progress import SilentProgress
    from pipelines.host.machine import gather
    from pipelines.plan.plan import make_plan
    from pipelines.plan.weights_checks import training_memory_bytes
    from pipelines.settings.compose import load
    from pipelines.settings.model import BUNDLED
    from pipelines.store.store import Store

    class Timed(SilentProgress):
        """Remembers when each step ended."""

        ends: list[float] = []  # noqa: RUF012 - one training in a process

        def task(self, title, total, unit=""):  # type: ignore[no-untyped-def]
            from contextlib import contextmanager

            @contextmanager
            def context():  # type: ignore[no-untyped-def]
                yield lambda _amount: self.ends.append(time.monotonic()) if title == "training" else None

            return context()

    with tempfile.TemporaryDirectory(dir=model.parent) as work:
        words = ["quant=int4_rtn", *SHORT, *training.split(",")]
        settings = load([f"paths.store={work}/store", f"model.path={model}", "engine=openvino", *words])
        made = make_plan(settings, "build", Store(settings.paths.store), gather())
        spec = next(step.node.stage for step in made.steps if step.node.id == "recover").spec  # type: ignore[attr-defined]
        facts = recover(model, model, Path(work) / "out", spec, load_texts(BUNDLED / "corpus.jsonl"), progress=Timed())
    on_gpu = torch.cuda.is_available()
    resident = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    steps = [after - before for before, after in zip(Timed.ends[1:], Timed.ends[2:], strict=False)]
    step = sorted(steps)[len(steps) // 2]
    result = {
        "step_s": step,
        "tokens_s": spec.recover.batch_size * spec.recover.accumulation * spec.recover.seq_len / step,
        "where": "GPU" if on_gpu else "resident",
        "peak": torch.cuda.max_memory_reserved() if on_gpu else 1024 * resident,
        "planned": training_memory_bytes(made.deployment.shape, made.settings),  # type: ignore[arg-type]
        "losses": [facts["loss_before"], facts["loss_after"]],
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]), tuple(sys.argv[2:]) or DEFAULT)
