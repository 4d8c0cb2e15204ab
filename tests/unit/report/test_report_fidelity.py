"""The section on fidelity: of the engine that is shown, with the noise, flips and errors by layer."""

from dataclasses import asdict

import pytest

from eval.fidelity.bounds import BoundFigures, BoundsResult, TextBounds
from eval.fidelity.divergence import FidelityResult, Figures, GreedyFidelity, LayerErrors, TextFidelity
from pipelines.document.blocks import Figure, Fold, Table
from pipelines.report.collect import collect
from pipelines.report.sections import document
from pipelines.store.store import Store
from tests.support.report_store import add_format, commit

NOISE = Figures(1_000, 1e-5, 1e-8, 2e-4, 0.01, 0.996, 4.0, 4.0001)
FOUND = Figures(4_000, 0.0025, 5e-9, 0.03, 1.5, 0.97, 4.0, 4.2)
LAYERS = LayerErrors((0.01, 0.04), (0.001, 0.002), {"mlp.up_proj": (0.05, 0.0)}, scaled=True)


def compared(store, variant, engine, *, layers=None, minute=20):
    """Add a comparison of an engine with the 16-bit one."""
    result = FidelityResult(
        "synthetic", variant, "openvino", "synthetic", "f32", "f32 rounded to bfloat16", 512, 1920, FOUND, NOISE,
        (TextFidelity("bundled", True, FOUND, NOISE),), GreedyFidelity(64, (None, 12)), layers,
    )  # fmt: skip
    inputs = {"engine": engine, "reference": "ef" * 32, "model": "cd" * 32}
    settings = {"model": "synthetic", "variant": variant}
    facts = {"kl_mean": FOUND.kl_mean, "top1_agreement": FOUND.top1_agreement, "tokens": 4_000}
    commit(
        store, "fidelity", f"synthetic-{variant}", facts, inputs, settings, {"fidelity.json": asdict(result)}, minute
    )


def engine_of(store, repository):
    return repository.manifest["made_from"]["inputs"]["engine"]


def section(store):
    return next((each for each in document(collect(store)).sections if each.id == "fidelity"), None)


def test_the_newest_comparison_of_the_engine_is_shown_with_its_noise(tmp_path):
    store = Store(tmp_path)
    add_format(store, "none")
    repository = add_format(store, "int8_sq", minute=5)
    compared(store, "int8_sq", engine_of(store, repository))
    compared(store, "int8_sq", "99" * 32, minute=30)  # newer, and of another engine
    table, _, figure, greedy, flips = section(store).blocks
    assert isinstance(table, Table)
    assert table.rows == (
        ("int8_sq", "bundled", "4,000", "0.0025", "5e-09~", "0.03", "1.5", "97.00", "1.0500"),
        ("int8_sq", "noise", "1,000", "1e-05", "1e-08", "0.0002", "0.01", "99.60", "1.0000"),
    )
    assert table.notes[1].endswith("on the first part of each text. ~: within noise.")
    assert isinstance(figure, Figure)
    assert figure.alt == "Mean KL divergence in nats. int8_sq 0.0025, noise 1e-05."
    assert "1 of 2 are equal over 64 tokens; the others first differ after 12" in greedy.items[0]
    # int8_sq answers the last of 200 questions wrongly; every margin is that of log probabilities -0.1 and -2.0
    assert isinstance(flips, Table)
    assert flips.rows == (("int8_sq", "200", "1", "1", "0", "0", "0.740", "0.740"),)


def test_its_command_is_one_of_those_that_repeat_the_report(tmp_path):
    store = Store(tmp_path)
    compared(store, "fp8", engine_of(store, add_format(store, "fp8")))
    data = collect(store)
    assert data.newest == "2026-01-02T03:20:00+00:00"
    code = next(each for each in document(data).sections if each.id == "repeat").blocks[1]
    assert "python -m pipelines fidelity quant=fp8" in code.lines


def bounded(store, url, minute):
    """Add a comparison of a server with the 16-bit model."""
    figures = BoundFigures(1_000, 0.00123, 0.0, 0.0456, 1.5, 0.97, 0.98, 4.0, 4.2)
    result = BoundsResult(
        "synthetic", url, "served", "f32", 512, 1920, 20, 1e-5, figures, (TextBounds("bundled", figures),)
    )
    commit(store, "bounds", "synthetic-served", {}, {"engine": "12" * 32, "model": "cd" * 32},
           {"model": "synthetic"}, {"bounds.json": asdict(result)}, minute)  # fmt: skip


def test_bounds_of_a_server_stand_below_labelled_as_bounds(tmp_path):
    """The newest of each server; an older one of the same is not shown."""
    store = Store(tmp_path)
    add_format(store, "none")
    for url, minute in (("http://one:8000/v1", 20), ("http://one:8000/v1", 30), ("http://two:8000/v1", 25)):
        bounded(store, url, minute)
    first, second = section(store).blocks
    assert first.caption.startswith("Bounds: predictions of served at http://one:8000/v1 beside those of synthetic")
    assert "http://two:8000/v1" in second.caption
    assert first.rows == (("bundled", "1,000", ">= 0.0012", ">= 0", ">= 0.045", ">= 1.5", "98.00", "1.0500"),)
    assert first.columns[2].group == "KL divergence at least, nats"
    assert "There is no upper bound" in first.notes[0]
    assert collect(store).newest == "2026-01-02T03:30:00+00:00"


@pytest.mark.pictures
def test_errors_by_layer_are_a_heat_map(tmp_path):
    store = Store(tmp_path)
    compared(store, "fp8", engine_of(store, add_format(store, "fp8")), layers=LAYERS)
    fold = section(store).blocks[-1]
    assert isinstance(fold, Fold)
    (heat,) = fold.blocks
    assert heat.alt == "Heat map of errors by layer. The largest output error is 4 % in layer 1."
    assert ">5<" in heat.svg.replace(" ", "").replace("\n", "")  # 5 % of the weight in layer 0, as text
    assert "A factor per input channel was taken out" in heat.caption


def test_without_a_comparison_there_is_no_section(two_formats):
    assert section(two_formats) is None
