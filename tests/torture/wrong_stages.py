"""Faults in one stage of a deployment, which a diagnosis must name, and clean deployments, which it must not accuse.

    python -m tests.torture.wrong_stages [--only WORD] [--json FILE]       every fault and every clean deployment

It takes about a quarter of an hour, so it is no part of `make torture`.
The first run makes the deployments and keeps them in build/diagnosed.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from eval.diagnose.result import Place, StageDiagnosis
from eval.diagnose.run import diagnose
from eval.fidelity.divergence import compare_logits
from pipelines.checkpoint.read import Checkpoint
from pipelines.compress.traced import trace_checkpoint
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from tests.support.diagnosed import CLEAN, Deployments, Places, Recipe
from tests.support.planted_faults import FAULTS, Fault
from tests.support.scored_logits import scored_logits

KEPT = Path("build/diagnosed")
MOST_S = 60.0
SERVED_CLEAN = 4
"""Every so manieth clean deployment is served as well, if its checkpoint is not split."""
TEXT = [2, 388, 774, 340, 333, 514, 368, 401, 912, 1033, 77, 640, 1200, 345, 678, 905]


@dataclass(frozen=True, slots=True)
class Judged:
    """One diagnosis of the campaign.

    Attributes:
        what: fault, or clean deployment.
        recipe: deployment.
        stage: where the fault was planted; empty for none.
        found: whether any stage was accused.
        named: whether stage, layer and tensor are the planted ones; of a clean deployment, that none is.
        seconds: of the diagnosis, servers included.
        moved: KL that the fault makes between answers; None where it was not computed.
        said: the sentence.
    """

    what: str
    recipe: str
    stage: str
    found: bool
    named: bool
    seconds: float
    moved: float | None
    said: str


def _deployments() -> Deployments:
    KEPT.mkdir(parents=True, exist_ok=True)
    return Deployments(KEPT.absolute())


def plant(fault: Fault, made: Deployments) -> Judged:
    """Plant a fault in a copy and diagnose it."""
    with TemporaryDirectory() as scratch:
        places = made.copied(fault.recipe, Path(scratch) / "copy", served=fault.served)
        fault.plant(places)
        result, seconds = _diagnosed(places, fault.recipe, Path(scratch))
        moved = None if fault.served else _moved(fault, places, made.made(fault.recipe))
    accused = result.accused
    first = accused.findings[0] if accused else None
    named = accused is not None and first is not None and accused.stage == fault.stage
    named = named and first is not None and first.layer == fault.layer and fault.tensor in first.tensor
    said = result.sentence()
    return Judged(fault.name, str(fault.recipe), str(fault.stage), accused is not None, named, seconds, moved, said)


def leave(recipe: Recipe, made: Deployments, *, served: bool) -> Judged:
    """Diagnose a deployment without a fault."""
    with TemporaryDirectory() as scratch:
        result, seconds = _diagnosed(made.made(recipe, served=served), recipe, Path(scratch))
    accused = result.accused is not None
    what = f"clean {recipe}{', served' if served else ''}"
    return Judged(what, str(recipe), "", accused, not accused, seconds, None, result.sentence())


def _diagnosed(places: Places, recipe: Recipe, scratch: Path) -> tuple[StageDiagnosis, float]:
    start = time.monotonic()
    given = places.deployment(scratch / "triton.log")
    result = diagnose(
        given, model=recipe.model, variant=str(recipe.qformat), seed=1, new_tokens=24, progress=SilentProgress()
    )
    return result, time.monotonic() - start


def _moved(fault: Fault, places: Places, clean: Places) -> float | None:
    """Return the mean KL between the answers with and without a fault; infinite where it cannot be read at all."""
    if fault.stage == Place.CPU_ENGINE:
        right, found = (_engine_logits(each.engine) for each in (clean, places))
    else:
        right, found = (
            trace_checkpoint(each.model, Checkpoint(each.checkpoint)).logits([TEXT])[0] for each in (clean, places)
        )
    if not np.isfinite(found).all():
        return None
    return float(compare_logits(right, found, np.zeros(len(TEXT), dtype=np.int64)).kl.mean())


def _engine_logits(engine: Path) -> np.ndarray:
    from pipelines.engines.openvino.runtime import OpenVinoOptions

    return scored_logits(OpenVinoEngine(OpenVinoOptions(inference_precision="f32")).open(engine), TEXT)


def main(words: list[str]) -> int:
    """Diagnose every fault and every clean deployment, print each, and return 1 if less than promised was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.wrong_stages")
    parser.add_argument("--only", default="", help="faults and clean deployments whose name has this word")
    parser.add_argument("--json", type=Path, help="file for all results")
    asked = parser.parse_args(words)
    made, judged = _deployments(), list[Judged]()
    for fault in FAULTS:
        if asked.only in fault.name:
            judged.append(plant(fault, made))
            _show(judged[-1])
    for number, recipe in enumerate(CLEAN):
        served = number % SERVED_CLEAN == 0 and recipe.tp == recipe.pp == 1
        if asked.only in f"clean {recipe}":
            judged.append(leave(recipe, made, served=served))
            _show(judged[-1])
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in judged], indent=1))
    return _summary(judged)


def _show(each: Judged) -> None:
    mark = "ok   " if each.named else "WRONG"
    moved = "" if each.moved is None else f" KL {each.moved:.2g}"
    sys.stdout.write(f"{mark} {each.seconds:5.1f} s  {each.what} [{each.recipe}]{moved}\n")
    if each.stage or not each.named:
        sys.stdout.write(f"      {each.said}\n")
    sys.stdout.flush()


def _summary(judged: list[Judged]) -> int:
    planted, clean = ([each for each in judged if bool(each.stage) is wanted] for wanted in (True, False))
    found, named = sum(each.found for each in planted), sum(each.named for each in planted)
    slow = [each.seconds for each in judged]
    sys.stdout.write(
        f"planted {len(planted)}: found {found}, named {named}; clean {len(clean)}: accused "
        f"{sum(each.found for each in clean)}; longest {max(slow, default=0):.1f} s\n"
    )
    enough = not planted or named >= 0.95 * len(planted)
    return int(not enough or any(each.found for each in clean) or max(slow, default=0) > MOST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
