"""Fidelity results as text for a terminal, and the words that the report shares with it."""

import math
from collections.abc import Iterable, Sequence

from eval.fidelity.bounds import BoundFigures, BoundsResult
from eval.fidelity.divergence import FidelityResult, Figures
from eval.results import Flips
from pipelines.document.blocks import Table, groups, left, right
from pipelines.document.show import count
from pipelines.host.screen import table, wrapped

WITHIN = "~"
"""Marks a figure that is no worse than that of the 16-bit model against itself."""
SHOWN = ("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement", "perplexity_ratio")
HEADINGS = ("mean KL", "median", "p99", "max", "top-1 %", "ppl ratio")
READING = (
    "KL: divergence of the next token's probabilities from the 16-bit model's, over the whole vocabulary, nats. top-1: "
    "both find the same token likeliest. ppl ratio: perplexity of the text over the 16-bit model's."
)
NO_DIRECTION = (
    "KL shows that predictions changed, not whether answers got worse: a large one rejects a format, and only paired "
    "questions accept it (make evaluate)."
)


def cells(figures: Figures, noise: Figures | None = None) -> tuple[str, ...]:
    """Return the figures in the order of `HEADINGS`; those within the noise are marked."""
    within = figures.within(noise) if noise is not None else frozenset[str]()
    return tuple(_shown(name, figures) + (WITHIN if name in within else "") for name in SHOWN)


def legend(rows: Iterable[Sequence[str]]) -> str:
    """Return what the mark means, as the end of a note; empty if no cell has it."""
    return f" {WITHIN}: within noise." if any(cell.endswith(WITHIN) for row in rows for cell in row) else ""


def _shown(name: str, figures: Figures) -> str:
    value = float(getattr(figures, name))
    if name == "top1_agreement":
        return f"{100 * value:.2f}"
    return f"{value:.4f}" if name == "perplexity_ratio" else f"{value:.2g}"


def figure_rows(result: FidelityResult) -> list[tuple[str, ...]]:
    """Return a row per text, for all texts if there are several, and for the noise: name, tokens, `HEADINGS`."""
    each = [(text.name, text.figures, text.noise) for text in result.texts]
    if len(result.texts) > 1:
        each.append(("all", result.overall, result.noise))
    rows = [(name, f"{figures.tokens:,}", *cells(figures, noise)) for name, figures, noise in each]
    return [*rows, ("noise", f"{result.noise.tokens:,}", *cells(result.noise))]


def fidelity_text(result: FidelityResult, flips: Flips | None) -> str:
    """Return one row per text with the noise, and sentences about greedy continuations, flips and layers."""
    rows = [("text", "tokens", *HEADINGS), *figure_rows(result)]
    lines = [f"{result.model} {result.qformat} against {result.reference} in 16 bit:", "", *table(rows), ""]
    lines += [wrapped(text, 0) for text in (*sentences(result, flips), READING, NO_DIRECTION)]
    if result.layers is not None:
        names = list(result.layers.weights)
        errors = [("layer", "output", "noise", *(name.rpartition(".")[2].removesuffix("_proj") for name in names))]
        for layer, both in enumerate(zip(result.layers.blocks, result.layers.noise, strict=True)):
            shares = (*both, *(result.layers.weights[name][layer] for name in names))
            errors.append((str(layer), *(f"{100 * share:.3g}" for share in shares)))
        note = LAYERS + (SCALED if result.layers.scaled else "")
        lines += ["", *table(errors), "", wrapped(note, 0)]
    return "\n".join(lines)


def bounds_table(result: BoundsResult) -> Table:
    """Return one row per text, with every divergence as the bound that it is."""
    texts = [(text.name, text.figures) for text in result.texts]
    if len(texts) > 1:
        texts.append(("all", result.overall))
    note = (
        f"The server gives the probabilities of {result.top_logprobs} of {result.vocabulary:,} tokens, which hold "
        f"{100 * result.overall.known_mass:.2f} % of the 16-bit model's probability (mean). >=: the KL divergence is "
        "this or more. There is no upper bound, as a token that was not returned may have any probability down to 0."
    )
    return Table(
        caption=(
            f"Bounds: predictions of {result.served_model} at {result.url} beside those of {result.model} in 16 bit, "
            f"windows of {result.window} tokens, arithmetic {result.arithmetic}"
        ),
        origin="measured",
        columns=(
            *left("text"),
            *right("tokens"),
            *groups("KL divergence at least, nats", ("mean", *HEADINGS[1:4])),
            *right(*HEADINGS[4:]),
        ),
        rows=tuple((name, f"{figures.tokens:,}", *bound_cells(figures)) for name, figures in texts),
        notes=(note, BOUND_READING, LEFT_OUT),
    )


def bound_cells(figures: BoundFigures) -> tuple[str, ...]:
    """Return the figures in the order of `HEADINGS`."""
    names = ("kl_mean_at_least", "kl_median_at_least", "kl_p99_at_least", "kl_max_at_least")
    least = [at_least(float(getattr(figures, name))) for name in names]
    return (*least, f"{100 * figures.top1_agreement:.2f}", f"{figures.perplexity_ratio:.4f}")


def at_least(value: float) -> str:
    """Show a bound from below that is not negative, with two digits, rounded down."""
    if value == 0:
        return ">= 0"
    exponent = math.floor(math.log10(value))
    return f">= {math.floor(value / 10.0 ** (exponent - 1)) * 10.0 ** (exponent - 1):.2g}"


BOUND_READING = (
    "top-1 (both find the same token likeliest) and ppl ratio (perplexity of the text over the 16-bit model's) are "
    "exact. A large bound rejects what is served; a small one shows nothing, and only paired questions accept (make "
    "evaluate)."
)
LEFT_OUT = (
    "Not measured: the noise and errors by layer, which need the model itself, and greedy continuations, which servers "
    "return as text. What the served model was calibrated on is not known here."
)


def sentences(result: FidelityResult, flips: Flips | None) -> list[str]:
    """Return what the table of figures does not hold, in sentences."""
    noise = (
        "noise: the 16-bit model against itself in iterations of another size and with another arithmetic "
        f"({result.noise_arithmetic}; the figures: {result.arithmetic}), on the first part of each text."
        f"{legend(figure_rows(result))}"
    )
    lines = [noise, greedy_text(result)]
    if seen := [text.name for text in result.texts if not text.unseen]:
        lines.append(
            f"Calibration may have observed the text {', '.join(seen)}: it is too short to leave that part out."
        )
    if flips is not None:
        text = (
            f"Flips: {count(flips.flipped, 'answer')} of {flips.questions:,} changed: {flips.to_wrong} from right to "
            f"wrong, {flips.to_right} from wrong to right, {flips.wrong_to_wrong} from wrong to wrong."
        )
        if flips.margin_flipped is not None and flips.margin_kept is not None:
            text += (
                f" The 16-bit model preferred its choice by a probability of {flips.margin_flipped:.3f} (median) there,"
                f" and by {flips.margin_kept:.3f} where the answer stayed."
            )
        lines.append(text)
    return lines


def greedy_text(result: FidelityResult) -> str:
    """Return what became of greedy continuations, in a sentence."""
    greedy = result.greedy
    text = (
        f"Greedy continuations: {greedy.equal} of {len(greedy.first_difference)} are equal over {greedy.new_tokens} "
        "tokens"
    )
    if greedy.median_first is None:
        return f"{text}."
    return f"{text}; the others first differ after {greedy.median_first:g} (median)."


LAYERS = (
    "Relative errors in percent: of each block's output, of the same for the 16-bit model against itself, and of the "
    "weights."
)
SCALED = " A factor per input channel was taken out of the weights, because the format moves such factors into them."
