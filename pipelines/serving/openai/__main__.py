"""Run the service: python -m pipelines.serving.openai --repository R --grpc HOST:PORT ..."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import uvicorn

from pipelines.serving.openai.app import ServedModel, make_app
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.repository import ModelRepository, read_repository


def main() -> None:
    """Serve until SIGTERM; running responses finish first."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serving.openai", description=__doc__)
    parser.add_argument("--repository", type=Path, required=True, help="the model repository that tritonserver serves")
    parser.add_argument("--grpc", required=True, help="host:port of tritonserver's gRPC service")
    parser.add_argument("--metrics", required=True, help="URL of tritonserver's metrics")
    parser.add_argument("--target", default="ensemble", help="the Triton model to ask")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain-timeout-s", type=int, default=30)
    parser.add_argument("--chat-template", type=Path, help="instead of the tokenizer's own")
    given = parser.parse_args()
    known = served(read_repository(given.repository), given.metrics, given.chat_template)
    app = make_app(known, Backend(given.grpc, given.target))
    uvicorn.run(
        app,
        host=given.host,
        port=given.port,
        log_level="warning",
        timeout_graceful_shutdown=given.drain_timeout_s,
    )


def served(repository: ModelRepository, metrics_url: str, chat_template: Path | None = None) -> ServedModel:
    """Collect the facts of the repository that responses depend on."""
    return ServedModel(
        label=repository.label,
        created=int(repository.path.stat().st_mtime),
        max_seq_len=repository.max_seq_len,
        template=ChatTemplate.load(
            repository.tokenizer, chat_template, tokenizer_adds_special=repository.adds_special_tokens
        ),
        count_tokens=_counter(repository),
        metrics_url=metrics_url,
    )


def _counter(repository: ModelRepository) -> Callable[[str], int] | None:
    """Return a function that counts a prompt's tokens as the preprocessing model does."""
    file = repository.tokenizer / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    special = repository.adds_special_tokens
    return lambda text: len(tokenizer.encode(text, add_special_tokens=special).ids)


if __name__ == "__main__":
    main()
