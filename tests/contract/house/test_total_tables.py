"""Tables keyed by an enumeration have a row for each of its members, and each combination of choices has a verdict."""

import importlib
import itertools
import pkgutil
import random
from collections.abc import Mapping
from typing import get_args

import pytest

import eval
import pipelines
import pipelines.stages
import triton_repo
from eval.verdict import Verdict
from pipelines.domain.families import Architecture
from pipelines.domain.formats import FORMATS, Activation, KvFormat, QFormat
from pipelines.engines.registry import ServerBackend
from pipelines.loadgen.config import Arrival
from pipelines.plan.targets import Target
from pipelines.settings.features import HEADS
from pipelines.settings.groups import choices
from tests.support.configurations import Case
from tests.torture.configurations import judge

WEIGHTS = {form.weights for form in FORMATS.values()}
KEYS = (*map(set, (QFormat, KvFormat, Architecture, ServerBackend, Verdict)), set(get_args(Activation)),
        set(get_args(Arrival)), set(HEADS), WEIGHTS)  # fmt: skip
PARTIAL = {
    "ACTS": "names of activation functions",
    "_QUANTIZERS": "16 bit is not rounded",
    "LARGEST_CODE": "16 bit is not rounded",
    "_KV_CACHE": "auto is not quantized",
    "LARGEST_CACHED": "auto is not quantized",
    "MOST_KV": "auto is not quantized",
    "UNSMOOTHED": "formats that share a quant_algo",
    "pipelines.checkpoint.unified._WEIGHTS": "formats that the LLM API reads",
    "pipelines.predict.performance.measured_tools.ENGINES": "names that other tools give engines",
    "NOT_LISTED": "formats that every family has are not in it",
    "WHY_NOT": "formats that the LLM API runs need no reason",
    "_ROUND": "formats of trained weights that are rounded",
}
"""Tables that have no row for some members, and the reason; who reads them asks for these members alone."""


def modules():
    for root in (pipelines, eval, triton_repo):
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not found.name.endswith("__main__") and ".models" not in found.name.removeprefix("triton_repo"):
                yield importlib.import_module(found.name)


def tables():
    for module in modules():
        for name, value in vars(module).items():
            if name.lstrip("_").isupper() and isinstance(value, Mapping) and value:
                yield f"{module.__name__}.{name}", name, value


def test_tables_keyed_by_an_enumeration_are_total():
    keyed = [(place, name, set(table), full) for place, name, table in tables() for full in KEYS if set(table) <= full]
    assert len(keyed) > 30
    holes = {
        place: full - keys for place, name, keys, full in keyed if not {name, place} & PARTIAL.keys() and keys != full
    }
    # chosen weights are those of the other kinds
    assert {place: hole for place, hole in holes.items() if hole - {FORMATS[QFormat.AUTO].weights}} == {}


AXES = {
    "quant": choices("quant"),
    "prune": ("none", "width prune.mlp=256", "width prune.heads=2", "depth prune.layers=2"),
    "sparsity": choices("sparsity"),
    "recover": choices("recover"),
    "speculative": choices("speculative"),
    "lora": choices("lora"),
    "kv_cache": choices("kv_cache"),
    "window": choices("window"),
    "parallel": ("single", "tp2"),
}


def combinations():
    """Yield each pair of choices of two groups once, on an engine and for a command drawn anew each time."""
    draw = random.Random(0)
    engines, models = choices("engine"), ("tiny_llama", "tiny_gemma", "tiny_qwen")
    for (one, ones), (other, others) in itertools.combinations(AXES.items(), 2):
        for first, second in itertools.product(ones, others):
            words = (f"model={draw.choice(models)}", f"engine={draw.choice(engines)}", "hardware=h100_sxm")
            target = draw.choice(get_args(Target))
            yield (*words, *f"{one}={first}".split(), *f"{other}={second}".split(), f"plan.target={target}")


SAMPLE = 100
"""Of some 600 pairs, so that the test stays short; the pairs are the same in each run."""


def test_every_combination_has_a_plan_or_a_refusal(tmp_path):
    """Nothing is said about which; the rules' own tests know."""
    verdicts = [judge(Case(words), tmp_path) for words in random.Random(1).sample(list(combinations()), SAMPLE)]
    crashed = [(verdict.case.words, fault) for verdict in verdicts for fault in verdict.faults if "Traceback" in fault]
    assert crashed == []


@pytest.mark.parametrize("prune", ["width prune.mlp=256", "depth prune.layers=2"])
def test_a_pruned_model_is_planned_for_a_gpu(capsys, prune):
    from pipelines.cli.main import main

    assert main(["plan", "engine=tensorrt_llm", *f"prune={prune}".split(), "recover=distill"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pruned models 4.9 MiB" in said if "width" in prune else "pruned models" in said
    assert "recovered models" in said
