"""openvino_genai's paged, in-flight batching pipeline for an engine folder; output that follows a guide beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes
from pipelines.engines.openvino.build import MODEL_FILE, save_graph
from pipelines.engines.openvino.generation_request import GenerationRequest, Guides
from pipelines.engines.openvino.memory import KV_BLOCK_TOKENS, blocks_of, elsewhere_fault, kv_fault
from pipelines.engines.openvino.prompt_table import PROBED, Array, TablePlaces, mapped_table
from pipelines.engines.openvino.runtime import (
    FIRST_TOKENS,
    EngineFolder,
    OpenVinoOptions,
    kv_block_bytes,
    kv_blocks,
    kv_precision,
    properties,
)
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence, TokenChooser
from pipelines.engines.port import Generation, NotFiniteError, SamplingParams, TokenIds

# Draft models for speculative decoding: check that one fits, and prepare its folder for openvino_genai.

TOKENIZER_FILE = "openvino_tokenizer.xml"


def check_draft(target: EngineFolder, draft: EngineFolder) -> None:
    """Reject a draft model that does not fit this engine.

    Raises:
        UserError: its vocabulary differs, or its sequences are shorter.
    """
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise UserError(
            f"The draft engine {draft.path} has a vocabulary of {theirs} tokens; the engine's is {ours}.",
            allowed="A draft model must have the same tokenizer.",
        )
    if draft.limits.max_seq_len < target.limits.max_seq_len:
        raise UserError(
            f"The draft engine {draft.path} was built with max_seq_len={draft.limits.max_seq_len}.",
            allowed=f"It must be at least the engine's {target.limits.max_seq_len}.",
        )


def with_tokenizer(engine_dir: Path, folder: Path) -> Path:
    """Create a folder with links to an engine's files and a tokenizer.

    openvino_genai compares how both tokenizers encode a sentence before it accepts a draft model, even if it will only
    get token ids. Engine folders hold no tokenizer (`check_draft` makes sure that the vocabularies are equal), so it
    gets one that turns any text into a single token.
    """
    folder.mkdir()
    for file in (MODEL_FILE, Path(MODEL_FILE).with_suffix(".bin").name):
        (folder / file).symlink_to((engine_dir / file).resolve())
    text = op.parameter(ov.PartialShape([-1]), ov.Type.string)
    shape = op.concat([op.shape_of(text), np.array([1], dtype=np.int64)], 0)
    results = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        result = op.result(op.broadcast(np.int64(value), shape))
        result.get_output_tensor(0).set_names({name})
        results.append(result)
    ov.save_model(ov.Model(results, [text], "tokenizer"), folder / TOKENIZER_FILE)
    return folder


_NAN_OF_SAMPLER = "isnan"
"""Part of what genai says of logits that are NaN."""


def open_pipeline(folder: EngineFolder, options: OpenVinoOptions) -> genai.ContinuousBatchingPipeline:
    """Load the pipeline for token ids, which needs no tokenizer, and generate the first tokens with it.

    Raises:
        UserError: the KV cache cannot hold one request of max_seq_len tokens, this processor does not support its
            type, the engine does not support the window, or the draft model does not fit.
        NotFiniteError: the model returns NaN for the simplest of prompts, of which genai makes token 0 without a word.
    """
    with folder.loading():
        pipeline = _load(folder, options)
        read_with_log_probs(pipeline, options, [0] * FIRST_TOKENS, 2)
    return pipeline


def read_with_log_probs(
    pipeline: genai.ContinuousBatchingPipeline, options: OpenVinoOptions, tokens: TokenIds, new: int
) -> genai.GenerationHandle:
    """Generate so many new tokens with log probabilities, which genai refuses to compute of NaN; nothing else may run.

    Returns:
        the handle of the request, which has ended.

    Raises:
        NotFiniteError: the logits are NaN; the pipeline has then lost count of its blocks, and is of no more use.
    """
    config = genai.GenerationConfig(max_new_tokens=new, eos_token_id=0, stop_token_ids={0}, ignore_eos=True, logprobs=1)
    if options.draft_dir is not None:
        config.num_assistant_tokens = options.num_draft_tokens
    handle = pipeline.add_request(0, ov.Tensor(np.array([tokens], dtype=np.int64)), config)
    with finite(tokens):
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            pipeline.step()
    return handle


def open_table(
    folder: EngineFolder, options: OpenVinoOptions, pipeline: genai.ContinuousBatchingPipeline
) -> TablePlaces | None:
    """Return the places of the prompt table of a pipeline in which nothing runs; None for an engine without one.

    Raises:
        UserError: OpenVINO does not read it from memory that can be written to, see `prompt_table.mapped_table`.
    """
    rows, vocab_size = folder.limits.max_prompt_embedding_table_size, folder.config.vocab_size
    if not rows:
        return None
    row = np.random.default_rng(0).standard_normal(folder.config.hidden_size, dtype=np.float32)

    def is_read(table: Array) -> bool:
        seen = []
        for generation in range(PROBED):
            table[0] = row if generation else -row
            token = vocab_size + rows * generation
            handle = read_with_log_probs(pipeline, options, [token], 1)
            seen.append(float(handle.read_all()[0].generated_log_probs[0]))
        return seen[0] != seen[1]

    return TablePlaces(mapped_table(folder.path / MODEL_FILE, is_read), vocab_size)


@contextmanager
def finite(tokens: TokenIds = ()) -> Iterator[None]:
    """Translate genai's error about NaN.

    Raises:
        NotFiniteError: the logits are NaN.
    """
    try:
        yield
    except RuntimeError as error:
        if _NAN_OF_SAMPLER not in str(error):
            raise
        raise NotFiniteError("The engine", "no token can be chosen", tokens) from error


def _load(folder: EngineFolder, options: OpenVinoOptions) -> genai.ContinuousBatchingPipeline:
    precision = kv_precision(folder.config, options)
    if fault := kv_fault(options):
        raise UserError.of([fault])
    if folder.grouped_experts and (fault := elsewhere_fault(folder.path, options)):
        raise UserError.of([fault])
    blocks = kv_blocks(folder, options)
    if blocks * KV_BLOCK_TOKENS < folder.limits.max_seq_len:
        needed = blocks_of(folder.limits.max_seq_len) * kv_block_bytes(folder.config, precision)
        raise UserError(
            f"engine.openvino.kv_cache_bytes={options.kv_cache_bytes} holds {blocks * KV_BLOCK_TOKENS} tokens at"
            f" {precision}; one request may have max_seq_len={folder.limits.max_seq_len}.",
            todo=f"Set at least {needed} bytes ({show_bytes(needed)}).",
        )
    scheduler, chosen = _scheduler(folder, options, blocks), properties(folder.config, options, precision)
    if options.draft_dir is not None:
        return _with_draft(folder, options, scheduler, chosen)
    if folder.adapter is None:
        return genai.ContinuousBatchingPipeline(str(folder.path), scheduler, "CPU", chosen)
    # The pipeline reads a folder. Its memory maps stay valid after the folder is gone.
    with tempfile.TemporaryDirectory(prefix="pipelines-lora-") as scratch:
        save_graph(folder.read_model(), Path(scratch) / MODEL_FILE)
        return genai.ContinuousBatchingPipeline(scratch, scheduler, "CPU", chosen)


def _scheduler(folder: EngineFolder, options: OpenVinoOptions, blocks: int) -> genai.SchedulerConfig:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = folder.limits.max_num_tokens
    scheduler.max_num_seqs = folder.limits.max_batch_size
    scheduler.cache_size, scheduler.num_kv_blocks = 0, blocks
    scheduler.enable_prefix_caching = options.enable_prefix_caching
    # one iteration mixes prompts and single tokens, as in TensorRT-LLM's in-flight batching
    scheduler.dynamic_split_fuse = True
    eviction = options.eviction(folder.limits.max_seq_len)
    if eviction is not None:
        scheduler.use_cache_eviction = True
        # positions remain those in the text: max_seq_len bounds them, so none exceeds what the model was trained for
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            eviction.start, eviction.recent, eviction.total, genai.AggregationMode.NORM_SUM, apply_rotation=False
        )
    return scheduler


def _with_draft(
    folder: EngineFolder, options: OpenVinoOptions, scheduler: genai.SchedulerConfig, chosen: dict[str, Any]
) -> genai.ContinuousBatchingPipeline:
    """Load the pipeline with a draft model, which gets a KV cache for the same number of tokens."""
    assert options.draft_dir is not None
    draft = EngineFolder.load(options.draft_dir)
    check_draft(folder, draft)
    guessing = _scheduler(draft, options, scheduler.num_kv_blocks)
    guessing.max_num_seqs, guessing.max_num_batched_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    its_own = properties(draft.config, options, kv_precision(draft.config, options))
    with tempfile.TemporaryDirectory(prefix="pipelines-draft-") as scratch:
        target = with_tokenizer(folder.path, Path(scratch) / "target")
        small = with_tokenizer(draft.path, Path(scratch) / "draft")
        model = genai.draft_model(str(small), "CPU", scheduler_config=guessing, **its_own)
        return genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", {**chosen, "draft_model": model})


NO_TOKEN = -1


class GuidedGenerator:
    """Generates one prompt after another, as the server runs a guided request."""

    def __init__(self, folder: EngineFolder, model: StatefulModel, tokenizer: Path) -> None:
        """Load the vocabulary.

        Raises:
            UserError: llguidance cannot read the tokenizer.
        """
        self.tokenizer = tokenizer
        self._guides = Guides(tokenizer, folder.config.vocab_size)
        self._model = model

    def generate(
        self, prompts: Sequence[TokenIds], limits: SamplingParams, schema: str, progress: Progress
    ) -> list[Generation]:
        """Generate for every prompt; the smallest stop token ends an output where the guide allows it.

        Raises:
            UserError: the schema is not valid.
        """
        guide = self._guides.read("json_schema", schema)
        generations = []
        with progress.task("generating", len(prompts), "requests") as advance:
            for prompt in prompts:
                request = GenerationRequest(
                    np.asarray(prompt, dtype=np.int64),
                    limits.max_new_tokens,
                    end_id=min(limits.stop_token_ids, default=NO_TOKEN),
                    temperature=limits.temperature,
                    top_k=limits.top_k,
                    top_p=limits.top_p,
                    guide=guide,
                )
                generations.append(_output(self._model, request, limits.seed))
                advance(1)
        return generations


def _output(model: StatefulModel, request: GenerationRequest, seed: int) -> Generation:
    state, chooser = StatefulSequence(model), TokenChooser(request, seed)
    tokens: list[int] = []
    fed: Sequence[int] = request.prompt.tolist()
    while len(tokens) < request.max_tokens:
        logits = state.feed(fed)
        if np.isnan(logits).any():
            raise NotFiniteError("The engine", "no token can be chosen", [*request.prompt.tolist(), *tokens])
        token, _ = chooser.choose(logits)
        if token == request.end_id:
            return Generation(tokens, "stop")
        tokens.append(token)
        if chooser.complete:
            return Generation(tokens, "stop")
        fed = [token]
    return Generation(tokens, "length")
