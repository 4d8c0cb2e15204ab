"""A stage that writes other bytes raises its `version`, or stores would mix what the old and the new code made.

The golden file holds, for each of some tiny artifacts, the stage's version, the versions of its libraries, and a
fingerprint. What is computed without sums of floating-point numbers has a digest of every file: it is equal on every
processor. Sums differ in their last bits between processors, so that what rests on them has a digest of what is exact
(names, types, shapes, settings) and two numbers for each tensor, compared with a tolerance.

`make golden` writes what is new, and refuses other bytes at an equal version.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.config import EvalSettings, FidelitySettings
from eval.dataset import MINI_MMLU
from pipelines.compress.config import (
    CalibrationSettings,
    KvCacheSettings,
    PruningSettings,
    QuantSettings,
    RecoverSettings,
    SparsitySettings,
)
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.config import OpenVinoSettings, all_options
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.settings.model import BUNDLED
from pipelines.stages import Stage
from pipelines.stages.build import Build
from pipelines.stages.compress import PruneModel, Recover, Sparsify
from pipelines.stages.evaluate import Evaluate, EvaluateSequentially
from pipelines.stages.fidelity import Fidelity
from pipelines.stages.quantize import Quantize
from pipelines.stages.repository import WriteRepository
from pipelines.store.manifest import MANIFEST, sealed
from scripts.records.documents import Neutral, file_rows
from scripts.records.weights import digest
from tests.support.numbered_model import write_numbered_model
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec

pytest.importorskip("modelopt")
pytest.importorskip("openvino_genai")
pytest.importorskip("lm_eval")

GOLDEN = Path(__file__).parent / "stage_bytes.json"
TOLERANCE, IN_FIRST_LAYER = 1e-2, 2.5e-3
"""Of a tensor's numbers, as a part of its root mean square; the second layer observes what the first made differently.

Measured with instructions up to SSE 4.2: 0.0037 and 0.0015, both of GPTQ; up to AVX2: 0.0001.
"""

CALIBRATION = CalibrationSettings(source="bundled", size=4, seq_len=32, batch_size=2)
OPENVINO = OpenVinoSettings(inference_precision="f32", num_threads=1)
NUMBERED = RepositorySpec(
    "openvino", "numbered", "int4_rtn", enable_chunked_context=True, options=all_options(OPENVINO)
)
LIBRARIES = ("openvino", "openvino-genai")
TRAINING = RecoverSettings(
    method="distill", texts=8, steps=4, learning_rate=1e-3, seq_len=32, batch_size=2, accumulation=1,
    evaluate_every=2, patience=5, seed=1,
)  # fmt: skip


def quantized(qformat: QFormat, *, tp: int = 1, layout: Any = "tensorrt_llm", **options: Any) -> Quantize:
    kv_cache = KvCacheSettings(dtype=options.pop("kv_cache", KvFormat.AUTO))
    quant = QuantSettings(qformat=qformat, **{"group_size": 32, **options})
    return Quantize(quant, kv_cache, CALIBRATION, tp, 1, "cpu", layout)


def built() -> Build:
    limits = BuildSettings(max_batch_size=2, max_input_len=448, max_seq_len=512, max_num_tokens=512)
    return Build("openvino", limits, LIBRARIES, ())


def labelled() -> dict[str, Any]:
    return {"engine": "openvino", "options": OPENVINO, "libraries": LIBRARIES, "needs": ()}


@dataclass(frozen=True)
class Artifact:
    """What one stage makes.

    Attributes:
        stage: which makes it, given a folder for what it keeps elsewhere.
        inputs: names of artifacts by the stage's input.
        exact: whether every processor makes the same bytes.
    """

    stage: Callable[[Path], Stage]
    inputs: Mapping[str, str]
    exact: bool = False


MODEL = {"model": "model", "calibration": "texts"}
ENGINES = {"model": "model", "engine": "engine_int4_rtn"}
ARTIFACTS = {
    "prune_width": Artifact(
        lambda _: PruneModel(PruningSettings(method="width", mlp=96, heads=2, texts=4), CALIBRATION, "cpu"), MODEL, True
    ),
    "sparsify_magnitude": Artifact(
        lambda _: Sparsify(SparsitySettings(method="magnitude"), CALIBRATION, "cpu"), MODEL, True
    ),
    "sparsify_sparsegpt": Artifact(lambda _: Sparsify(SparsitySettings(method="sparsegpt"), CALIBRATION, "cpu"), MODEL),
    "recover_distill": Artifact(
        lambda _: Recover(TRAINING, CALIBRATION, False, QuantSettings(qformat=QFormat.NVFP4), "cpu", 1),
        MODEL | {"teacher": "model"},
    ),
    "none_tp2": Artifact(lambda _: quantized(QFormat.NONE, tp=2), MODEL, True),
    "int8_wo": Artifact(lambda _: quantized(QFormat.INT8_WO), MODEL, True),
    "int4_rtn": Artifact(lambda _: quantized(QFormat.INT4_RTN), MODEL, True),
    "fp8_fp8_kv": Artifact(lambda _: quantized(QFormat.FP8, kv_cache=KvFormat.FP8), MODEL),
    "int8_sq": Artifact(lambda _: quantized(QFormat.INT8_SQ), MODEL),
    "int4_awq": Artifact(lambda _: quantized(QFormat.INT4_AWQ, awq_alpha_step=0.5), MODEL),
    "int4_gptq": Artifact(lambda _: quantized(QFormat.INT4_GPTQ), MODEL),
    "nvfp4_hugging_face": Artifact(lambda _: quantized(QFormat.NVFP4, layout="hugging_face"), MODEL),
    "engine_none": Artifact(lambda _: built(), {"checkpoint": "int8_wo"}, True),
    "engine_int4_rtn": Artifact(lambda _: built(), {"checkpoint": "int4_rtn"}, True),
    "repository": Artifact(
        lambda _: WriteRepository(TritonSettings(), NUMBERED),
        ENGINES,
        True,
    ),
    "evaluate": Artifact(
        lambda _: Evaluate(eval=EvalSettings(task="mini_mmlu", num_fewshot=0, limit=1), model="numbered",
                           variant="int4_rtn", **labelled()),
        ENGINES | {"dataset": "questions"},
    ),
    "evaluate_in_turns": Artifact(
        lambda own: EvaluateSequentially(
            eval=EvalSettings(task="mini_mmlu", num_fewshot=0, sequential=True, max_questions=8), model="numbered",
            variant="int4_rtn", answers=own, **labelled(),
        ),
        ENGINES | {"dataset": "questions", "baseline": "engine_none"},
    ),
    "fidelity": Artifact(
        lambda _: Fidelity(
            fidelity=FidelitySettings(window=33, prompts=2, new_tokens=4), tokens=128, calibration=CALIBRATION,
            quant=QuantSettings(qformat=QFormat.INT4_RTN), model="numbered", variant="int4_rtn", reference="numbered",
            **labelled(),
        ),
        ENGINES | {"reference": "engine_none", "calibration": "texts"},
    ),
}  # fmt: skip


def made_from(artifact: Artifact) -> list[str]:
    """Return the artifacts among its inputs."""
    return [each for each in artifact.inputs.values() if each in ARTIFACTS]


class Workshop:
    """Makes each artifact once, when it is asked for first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._given = {"texts": BUNDLED / "corpus.jsonl", "questions": MINI_MMLU}

    @cached_property
    def model(self) -> Path:
        return write_numbered_model(self.root / "model")

    def folder(self, name: str) -> Path:
        if name in self._given:
            return self._given[name]
        if name == "model":
            return self.model
        artifact, out = ARTIFACTS[name], self.root / name
        if not out.exists():
            inputs = {source: self.folder(other) for source, other in artifact.inputs.items()}
            out.mkdir()
            artifact.stage(self.root / "elsewhere").run(inputs, out, SilentProgress())
            (out / MANIFEST).write_text(json.dumps(sealed({"digest": name})))  # evaluations in turns read it
        return out


def fingerprint(folder: Path, *, exact: bool, root: Path) -> dict[str, Any]:
    """Return a digest of what is exact and, where not everything is, the numbers of the rest by name."""
    same: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    neutral = Neutral({str(root): "<root>", str(BUNDLED): "<bundled>"})
    is_model = any(folder.glob("*.safetensors"))
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors" and not exact:
            for tensor, form, statistics in tensors(file):
                same[f"{name}/{tensor}"], numbers[f"{name}/{tensor}"] = form, statistics
            continue
        if file.suffix == ".safetensors":
            same[f"{name} (whole)"] = {"sha256": digest(file.read_bytes())}
        if (rows := file_rows(file, neutral)) is not None:
            inexact = {} if exact or is_model else {k: v for k, v in rows.items() if isinstance(v, float)}
            numbers |= {f"{name}/{row}": value for row, value in inexact.items()}
            same[name] = {row: value for row, value in rows.items() if row not in inexact}
    found = {"exact": digest(json.dumps(same, sort_keys=True).encode())}
    return found if exact else found | {"numbers": numbers}


def tensors(file: Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yield name, type with shape, and the numbers of each tensor of a safetensors file, in the order of the file."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = decoded(content[start + begin : start + end], entry["dtype"])
        signs = np.random.default_rng(5).integers(0, 2, values.size) * 2 - 1
        size = float(np.sqrt(np.mean(values**2)))
        yield name, f"{entry['dtype']} {entry['shape']}", [size, float(np.mean(values * signs))]


def decoded(content: bytes, form: str) -> np.ndarray:
    """Return a tensor's values, flat; of codes of up to 8 bit, the halves of each byte, which are never far apart."""
    if form == "BF16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if form in ("F16", "F32"):
        return np.frombuffer(content, {"F16": np.float16, "F32": np.float32}[form]).astype(np.float64)
    codes = np.frombuffer(content, np.uint8)
    return np.concatenate([codes & 15, codes >> 4]).astype(np.float64)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs between two fingerprints by more than processors do."""
    found = [] if before["exact"] == now["exact"] else ["names, types, shapes or bytes"]
    old, new = before.get("numbers", {}), now.get("numbers", {})
    if old.keys() != new.keys():
        return [*found, *sorted(old.keys() ^ new.keys())]
    return found + [f"{name}: {old[name]} -> {new[name]}" for name in old if not close(name, old[name], new[name])]


def close(name: str, before: list[float] | float, now: list[float] | float) -> bool:
    """Whether a tensor's size and its mean with signs agree, or a single number does."""
    if isinstance(before, list) and isinstance(now, list):
        bound = IN_FIRST_LAYER if "layers.0." in name else TOLERANCE
        return all(abs(a - b) <= bound * before[0] for a, b in zip(before, now, strict=True))
    return now == pytest.approx(before, rel=TOLERANCE, abs=1e-3)


def rounded(value: Any) -> Any:
    """Return numbers with the digits that the tolerance needs."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def judged(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Return why a fingerprint is not the golden one; empty if it is."""
    if before is None:
        return f"{name} is new: make golden"
    if before["version"] != now["version"]:
        return f"{now['stage']} has version {now['version']}, the golden file {before['version']}: make golden"
    if before.get("inputs") != now.get("inputs"):
        return f"{name} is made from {now['inputs']}, the golden one from {before.get('inputs')}: make golden"
    if not (found := differences(before, now)):
        return ""
    told = "; ".join(found[:5])
    if before["libraries"] != now["libraries"]:
        return f"{name} has other bytes with {now['libraries']} than with {before['libraries']}: make golden ({told})"
    return (
        f"{now['stage']} writes other bytes at version {now['version']} ({name}): raise `version` if that is meant, "
        f"then make golden ({told})"
    )


def test_a_stage_that_writes_other_bytes_has_another_version(tmp_path, subtests, request):
    workshop = Workshop(tmp_path)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    fresh = {}
    for name, artifact in ARTIFACTS.items():
        with subtests.test(artifact=name):
            stage = artifact.stage(tmp_path)
            now = {
                "stage": type(stage).__name__,
                "version": stage.version,
                "inputs": {each: ARTIFACTS[each].stage(tmp_path).version for each in made_from(artifact)},
                "libraries": {library: version(library) for library in stage.libraries},
                **rounded(fingerprint(workshop.folder(name), exact=artifact.exact, root=tmp_path)),
            }
            why = judged(name, golden.get(name), now)
            rewrites = request.config.getoption("--rewrite-golden") and "make golden" in why and "raise" not in why
            fresh[name] = now if rewrites else golden.get(name, now)
            assert rewrites or not why, why
    if request.config.getoption("--rewrite-golden"):
        lines = json.dumps(fresh, indent=1)
        GOLDEN.write_text(
            re.sub(r"\[\n\s+([^\]]*?)\n\s+\]", lambda pair: f"[{' '.join(pair[1].split())}]", lines) + "\n"
        )


def test_why_a_fingerprint_is_not_the_golden_one_is_told():
    golden = json.loads(GOLDEN.read_text())["fp8_fp8_kv"]
    name = next(iter(golden["numbers"]))
    size, mean = golden["numbers"][name]
    assert not judged("x", golden, golden)
    assert not judged("x", golden, golden | {"numbers": golden["numbers"] | {name: [size * 1.001, mean]}})
    other = golden | {"numbers": golden["numbers"] | {name: [size, mean + size / 50]}}
    assert "Quantize writes other bytes at version 2 (x): raise `version`" in judged("x", golden, other)
    assert name in judged("x", golden, other)
    assert "bytes" in judged("x", golden, golden | {"exact": "0"})
    assert "version 3" in judged("x", golden, other | {"version": "3"})
    assert "make golden" in judged("x", golden, other | {"libraries": {"torch": "3"}})
    assert "made from {'engine': '5'}" in judged("x", golden, other | {"inputs": {"engine": "5"}})
    assert judged("x", None, golden) == "x is new: make golden"
