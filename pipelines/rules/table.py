"""The table of all rules, and functions to apply them."""

from __future__ import annotations

from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.rules import attention, builder, cpu, gpu, llmapi, lora, rotary, serving, speculation, split
from pipelines.rules.record import Alternatives, BrokenRule, DeploymentFacts, Rule, Severity, judge
from pipelines.settings.build import BuildSettings

RULES: tuple[Rule, ...] = (
    *gpu.RULES,
    *split.RULES,
    *attention.RULES,
    *rotary.RULES,
    *builder.RULES,
    *speculation.RULES,
    *lora.RULES,
    *serving.RULES,
    *cpu.RULES,
    *llmapi.RULES,
)


def check(deployment: DeploymentFacts) -> list[BrokenRule]:
    """Return every finding, all at once."""
    return judge(RULES, deployment)


def refused_whatever_format(deployment: DeploymentFacts) -> set[str]:
    """Return the names of the rules that refuse a deployment in every format of the weights."""
    return Alternatives(RULES, deployment, "quant").whatever


def refused(findings: list[BrokenRule]) -> list[Fault]:
    """Return the findings that stop a run."""
    return [finding.fault for finding in findings if finding.rule.severity is Severity.REFUSE]


def warned(findings: list[BrokenRule]) -> list[Fault]:
    """Return the findings that are reported as warnings."""
    return [finding.fault for finding in findings if finding.rule.severity is Severity.WARN]


def check_checkpoint(
    shape: ModelShape,
    qformat: QFormat,
    *,
    group_size: int = 128,
    sparsity: str = "none",
    tp_size: int = 1,
    pp_size: int = 1,
    positions: Rotary | None = None,
) -> list[Fault]:
    """Return what stops a model from being exported in a format and a split, for callers without a configuration."""
    if tp_size < 1 or pp_size < 1:
        return [Fault(f"tp_size={tp_size}, pp_size={pp_size} is not a valid split.", "Both are at least 1.")]
    build = BuildSettings(tp_size=tp_size, pp_size=pp_size, max_input_len=1)
    asked = DeploymentFacts(
        shape=shape, qformat=qformat, group_size=group_size, sparsity=sparsity, build=build, rotary=positions
    )
    return refused(judge((*gpu.RULES, *split.RULES, *rotary.RULES), asked))
