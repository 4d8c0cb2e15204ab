"""Generate configurations of which it is known whether `make plan` takes them: from the settings' own schema.

A bad one has one or two values that the schema forbids, a word that does not exist, or a pair that does not go
together; its refusal must name the key and the value. A good one has values that the schema allows, within what other
keys need beside them.
"""

import enum
import inspect
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pipelines.compress.config import PruningSettings, RecoverSettings
from pipelines.host.machine import native_bf16
from pipelines.loadgen.config import BenchmarkSettings
from pipelines.settings.base import OptionTable, largest
from pipelines.settings.by_hydra import compose_config, to_raw
from pipelines.settings.groups import choices, groups
from pipelines.settings.root import Settings


@dataclass(frozen=True)
class Leaf:
    """One setting with the type, the bounds and the choices of its schema.

    Attributes:
        name: as on the command line.
        kind: bool, int, float, str, Path, "choice" or "other" (lists, mappings and unions, of which types are tried).
        nullable: whether null is allowed.
        bounds: ge, gt, le, lt.
        values: of a choice.
        pattern: whether a text must match one, or is checked by a function.
    """

    name: str
    kind: object
    nullable: bool
    bounds: dict[str, float] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    pattern: bool = False

    @property
    def group(self) -> str:
        """The group of conf/ that it belongs to."""
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        words: overrides as typed.
        named: what a refusal must contain: for each fault the key, and the forms of the value of which one must be
            there. Empty for a good configuration.
    """

    words: tuple[str, ...]
    named: tuple[tuple[str, tuple[str, ...]], ...] = ()


def leaves(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[Leaf]:
    """Walk the schema; groups inside lists and mappings are left to their own tests."""
    for attribute, info in model.model_fields.items():
        name = prefix + attribute
        annotation, nullable, metadata = _plain(info.annotation, list(info.metadata))
        nullable = nullable or attribute in getattr(model, "CHOSEN", ())
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            if not nullable:
                yield from leaves(annotation, f"{name}.")
            continue
        if table := OptionTable.of(info):
            yield from (_leaf(f"{name}.{option}", *_plain(kind, [])) for option, kind in table.kinds.items())
            continue
        yield _leaf(name, annotation, nullable, metadata)


def _plain(annotation: Any, metadata: list[Any]) -> tuple[Any, bool, list[Any]]:
    """Take a type out of `Annotated` and `| None`."""
    nullable = False
    while True:
        origin, parts = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            annotation, metadata = parts[0], [*parts[1:], *metadata]
        elif origin in (Union, types.UnionType):
            nullable = nullable or type(None) in parts
            others = [part for part in parts if part is not type(None)]
            if len(others) > 1:
                return annotation, nullable, metadata
            (annotation,) = others
        else:
            return annotation, nullable, metadata


def _leaf(name: str, annotation: Any, nullable: bool, metadata: list[Any]) -> Leaf:
    bounds: dict[str, float] = {}
    checked = False
    for each in metadata:
        for item in getattr(each, "metadata", None) or [each]:
            bounds |= {key: getattr(item, key) for key in ("ge", "gt", "le", "lt") if hasattr(item, key)}
            checked = checked or getattr(item, "pattern", None) is not None or hasattr(item, "func")
    if get_origin(annotation) is Literal:
        return Leaf(name, "choice", nullable, values=tuple(str(value) for value in get_args(annotation)))
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return Leaf(name, "choice", nullable, values=tuple(str(each.value) for each in annotation))
    if annotation in (bool, int, float, str, Path):
        return Leaf(name, annotation, nullable, bounds, pattern=checked)
    return Leaf(name, "other", nullable)


@cache
def known() -> tuple[Leaf, ...]:
    """Return the settings that a plain configuration has, so that each can be overridden by itself.

    All but paths.store, which a test sets for itself.
    """
    raw = to_raw(compose_config([]))

    def is_there(name: str) -> bool:
        node: Any = raw
        for part in name.split("."):
            if not isinstance(node, dict) or part not in node:
                return False
            node = node[part]
        return True

    return tuple(leaf for leaf in leaves() if is_there(leaf.name) and leaf.name != "paths.store")


# Bad configurations.


def _forms(value: object) -> tuple[str, ...]:
    """Return the spellings of a value in a message."""
    if isinstance(value, bool):
        return (str(value), str(value).lower())
    if isinstance(value, int | float):
        return (str(value), f"{value:g}", f"{value:,g}", f"{value:,}", str(int(value)) if value == value // 1 else "")
    return (str(value),)


def wrong_values(leaf: Leaf) -> list[tuple[str, tuple[str, ...]]]:
    """Return values that the schema forbids, as they are typed, each with its spellings in a message."""
    found: list[tuple[str, tuple[str, ...]]] = []
    if not leaf.nullable and leaf.name not in NULL_IS_CHOSEN and not leaf.name.startswith("build.trtllm."):
        found.append(("null", ("null",)))
    if leaf.kind == "choice":
        found += [("no_such_thing", ("no_such_thing",)), ("-17", ("-17",)), ("[1,2]", ("1",))]
    elif leaf.kind is bool:
        found += [("perhaps", ("perhaps",)), ("17", ("17",)), ("[true,false]", ("True", "true"))]
    elif leaf.kind in (int, float):
        found += [("twelve", ("twelve",)), ("true", ("True", "true")), ("{a:7}", ("7",)), ("1e999", ("inf",))]
        found += [(_typed(value), _forms(value)) for value in _outside(leaf)]
        if leaf.kind is int:
            found.append(("3.25", ("3.25",)))
    elif leaf.kind is str or leaf.kind is Path:
        found += [("[a,b]", ("a",)), ("{a:b}", ("b",))]
    return found


def _typed(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _outside(leaf: Leaf) -> list[float]:
    kind: Any = leaf.kind
    name = leaf.name.split(".")[-1]
    bounds, step = leaf.bounds, 1 if kind is int else 0.25
    found: list[float] = [10 * largest(name)]
    if "ge" in bounds:
        found.append(bounds["ge"] - step)
    if "gt" in bounds:
        found += [bounds["gt"], bounds["gt"] - step]
    if "le" in bounds:
        found.append(bounds["le"] + step)
    if "lt" in bounds:
        found.append(bounds["lt"])
    return [kind(value) for value in found]


def bad_cases(leaf: Leaf) -> list[Case]:
    """One setting with each forbidden value."""
    return [Case((f"{leaf.name}={typed}",), ((leaf.name, forms),)) for typed, forms in wrong_values(leaf)]


def bad_single(dice: random.Random) -> Case:
    """One forbidden value."""
    return dice.choice(dice.choice([cases for leaf in known() if (cases := bad_cases(leaf))]))


def bad_pair(dice: random.Random) -> Case:
    """Two forbidden values in different groups, which are both named."""
    cases = [bad_single(dice), bad_single(dice)]
    while cases[0].named[0][0].split(".")[0] == cases[1].named[0][0].split(".")[0]:
        cases[1] = bad_single(dice)
    return Case(cases[0].words + cases[1].words, cases[0].named + cases[1].named)


def bad_word(dice: random.Random) -> Case:
    """A key or a choice that does not exist, but nearly does."""
    if dice.random() < 0.5:
        group = dice.choice([group for group in groups() if len(choices(group)) > 1 and "/" not in group])
        word = _misspelt(dice, dice.choice(choices(group)))
        if word not in choices(group):
            return Case((f"{group}={word}",), ((group, (word,)),))
    name = dice.choice(known()).name
    key = ".".join([*name.split(".")[:-1], _misspelt(dice, name.split(".")[-1])])
    if any(leaf.name == key for leaf in known()):
        key += "_x"
    return Case((f"{key}=1",), ((key, (key,)),))


def _misspelt(dice: random.Random, word: str) -> str:
    at = dice.randrange(len(word))
    changes: list[Callable[[], str]] = [
        lambda: word[:at] + word[at + 1 :] if len(word) > 2 else word + "x",
        lambda: word[:at] + "x" + word[at:],
        lambda: word + "s",
    ]
    changed = dice.choice(changes)()
    return changed if changed != word and changed[0].isalpha() else word + "x"


CONTRADICTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # asking until the verdict is known needs two engines that are built here
    (("eval.max_questions=400", "eval.sequential=false"), ("max_questions=400", "sequential=false")),
    (("eval=quick", "eval.baseline=skip"), ("max_questions=400", "baseline=skip")),
    (("eval.sequential=true", "eval.baseline=hugging_face"), ("sequential=true", "baseline=hugging_face")),
    (("eval.fidelity=true", "eval.url=http://127.0.0.1:9/v1"), ("fidelity=true", "url=http")),
    (("eval.fewshot_as_multiturn=true", "eval.num_fewshot=3"), ("fewshot_as_multiturn=true", "apply_chat_template")),
    # quantization and GPU; capabilities: conf/hardware
    *((("engine=tensorrt_llm", f"quant={quant}", f"hardware={gpu}"), (quant, "8."))
      for quant in ("fp8", "w4a8_awq") for gpu in ("a10", "a30", "a100_sxm_80gb", "a100_pcie_40gb")),
    *((("engine=tensorrt_llm", "quant=nvfp4", "model=tiny_llama", f"hardware={gpu}"), ("nvfp4", "arithmetic"))
      for gpu in ("h100_sxm", "h200_nvl", "l4", "l40s", "a10")),
    *((("engine=tensorrt_llm", f"quant={quant}", f"hardware={gpu}", "model=tiny_llama"), (quant, "10.0"))
      for quant in ("int8_sq", "int4_awq", "int8_wo", "int4_wo") for gpu in ("b200_sxm", "gb200")),
    (("quant=nvfp4", "model=gemma_2b", "engine=tensorrt_llm"), ("nvfp4", "Gemma")),
    # KV cache
    (("kv_cache=int8", "kv_cache.enable_block_reuse=true"), ("kv_cache=int8", "reuse")),
    (("kv_cache=int8", "runtime=chunked"), ("kv_cache=int8", "chunked")),
    *((("kv_cache=fp8", f"quant={quant}", "kv_cache.enable_block_reuse=true"), ("kv_cache=fp8", quant))
      for quant in ("none", "int8_sq", "int4_awq", "int8_wo", "int4_wo")),
    (("kv_cache=int8", "reuse=system_prompt", "engine=tensorrt_llm"), ("kv_cache=int8", "reuse")),
    # limits
    (("build.max_seq_len=512", "build.max_input_len=1024"), ("max_input_len=1024", "512")),
    (("build.max_seq_len=1000000",), ("max_seq_len=1000000", "supports")),
    (("build.max_num_tokens=100", "build.max_input_len=200"), ("max_num_tokens=100", "200")),
    (("workload.isl=1500", "build.max_input_len=1024"), ("1500", "1024")),
    (("workload.osl=4000",), ("4000", "max_seq_len")),
    (("build.tokens_per_block=48",), ("tokens_per_block=48", "32")),
    (("triton.triton_max_batch_size=9", "build.max_batch_size=8"), ("triton_max_batch_size=9", "8")),
    (("triton.max_beam_width=3",), ("max_beam_width=3", "1")),
    # ranks
    *(((f"build.tp_size={ranks}", "model=gemma_2b", "engine=tensorrt_llm"), (f"tp_size={ranks}", "8"))
      for ranks in (3, 5, 7, 16)),
    (("build.pp_size=2", "model=gemma_2b", "engine=tensorrt_llm"), ("pp_size=2", "Gemma")),
    (("triton.num_nodes=2", "engine=tensorrt_llm"), ("num_nodes=2", "1")),
    # load and server
    (("benchmark.request_rate=[2]",), ("request_rate=[2]", "closed")),
    (("workload=poisson",), ("poisson", "rate")),
    (("workload=poisson", "benchmark.concurrency=[4]", "benchmark.request_rate=[1]"), ("concurrency=[4]", "poisson")),
    (("workload=burst",), ("burst", "num_requests")),
    (("triton.decoupled_mode=false",), ("decoupled_mode=false", "streaming=true")),
    (("workload.trace=/no/trace",), ("workload", "/no/trace")),
    # speculation
    (("speculative=draft_target", "model=tiny_llama"), ("draft", "tokens")),
    (("speculative=medusa", "speculative.heads_path=/no/heads"), ("speculative.heads_path", "/no/heads")),
    (("speculative=lookahead", "engine=openvino"), ("lookahead", "openvino")),
    # files
    (("model.path=/no/such",), ("model.path", "/no/such")),
    (("engine.path=/no/such",), ("engine.path", "/no/such")),
    (("calibration=local", "calibration.path=/no/such"), ("calibration.path", "/no/such")),
    (("serving.chat_template=/no/such",), ("serving.chat_template", "/no/such")),
    # CPU engine
    (("engine=openvino", "weights=streaming"), ("weight_streaming", "openvino")),
    (("engine=openvino", "guided=xgrammar"), ("xgrammar", "openvino")),
    (("engine=openvino", "triton.max_attention_window_size=[100]", "kv_cache.enable_block_reuse=false"),
     ("max_attention_window_size=100", "32")),
)  # fmt: skip
"""Pairs across groups that exclude one another, each with what its refusal must contain."""


def contradiction(dice: random.Random) -> Case:
    """A pair that does not go together, in either order of its words."""
    words, named = dice.choice(CONTRADICTIONS)
    shuffled = dice.sample(words, len(words))
    return Case(tuple(shuffled), ((named[0], (named[1],)),))


def bad(seed: int, count: int) -> Iterator[Case]:
    """Yield configurations that must be refused."""
    dice = random.Random(f"bad {seed}")
    kinds = [bad_single] * 5 + [bad_pair] * 2 + [bad_word] * 2 + [contradiction] * 3
    for _ in range(count):
        yield dice.choice(kinds)(dice)


# Good configurations.

NULL_IS_CHOSEN = {
    *("nightly.expect.accuracy_loss_percent", "nightly.expect.floor_percent", "nightly.matrix"),
    *("lora.adapters", "cluster.env", "llm_api.extra"),
    *("manifests.env", "manifests.node_selector", "manifests.extra_resources"),
}
"""Keys whose null means "not given", beside those of `Group.CHOSEN`."""

ONLY: dict[str, tuple[str, ...]] = {
    "model.bundled": ("tiny_gemma", "tiny_llama"),
    "quant.qformat": ("none", "fp8", "int8_sq", "int4_awq", "int8_wo", "int4_wo"),
    **{f"quant.{name}": ("null",) for name in ("effective_bits", "candidates", "scoring", "scoring_texts")},
    "recover.method": ("none",),
    **{f"recover.{name}": ("null",) for name in RecoverSettings.model_fields if name != "method"},
    "recover.gradient_checkpointing": ("false",),
    "recover.sharding": ("none",),
    "prune.method": ("none",),
    **{f"prune.{name}": ("null",) for name in PruningSettings.model_fields if name != "method"},
    "build.max_input_len": ("128", "500", "1024"),
    "build.max_seq_len": ("512", "1024", "2048"),
    "build.max_num_tokens": ("1024", "8192"),
    "build.tokens_per_block": ("32",),
    "build.tp_size": ("1",),
    "build.pp_size": ("1",),
    "build.moe_ep_size": ("1",),  # more need a mixture
    "build.trtllm.log_level": ("info", "verbose", "debug", "trace"),
    **{f"build.{name}": ("false",) for name in ("strip_plan", "dry_run", "weight_streaming")},
    "engine.name": ("auto", "openvino", "tensorrt_llm"),
    "workload.arrival": ("closed",),
    "workload.turns": ("1", "2"),
    "workload.cv": ("1",),  # more need arrival=gamma
    "workload.trace_speed": ("1",),  # more need a trace
    "workload.image_side": ("336",),  # others need pictures
    "benchmark.min_requests": ("1", "10"),  # others may be more than num_requests
    "workload.images": ("0",),  # more need a model that sees
    "sizing.peak_percentile": ("50", "99.9"),
    "sizing.prices.server_usd": ("9", "250000"),
    "sizing.slo.percentile": ("50", "95", "99.9"),
    "triton.guided_decoding_backend": ("null",),
    "triton.sink_token_length": ("null",),  # goes only with a window
    "triton.decoding_mode": ("null", "top_k", "top_p", "top_k_top_p"),
    "calibration.source": ("bundled",),
    "benchmark.duration_s": ("5", "60"),  # null needs benchmark.num_requests
    "eval.baseline": ("build", "hugging_face", "skip"),
    "eval.apply_chat_template": ("false",),  # the bundled models have none
    "eval.fewshot_as_multiturn": ("null",),
    "eval.baseline_tp_size": ("1", "2", "4"),
    "eval.guided": ("false",),
    "eval.answers": ("null",),
    "engine.openvino.dynamic_quantization": ("auto", "off"),
    "engine.openvino.experts": ("auto", "separate"),  # grouped needs a mixture
    "engine.openvino.kv_cache_precision": ("auto", "bf16" if native_bf16() else "f32", "f16", "u8", "u4"),
    "quant.fp4_inputs": ("max",),
    "quant.int4_scales": ("max",),
    "sizing.autoscaling.down_at": ("0.1", "0.6"),
    "sizing.autoscaling.up_at": ("0.5", "1.0"),
    "manifests.replicas": ("1", "4"),
    **{f"cluster.{name}": ("1", "60") for name in ("prefill", "decode")},
    "triton.batching_strategy": ("inflight_fused_batching", "inflight_batching"),
    "triton.max_beam_width": ("1",),
    "triton.max_queue_delay_microseconds": ("0",),
    "triton.speculative_decoding_fast_logits": ("false",),
    "speculative.mode": ("none",),
    "multimodal.model_type": ("none",),
    **{f"triton.lookahead_{name}": ("null",) for name in ("window_size", "ngram_size", "verification_set_size")},
    "manifests.storage": ("claim",),
    "manifests.access_mode": ("ReadWriteMany", "ReadOnlyMany"),
    "serving.server": ("tritonserver",),
}
"""Keys of which a plain configuration takes some values only, because of the model, the engine or another key."""
LIMIT = "benchmark.slo.ttft_ms=500"
BESIDE: dict[str, tuple[str, ...]] = {
    "quant.smoothquant_alpha": ("quant=int8_sq",),
    "quant.awq_alpha_step": ("quant=int4_awq",),
    "sizing.users": ("sizing.requests_per_user_day=10",),
    "sizing.requests_per_user_day": ("sizing.users=10",),
    "sizing.prices.server_usd": ("sizing.prices.years=3",),
    "sizing.prices.years": ("sizing.prices.server_usd=9",),
    "sizing.prices.kwh_usd": ("sizing.prices.pue=1.5",),
    "sizing.prices.pue": ("sizing.prices.kwh_usd=0.5",),
    "sizing.peak_factor": ("sizing.average_rate=2",),
    "sizing.peak_percentile": ("sizing.average_rate=2",),
    "sizing.measured_gpus": ("sizing.rate=2.4",),
    "benchmark.tp_size": ("benchmark.url=localhost:8001",),
    "benchmark.api": ("benchmark.url=http://localhost:8000/v1",),
    "benchmark.search": (LIMIT,),
    **{f"benchmark.{name}": ("benchmark.search=max_load", LIMIT) for name in BenchmarkSettings.SEARCH},
    "triton.decoupled_mode": ("benchmark.streaming=false",),
    "cluster.prefill": ("cluster.decode=1",),
    "cluster.decode": ("cluster.prefill=1",),
    "manifests.route.weight": tuple(
        f"manifests.route.{each}" for each in ("beside=other", "name=chat", "gateway=edge")
    ),
    "manifests.kv_routing": ("manifests.operator=dynamo",),
}
"""What else a key needs."""


def right_values(leaf: Leaf) -> tuple[str, ...]:
    """Return values that the schema allows, as they are typed."""
    if leaf.name in ONLY:
        return ONLY[leaf.name]
    if leaf.kind == "choice":
        return leaf.values
    if leaf.kind is bool:
        return ("true", "false")
    if leaf.kind is int:
        return tuple(str(value) for value in _inside(leaf, 1))
    if leaf.kind is float:
        return tuple(_typed(float(value)) for value in _inside(leaf, 0.25))
    return ("null",) if leaf.nullable else ()


def _inside(leaf: Leaf, step: float) -> list[float]:
    low = leaf.bounds.get("ge", leaf.bounds.get("gt", 0 - step) + step)
    high = leaf.bounds.get("le", leaf.bounds.get("lt", 1e6 + step) - step)
    return sorted({low, min(high, low + step), min(high, max(low, 60))})


def good_cases(leaf: Leaf) -> list[Case]:
    """One setting with each allowed value."""
    return [Case((f"{leaf.name}={value}", *BESIDE.get(leaf.name, ()))) for value in right_values(leaf)]


def good_single(dice: random.Random) -> Case:
    """One setting with an allowed value."""
    return dice.choice(dice.choice([cases for leaf in known() if (cases := good_cases(leaf))]))


GPUS = {
    8.0: ("a30", "a100_sxm_80gb", "a100_pcie_40gb"),
    8.6: ("a10", "a10g"),
    8.9: ("l4", "l40s", "rtx_4090"),
    9.0: ("h100_sxm", "h200_nvl", "h20_sxm", "gh200_96gb"),
    10.0: ("b200_sxm", "gb200"),
    12.0: ("rtx_pro_6000", "rtx_5090"),
}
"""Compute capability -> some files of conf/hardware."""


def good_deployment(dice: random.Random) -> Case:
    """Model, formats, GPU and features that go together by NVIDIA's tables."""
    sm = dice.choice(sorted(GPUS))
    model = dice.choice(("gemma_2b", "llama_3_2_1b"))
    quants = ["none"]
    quants += ["int8_sq", "int4_awq", "int8_wo", "int4_wo"] if sm != 10.0 else []
    quants += ["fp8"] if sm >= 8.9 else []
    quants += ["w4a8_awq"] if 8.9 <= sm != 10.0 else []
    quants += ["nvfp4"] if sm >= 10.0 and model.startswith("llama") else []
    quant = dice.choice(quants)
    kvs = ["default", "auto"] + (["fp8"] if sm >= 8.9 else []) + (["int8"] if sm != 10.0 else [])
    kv = dice.choice(kvs)
    reuses = kv in ("default", "auto") or (kv == "fp8" and quant in ("fp8", "w4a8_awq", "nvfp4"))
    words = [f"model={model}", f"hardware={dice.choice(GPUS[sm])}", f"quant={quant}", f"kv_cache={kv}"]
    words += ["runtime=chunked"] if reuses and dice.random() < 0.3 else []
    words += [f"reuse={dice.choice(('none', 'system_prompt') if reuses else ('none',))}"] * (dice.random() < 0.3)
    words += [dice.choice(("build.max_seq_len=512", "build.max_seq_len=4096", "tuning=plain", "eval=mmlu"))]
    words += [f"plan.target={dice.choice(('build', 'evaluate', 'repository', 'serve', 'benchmark', 'all'))}"]
    return Case(tuple(dice.sample(words, len(words))))


def good_pair(dice: random.Random) -> Case:
    """Two settings of different groups that have nothing to do with one another."""
    first, second = good_single(dice), good_single(dice)
    while _group(first) == _group(second) or {_group(first), _group(second)} in RELATED:
        second = good_single(dice)
    return Case(first.words + second.words)


def _group(case: Case) -> str:
    return case.words[0].split(".")[0]


RELATED: Sequence[set[str]] = (
    {"build", "workload"}, {"build", "triton"}, {"build", "engine"}, {"build", "quant"}, {"build", "model"},
    {"quant", "engine"}, {"quant", "kv_cache"}, {"kv_cache", "triton"}, {"workload", "benchmark"},
    {"benchmark", "triton"}, {"engine", "triton"}, {"build", "hardware"}, {"engine", "hardware"}, {"build", "runtime"},
    {"workload", "engine"}, {"model", "engine"},
)  # fmt: skip
"""Groups between which there are rules."""


def good(seed: int, count: int) -> Iterator[Case]:
    """Yield configurations that must be planned."""
    dice = random.Random(f"good {seed}")
    kinds = [good_single] * 4 + [good_pair] * 2 + [good_deployment] * 4
    for _ in range(count):
        yield dice.choice(kinds)(dice)
