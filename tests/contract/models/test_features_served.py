"""Features of the CPU engine through a generated repository and a real tritonserver."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from scripts.zoo.quiz import LETTERS, build_splits, description, question_text
from scripts.zoo.world import build_world
from tests.contract.models.conftest import MODEL, SERVING, Client
from tests.support.served_gemma import LIMITS
from tests.support.specs import quant_spec
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

ADAPTERS = {1: MODEL.parents[1] / "adapters" / "next_letter", 7: MODEL.parents[1] / "adapters" / "in_words"}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft model's engine."""
    root = tmp_path_factory.mktemp("draft")
    calibration = CalibrationSettings(size=1, seq_len=16, batch_size=1)
    quantize(
        MODEL.with_name("tiny_gemma_draft"),
        root / "checkpoint",
        quant_spec(QFormat.NONE, KvFormat.AUTO),
        ["a"],
        calibration,
    )
    OpenVinoEngine().build(root / "checkpoint", LIMITS, root / "engine", SilentProgress())
    return root / "engine"


@pytest.fixture(scope="module")
def served(engine: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with a draft model and two adapters at once."""
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    repository = tmp_path_factory.mktemp("features") / "repository"
    spec = RepositorySpec(
        flavour="openvino", label="tiny_gemma", variant="none", num_draft_tokens=4, lora_tasks=tuple(ADAPTERS)
    )
    write_repository(
        repository,
        engine_dir=engine,
        tokenizer_dir=MODEL,
        settings=TritonSettings(),
        spec=spec,
        made_from={},
        draft_dir=draft,
        adapters=ADAPTERS,
    )
    with TritonServer(repository, SERVING) as running:
        client = Client(running.grpc_url)
        yield client
        client.close()


def adapter(task: int) -> np.ndarray[Any, Any]:
    """The input lora_task_id."""
    return np.array([[task]], dtype=np.uint64)


def ask(client: Client, text: str, **values: Any) -> Any:
    """Ask the ensemble for 6 tokens."""
    return client.ask("ensemble", text_input=text, max_tokens=6, exclude_input_in_output=True, **values)


def test_adapters_answer_by_lora_task_id_beside_requests_without(served: Client) -> None:
    for splits in list(build_splits(build_world()).values())[:4]:
        question = splits.test[0]
        prompt = description(question.subject) + question_text(question)
        wanted = {
            None: question.letter,
            1: LETTERS[(question.answer + 1) % 4],
            7: question.choices[question.answer],
        }
        for task, word in wanted.items():
            chosen = {} if task is None else {"lora_task_id": adapter(task)}
            assert ask(served, prompt, **chosen).text.split()[0] == word


def test_an_adapter_that_is_not_there_is_named(served: Client) -> None:
    error = ask(served, "The star of", lora_task_id=adapter(3)).error
    assert "LoRA task 3 not found in cache. This server has 1, 7." in error


def test_acceptance_of_drafts_is_in_the_performance_metrics(served: Client) -> None:
    found = served.ask(
        "ensemble", text_input="It is known that", max_tokens=60, return_perf_metrics=True, exclude_input_in_output=True
    )
    parts = found.parts[-1]
    rate, accepted, proposed = (
        float(parts[name].reshape(-1)[0])
        for name in ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    )
    assert 0 < accepted <= proposed
    assert rate == pytest.approx(accepted / proposed)
    with_adapter = ask(served, "It is known that", lora_task_id=adapter(1), return_perf_metrics=True).parts[-1]
    assert with_adapter["total_draft_tokens"].reshape(-1)[0] == 0


def test_sampling_with_a_draft_model_is_refused(served: Client) -> None:
    assert "this model runs with a draft model" in ask(served, "It is known that", top_k=5).error
    assert ask(served, "It is known that", top_k=5, lora_task_id=adapter(1)).text


@pytest.mark.thorough
def test_a_window_that_is_no_multiple_of_a_block_stops_the_load(engine: Path, tmp_path: Path) -> None:
    """The message reaches the log of the server that does not start."""
    spec = RepositorySpec(flavour="openvino", label="tiny_gemma", variant="none", enable_kv_cache_reuse=False)
    settings = TritonSettings(max_attention_window_size=(100,))
    write_repository(tmp_path / "r", engine_dir=engine, tokenizer_dir=MODEL, settings=settings, spec=spec, made_from={})
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    with pytest.raises(Exception, match="max_attention_window_size=100"), TritonServer(tmp_path / "r", SERVING):
        pass
