"""Write the accuracy section of docs/sizing.md and its picture from the parameters and cross-validated predictions.

python -m scripts.published_fit.accuracy_docs
"""

import json
from pathlib import Path
from typing import Any

from pipelines.host.files import write_text
from pipelines.predict.performance.performance import LEAST_CONFIGURATIONS
from pipelines.predict.performance.physics import BOUNDS, Parameters
from scripts.published.cases import PUBLISHED, read_rows
from scripts.published.predict import VALIDATION
from scripts.published_fit.accuracy import (
    ENOUGH_ROWS_OF_FAMILY,
    GOALS,
    UNSEEN,
    case_scores,
    goals_of,
    validated,
    verdict,
)
from scripts.published_fit.crossvalidation import FOLDS
from scripts.published_fit.priors import PRIORS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURE = "pictures/accuracy.png"
PANELS = (
    ("TTFT, closed loop, ms", "closed_loop_concurrency", ("ttft_ms",)),
    ("ITL, closed loop, ms", "closed_loop_concurrency", ("tpot_ms", "itl_ms")),
    ("Tokens/s at full load", "inflight_maxload", ("output_tok_s", "output_tok_s_per_gpu")),
    ("Tokens/s/GPU, static batch", "static_batch", ("output_tok_s_per_gpu",)),
    ("Prefill, ms", "static_batch", ("ttft_ms", "prefill_batch_ms")),
    ("Tokens/s, MLPerf", "mlperf", ("output_tok_s",)),
)
FITTED = 1e-3
"""Deviation of a prior above which the shared value is fitted, and not only that of mixtures."""
WORST = 4
"""Of each kind that was left out, so many with the largest errors are shown."""
BEGIN = "<!-- accuracy: made by python -m scripts.published_fit.accuracy_docs -->"
END = "<!-- end of accuracy -->"
TEXT = """How far predictions of `make plan`, `make simulate` and `make size` are off for a GPU that you have not
measured.

All errors in this section are errors of **predictions for measurements that were left out** of the fit: {folds}-fold
cross-validation over {rows:,} published measurements, where all rows of one configuration (over framework versions
and models of the same shape) are in the same fold. An error is |predicted / measured - 1|; bias is the signed median.

To predict a table of your own cases:

    python -m scripts.published.predict --cases FILE.csv --out FILE.csv

Data and licences: [scripts/published/data](../scripts/published/data/README.md). This section
is written by `python -m scripts.published_fit.accuracy_docs` from what `scripts/published_fit` writes; no number is
typed by hand.

### Goals

| goal | pass | stretch | for comparison | cross-validated | reached |
|---|---|---|---|---|---|
{goals}

![Predicted against measured, each point left out of the fit]({picture})

The shaded band marks errors within 20 %; colours are frameworks.

### By source, protocol, framework and metric

- *Formula*: physics and fitted parameters alone, as used by sizing and simulation.
- *With neighbours*: corrected by the errors of similar measured cases, as written by
  `scripts.published.predict`.
- *90 % below*: the error that 90 % of the rows do not exceed.
- *Held*: share of measurements inside the 80 % interval.

| source, mode, family, metric | n | formula: median / MAPE | with neighbours | 90 % below | bias | rank corr. | held |
|---|---|---|---|---|---|---|---|
{table}

The model predicts every public row. It refuses unknown GPUs, models, frameworks, metrics and formats, FP8 without FP8
tensor cores (A100), FP4 before Blackwell, and numbers of ranks that do not divide the heads.

### Transfer

Here whole GPUs, models or framework versions were left out of both the fit and the neighbours: all of a kind, and the
{worst} with the largest mean error (MAPE). `validation.json` there has every one.{older_transfer}

| left out | n | median | MAPE | 90 % below | bias | rank corr. |
|---|---|---|---|---|---|---|
{transfer}

Shared parameters at a bound of what physics allows: {bounds}; with the offsets of a GPU, an efficiency may reach 1.
`parameters.json` has the values with 90 % intervals, and offsets by framework, GPU, format and link.

### What was held out, and what the intervals cover

- *Published rows*: each is predicted by a fit that its configuration was left out of. Protocols (limits of an
  iteration, requests per user, waits) come from public scripts of the benchmarks where there are any, otherwise from
  the errors of all rows.
- *89 stages* of vLLM under open loops and *two replayed traces* are in no fit; `python -m scripts.published.judge`
  prints their errors ([table](benchmarks.md#open-loops-that-no-fit-has-seen)).
- *Intervals*: the width is a quantile of the errors of left-out rows (split conformal prediction), by metric, by family
  where it has {enough} rows, and by whether this GPU was measured with this family in at least {least} configurations.
  Under an open loop the interval is what a slower and a faster engine would give, because a queue amplifies errors.

### Limits of the performance model

- TTFT of 64 users and more depends on the protocol (number of requests, whether the initial burst counts, client
  delay), which many sources do not state: its mean error is twice that of fewer users.
- MLPerf's results do not state how close to saturation a submitter went. The largest rate within the limit of TPOT is
  assumed; a request then waits for the rest of the running iteration and for its own. Submitters of one GPU, count,
  model and format differ by up to a factor of 3 in the 99th percentile. The layout (ranks) is assumed to be the
  smallest that fits.
- Open loops near saturation amplify errors: 15 % in the time of an iteration are 44 % in the mean TTFT of a trace.
- Open loops of vLLM that no fit has seen are in [benchmarks](benchmarks.md#open-loops-that-no-fit-has-seen).
- Some rows of Splitwise's prefill timed the queue rather than the GPU; they dominate its MAPE.
- These are averages over published numbers, and your engine is one engine. Measure it and
  [fit the model to it](benchmarking.md#fit-the-performance-model-to-a-benchmark).
"""


def main() -> None:
    """Write the section and its picture."""
    document, validation = Parameters.load().document, json.loads(VALIDATION.read_text(encoding="utf-8"))
    bound = [
        f"`{name}`"
        for name, entry in document["parameters"].items()
        if PRIORS[name].spread > FITTED and not BOUNDS[name][0] * 1.02 < entry["value"] < BOUNDS[name][1] / 1.02
    ]
    section = TEXT.format(
        folds=FOLDS,
        rows=document["data"]["rows"],
        picture=PICTURE,
        goals="\n".join(goal_lines(goal_scores(validation["transfer"]))),
        table="\n".join(table_lines()),
        transfer="\n".join(transfer_lines(validation["transfer"])),
        worst=WORST,
        bounds=", ".join(bound) or "none",
        older_transfer=" Models and versions are of an earlier fit."
        if "transfer" in validation["of_an_earlier_fit"]
        else "",
        enough=ENOUGH_ROWS_OF_FAMILY,
        least=LEAST_CONFIGURATIONS,
    )
    page = DOCS / "sizing.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    write_text(page, f"{before}{BEGIN}\n\n{section}\n{END}{rest.partition(END)[2]}")
    draw(DOCS / PICTURE)


def goal_scores(transfer: Any) -> dict[str, Any]:
    """Return the score of each goal."""
    scores = {name: corrected for name, (_, corrected) in case_scores(goals_of).items()}
    return scores | {UNSEEN: transfer["gpu"]["all"]}


def goal_lines(scores: Any) -> list[str]:
    """Format one line per goal."""
    lines = []
    for name, goal in GOALS.items():
        score = scores.get(name)
        if score is None:
            continue
        shown = f"median {score['median']:.1f} %, MAPE {score['mape']:.1f} % (n = {score['n']})"
        cells = (name, goal.words("pass"), goal.words("stretch"), goal.anchor, shown, verdict(goal, score))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table_lines() -> list[str]:
    """Format one line per source, mode, family and metric."""
    scores = case_scores(lambda case: [", ".join((case.source, case.mode, case.setup.runs_on.family, case.metric))])
    return [
        f"| {name} | {score['n']} | {plain['median']:.1f} / {plain['mape']:.1f} "
        f"| {score['median']:.1f} / {score['mape']:.1f} | {score['p90']:.1f} | {score['bias']:+.1f} "
        f"| {score['rank']:.2f} | {score['covered']:.0f} % |"
        for name, (plain, score) in sorted(scores.items())
    ]


def transfer_lines(transfer: Any) -> list[str]:
    """Format, for each kind of transfer, one line for all and one for each of the worst."""
    lines = []
    for kind, scores in transfer.items():
        others = sorted((name for name in scores if name != "all"), key=lambda name: -scores[name]["mape"])
        for name in ("all", *others[:WORST]):
            score, what = scores[name], f"each {kind}" if name == "all" else f"{kind} {name}"
            lines.append(
                f"| {what} | {score['n']} | {score['median']:.1f} | {score['mape']:.1f} | {score['p90']:.1f} "
                f"| {score['bias']:+.1f} | {score['rank']:.2f} |"
            )
    return lines


def draw(path: Path) -> None:
    """Draw predicted against measured values on logarithmic axes, by panel and framework."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["case_id"]: row for row in read_rows(PUBLISHED)}
    pairs = [(rows[name], each) for name, each in validated().items()]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 8), constrained_layout=True)
    colours: dict[str, Any] = {}
    for axis, (title, mode, metrics) in zip(axes.flat, PANELS, strict=True):
        panel = [(row, each) for row, each in pairs if row["mode"].startswith(mode) and row["metric"] in metrics]
        for family in sorted({row["framework"].split()[0] for row, _ in panel}):
            points = [
                (float(each["measured"]), float(each["predicted"]))
                for row, each in panel
                if row["framework"].split()[0] == family
            ]
            colour = colours.setdefault(family, f"C{len(colours)}")
            axis.scatter(*zip(*points, strict=True), s=9, alpha=0.6, color=colour, label=family, linewidths=0)
        ends = [
            min(float(each["measured"]) for _, each in panel) / 1.5,
            max(float(e["measured"]) for _, e in panel) * 1.5,
        ]
        axis.fill_between(ends, [end * 0.8 for end in ends], [end * 1.2 for end in ends], color="0.88", zorder=0)
        axis.plot(ends, ends, color="0.4", linewidth=0.8, zorder=1)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=f"{title} (n = {len(panel)})")
        axis.set(xlabel="measured", ylabel="predicted")
        axis.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
