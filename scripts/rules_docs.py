"""Write docs/rules.md from the table of rules: `python -m scripts.rules_docs`; a test fails when the page is stale.

Nothing on the page is written by hand. The rules are applied to deployments that are composed from the files under
conf/, which shows the formats that a GPU supports and the features that work together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.domain.adapter import Adapter
from pipelines.domain.families import BUILT, FAMILIES
from pipelines.domain.formats import UNIFORM, KvFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import ENGINES, LLM_API, OPENVINO, TENSORRT_LLM, choose
from pipelines.host.files import write_text
from pipelines.host.machine import Machine
from pipelines.plan.deployment import Deployment
from pipelines.plan.user_inputs import UserInputs
from pipelines.rules.record import BrokenRule, DeploymentFacts, Rule, Severity
from pipelines.rules.rulebook import RULES, check
from pipelines.settings.by_hydra import compose_config, to_raw
from pipelines.settings.groups import CONF
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import validate

PAGE = PROJECT_ROOT / "docs" / "rules.md"
GENERATIONS = {
    "8.0 A100, A30": 8.0,
    "8.6 A10, RTX 30": 8.6,
    "8.9 L4, L40S, RTX 40": 8.9,
    "9.0 H100, H200": 9.0,
    "10.0 B200": 10.0,
    "12.0 RTX PRO 6000": 12.0,
}
NUMBERS = {rule.name: number for number, rule in enumerate(RULES, 1)}
NOWHERE = Machine(1, 0, (), "", has_tensorrt_llm=False, platform="")
SMALL = ModelShape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False)
"""Llama 3.1 8B, whose sizes are divisible for every split and format."""
ADAPTER = Adapter("/adapter", 8, ("q_proj",), {"q_proj": (4096, 4096)})


@dataclass(frozen=True)
class Feature:
    """One row of the feature table.

    Attributes:
        title: heading of the row, as the override is written on the command line.
        files: group -> file under conf/ that is added to the configuration.
        values: settings that these files leave open.
    """

    title: str
    files: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


FP8_BOTH: dict[str, Any] = {"quant": {"qformat": "fp8"}, "kv_cache": {"dtype": "fp8"}}
INT8_KV: dict[str, Any] = {"kv_cache": {"dtype": "int8", "enable_block_reuse": False}}
HEADS: dict[str, Any] = {"speculative": {"heads_path": "/heads"}}
FEATURES = (
    Feature("`quant=fp8`", values={"quant": {"qformat": "fp8"}}),
    Feature("`quant=int4_awq`", values={"quant": {"qformat": "int4_awq"}}),
    Feature("`quant=fp8 kv_cache=fp8`", values=FP8_BOTH),
    Feature("`kv_cache=int8`", values=INT8_KV),
    Feature("`runtime=chunked`", {"runtime": "chunked"}),
    Feature("`reuse=system_prompt`", {"reuse": "system_prompt"}),
    Feature("`window=sliding`", {"window": "sliding"}),
    Feature("`window=sinks`", {"window": "sinks"}),
    Feature(
        "`lora=adapters`", {"lora": "adapters"}, {"lora": {"adapters": {1: "/adapter"}}, "quant": {"dtype": "float16"}}
    ),
    Feature(
        "`speculative=draft_target`",
        {"speculative": "draft_target"},
        {
            "speculative": {
                "draft": {"name": "d", "hub_id": "d", "revision": None, "bundled": None, "path": None, "shape": None}
            }
        },
    ),
    Feature("`speculative=medusa`", {"speculative": "medusa"}, HEADS),
    Feature("`speculative=redrafter`", {"speculative": "redrafter"}, HEADS),
    Feature("`speculative=eagle`", {"speculative": "eagle"}, HEADS),
    Feature("`speculative=lookahead`", {"speculative": "lookahead"}),
    Feature("`weights=streaming`", {"weights": "streaming"}),
    Feature("`guided=xgrammar`", {"guided": "xgrammar"}),
    Feature("`multimodal=llava`", {"multimodal": "llava"}, {"multimodal": {"path": "/model"}}),
    Feature("`parallel=tp2`", {"parallel": "tp2"}),
    Feature("`parallel=tp8_pp2`", {"parallel": "tp8_pp2"}),
    Feature("`sparsity=sparsegpt_2_4`", {"sparsity": "sparsegpt_2_4"}),
)
BASE = ("engine=tensorrt_llm", "model=llama_3_1_8b", "quant=none", "hardware=h100_sxm")
ADVICE = {"quants": "quant=‹formats›", "quants.names": "‹formats›", "kv_caches": "kv_cache=‹formats›"}
"""Formats that a message recommends, which depend on the other settings."""
TOUCHED = ("quant", "kv_cache", "build", "runtime", "triton", "lora", "speculative", "multimodal", "sparsity")
"""Groups that the features change."""


class Composer:
    """Adds features to a configuration as Hydra does: formats, then files in conf/config.yaml's order, then values."""

    def __init__(self) -> None:
        from omegaconf import OmegaConf

        config = compose_config(BASE)
        parts = OmegaConf.to_container(config)
        assert isinstance(parts, dict)
        self._merged = OmegaConf.create({group: parts[group] for group in TOUCHED})
        self._others = {group: value for group, value in to_raw(config).items() if group not in TOUCHED}
        self._order = list(_feature_groups())

    def raw(self, features: Sequence[Feature]) -> dict[str, Any]:
        """Return the resolved configuration with some features."""
        from omegaconf import OmegaConf

        chosen = {group: name for feature in features for group, name in feature.files.items()}
        layers = [_layer(CONF / group / f"{chosen[group]}.yaml") for group in self._order if group in chosen]
        first = [dict(feature.values) for feature in features if not feature.files]
        last = [dict(feature.values) for feature in features if feature.files]
        return self._others | to_raw(OmegaConf.merge(self._merged, *first, *layers, *last))

    def deployment(self, features: Sequence[Feature]) -> DeploymentFacts:
        """Return the configuration with some features as the record that the rules read."""
        settings = validate(self.raw(features))
        inspected = UserInputs(adapters=dict.fromkeys(settings.lora.adapters, ADAPTER))
        return Deployment(
            settings, "all", choose(settings.engine.name, NOWHERE).engine, NOWHERE, inspected, SMALL
        ).facts


def _layer(file: Path) -> Any:
    """Return the settings of a feature's file without its defaults, which the base already contains."""
    from omegaconf import OmegaConf

    layer: Any = OmegaConf.load(file)
    layer.pop("defaults", None)
    return layer


def _feature_groups() -> Iterator[str]:
    """Return the groups of conf/ in the order in which conf/config.yaml applies them."""
    for line in (CONF / "config.yaml").read_text().splitlines():
        if match := re.fullmatch(r"  - (\w+): \w+", line):
            yield match.group(1)


def page() -> str:
    """Return the whole page."""
    parts = [
        "# Which settings work together",
        "Which quantization formats, GPUs, model families and features can be combined, for anyone who plans a"
        " deployment. The first tables answer the question; the [rules](#rules) at the end give the reasons and their"
        " sources.",
        "`make plan` and the start of every run apply the same rules to your own configuration:",
        "    make plan quant=nvfp4 hardware=a10",
        "In the tables, **no** is refused and **warn** is reported as a warning; the numbers are those of the"
        " [rules](#rules). This page is generated by `python -m scripts.rules_docs` from the rules in"
        " `pipelines/rules/`.",
        *_formats(),
        *_together(),
        *_rules(),
    ]
    return "\n\n".join(parts) + "\n"


def _formats() -> Iterator[str]:
    yield "## Formats and GPUs"
    yield "The columns are compute capabilities; the engine is built with TensorRT-LLM 1.2."
    rows = [
        [f"`quant={q}`", *(_cell(check(DeploymentFacts(qformat=q, sm=sm))) for sm in GENERATIONS.values())]
        for q in UNIFORM
    ]
    rows += [
        [f"`kv_cache={k}`", *(_cell(check(DeploymentFacts(kv_format=k, sm=sm))) for sm in GENERATIONS.values())]
        for k in KvFormat
    ]
    yield _table(["", *GENERATIONS], rows)
    yield "## Formats and model families"
    shapes = [_shape(architecture) for architecture in BUILT]
    rows = [
        [f"`quant={q}`", *(_cell(check(DeploymentFacts(qformat=q, shape=shape))) for shape in shapes)] for q in UNIFORM
    ]
    yield _table(["", *BUILT], rows)


def _shape(architecture: str) -> ModelShape:
    tied = FAMILIES[architecture].head_is_embedding
    return ModelShape(architecture, 32, 4096, 32, 8, 128, 14336, 128256, 131072, tied)


def _together() -> Iterator[str]:
    yield "## Features together"
    yield (
        f"Each feature is added to `{' '.join(BASE[1:])}`. The diagonal shows each feature alone. Every other cell"
        " shows what applies only to the two features together; (no) means that one of them is already refused alone,"
        " and – that both set the same group."
    )
    composer = Composer()
    pairs = {
        (row, column): composer.deployment([one] if one is other else [other, one])
        for row, one in enumerate(FEATURES)
        for column, other in enumerate(FEATURES[: row + 1])
        if one is other or not _same_question(one, other)
    }
    for engine in (TENSORRT_LLM, OPENVINO, LLM_API):
        facts = {"needs_gpu": engine.needs_gpu, "writes_engine": engine.writes_engine}
        broken = {place: check(replace(deployed, **facts)) for place, deployed in pairs.items()}
        yield f"### `engine={engine.setting}`"
        rows = [
            [f"{_letter(row)} {feature.title}", *(_new(broken, row, column) for column in range(len(FEATURES)))]
            for row, feature in enumerate(FEATURES)
        ]
        yield _table(["", *(_letter(number) for number in range(len(FEATURES)))], rows)


def _new(broken: Mapping[tuple[int, int], list[BrokenRule]], row: int, column: int) -> str:
    """Return findings that apply only to two features together; "–" where both set the same group or key."""
    if column > row:
        return ""
    if (row, column) not in broken:
        return "–"
    alone = {finding.rule for at in (row, column) if row != column for finding in broken[at, at]}
    if any(rule.severity is Severity.REFUSE for rule in alone):
        return "(no)"
    return _cell([finding for finding in broken[row, column] if finding.rule not in alone])


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number]


def _same_question(one: Feature, other: Feature) -> bool:
    keys = [{*feature.files, *(feature.values if not feature.files else ())} for feature in (one, other)]
    return bool(keys[0] & keys[1])


def _cell(findings: Iterable[BrokenRule]) -> str:
    """Format findings as `no 3, 7`, `warn 5` or `yes`."""
    for severity, word in ((Severity.REFUSE, "**no**"), (Severity.WARN, "warn")):
        names = dict.fromkeys(finding.rule.name for finding in findings if finding.rule.severity is severity)
        if names:
            return f"{word} " + ", ".join(str(NUMBERS[name]) for name in names)
    return "yes"


def _rules() -> Iterator[str]:
    yield "## Rules"
    yield (
        "A rule without an engine applies to all of them. Sources are files and issues of NVIDIA/TensorRT-LLM, unless"
        " stated otherwise."
    )
    topics = dict.fromkeys(rule.topic for rule in RULES)
    for topic in topics:
        yield f"### {topic}"
        rows = [_row(rule) for rule in RULES if rule.topic == topic]
        yield _table(["", "rule", "engine", "message", "source"], rows)


def _row(rule: Rule) -> list[str]:
    judged = rule.engines
    engines = "" if judged is None else ", ".join(name for name, engine in ENGINES.items() if engine in judged)
    word = "**no**" if rule.severity is Severity.REFUSE else "warn"
    message = " ".join(part for part in (rule.failed, rule.allowed, rule.todo) if part)
    return [str(NUMBERS[rule.name]), f"{word} {rule.name}", engines, _readable(message), rule.source]


def _readable(text: str) -> str:
    """Return a message with its placeholders named: `{d.build.tp_size}` becomes <tp_size>."""
    return re.sub(r"\{([\w.\[\]]+)(?::([^}]*))?\}", _named, text).replace("|", "\\|")


def _named(gap: re.Match[str]) -> str:
    """Name a placeholder; one for formats may have words before it, which stand there if there are any."""
    if gap[1] in ADVICE:
        return f"{gap[2] or ''}{ADVICE[gap[1]]}"
    return f"‹{gap[1].split('.')[-1]}›"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    """Write the page."""
    write_text(PAGE, page())
    sys.stdout.write(f"{PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
