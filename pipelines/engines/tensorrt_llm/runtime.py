"""TensorRT-LLM's own Python runtime as a `port.Session`; the only module that imports `tensorrt_llm`.

Source: TensorRT-LLM 1.2 `tensorrt_llm/_tensorrt_engine`, `llmapi/llm.py` (`_TrtLLM`), `llmapi/llm_args.py`,
`sampling_params.py`, `executor/result.py`. Not run here; tests/gpu_trtllm runs it.

Scoring requests the logits of one generated token after every prefix of a continuation. That needs no logits of the
prompt, so an engine is evaluated as it is served: without gather_context_logits, which costs memory and time.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipelines.checkpoint.config_json import WINDOWS, windows_of
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.limits import EngineLimits, read_engine_config
from pipelines.engines.port import Generation, SamplingParams, TokenIds
from pipelines.settings.features import lookahead_sizes

if TYPE_CHECKING:
    import torch

LOGITS_AT_ONCE = 2**28
"""Most logits held at once while scoring, 1 GiB of float32 on the host."""


class TensorRtSession:
    """A loaded engine. Inputs and outputs are token ids, so a tokenizer is loaded only to guide outputs."""

    def __init__(self, engine_dir: Path) -> None:
        """Load every rank of an engine onto this machine's GPUs.

        Raises:
            UserError: the folder is not a complete engine.
        """
        self.limits = EngineLimits.load(engine_dir)
        self._engine_dir = engine_dir
        self._llm: Any = None
        self._tokenizer: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    def generate(self, prompts: Sequence[TokenIds], limits: SamplingParams, progress: Progress) -> list[Generation]:
        """See `port.Session.generate`; the runtime schedules all prompts together.

        Raises:
            UserError: a prompt is longer than the engine was built for.
        """
        for prompt in prompts:
            self._check(prompt, limits.max_new_tokens)
        if limits.guide is not None and limits.guide.tokenizer != self._tokenizer:
            self._close()
            self._tokenizer = limits.guide.tokenizer
        runtime, params = self._runtime(), sampling_params(limits)
        requests = [runtime.generate_async(list(prompt), params) for prompt in prompts]
        generations = []
        with progress.task("generating", len(requests), "requests") as advance:
            for request in requests:
                generations.append(_generation(request.result().outputs[0], limits))
                advance(1)
        return generations

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """See `port.Session.loglikelihood`.

        Raises:
            UserError: a pair is empty or longer than the engine was built for.
        """
        for context, continuation in pairs:
            if not context or not continuation:
                raise UserError("A pair to score has an empty context or continuation.")
            self._check([*context, *continuation[:-1]], 1)
        at_once = max(1, LOGITS_AT_ONCE // self.limits.vocab_size)
        scores: list[tuple[float, bool]] = []
        with progress.task("scoring", len(pairs), "pairs") as advance:
            for batch in _batches(pairs, at_once):
                scores += self._score(batch)
                advance(len(batch))
        return scores

    def _score(self, pairs: Sequence[tuple[TokenIds, TokenIds]]) -> list[tuple[float, bool]]:
        """Run each distinct prefix once and look up the tokens that follow it."""
        from tensorrt_llm.sampling_params import SamplingParams as Params

        prefixes = {prefix: None for pair in pairs for prefix in _prefixes(pair)}
        runtime = self._runtime()
        # one greedy token with its logits; an end token counts like any other
        params = Params(
            max_tokens=1, end_id=0, pad_id=0, ignore_eos=True, detokenize=False, return_generation_logits=True
        )
        requests = {prefix: runtime.generate_async(list(prefix), params) for prefix in prefixes}
        logprobs = {}
        for prefix, request in requests.items():
            # engines pad the vocabulary to a multiple of the ranks; padding has logits too, which must not count
            logits: torch.Tensor = request.result().outputs[0].generation_logits[0, : self.limits.vocab_size]
            logprobs[prefix] = logits.float().log_softmax(dim=-1)
        return [_scored(pair, logprobs) for pair in pairs]

    def _check(self, tokens: TokenIds, new_tokens: int) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.limits.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"Token id {wrong} is not in the vocabulary of {self.limits.vocab_size}.",
                todo="Was another model's tokenizer used?",
            )
        limits = self.limits  # draft tokens are part of max_seq_len, see builder.py
        for name, most, length in (
            ("max_num_tokens", limits.max_num_tokens, len(tokens)),
            ("max_seq_len", limits.max_seq_len - limits.max_draft_len, len(tokens) + new_tokens),
        ):
            if length > most:
                raise UserError(
                    f"A request needs {length} tokens; the engine was built with {name}={most}.",
                    todo=f"Shorten it, or build with build.{name}={length} or more.",
                )

    def _runtime(self) -> Any:
        """The engine, loaded when first used."""
        if self._llm is None:
            try:
                # TensorRT-LLM's documented class for engines; `tensorrt_llm.LLM` is the class of its PyTorch backend
                from tensorrt_llm._tensorrt_engine import LLM
                from tensorrt_llm.llmapi import KvCacheConfig, LookaheadDecodingConfig
            except ImportError as error:
                raise UserError(
                    f"The Python package tensorrt_llm cannot be imported: {error}.",
                    todo="Run inside NVIDIA's container, where it matches its libraries: make shell",
                ) from error
            options: dict[str, Any] = {"skip_tokenizer_init": True}
            if self._tokenizer is not None:  # xgrammar reads the vocabulary from the tokenizer (`llmapi/llm.py`)
                options = {"tokenizer": str(self._tokenizer), "guided_decoding_backend": "xgrammar"}
            if self.limits.lookahead:
                # "Lookahead decoding config must be provided": any sizes that give the engine's draft length will do,
                # as drafts are verified, so that they decide speed and not tokens. Source: llmapi/llm_args.py and
                # cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp
                window, ngram, verification = lookahead_sizes(self.limits.max_draft_len)
                options["speculative_config"] = LookaheadDecodingConfig(
                    max_window_size=window, max_ngram_size=ngram, max_verification_set_size=verification
                )
            self._llm = LLM(
                model=str(self._engine_dir),
                **options,
                tensor_parallel_size=self.limits.tp_size,
                pipeline_parallel_size=self.limits.pp_size,
                kv_cache_config=KvCacheConfig(
                    enable_block_reuse=bool(self.limits.paged_context_fmha),
                    max_attention_window=stated_windows(self._engine_dir, self.limits.max_seq_len),
                ),
                gather_generation_logits=True,
            )
        return self._llm


def stated_windows(engine_dir: Path, longest: int) -> list[int] | None:
    """Return the tokens that layers attend to, a pattern over them, which an engine does not keep to by itself.

    None where the checkpoint states no window.
    """
    _, pretrained, _ = read_engine_config(engine_dir)
    pattern = pretrained.get(WINDOWS) or windows_of(pretrained, int(pretrained.get("num_hidden_layers", 0)))
    return [min(window or longest, longest) for window in pattern] if any(pattern) else None


def sampling_params(limits: SamplingParams) -> Any:
    """Translate sampling limits. Without a tokenizer the runtime requires an end token but can be told to ignore it."""
    from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

    stops = sorted(limits.stop_token_ids)
    options: dict[str, Any] = {}
    if limits.temperature > 0:
        options = {"temperature": limits.temperature, "top_k": limits.top_k, "top_p": limits.top_p, "seed": limits.seed}
    if limits.guide is not None:
        options["guided_decoding"] = GuidedDecodingParams(json=limits.guide.schema)
    return SamplingParams(
        max_tokens=limits.max_new_tokens,
        end_id=stops[0] if stops else 0,
        pad_id=stops[0] if stops else 0,
        stop_token_ids=stops or None,
        ignore_eos=not stops,
        detokenize=False,
        **options,
    )


def _generation(output: Any, limits: SamplingParams) -> Generation:
    tokens = list(output.token_ids)
    stopped = output.finish_reason == "stop"
    if stopped and tokens and tokens[-1] in limits.stop_token_ids:
        tokens.pop()
    return Generation(tokens, "stop" if stopped else "length")


def _prefixes(pair: tuple[TokenIds, TokenIds]) -> list[tuple[int, ...]]:
    """Return the tokens before each token of the continuation."""
    context, continuation = pair
    return [(*context, *continuation[:at]) for at in range(len(continuation))]


def _scored(pair: tuple[TokenIds, TokenIds], logprobs: "dict[tuple[int, ...], torch.Tensor]") -> tuple[float, bool]:
    total, greedy = 0.0, True
    for prefix, token in zip(_prefixes(pair), pair[1], strict=True):
        row = logprobs[prefix]
        total += float(row[token])
        greedy = greedy and int(row.argmax()) == token
    return total, greedy


def _batches(pairs: Sequence[tuple[TokenIds, TokenIds]], at_once: int) -> Iterator[Sequence[tuple[TokenIds, TokenIds]]]:
    """Yield pairs in order, together as many as have at most `at_once` prefixes, and at least one."""
    start, size = 0, 0
    for index, (_, continuation) in enumerate(pairs):
        if size and size + len(continuation) > at_once:
            yield pairs[start:index]
            start, size = index, 0
        size += len(continuation)
    if start < len(pairs):
        yield pairs[start:]
