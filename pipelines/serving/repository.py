"""Facts about a model repository that serving needs before it starts."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.settings.plain import override

DESCRIPTION = "repository.json"
TEXT_MODEL = "ensemble"
"""The Triton model that takes and returns text."""
CPU_ENGINE = "openvino"
"""Name of this project's own engine in that file."""
MOST_IMAGES = re.compile(r'key: "max_num_images"\s*value \{\s*string_value: "(\d+)"')
ENCODERS, ENCODER_FOLDER, ENGINE_FOLDER = "multimodal_encoders", "multimodal_encoders/1/engine", "tensorrt_llm/1/engine"
BACKEND = re.compile(r'^\s*backend:\s*"(\w+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelRepository:
    """A model repository.

    Attributes:
        models: names of its models, sorted.
        label: the model's name, also for OpenAI clients.
        gpu: whether it runs on TensorRT-LLM's own backend.
        skips_special_tokens: whether postprocessing leaves special tokens out.
        decoupled: whether its engine sends several responses to a request.
        guided: what makes its engine follow guides: llguidance, xgrammar; None if it cannot.
        tokens_per_block: of the KV cache, where the engine says how many blocks it has reused; otherwise None.
        few_log_probs: whether its engine returns the log probabilities of a few tokens instead of all logits.
        perf_metrics: whether its engine can say how long a request waited.
        most_at_once: requests that the CPU engine runs or lets wait; None if any number may wait, and on a GPU, where
            instances and Triton add queues of their own.
        max_images: pictures of one request; 0 where its own code takes none.
        draws_anew: whether its engine samples differently each time without a seed; TensorRT-LLM always the same.
        world_size: number of GPUs (ranks) it needs.
        max_input_len: maximum of prompt tokens of one request; None if the repository does not state it.
        max_seq_len: maximum of prompt and output tokens of one request; None if the repository does not state it.
        launched_by_hand: whether it spans machines or pre-started ranks, which a single command cannot start.
        adds_special_tokens: whether preprocessing lets the tokenizer add special tokens, such as BOS.
    """

    path: Path
    models: tuple[str, ...]
    label: str
    gpu: bool
    world_size: int
    max_input_len: int | None = None
    max_seq_len: int | None = None
    adds_special_tokens: bool = True
    skips_special_tokens: bool = True
    decoupled: bool = True
    guided: str | None = None
    tokens_per_block: int | None = None
    launched_by_hand: bool = False
    draws_anew: bool = False
    few_log_probs: bool = False
    perf_metrics: bool = False
    most_at_once: int | None = None
    max_images: int = 0

    @property
    def tokenizer(self) -> Path:
        """The Hugging Face tokenizer folder."""
        return self.path / "preprocessing" / "1" / "tokenizer"

    @property
    def longest_prompt(self) -> int | None:
        """Maximum of prompt tokens, as far as the repository states one."""
        return self.max_input_len or self.max_seq_len


def read_repository(folder: Path) -> ModelRepository:
    """Read the facts of a repository.

    Raises:
        UserError: it does not exist or holds no model.
    """
    path = folder.expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"The model repository '{folder}' does not exist.", todo="Write one: make repository")
    models = tuple(sorted(child.parent.name for child in path.glob("*/config.pbtxt")))
    if not models:
        raise UserError(
            f"'{folder}' is not a model repository: no folder in it has a config.pbtxt.",
            allowed="A model repository has one folder per model: <model>/config.pbtxt and <model>/1/.",
            todo="Write one: make repository",
        )
    described = _description(path)
    engine = path / "tensorrt_llm" / "config.pbtxt"
    engine_config = engine.read_text() if engine.is_file() else ""
    backend = BACKEND.search(engine_config)
    preprocessing = path / "preprocessing" / "config.pbtxt"
    images = MOST_IMAGES.search(preprocessing.read_text()) if preprocessing.is_file() else None
    on_cpu = described.get("flavour") == CPU_ENGINE
    settings, limits = described.get("settings") or {}, described.get("limits") or {}
    waiting, running = settings.get("max_queue_size"), limits.get("max_batch_size")
    return ModelRepository(
        path=path,
        models=models,
        label=str(described.get("label") or path.name),
        gpu=backend is not None and backend[1] == "tensorrtllm",
        world_size=int(described.get("world_size") or 1),
        max_input_len=limits.get("max_input_len"),
        max_seq_len=limits.get("max_seq_len"),
        adds_special_tokens=bool(settings.get("add_special_tokens", True)),
        skips_special_tokens=bool(settings.get("skip_special_tokens", True)),
        decoupled=bool(settings.get("decoupled_mode", True)),
        guided=settings.get("guided_decoding_backend"),
        tokens_per_block=described.get("tokens_per_block"),
        draws_anew=on_cpu,
        max_images=int(images[1]) if images is not None and on_cpu else 0,
        few_log_probs='"return_top_log_probs"' in engine_config,
        perf_metrics='"return_perf_metrics"' in engine_config,
        most_at_once=waiting + running if on_cpu and waiting and running else None,
        launched_by_hand=bool(settings.get("participant_ids")) or int(settings.get("num_nodes") or 1) > 1,
    )


def refuse_elsewhere(repository: ModelRepository, *, from_wheel: bool) -> None:
    """Refuse a repository that the server found here cannot serve.

    Args:
        repository: to be served.
        from_wheel: whether the server is that of nvidia-pytriton, which has only the Python backend.

    Raises:
        UserError: it needs TensorRT-LLM's backend, or a launch over several machines.
    """
    if repository.gpu and from_wheel:
        raise UserError(
            f"'{repository.path}' runs on TensorRT-LLM's backend; the tritonserver here has only the Python backend.",
            todo="Serve it inside NVIDIA's Triton container with TensorRT-LLM, or write one for this machine with "
            "engine=openvino.",
        )
    if repository.launched_by_hand:
        raise UserError(
            f"'{repository.path}' is meant for several machines, or for ranks that are started beforehand.",
            todo=f"The plain command is under 'start' in {repository.path / DESCRIPTION}. Scripts that start it on a "
            "cluster:",
            command=("make", "scripts", "cluster=slurm", override("serving.repository", repository.path)),
        )


def _description(path: Path) -> dict[str, Any]:
    """Read the description of the repository; one made by hand need not have any."""
    file = path / DESCRIPTION
    if not file.is_file():
        return {}
    try:
        described = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}.", todo="Write the repository again.") from None
    return described if isinstance(described, dict) else {}
