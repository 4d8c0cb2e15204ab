"""Whole deployments of the bundled models, made once each, to plant faults in copies of them."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.diagnose.run import DiagnosedFolders, Simulation
from eval.diagnose.servers import Servers
from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.simulating import SimulatedModel, fake_quantized_model
from pipelines.compress.specs import QuantSpec
from pipelines.compress.texts import load_texts
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.port import BuildLimits
from pipelines.serving.config import ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from pipelines.settings.model import BUNDLED
from tests.support.specs import quant_spec
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

MODELS = ("llama", "gemma")
TEXTS = BUNDLED / "corpus.jsonl"
CALIBRATION = CalibrationSettings(size=16, seq_len=256, batch_size=8)
LIMITS = BuildLimits(max_batch_size=4, max_input_len=1024, max_seq_len=2048, max_num_tokens=2048)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}Question: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a deployment is made of.

    Attributes:
        model: "gemma" or "llama".
        qformat: of the weights.
        kv: of the KV cache.
        tp: tensor-parallel ranks of the checkpoint.
        pp: pipeline stages of it.
    """

    model: str
    qformat: QFormat = QFormat.NONE
    kv: KvFormat = KvFormat.AUTO
    tp: int = 1
    pp: int = 1

    @property
    def spec(self) -> QuantSpec:
        """The formats."""
        return quant_spec(self.qformat, self.kv)

    def simulation(self, model: Path) -> Simulation | None:
        """Return how ModelOpt simulates it; None where nothing is calibrated, or not on a CPU."""
        form = FORMATS[self.qformat]
        if form.activation == "fp4" or (not form.calibrated and self.kv is KvFormat.AUTO):
            return None
        return Simulation(
            self.spec,
            lambda: SimulatedModel(fake_quantized_model(model, self.spec, load_texts(TEXTS), CALIBRATION).float()),
        )

    def __str__(self) -> str:
        split = "".join(f" {name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp)) if n > 1)
        kv = "" if self.kv is KvFormat.AUTO else f" kv {self.kv}"
        return f"{self.model} {self.qformat}{kv}{split}"


NONE, KV = QFormat.NONE, (KvFormat.FP8, KvFormat.INT8)
AT_BUILD = (NONE, QFormat.INT8_WO, QFormat.INT4_WO)
CALIBRATED = (
    *(QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.W4A8_AWQ),
    *(QFormat.INT4_GPTQ, QFormat.INT4_RTN),
)
CLEAN = (
    *(
        Recipe(model, form, tp=tp, pp=pp)
        for form in AT_BUILD
        for model in MODELS
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    ),
    *(Recipe(model, form) for form in CALIBRATED for model in MODELS),
    Recipe("llama", QFormat.NVFP4),
    *(Recipe(model, form, kv) for form in (NONE, QFormat.FP8, QFormat.INT8_WO) for model in MODELS for kv in KV),
    *(Recipe(model, QFormat.FP8, tp=2) for model in MODELS),
)
"""Forty-five deployments without a fault: formats x models x KV caches x ranks."""


@dataclass
class Places:
    """Folders of one deployment, which a fault may change.

    Attributes:
        recipe: what it was made of.
        model: Hugging Face folder.
        checkpoint: TensorRT-LLM checkpoint.
        engine: of the CPU.
        repository: of Triton; None if nothing is served.
        chat_template: that the OpenAI service is given; None for the tokenizer's own.
    """

    recipe: Recipe
    model: Path
    checkpoint: Path
    engine: Path
    repository: Path | None = None
    chat_template: Path | None = None

    def deployment(self, log: Path) -> DiagnosedFolders:
        """Return what is diagnosed."""
        return DiagnosedFolders(
            self.model,
            self.model,
            TEXTS,
            self.recipe.simulation(self.model),
            self.recipe.qformat is QFormat.INT4_RTN,
            self.checkpoint,
            self.engine,
            serve=None if self.repository is None else self._serving(self.repository, log),
        )

    def _serving(self, repository: Path, log: Path) -> Callable[[ExitStack], Servers]:
        settings = ServingSettings(openai=True, chat_template=self.chat_template, startup_timeout_s=60)

        def serve(stack: ExitStack) -> Servers:
            server = stack.enter_context(TritonServer(repository, settings, log_file=log))
            stack.enter_context(OpenAiFrontend(server))
            return Servers(server.grpc_url, server.openai_url, server.repository.label)

        return serve


@dataclass
class Deployments:
    """Makes deployments on first use and keeps them in a folder, also for the next run.

    Attributes:
        root: where they are kept.
    """

    root: Path
    _models: dict[str, Path] = field(default_factory=dict)

    def model(self, kind: str) -> Path:
        """Return a copy of a bundled model, with a chat template, which those have not."""
        folder = self.root / f"model-{kind}"
        if not folder.exists():
            half = self.root / f"half-{kind}"
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(BUNDLED / "models" / f"tiny_{kind}", half)
            config = json.loads((half / "tokenizer_config.json").read_text())
            (half / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
            half.rename(folder)
        return folder

    def made(self, recipe: Recipe, *, served: bool = False) -> Places:
        """Return the folders of a clean deployment; copy them before changing them."""
        name = str(recipe).replace(" ", "-")
        model = self.model(recipe.model)
        checkpoint = self._once(f"checkpoint-{name}", lambda out: _quantized(model, out, recipe))
        engine = self._once(f"engine-{name}", lambda out: _built(checkpoint, out))
        repository = None
        if served:
            repository = self._once(f"repository-{name}", lambda out: _written(model, engine, out, recipe))
        return Places(recipe, model, checkpoint, engine, repository)

    def copied(self, recipe: Recipe, to: Path, *, served: bool) -> Places:
        """Return a copy of a deployment that a fault may change."""
        made = self.made(recipe, served=served)
        shutil.rmtree(to, ignore_errors=True)
        copies: dict[str, Any] = {}
        for part in ("model", "checkpoint", "engine", "repository"):
            folder = getattr(made, part)
            copies[part] = None if folder is None else Path(shutil.copytree(folder, to / part))
        return Places(recipe, **copies)

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        folder, half = self.root / name, self.root / f"half-{name}"
        if not folder.exists():
            shutil.rmtree(half, ignore_errors=True)
            make(half)
            half.rename(folder)
        return folder


def _quantized(model: Path, out: Path, recipe: Recipe) -> None:
    quantize(model, out, recipe.spec, load_texts(TEXTS), CALIBRATION, tp_size=recipe.tp, pp_size=recipe.pp)


def _built(checkpoint: Path, out: Path) -> None:
    OpenVinoEngine().build(checkpoint, LIMITS, out, SilentProgress())


def _written(model: Path, engine: Path, out: Path, recipe: Recipe) -> None:
    spec = RepositorySpec(flavour="openvino", label="bundled", variant=str(recipe.qformat), enable_chunked_context=True)
    write_repository(out, engine_dir=engine, tokenizer_dir=model, settings=TritonSettings(), spec=spec, made_from={})
