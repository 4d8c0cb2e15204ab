"""Fit what only mixtures of experts have to NVIDIA's full loads of them: `python -m scripts.published_fit.mixtures`.

Reads scripts/published/data/mixtures.csv (TensorRT-LLM 1.0: Llama 4, Qwen3; 1.2: gpt-oss-20b). The parameters of dense
models stay as they are. Each model is also left out once, whose errors give the interval that the product shows. The
full loads in data/kept_apart.csv (1.2: DeepSeek R1, gpt-oss-120b, Llama 4 Maverick, Qwen3) are not read. Writes the
offsets into pipelines/predict/performance/parameters.json.
"""

import json
import sys
from pathlib import Path

import numpy as np

from pipelines.host.files import write_json
from pipelines.predict.performance.physics import FILE, Parameters
from scripts.published.bench import StackedCases
from scripts.published.cases import PUBLISHED, case_of, read_rows
from scripts.published_fit.__main__ import STEP, of_80
from scripts.published_fit.crossvalidation import refit
from scripts.published_fit.fit import Design, fit

ROWS = Path(PUBLISHED).parent / "mixtures.csv"
LINKS = ("link=experts over nvlink", "link=experts over pcie")
OWN = {
    *((name, "mixture") for name in ("t_eager", "c_expert", "tile", "e_c", "e_m", "t_layer", "kv_share")),
    *(("t_layer", "mixture version"), ("e_c", "mxfp4"), ("e_a", "heads")),
    *((name, link) for name in ("e_l", "a") for link in LINKS),
}
"""Parameters and levels, or labels, that are fitted here."""


def main() -> None:
    """Fit, leave each model out, write the offsets and what they rest on, and print the errors (median / mean)."""
    rows = read_rows(ROWS)
    cases = [case_of(row) for row in rows]
    measured, bench = np.array([float(row["value"]) for row in rows]), StackedCases(cases)
    design, before = Design.of(bench.labels), Parameters.load()
    chosen = np.array([(name, label) in OWN or (name, label.split("=")[0]) in OWN for name, label in design.columns])
    start = np.where(chosen, design.mean, design.theta(before))
    part = design.only(chosen, start)
    fitted = fit(part, bench.log_predicted, measured, start=start[chosen], steps=12, difference=STEP, tell=_tell)
    names, log = np.array([case.setup.model.name for case in cases]), np.log(measured)
    left_out = np.zeros(len(rows))
    for name in sorted(set(names)):
        kept = names != name
        left_out[~kept] = refit(part, bench, fitted, log, kept)[~kept]
        _tell(f"without {name}: {np.median(np.abs(left_out[~kept])):.3f}")
    document = json.loads(FILE.read_text(encoding="utf-8"))
    for (parameter, label), value in zip(part.columns, fitted.theta, strict=True):
        document["parameters"][parameter]["offsets"][label] = round(float(value), 4)
    document["mixtures"] = {
        "file": ROWS.name,
        "rows": len(rows),
        "models": {
            name: sorted({case.setup.gpu.name for case in cases if case.setup.model.name == name}) for name in names
        },
        "spread": round(of_80(left_out), 4),
    }
    write_json(FILE, document, sort_keys=False)
    for what, residuals in (("fitted", fitted.residuals), ("the model left out", left_out)):
        for name in sorted(set(names)):
            errors = 100 * np.abs(np.expm1(residuals[names == name]))
            _tell(f"{name}, {what}: {np.median(errors):.1f} / {np.mean(errors):.1f} %")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
