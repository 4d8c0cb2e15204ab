"""The bundled models, compressed by ModelOpt, built by the CPU engine and simulated by torch, each made once."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("modelopt")
pytest.importorskip("openvino_genai")

from pipelines.checkpoint.read import Checkpoint  # noqa: E402
from pipelines.compress.config import CalibrationSettings  # noqa: E402
from pipelines.compress.quantizing import quantize  # noqa: E402
from pipelines.compress.simulating import fake_quantized_model  # noqa: E402
from pipelines.compress.specs import QuantSpec  # noqa: E402
from pipelines.domain.formats import KvFormat, QFormat  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.openvino.engine import OpenVinoEngine, OpenVinoSession  # noqa: E402
from pipelines.engines.openvino.runtime import OpenVinoOptions  # noqa: E402
from pipelines.engines.port import BuildLimits  # noqa: E402
from pipelines.settings.model import BUNDLED  # noqa: E402
from scripts.zoo.quiz import build_prompt, build_splits  # noqa: E402
from scripts.zoo.world import build_world  # noqa: E402
from tests.support.made_once import made_once  # noqa: E402
from tests.support.scored_logits import scored_logits  # noqa: E402
from tests.support.small_models import model_of  # noqa: E402
from tests.support.specs import quant_spec  # noqa: E402

MODELS = BUNDLED / "models"
CALIBRATION = CalibrationSettings(size=8, seq_len=128, batch_size=4)
LIMITS = BuildLimits(max_batch_size=8, max_input_len=512, max_seq_len=1024, max_num_tokens=1024)
WIDTH, SEQUENCES = 128, 8


@cache
def quiz_prompts() -> list[str]:
    """Questions with two solved ones before them, of several subjects."""
    prompts = []
    for splits in build_splits(build_world()).values():
        shots, rest = splits.dev[:2], splits.test
        prompts += [build_prompt(shots, question) for question in rest[:8]]
    return prompts


@dataclass
class Workshop:
    """Makes checkpoints, engines and references on first use and remembers them.

    Attributes:
        root: scratch folder of this worker.
        shared: folder of all workers, for checkpoints and their engines.
    """

    root: Path
    shared: Path
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what `make` returned the first time for this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def source(self, kind: str) -> Path:
        """Return the folder of the bundled model of this kind, or a small one made from another's weights."""
        return self.once(("source", kind), lambda: model_of(self.root / f"model-{kind}", kind))

    def tokens(self, kind: str) -> list[list[int]]:
        """Token ids of the quiz prompts."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.source(kind))
        return self.once(("tokens", kind), lambda: [tokenizer(text)["input_ids"] for text in quiz_prompts()])

    def batch(self, kind: str) -> np.ndarray:
        """[8, 128] token ids that no calibration saw."""
        prompts = list(itertools.chain.from_iterable(reversed(self.tokens(kind))))
        return np.array(prompts[: SEQUENCES * WIDTH], dtype=np.int64).reshape(SEQUENCES, WIDTH)

    def checkpoint(
        self, kind: str, qformat: QFormat, kv: KvFormat = KvFormat.AUTO, *, tp: int = 1, pp: int = 1, ep: int = 1
    ) -> Path:
        """Compress a bundled model."""

        def make(out: Path) -> None:
            texts = quiz_prompts()[:8]
            ranks = {"tp_size": tp, "pp_size": pp, "moe_ep_size": ep}
            quantize(self.source(kind), out, quant_spec(qformat, kv), texts, CALIBRATION, **ranks)

        return made_once(self.shared / f"checkpoint-{kind}-{qformat}-{kv}-{tp}-{pp}-{ep}", make)

    def mix(self, kind: str, spec: QuantSpec) -> Path:
        """Compress a bundled model into searched formats."""

        def make() -> Path:
            out = self.root / f"mix-{kind}-{len(self._made)}"
            quantize(MODELS / f"tiny_{kind}", out, spec, quiz_prompts()[:8], CALIBRATION)
            return out

        return self.once(("mix", kind, spec), make)

    def float32_checkpoint(self, kind: str) -> Path:
        """Return the 16-bit checkpoint with every tensor widened to float32."""
        narrow, out = self.checkpoint(kind, QFormat.NONE), self.root / f"f32-{kind}"
        return self.once(("float32", kind), lambda: widen(narrow, out))

    def engine(self, checkpoint: Path) -> Path:
        """Build an engine folder."""
        return made_once(
            checkpoint.with_name(f"engine-{checkpoint.name}"),
            lambda out: OpenVinoEngine().build(checkpoint, LIMITS, out, SilentProgress()),
        )

    def open(self, checkpoint: Path, *, engine: Path | None = None, **options: Any) -> OpenVinoSession:
        """Open the engine of a checkpoint, or another of it; float32 arithmetic on one thread unless told otherwise."""
        chosen = OpenVinoOptions(**{"inference_precision": "f32", "num_threads": 1, **options})
        return OpenVinoEngine(chosen).open(engine or self.engine(checkpoint))

    def logits(self, checkpoint: Path, kind: str, **options: Any) -> np.ndarray:
        """Logits [8, 128, V] of the engine for `batch`."""

        def make() -> np.ndarray:
            with self.open(checkpoint, **options) as session:
                return np.stack([scored_logits(session, row.tolist()) for row in self.batch(kind)])

        return self.once(("logits", checkpoint, kind, *sorted(options.items())), make)

    def plain(self, kind: str, dtype: Any = None) -> Any:
        """Return the bundled model in Transformers."""
        path = self.source(kind)
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or torch.bfloat16).eval()

    def simulated_logits(self, kind: str, qformat: QFormat) -> np.ndarray:
        """Logits [8, 128, V] of ModelOpt's fake-quantized model for `batch`."""

        def make() -> np.ndarray:
            return torch_logits(self.simulated_by(kind, quant_spec(qformat)), self.batch(kind))

        return self.once(("simulated", kind, qformat), make)

    def simulated_by(self, kind: str, spec: QuantSpec) -> Any:
        """Return ModelOpt's fake-quantized model, computing in float32."""
        texts = quiz_prompts()[:8]
        model = fake_quantized_model(self.source(kind), spec, texts, CALIBRATION)
        return as_exported(model.float(), kind)


def as_exported(model: Any, kind: str) -> Any:
    """Round Gemma's norms as the checkpoint does: it stores bf16(1 + w)."""
    if kind == "gemma":
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data = (1 + weight.data).bfloat16().float() - 1
    return model


def torch_logits(model: Any, batch: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a torch model."""
    with torch.no_grad():
        return model(torch.from_numpy(batch)).logits.float().numpy()


def likeliest(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token after each beginning of prompt and answer: the answer itself, if and only if it is greedy."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """|found - expected| / |expected|, Frobenius."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def same_top(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of positions where both name the same next token."""
    return float((found.argmax(-1) == expected.argmax(-1)).mean())


def widen(folder: Path, out: Path) -> Path:
    """Write a 16-bit checkpoint as float32."""
    from safetensors.numpy import save_file

    checkpoint = Checkpoint(folder)
    out.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: checkpoint.tensor(name).astype(np.float32) for name in checkpoint}, out / "rank0.safetensors")
    return out


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Workshop]:
    """One workshop for all tests of a session; torch computes on one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Workshop(tmp_path_factory.mktemp("engines"), shared)
    torch.set_num_threads(threads)
