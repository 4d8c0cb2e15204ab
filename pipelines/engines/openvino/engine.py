"""The engine `openvino`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.openvino.build import build_engine
from pipelines.engines.openvino.memory import blocks_of
from pipelines.engines.openvino.pipeline import GuidedGenerator, open_pipeline, read_with_log_probs
from pipelines.engines.openvino.runtime import (
    EngineFolder,
    OpenVinoOptions,
    check_length,
    check_request,
    kv_blocks,
    properties,
)
from pipelines.engines.openvino.scoring import Scorer
from pipelines.engines.openvino.stateful import StatefulModel
from pipelines.engines.openvino.teacher_forcing import GraphBlocks, GraphForcing, GraphHead, linear_weights
from pipelines.engines.openvino.vision import VisualRows
from pipelines.engines.pictures import MARK, ScoredPictures
from pipelines.engines.port import BuildLimits, EngineFacts, Generation, NotFiniteError, SamplingParams, TokenIds

# Results of the single steps of the graph while it reads a text, to find the step that is wrong.

Array = np.ndarray[Any, Any]

OF_A_LAYER = (
    "input_layernorm", "self_attn.qkv_proj.input", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.q_proj.biased", "self_attn.k_proj.biased", "self_attn.v_proj.biased", "self_attn.q_norm",
    "self_attn.k_norm", "self_attn.q_rotated",
    "self_attn.k_rotated", "self_attn.k_rounded", "self_attn.v_rounded", "self_attn.attention",
    "self_attn.o_proj.input", "self_attn.o_proj", "self_attn.o_proj.biased", "attention_residual",
    "post_attention_layernorm", "mlp.gate_proj.input", "mlp.up_proj.input", "mlp.gate_proj", "mlp.gate_proj.biased",
    "mlp.up_proj", "mlp.up_proj.biased", "mlp.product", "mlp.down_proj.input", "mlp.down_proj",
    "mlp.down_proj.biased", "mlp_residual",
)  # fmt: skip
"""Ends of the names of a decoder layer's nodes whose results are given, in order; those that it does not have are
left out."""
OUTSIDE = ("model.embed_tokens", "rotary.angles", "model.norm", "lm_head.input")


# A loaded OpenVINO engine: generation with in-flight batching, and scoring.


class OpenVinoSession:
    """Generates, scores and generates under a guide. Each loads the model when first used, which then stays loaded."""

    def __init__(self, engine_dir: Path, options: OpenVinoOptions) -> None:
        """Read the engine's description.

        Raises:
            UserError: the folder is not a complete OpenVINO engine.
        """
        self.folder = EngineFolder.load(engine_dir)
        self.limits, self.vocabulary = self.folder.limits, self.folder.config.vocab_size
        self._options = options
        self._pipeline: genai.ContinuousBatchingPipeline | None = None
        self._stateful: StatefulModel | None = None
        self._scorer: Scorer | None = None
        self._guided: GuidedGenerator | None = None
        self._visual: VisualRows | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pipeline, self._stateful, self._scorer, self._guided = None, None, None, None

    def generate(self, prompts: Sequence[TokenIds], limits: SamplingParams, progress: Progress) -> list[Generation]:
        """See `port.Session.generate`; a prompt starts as soon as the KV cache has room for everything it may need.

        Without that, prompts that do not fit into the cache together would evict each other and be recomputed, and
        openvino_genai drops those for which no block is left.

        Raises:
            UserError: a prompt is longer than the engine was built for, or sampling with a draft model was requested.
        """
        if limits.temperature > 0 and self._options.draft_dir is not None:
            raise UserError(
                f"temperature={limits.temperature:g} is not possible with a draft model: its tokens are verified"
                " greedily.",
                todo="Leave the temperature at 0, or open the engine without draft_dir.",
            )
        for prompt in prompts:
            self._check_tokens(prompt)
            check_request(self.folder, self._options, len(prompt), limits.max_new_tokens)
        if limits.guide is not None:
            tokenizer, schema = limits.guide.tokenizer, limits.guide.schema
            if self._guided is None or self._guided.tokenizer != tokenizer:
                self._guided = GuidedGenerator(self.folder, self._compiled(), tokenizer)
            return self._guided.generate(prompts, limits, schema, progress)
        if self._pipeline is None:
            self._pipeline = open_pipeline(self.folder, self._options)
        made = self._run(self._pipeline, prompts, limits, progress)
        self._check_finite(self._pipeline, prompts, made, limits)
        return made

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """See `port.Session.loglikelihood`; shared prefixes are computed once.

        Only max_seq_len limits a pair: long contexts are run in pieces of max_num_tokens.

        Raises:
            UserError: a pair is empty or longer than the engine was built for.
        """
        for context, continuation in pairs:
            if not context or not continuation:
                raise UserError("A pair to score has an empty context or continuation.")
            self._check_tokens([*context, *continuation])
            check_length(self.folder, len(context) + len(continuation) - 1)  # the last token is only predicted
        with progress.task("scoring", len(pairs), "pairs") as advance:
            return self._scoring().score(pairs, advance)

    def see(self, pictures: ScoredPictures) -> None:
        """See `SeeingSession.see`."""
        self._visual, self._scorer = VisualRows(pictures, self.folder, self._options), None

    def teacher_forcing(self, *, varied: bool = False) -> GraphForcing:
        """See `port.LogitsSession.teacher_forcing`."""
        return GraphForcing(self.folder, self._options, varied=varied)

    def head(self) -> GraphHead:
        """See `port.LogitsSession.head`."""
        return GraphHead(self.folder, self._options)

    def block_outputs(self, *, varied: bool = False) -> GraphBlocks:
        """See `port.LogitsSession.block_outputs`."""
        return GraphBlocks(self.folder, self._options, varied=varied)

    def linear_weights(self) -> Iterator[tuple[str, Array]]:
        """See `port.LogitsSession.linear_weights`."""
        return linear_weights(self.folder)

    def step_results(self, tokens: TokenIds, first_position: int, layers: range) -> Mapping[str, Array]:
        """See `port.LogitsSession.step_results`; everything is computed in float32."""
        exact = self._options.model_copy(update={"inference_precision": "f32", "dynamic_quantization": "off"})
        model = self.folder.read_model()
        steps = {*OUTSIDE, *(f"model.layers.{layer}.{end}" for layer in layers for end in OF_A_LAYER)}
        # the block before the first one is its input
        steps.add(f"model.layers.{layers.start - 1}.mlp_residual")
        names = []
        for node in model.get_ordered_ops():
            name = node.get_friendly_name()
            if name in steps:
                result = op.result(node.output(0))
                result.get_output_tensor(0).add_names({f"step.{name}"})  # the node may have a name already
                model.add_results([result])
                names.append(name)
        compiled = ov.Core().compile_model(model, "CPU", properties(self.folder.config, exact, "f32"))
        request = compiled.create_infer_request()
        count = len(tokens)
        positions = np.arange(first_position, first_position + count, dtype=np.int64)
        request.infer(
            {
                "input_ids": np.array([tokens], dtype=np.int64),
                "attention_mask": np.ones((1, count), dtype=np.int64),
                "position_ids": positions[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        results = {name: np.array(request.get_tensor(f"step.{name}").data[0]) for name in names}
        return {**results, "logits": np.array(request.get_tensor("logits").data[0])}

    def _scoring(self) -> Scorer:
        if self._scorer is None:
            self._scorer = Scorer(self.folder, self._compiled(), self._visual)
        return self._scorer

    def _compiled(self) -> StatefulModel:
        if self._stateful is None:
            self._stateful = StatefulModel(self.folder, self._options)
        return self._stateful

    def _check_finite(
        self,
        pipeline: genai.ContinuousBatchingPipeline,
        prompts: Sequence[TokenIds],
        made: Sequence[Generation],
        limits: SamplingParams,
    ) -> None:
        """Refuse answers that were chosen among logits of NaN: genai takes token 0 then, or samples among all tokens.

        A suspicious answer is read once more, with log probabilities.
        """
        for prompt, one in zip(prompts, made, strict=True):
            stopped = one.finish_reason == "stop"
            if limits.temperature == 0 and not (0 in limits.stop_token_ids if stopped else one.token_ids[-1:] == [0]):
                continue
            before_last = one.token_ids if stopped else one.token_ids[:-1]
            try:
                read_with_log_probs(pipeline, self._options, [*prompt, *before_last], 1)
            except NotFiniteError:
                self._pipeline = None
                raise

    def _run(
        self,
        pipeline: genai.ContinuousBatchingPipeline,
        prompts: Sequence[TokenIds],
        limits: SamplingParams,
        progress: Progress,
    ) -> list[Generation]:
        """Run the prompts in order, at any time as many as have blocks that fit into the KV cache."""
        config, eviction = generation_config(limits), self._options.eviction(self.folder.limits.max_seq_len)
        if self._options.draft_dir is not None:
            config.num_assistant_tokens = self._options.num_draft_tokens
        blocks_at_most = eviction.blocks_at_most if eviction else lambda prompt, new: blocks_of(prompt + new)
        blocks = [blocks_at_most(len(prompt), limits.max_new_tokens) for prompt in prompts]
        free, started = kv_blocks(self.folder, self._options), 0
        running: dict[int, genai.GenerationHandle] = {}
        generations: dict[int, Generation] = {}
        with progress.task("generating", len(prompts), "requests") as advance:
            try:
                while len(generations) < len(prompts):
                    while started < len(prompts) and blocks[started] <= free:
                        prompt = ov.Tensor(np.array([prompts[started]], dtype=np.int64))
                        running[started] = pipeline.add_request(started, prompt, config)
                        free -= blocks[started]
                        started += 1
                    pipeline.step()
                    going = genai.GenerationStatus.RUNNING
                    ended = [number for number, handle in running.items() if handle.get_status() != going]
                    for number in ended:
                        generations[number] = _generation(running.pop(number), limits)
                        free += blocks[number]
                    advance(len(ended))
            except KeyboardInterrupt:  # openvino_genai reports blocks of unfinished requests as an error
                for handle in running.values():
                    handle.cancel()
                pipeline.step()
                raise
        return [generations[number] for number in range(len(prompts))]

    def _check_tokens(self, tokens: TokenIds) -> None:
        vocab = self.folder.config.vocab_size
        sees = self._visual is not None
        wrong = next((token for token in tokens if not (0 <= token < vocab or (sees and token >= MARK))), None)
        if wrong is not None:
            raise UserError(
                f"Token id {wrong} is not in the vocabulary of {vocab}; was another model's tokenizer used?"
            )


def generation_config(limits: SamplingParams) -> genai.GenerationConfig:
    """Translate sampling limits.

    genai requires an end token: without stop tokens it gets one, with ignore_eos.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = limits.max_new_tokens
    config.eos_token_id = min(limits.stop_token_ids, default=0)
    config.stop_token_ids = set(limits.stop_token_ids) or {0}
    config.ignore_eos = not limits.stop_token_ids
    config.do_sample = limits.temperature > 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = limits.temperature, limits.top_p, limits.seed
        if limits.top_k:
            config.top_k = limits.top_k
    return config


def _generation(handle: genai.GenerationHandle, limits: SamplingParams) -> Generation:
    if handle.get_status() == genai.GenerationStatus.IGNORED:
        raise UserError("The KV cache is too small for a request.", todo="Raise engine.openvino.kv_cache_bytes.")
    output = handle.read_all()[0]
    tokens = list(output.generated_ids)
    stopped = output.finish_reason == genai.GenerationFinishReason.STOP
    if stopped and tokens and tokens[-1] in limits.stop_token_ids:
        tokens.pop()
    return Generation(tokens, "stop" if stopped else "length")


class OpenVinoEngine:
    """Runs a TensorRT-LLM checkpoint on the CPU; implements `port.Engine`."""

    def __init__(self, options: OpenVinoOptions | None = None) -> None:
        """Take the options; `head_precision` and `experts` affect what `build` writes."""
        self._options = options or OpenVinoOptions()

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build `out_dir` from a checkpoint folder; see `build.build_engine`."""
        form = {
            "int8_head": self._options.head_precision == "int8",
            "grouped_experts": self._options.experts == "grouped",
        }
        return build_engine(checkpoint, limits, out_dir, progress, **form)

    def open(self, engine_dir: Path) -> OpenVinoSession:
        """Open a built engine; weights are loaded by the first request."""
        return OpenVinoSession(engine_dir, self._options)


def make_engine(**options: Any) -> OpenVinoEngine:
    """Create the engine from options by name; see `OpenVinoOptions`."""
    return OpenVinoEngine(OpenVinoOptions.judged(options, "engine.openvino."))
