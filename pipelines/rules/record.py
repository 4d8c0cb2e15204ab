"""Terms of the rulebook: its input, a rule, a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import Fault
from pipelines.domain.formats import UNIFORM, KvFormat, QFormat, group_instead
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import LlmApiOptions
from pipelines.settings.features import MultimodalSettings, SpeculationMode
from triton_repo.config import TritonSettings


@dataclass(frozen=True, slots=True)
class Engines:
    """Set of the engines, or deployments, with certain capabilities; None matches either value."""

    needs_gpu: bool | None = None
    writes_engine: bool | None = None
    on_device: bool | None = None

    def __contains__(self, engine: Any) -> bool:
        """Whether an engine belongs to the set."""
        return (
            self.needs_gpu in (None, engine.needs_gpu)
            and self.writes_engine in (None, engine.writes_engine)
            and self.on_device in (None, engine.on_device)
        )


CPU = Engines(needs_gpu=False)
GPU = Engines(needs_gpu=True, writes_engine=True)
LLM_API = Engines(writes_engine=False, on_device=False)
EDGE = Engines(on_device=True)
BUILT = Engines(writes_engine=True)
ON_GPUS = Engines(needs_gpu=True, on_device=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """All facts that rules look at. A fact not known yet is None, and rules that need it are skipped.

    Attributes:
        needs_gpu: whether the engine computes on GPUs.
        writes_engine: whether it is built from a TensorRT-LLM checkpoint; if not, the runtime reads a Hugging Face one.
        on_device: whether another device builds and serves it.
        label: name of the model, for messages.
        qformat: format of weights and activations.
        candidates: for `auto`: formats that a linear may get.
        dtype: type of everything that is not quantized; "auto" means the model's own.
        group_size: input channels per scale.
        sparsity: "none", "magnitude" or "sparsegpt".
        sm: compute capability of the target GPU, e.g. 8.9.
        kv_reuse: whether blocks of a shared prompt prefix are to be reused.
        chunked_context: whether long prompts are to be processed in chunks.
        triton: parameters of the served model.
        dynamic_quantization: activations that the CPU engine gives a scale together, "auto" or "off".
        through_bls: whether requests go to `tensorrt_llm_bls`.
        draft_depth: tokens that Medusa's heads or EAGLE's layers guess in a row.
        same_vocabulary: whether draft and target have the same tokens.
        pickled_heads: names of files with pickled weights among the trained heads.
        adapters: LoRA adapters by task id.
        tiled: whether its images are cut into tiles, as of LLaVA 1.6.
        rotary: how the model encodes positions.
        llm_api: options of the LLM API that are no settings.
    """

    needs_gpu: bool = True
    writes_engine: bool = True
    on_device: bool = False
    label: str = "the model"
    shape: ModelShape | None = None
    qformat: QFormat = QFormat.NONE
    candidates: tuple[QFormat, ...] = ()
    dtype: str = "auto"
    kv_format: KvFormat = KvFormat.AUTO
    group_size: int = 128
    sparsity: str = "none"
    sm: float | None = None
    gpus_per_server: int | None = None
    kv_reuse: bool = False
    chunked_context: bool = False
    build: BuildSettings = field(default_factory=BuildSettings)
    triton: TritonSettings = field(default_factory=TritonSettings)
    dynamic_quantization: str = "auto"
    through_bls: bool = False
    speculation: SpeculationMode = "none"
    draft: ModelShape | None = None
    draft_depth: int | None = None
    same_vocabulary: bool | None = None
    pickled_heads: tuple[str, ...] = ()
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    images: MultimodalSettings | None = None
    tiled: bool = False
    rotary: Rotary | None = None
    llm_api: LlmApiOptions = field(default_factory=LlmApiOptions)

    @property
    def longest(self) -> int | None:
        """Length of the longest sequence, prompt and output together, in tokens."""
        return self.build.max_seq_len or (self.shape.max_position_embeddings if self.shape else None)

    @property
    def outgrows_window(self) -> bool:
        """Whether sequences can grow longer than the model's own attention window."""
        window = self.shape.sliding_window if self.shape else None
        return bool(window and self.longest and self.longest > window)

    @property
    def world_size(self) -> int:
        """Number of ranks, each with its own GPU."""
        return self.build.tp_size * self.build.pp_size


T = TypeVar("T")


class UnknownFactError(Exception):
    """A rule asks for a fact that is not known yet."""


def known(value: T | None) -> T:
    """Return a fact; a rule that asks for one that is not known yet is skipped."""
    if value is None:
        raise UnknownFactError
    return value


Cases = Sequence[Mapping[str, Any]]
"""Result of a rule's test: one mapping of message words per finding."""


class Alternatives:
    """The rules that refuse a deployment in each format, of the weights or of the KV cache."""

    def __init__(self, rules: Sequence[Rule], deployment: DeploymentFacts, group: Literal["quant", "kv_cache"]) -> None:
        """Judge nothing yet: most messages do not ask."""
        self._rules, self._deployment, self.group = rules, deployment, group

    @cached_property
    def refusals(self) -> dict[str, set[str]]:
        """The names of the rules that refuse each format."""
        changed: dict[str, DeploymentFacts] = (
            {choice: _in_format(self._deployment, choice) for choice in UNIFORM}
            if self.group == "quant"
            else {choice: replace(self._deployment, kv_format=choice) for choice in KvFormat}
        )
        return {choice: {rule.name for rule in self._rules if rule.refuses(d)} for choice, d in changed.items()}

    @cached_property
    def whatever(self) -> set[str]:
        """The names of the rules that refuse every format."""
        return set.intersection(*self.refusals.values())


def _in_format(deployment: DeploymentFacts, qformat: QFormat) -> DeploymentFacts:
    size = group_instead(deployment.qformat, deployment.group_size, qformat)
    return replace(deployment, qformat=qformat, candidates=(), group_size=size)


@dataclass(frozen=True, slots=True)
class Advice:
    """Formats that a rule can recommend, because no rule refuses them.

    Other rules that refuse every format are left aside: no choice of format mends what they are about.

    In a text, `{quants}` is "quant=none, fp8", `{quants.names}` "none, fp8", and `{quants:, or choose }` puts its words
    before the former, or leaves out everything if there is no such format.
    """

    alternatives: Alternatives
    adviser: str

    @property
    def names(self) -> str:
        """The formats; empty if there are none."""
        spared = self.alternatives.whatever - {self.adviser}
        return listed(choice for choice, names in self.alternatives.refusals.items() if names <= spared)

    def __format__(self, spec: str) -> str:
        """See the class."""
        if not self.names:
            return "" if spec else "no format with the other settings"
        return f"{spec}{self.alternatives.group}={self.names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule on settings that cannot be combined.

    Attributes:
        topic: heading in the docs.
        warns: whether the run goes on, with a warning; otherwise it is refused.
        engines: engines it applies to; None means all.
        when: true, or one mapping of words per finding, if the rule is broken; it asks for facts with `known`.
        failed: what failed and what was given; `{d.sm}` is a field of the deployment, `{word}` one of `when`, and
            `{quants}` and `{kv_caches}` are `Advice`.
        allowed: values that would be accepted.
        todo: the change that makes it work.
        source: public source of the rule, for anyone to check.
    """

    name: str
    topic: str
    warns: bool = False
    engines: Engines | None = None
    when: Callable[[DeploymentFacts], bool | Cases]
    failed: str
    allowed: str = ""
    todo: str = ""
    source: str

    def findings(self, deployment: DeploymentFacts, others: Sequence[Alternatives] = ()) -> list[BrokenRule]:
        """Return the findings of this rule for a deployment.

        Args:
            deployment: what is planned.
            others: formats of weights and of the KV cache for its advice; by default they only respect this rule.
        """
        others = others or alternatives((self,), deployment)
        return [BrokenRule(self, self._fault(deployment, words, others)) for words in self._cases(deployment)]

    def refuses(self, deployment: DeploymentFacts) -> bool:
        """Return whether this rule stops a deployment."""
        return not self.warns and bool(self._cases(deployment))

    def _cases(self, deployment: DeploymentFacts) -> Cases:
        if self.engines is not None and deployment not in self.engines:
            return ()
        try:
            cases = self.when(deployment)
        except UnknownFactError:
            return ()
        return ({},) if cases is True else cases or ()

    def _fault(self, deployment: DeploymentFacts, words: Mapping[str, Any], others: Sequence[Alternatives]) -> Fault:
        quants, kv_caches = (Advice(each, self.name) for each in others)
        message, allowed, todo = (
            text.format(d=deployment, quants=quants, kv_caches=kv_caches, **words)
            for text in (self.failed, self.allowed, self.todo)
        )
        return Fault(message, allowed, todo)


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that a deployment breaks, with the message for it."""

    rule: Rule
    fault: Fault


def judge(rules: Sequence[Rule], deployment: DeploymentFacts) -> list[BrokenRule]:
    """Apply all rules and return every finding at once; a mix of formats breaks every rule that a candidate breaks."""
    others = alternatives(rules, deployment)
    broken = [finding for rule in rules for finding in rule.findings(deployment, others)]
    whole = {finding.rule.name for finding in broken}
    for qformat in deployment.candidates:
        alone = _in_format(deployment, qformat)
        for finding in (each for rule in rules for each in rule.findings(alone, others)):
            if finding.rule.name not in whole:
                fault = finding.fault
                restated = Fault(f"The candidate {qformat} of quant=auto: {fault.message}", fault.allowed, fault.todo)
                broken.append(BrokenRule(finding.rule, restated))
    return broken


def alternatives(rules: Sequence[Rule], deployment: DeploymentFacts) -> tuple[Alternatives, Alternatives]:
    """Return the other formats of the weights and of the KV cache."""
    return Alternatives(rules, deployment, "quant"), Alternatives(rules, deployment, "kv_cache")


def either(names: Iterable[object], word: str = "or") -> str:
    """Join names for a sentence: "a, b or c"."""
    *first, last = (str(name) for name in names)
    return f"{', '.join(first)} {word} {last}" if first else last


def listed(names: Iterable[object]) -> str:
    """Join names for a message: "a, b"."""
    return ", ".join(str(name) for name in names)
