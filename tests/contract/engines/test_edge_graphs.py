"""What TensorRT Edge-LLM's exporter makes of our checkpoints: whole, and computing what the CPU engine computes.

The exporter is NVIDIA's own, in the environment of `make setup-edge`; tests/support/edge_graph.py executes its graph.
"""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipelines.checkpoint.tensors import TensorFile
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import FORMATS, UNIFORM, KvFormat, QFormat
from pipelines.domain.progress import SILENT
from pipelines.engines.tensorrt_edge.exporter import LLM, environment_fault, export
from pipelines.engines.tensorrt_edge.read_back import read_back
from pipelines.stages.unified import PLAIN_TEMPLATE
from tests.conftest import ROOT
from tests.contract.engines.conftest import CALIBRATION, Workshop, quiz_prompts, same_top
from tests.support.edge_graph import EdgeModel
from tests.support.made_once import made_once
from tests.support.specs import mix_spec, quant_spec
from triton_repo.llmapi import checkpoint_files, link_files, tokenizer_files

ENVIRONMENT = ROOT / ".venv-edge"
FAULT = environment_fault(ENVIRONMENT)
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(FAULT is not None, reason=str(FAULT))]

QUANTIZED = [qformat for qformat in UNIFORM if FORMATS[qformat].edge and qformat is not QFormat.NONE]
MIX = mix_spec((QFormat.FP8, QFormat.INT4_AWQ), 6.0, texts=8)
KINDS = ("llama", "mistral", "qwen2", "qwen2_tied", "qwen")
SEQUENCES = 4


class Exported:
    """An export of a model in a format."""

    def __init__(self, workshop: Workshop, kind: str, qformat: QFormat, kv: KvFormat = KvFormat.AUTO) -> None:
        self.kind, self.workshop = kind, workshop
        spec = MIX if qformat is QFormat.AUTO else quant_spec(qformat, kv)
        source = workshop.source(kind)

        def make(out: Path) -> None:
            checkpoint = out / "checkpoint"
            made = source
            if qformat is not QFormat.NONE:
                made, texts = out / "made", quiz_prompts()[:8]
                quantize(source, made, spec, texts, CALIBRATION, layout="hugging_face")
            link_files(tokenizer_files(source), source, checkpoint)
            link_files(checkpoint_files(made), made, checkpoint)
            (checkpoint / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
            listing = export(checkpoint, out, ENVIRONMENT, SILENT)
            (out / "kept.json").write_text(json.dumps(listing))

        self.folder = made_once(workshop.shared / f"edge-{kind}-{qformat}-{kv}", make)
        self.listing = json.loads((self.folder / "kept.json").read_text())

    def faults(self) -> list[str]:
        files = [TensorFile(path) for path in sorted((self.folder / "checkpoint").glob("*.safetensors"))]
        return [str(fault) for fault in read_back(files, self.listing, self.folder / LLM)]

    def logits(self, *, rounds: bool = False, chunks: int = 1, kv_in_16_bit: bool = False) -> np.ndarray:
        listing = copy.deepcopy(self.listing)
        for node in listing["nodes"]:
            if kv_in_16_bit and node["op"] == "AttentionPlugin":
                node["attributes"]["enable_fp8_kv_cache"] = 0
        model = EdgeModel(self.folder / LLM, listing, rounds=rounds)
        return model.logits(self.workshop.batch(self.kind)[:SEQUENCES], chunks=chunks)


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean KL divergence of the next token, nats."""
    first, second = (_log_probabilities(each.astype(np.float64)) for each in (expected, found))
    return float((np.exp(first) * (first - second)).sum(-1).mean())


@pytest.mark.parametrize("qformat", [QFormat.NONE, *QUANTIZED])
def test_phi_3_is_whole_and_near_the_model(qformat: QFormat, workshop: Workshop) -> None:
    """Its fused linears may be apart in the graph. The CPU engine has few of these formats: the model is compared."""
    kind = "phi3_without_window"  # windows are refused
    exported = Exported(workshop, kind, qformat)
    assert exported.faults() == []
    model = transformers.AutoModelForCausalLM.from_pretrained(workshop.source(kind), dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(workshop.batch(kind)[:SEQUENCES])).logits.numpy()
    assert divergence(expected, exported.logits()) < (1e-6 if qformat is QFormat.NONE else 0.03)


def test_a_mix_of_formats_is_whole_and_near_the_model(workshop: Workshop) -> None:
    exported = Exported(workshop, "llama", QFormat.AUTO)
    expected = workshop.logits(workshop.checkpoint("llama", QFormat.NONE), "llama")[:SEQUENCES]
    assert exported.faults() == []
    assert divergence(expected, exported.logits()) < 0.01


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bit_the_graph_is_the_cpu_engine(kind: str, workshop: Workshop) -> None:
    """The same next token after 99.9 % of the tokens, and KL 1e-4, which holds with values rounded to FP16, too."""
    exported = Exported(workshop, kind, QFormat.NONE)
    expected = workshop.logits(workshop.checkpoint(kind, QFormat.NONE), kind)[:SEQUENCES]
    assert exported.faults() == []
    found = exported.logits()
    assert same_top(found, expected) >= 0.999
    assert divergence(expected, found) <= 1e-4
    rounded = exported.logits(rounds=True, chunks=3)  # the second and third read earlier tokens from the KV cache
    assert divergence(expected, rounded) <= 1e-4


@pytest.mark.parametrize(
    ("kind", "qformat", "kv"),
    [
        *(("llama", qformat, KvFormat.AUTO) for qformat in QUANTIZED),
        *(("llama", qformat, KvFormat.FP8) for qformat in (QFormat.FP8, QFormat.NVFP4, QFormat.INT8_SQ)),
        *((kind, qformat, KvFormat.AUTO) for kind in KINDS[2:] for qformat in (QFormat.FP8, QFormat.INT4_AWQ)),
        ("qwen", QFormat.NVFP4, KvFormat.AUTO),
    ],
)
def test_each_format_is_within_its_own_noise(kind: str, qformat: QFormat, kv: KvFormat, workshop: Workshop) -> None:
    """All tensors are read back, and graph and CPU engine differ by less than the format does from 16 bit.

    The CPU engine's KV cache has 16 bit here, so that of the graph gets 16 bit, too; its scales are read back.
    """
    exported = Exported(workshop, kind, qformat, kv)
    assert exported.faults() == []
    plain = workshop.logits(workshop.checkpoint(kind, QFormat.NONE), kind)[:SEQUENCES]
    same = workshop.logits(workshop.checkpoint(kind, qformat), kind)[:SEQUENCES]
    found = exported.logits(kv_in_16_bit=True)
    noise, apart = divergence(plain, same), divergence(same, found)
    print(f"{kind} {qformat} kv {kv}: KL to the CPU engine {apart:.2g}, of the format {noise:.2g}")  # noqa: T201
    assert apart <= noise


@pytest.mark.parametrize(
    ("qformat", "kv", "lost"), [(QFormat.W4A8_AWQ, KvFormat.AUTO, 120), (QFormat.INT4_AWQ, KvFormat.FP8, 8)]
)
def test_what_the_exporter_leaves_out_is_named(qformat: QFormat, kv: KvFormat, lost: int, workshop: Workshop) -> None:
    """It ends with success; such formats are refused by rules, and here by what is read back."""
    assert f"lacks {lost} of the checkpoint's" in Exported(workshop, "llama", qformat, kv).faults()[0]


def test_a_family_that_it_does_not_know_is_exported_wrongly(workshop: Workshop) -> None:
    """Gemma: every tensor is there, and the graph has Llama's norms and activation. When this fails, allow Gemma."""
    exported = Exported(workshop, "gemma", QFormat.NONE)
    assert exported.faults() == []
    expected = workshop.logits(workshop.checkpoint("gemma", QFormat.NONE), "gemma")[:SEQUENCES]
    assert divergence(expected, exported.logits()) > 1
