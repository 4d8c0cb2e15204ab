"""Interface of an engine to the rest of the project; standard library types only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress

TokenIds = Sequence[int]


class NotFiniteError(UserError):
    """Logits are NaN or infinite, so that no token can be chosen.

    Attributes:
        tokens: the sequence after which they are.
    """

    def __init__(self, side: str, where: str, tokens: TokenIds) -> None:
        super().__init__(
            f"{side} gives logits that are NaN or infinite: {where}.",
            todo="Check the checkpoint with make verify, and its calibration.",
        )
        self.tokens = tokens


TABLE_ROWS = "max_prompt_embedding_table_size"


def without_table(limits: dict[str, Any]) -> dict[str, Any]:
    """Return limits without the rows of a prompt table that there is not, as engines before it had them."""
    return {name: value for name, value in limits.items() if name != TABLE_ROWS or value}


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Limits that an engine is built for, under their trtllm-build names.

    Attributes:
        max_batch_size: most requests scheduled together.
        max_input_len: longest prompt, tokens.
        max_seq_len: longest prompt + output, tokens.
        max_num_tokens: most tokens of all requests in one iteration.
        max_beam_width: most beams per request.
        max_prompt_embedding_table_size: rows of prompt embeddings of all running requests together; 0 is no table.
    """

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int = 1
    tokens_per_block: int = 32
    max_prompt_embedding_table_size: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the limits as an engine's config.json has them; a table of no rows is left out."""
        return without_table(asdict(self))


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The GPU that an engine is built for, and folders of its build.

    Attributes:
        gpu: name of the GPU; kernels are tuned for it. Empty if not known.
        sm: its compute capability, e.g. 9.0; the engine runs on no other. None if not known.
    """

    gpu: str
    sm: float | None
    timing_caches: Path
    failed_logs: Path


@dataclass(frozen=True, slots=True)
class JsonGuide:
    """A JSON schema that an output follows token by token."""

    schema: str
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of generation. Greedy unless `temperature` > 0.

    Attributes:
        stop_token_ids: tokens that end the generation and are not returned.
        temperature: divides the logits; 0 means greedy.
        top_k: sample from this many likeliest tokens; 0 means all.
        top_p: sample from tokens up to this cumulative probability; 1 means all.
        guide: what every output follows; None means nothing.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    guide: JsonGuide | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Output of one request: tokens after the prompt, and why it ended ("stop" or "length")."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about a build for the manifest."""

    engine_bytes: int
    details: Mapping[str, Any] = field(default_factory=dict)


class ScoringSession(Protocol):
    """A loaded model that scores texts, whatever it is loaded with."""

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """Score continuations.

        Args:
            pairs: (context, continuation) token ids; both non-empty.
            progress: advanced by one unit per pair.

        Returns:
            per pair, the summed natural-log probability of the continuation and
            whether it is what greedy decoding would have produced.
        """
        ...


@runtime_checkable
class Session(ScoringSession, Protocol):
    """A loaded engine that generates and scores. Use as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

    def generate(self, prompts: Sequence[TokenIds], limits: SamplingParams, progress: Progress) -> list[Generation]:
        """Generate for every prompt with in-flight batching; results in the order of the prompts."""
        ...


class Head(Protocol):
    """The last norm and the head of a loaded model."""

    def logits(self, hidden: Iterable[Any], logits_at_once: int) -> Iterator[Any]:
        """Predict each next token.

        Args:
            hidden: what the last decoder block puts out, in pieces [B, t, H].
            logits_at_once: tokens of each sequence in one slice.

        Yields:
            float32 logits [B, logits_at_once, vocabulary] (fewer in the last slice). The next slice overwrites them.
        """
        ...


class TeacherForcing(Head, Protocol):
    """A loaded model that reads given texts and predicts each next token."""

    arithmetic: str

    def hidden(self, sequences: Sequence[TokenIds], tokens_at_once: int) -> Iterator[Any]:
        """Read sequences of one length together.

        Args:
            sequences: token ids, B sequences of T tokens.
            tokens_at_once: tokens of each sequence in one iteration.

        Yields:
            what the last decoder block puts out, float32 [B, tokens_at_once, H] (fewer in the last piece). The next
            piece overwrites it.
        """
        ...


class BlockOutputs(Protocol):
    """A loaded model that reads given texts and returns the output of each decoder block."""

    def slices(self, sequences: Sequence[TokenIds], tokens_at_once: int) -> Iterator[Mapping[str, Any]]:
        """Read sequences of one length together.

        Args:
            sequences: token ids, B sequences of T tokens.
            tokens_at_once: tokens of each sequence in one slice.

        Yields:
            outputs [B, tokens_at_once, hidden] by name ("block.0"), fewer tokens in the last slice. The next slice
            overwrites them.
        """
        ...


@runtime_checkable
class LogitsSession(Session, Protocol):
    """A loaded engine that gives the logits after every token of a text, not only scores.

    Attributes:
        vocabulary: number of tokens that it knows.
        limits: that it was built for.
    """

    vocabulary: int
    limits: BuildLimits

    def teacher_forcing(self, *, varied: bool = False) -> TeacherForcing:
        """Load the model to read texts.

        Args:
            varied: with iterations of another size and another arithmetic, to learn how much these matter.
        """
        ...

    def head(self) -> Head:
        """Load only the last norm and the head, to predict from the output of `TeacherForcing.hidden`."""
        ...

    def block_outputs(self, *, varied: bool = False) -> BlockOutputs:
        """Load the layers below the head to read texts."""
        ...

    def linear_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the weight of each linear as it is multiplied, float32 [out, in], named "LAYER.module"."""
        ...

    def step_results(self, tokens: TokenIds, first_position: int, layers: range) -> Mapping[str, Any]:
        """Read a text in float32 and return the result of each step of the given layers, by Hugging Face names.

        Args:
            tokens: token ids, T of them.
            first_position: position of the first one.
            layers: decoder layers whose steps are wanted, "model.layers.0.self_attn.q_proj" and so on; the embedding,
                the rotary angles, the last norm, the head and the logits are always given.
        """
        ...


class Engine(Protocol):
    """An engine that can be built and opened."""

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build `out_dir` from a TensorRT-LLM checkpoint folder."""
        ...

    def open(self, engine_dir: Path) -> Session:
        """Load a built engine."""
        ...
