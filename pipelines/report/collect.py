"""Collect a report's data from the store: for every format the artifacts linked by digest, and the missing parts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eval.compare import change_row, loss_rows
from eval.fidelity.bounds import BoundsResult
from eval.fidelity.divergence import FidelityResult
from eval.perplexity import PerplexityResult, same_texts
from eval.results import BASELINE as IN_TURNS
from eval.results import RESULT, EvalResult, flips
from eval.verdict import USUAL, Criteria
from pipelines.domain.benchmark import RESULT as BENCHMARK
from pipelines.domain.benchmark import BenchmarkResult
from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.formats import QFormat
from pipelines.domain.summary import RequestColumns, Window
from pipelines.domain.variant import Variant
from pipelines.loadgen.health import from_stored
from pipelines.report.artifact_index import READ, STAGES, ArtifactIndex
from pipelines.report.data import (
    BASELINE,
    Accuracy,
    BenchmarkRun,
    FormatReport,
    ReportData,
    ReportedArtifact,
    ReportedBounds,
    ReportedFidelity,
    ReportedPerplexity,
    group_runs,
    run_key,
)
from pipelines.store.store import Store

Label = tuple[str, str]
"""Model and variant."""

_HEADS = ("benchmark", "evaluate", "repository", "build", "quantize")
"""Stages in order of preference; the newest artifact of the first one present determines a format's chain."""


def collect(
    store: Store, model: str | None = None, variants: Sequence[str] | None = None, criteria: Criteria = USUAL
) -> ReportData:
    """Collect all data of a report.

    Args:
        store: is only read; the artifacts' large files may be missing.
        model: label of one model; None is every model of the store.
        variants: formats in the order to show; None is every format of the store, the baseline first.
        criteria: which loss is acceptable, and how sure a verdict has to be.

    Raises:
        UserError: the store has no matching artifact, or a manifest or result is broken.
    """
    index = ArtifactIndex(store)
    by_label: dict[Label, list[ReportedArtifact]] = {}  # newest first; downloads, which are shared, by their digests
    for artifact in index.artifacts:
        if artifact.stage in _HEADS and (label := _label(artifact)):
            by_label.setdefault(label, []).append(artifact)
    labels = _choose(by_label, model, variants, store)
    benchmarks = [artifact for label in labels for artifact in _stage(by_label[label], "benchmark")]
    results = {artifact.place: _result(index, artifact) for artifact in benchmarks}
    evaluations = _evaluations(index, by_label, {label[0] for label in labels})
    tasks = _main_tasks(labels, by_label, evaluations)
    formats = tuple(_format(index, label, by_label[label], results, evaluations, tasks) for label in labels)
    formats = _judged(formats, evaluations, criteria)
    return ReportData(formats, group_runs(formats), _bounds(index, {label[0] for label in labels}))


def _judged(
    formats: Sequence[FormatReport], evaluations: Mapping[str, EvalResult], criteria: Criteria
) -> tuple[FormatReport, ...]:
    """Judge all formats with a baseline together, because several comparisons need a correction."""
    main = iter(_with_rows([item.accuracy for item in formats if item.accuracy], evaluations, criteria))
    others = [each for item in formats for each in item.other_tasks]
    judged = {
        each.artifact.place: each
        for task in dict.fromkeys(each.result.task for each in others)
        for each in _with_rows([each for each in others if each.result.task == task], evaluations, criteria)
    }
    return tuple(
        replace(
            item,
            accuracy=next(main) if item.accuracy else None,
            other_tasks=tuple(judged[each.artifact.place] for each in item.other_tasks),
        )
        for item in formats
    )


def _with_rows(
    accuracies: Sequence[Accuracy], evaluations: Mapping[str, EvalResult], criteria: Criteria
) -> list[Accuracy]:
    pairs = [(evaluations[each.baseline], each.result) for each in accuracies if each.baseline]
    rows = iter(loss_rows(pairs, criteria))
    return [replace(each, row=next(rows)) if each.baseline else each for each in accuracies]


def _main_tasks(
    labels: Sequence[Label], by_label: Mapping[Label, list[ReportedArtifact]], evaluations: Mapping[str, EvalResult]
) -> dict[str, str]:
    """Return the task of each model that most formats were evaluated on, of several the one asked last."""
    counts: dict[str, Counter[str]] = {}
    last: dict[tuple[str, str], str] = {}
    for model, variant in labels:
        artifacts = _stage(by_label[model, variant], "evaluate")
        for artifact in artifacts:
            task = evaluations[artifact.place].task
            last[model, task] = max(last.get((model, task), ""), artifact.created)
        counts.setdefault(model, Counter()).update({evaluations[artifact.place].task for artifact in artifacts})
    return {
        model: max(tasks, key=lambda task: (tasks[task], last[model, task])) for model, tasks in counts.items() if tasks
    }


def _stage(artifacts: Iterable[ReportedArtifact], stage: str) -> list[ReportedArtifact]:
    return [artifact for artifact in artifacts if artifact.stage == stage]


def _result(index: ArtifactIndex, artifact: ReportedArtifact) -> BenchmarkResult:
    """Read a benchmark, lightest load first; one of a server elsewhere has the server's address beside its format."""
    result = index.read(artifact, BENCHMARK, BenchmarkResult.from_json)
    levels = sorted(result.levels, key=lambda level: level.height)
    result, label = replace(result, levels=tuple(levels)), _label(artifact)
    return replace(result, precision=label[1]) if label and _elsewhere(artifact) else result


def _elsewhere(artifact: ReportedArtifact) -> str:
    """Return the address of the server that a benchmark measured, and how it was asked; empty for one of its own."""
    how = artifact.settings.get("benchmark") if artifact.stage == "benchmark" else None
    if not isinstance(how, Mapping) or not (url := how.get("url")):
        return ""
    scheme, _, rest = str(url).rpartition("://")
    return f" at {rest.partition('/')[0]} ({how.get('api') or 'completions' if scheme else 'gRPC'})"


def _label(artifact: ReportedArtifact) -> Label | None:
    """Return model and variant from the artifact's settings, else from its label without the model's name."""
    if artifact.stage == "evaluate":
        return str(artifact.settings["model"]), str(artifact.settings["variant"])
    for key in ("variant", "precision"):
        if artifact.settings.get("model") and artifact.settings.get(key):
            return str(artifact.settings["model"]), str(artifact.settings[key]) + _elsewhere(artifact)
    if artifact.model and artifact.label.startswith(f"{artifact.model}-"):
        return artifact.model, artifact.label.removeprefix(f"{artifact.model}-")
    model, _, variant = artifact.label.rpartition("-")
    return (model, variant) if model else None


def _choose(
    by_label: Mapping[Label, list[ReportedArtifact]], model: str | None, variants: Sequence[str] | None, store: Store
) -> list[Label]:
    """Return the requested formats in order, or all with the baselines first."""
    if not by_label:
        raise UserError(
            f"There is nothing to report in {store.root}: it contains no finished artifact.",
            todo="Make one first, e.g. `make evaluate quant=fp8`, or choose another store: paths.store=/some/folder",
        )
    models = sorted({label[0] for label in by_label})
    if model is not None and model not in models:
        raise UserError(
            f"There is no artifact of the model '{model}' in {store.root}.",
            allowed=f"It contains {', '.join(models)}.",
            todo=did_you_mean(model, models) or "Choose one: model=NAME or model.path=/its/folder",
        )
    chosen = [label for label in by_label if model in (None, label[0])]
    if variants is None:
        usual = [item.value for item in QFormat]
        return sorted(
            chosen, key=lambda label: (label[0], usual.index(label[1]) if label[1] in usual else len(usual), label[1])
        )
    available = sorted({label[1] for label in chosen})
    if missing := [variant for variant in dict.fromkeys(variants) if variant not in available]:
        raise UserError(
            f"There is no artifact of {model or 'any model'} in the format {', '.join(missing)} in {store.root}.",
            allowed=f"It contains {', '.join(available)}.",
            todo="Make it:",
            command=("make", "evaluate", *Variant.of(missing[0]).overrides),
        )
    order = list(dict.fromkeys(variants))
    return sorted((label for label in chosen if label[1] in order), key=lambda label: (label[0], order.index(label[1])))


def _format(
    index: ArtifactIndex,
    label: Label,
    artifacts: list[ReportedArtifact],
    results: Mapping[str, BenchmarkResult],
    evaluations: Mapping[str, EvalResult],
    main_tasks: Mapping[str, str],
) -> FormatReport:
    """Choose the artifacts that belong together, starting from the newest benchmark, else the newest evaluation, ..."""
    runs, repeated, cut = _runs(index, _stage(artifacts, "benchmark"), results)
    artifacts = [artifact for artifact in artifacts if artifact not in cut]
    head = _head(index, artifacts)
    engines = _engines(index, head)
    chain = {artifact.place: artifact for artifact in index.chain(head) if artifact.stage != "evaluate"}
    of_engine = [artifact for artifact in artifacts if artifact.is_of(engines)]
    if not _stage(chain.values(), "repository"):
        chain |= {artifact.place: artifact for artifact in _stage(of_engine, "repository")[:1]}
    by_task: dict[str, ReportedArtifact] = {}
    for artifact in _stage(of_engine, "evaluate"):
        by_task.setdefault(evaluations[artifact.place].task, artifact)
    task = main_tasks.get(label[0], "")
    main = by_task.pop(task if task in by_task else next(iter(by_task), ""), None)
    if main is not None:
        chain[main.place] = main
    accuracy = _accuracy(main, evaluations, index) if main is not None else None
    others = tuple(_accuracy(artifact, evaluations, index) for artifact in by_task.values())
    places = {*chain, *(run.artifact.place for run in runs), *repeated, *(each.artifact.place for each in others)}
    left_out = tuple(
        f"{artifact.place} ({artifact.created}): "
        f"{'a newer one' if _engines(index, artifact) & engines else 'another engine'} is shown"
        for artifact in artifacts
        if artifact.place not in places
    )
    return FormatReport(
        model=label[0],
        variant=label[1],
        chain=tuple(sorted(chain.values(), key=lambda artifact: STAGES.index(artifact.stage))),
        accuracy=accuracy,
        runs=runs,
        missing=(
            *_missing(label, artifacts, main is not None, runs),
            *(_incomplete(label, each, results[each.place], runs) for each in cut),
        ),
        left_out=left_out + tuple(f"{each.place} ({each.created}): it is incomplete" for each in cut),
        fidelity=_fidelity(index, label, engines, accuracy, evaluations),
        perplexities=_perplexities(index, label, engines),
        other_tasks=others,
    )


def _perplexities(index: ArtifactIndex, label: Label, engines: set[str]) -> tuple[ReportedPerplexity, ...]:
    """Return the newest perplexity of these engines for each task, with the newest baseline that read the same."""
    perplexities: dict[str, ReportedPerplexity] = {}
    read = {
        artifact.place: index.read(artifact, PerplexityResult.FILE, PerplexityResult.from_json)
        for artifact in index.of(READ)
        if (_label(artifact) or label)[0] == label[0]
    }
    for artifact in index.of(READ):
        if _label(artifact) != label or not artifact.is_of(engines):
            continue
        result = read[artifact.place]
        others = (each for each in read.values() if each.qformat == BASELINE and each.engine == result.engine)
        baseline = next((each for each in others if same_texts(each, result)), None)
        perplexities.setdefault(result.task, ReportedPerplexity(artifact, result, baseline))
    return tuple(perplexities.values())


def _fidelity(
    index: ArtifactIndex,
    label: Label,
    engines: set[str],
    accuracy: Accuracy | None,
    evaluations: Mapping[str, EvalResult],
) -> ReportedFidelity | None:
    """Return the newest comparison of these engines with the 16-bit model, with the answers that changed."""
    for artifact in index.of("fidelity"):
        if _label(artifact) == label and artifact.is_of(engines):
            baseline = evaluations.get(accuracy.baseline or "") if accuracy else None
            changed = flips(baseline, accuracy.result) if baseline and accuracy else None
            result = index.read(artifact, FidelityResult.FILE, FidelityResult.from_json)
            return ReportedFidelity(artifact, result, changed)
    return None


def _bounds(index: ArtifactIndex, models: set[str]) -> tuple[ReportedBounds, ...]:
    """Return the newest comparison of each server with one of these models in 16 bit."""
    bounds: dict[tuple[str, ...], ReportedBounds] = {}
    for artifact in index.of("bounds"):
        result = index.read(artifact, BoundsResult.FILE, BoundsResult.from_json)
        if result.model in models:
            bounds.setdefault((result.model, result.url, result.served_model), ReportedBounds(artifact, result))
    return tuple(bounds.values())


def _head(index: ArtifactIndex, artifacts: list[ReportedArtifact]) -> ReportedArtifact:
    ours = [p for p in _stage(artifacts, "benchmark") if _engines(index, p)]
    if ours:
        return ours[0]
    return next(heads[0] for stage in (*_HEADS[1:], "benchmark") if (heads := _stage(artifacts, stage)))


def _incomplete(
    label: Label, artifact: ReportedArtifact, result: BenchmarkResult, runs: tuple[BenchmarkRun, ...]
) -> str:
    newer = "A newer" if all(artifact.created > run.artifact.created for run in runs) else "Another"
    return f"{newer} benchmark of {' '.join(label)} is incomplete: {result.reason}."


def _missing(
    label: Label, artifacts: list[ReportedArtifact], evaluated: bool, runs: tuple[BenchmarkRun, ...]
) -> tuple[str, ...]:
    model, variant = label
    missing = []
    if not evaluated:
        other = _stage(artifacts, "evaluate")
        why = f" (there is an evaluation of another engine build: {other[0].place})" if other else ""
        missing.append(f"Accuracy of {model} {variant} was not measured on this engine{why}.")
    if not runs:
        missing.append(f"{model} {variant} was not benchmarked yet.")
    return tuple(missing)


def _runs(
    index: ArtifactIndex, artifacts: list[ReportedArtifact], results: Mapping[str, BenchmarkResult]
) -> tuple[tuple[BenchmarkRun, ...], set[str], list[ReportedArtifact]]:
    """Return each workload's newest run, with earlier runs of the same engine as repeats, and the repeats' places.

    An incomplete run replaces no complete one of the same engine, and one without a load is shown only if there is no
    other; such runs come third.
    """
    by_key: dict[str, list[ReportedArtifact]] = {}
    for artifact in artifacts:
        by_key.setdefault(run_key(results[artifact.place]), []).append(artifact)
    runs, repeated, cut = [], set[str](), []
    for same in by_key.values():
        alike = [artifact for artifact in same if _engines(index, artifact) == _engines(index, same[0])]
        newest = next((artifact for artifact in alike if results[artifact.place].complete), same[0])
        again = alike[alike.index(newest) + 1 :]
        cut += alike[: alike.index(newest)]
        repeated |= {artifact.place for artifact in again}
        result = results[newest.place]
        runs.append(
            BenchmarkRun(
                newest, result, _requests(index, newest, result), tuple(results[artifact.place] for artifact in again)
            )
        )
    if any(run.result.levels for run in runs):
        cut += [run.artifact for run in runs if not run.result.levels]
        runs = [run for run in runs if run.result.levels]
    return tuple(runs), repeated, cut


def _engines(index: ArtifactIndex, artifact: ReportedArtifact) -> set[str]:
    """Return digests of the engines that an artifact is or was made from, from this store or elsewhere."""
    chain = index.chain(artifact)
    built = {item.digest for item in chain if item.stage == "build"}
    return built | {source.digest for item in chain for source in item.inputs if source.name == "engine"}


def _requests(
    index: ArtifactIndex, artifact: ReportedArtifact, result: BenchmarkResult
) -> dict[str, tuple[RequestColumns, Window | None]]:
    requests = {}
    for name in [level.requests_file for level in result.levels if level.requests_file]:
        try:
            columns = index.read_json(artifact, name)
            requests[name] = from_stored(columns), columns.get("window_ns")
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index.root / artifact.place / name} does not contain request records: {error}."
            ) from None
    return requests


def _evaluations(
    index: ArtifactIndex, by_label: Mapping[Label, list[ReportedArtifact]], models: Iterable[str]
) -> dict[str, EvalResult]:
    """Return every evaluation of the models, by place; that of a baseline asked in turns by its file."""
    evaluations = {}
    for label, artifacts in by_label.items():
        for artifact in _stage(artifacts, "evaluate") if label[0] in models else ():
            evaluations[artifact.place] = result = index.read(artifact, RESULT, EvalResult.from_json)
            if result.sequential is not None:
                evaluations[_beside(artifact)] = index.read(artifact, IN_TURNS, EvalResult.from_json)
    return evaluations


def _beside(artifact: ReportedArtifact) -> str:
    return f"{artifact.place}/{IN_TURNS}"


def _accuracy(artifact: ReportedArtifact, evaluations: Mapping[str, EvalResult], index: ArtifactIndex) -> Accuracy:
    """Pair an evaluation with the newest baseline that answered the same prompts on the same engine.

    `original` compares it with the newest evaluation of the model itself that answered them.
    """
    result = evaluations[artifact.place]
    references = (
        index.read(each, RESULT, EvalResult.from_json) for each in index.of("reference") if each.model == result.model
    )
    reference = next((each for each in references if _same_prompts(each, result)), None)
    original = change_row(reference, result) if reference else None
    if result.qformat == BASELINE:
        return Accuracy(artifact, result, None, None, original=original)
    if result.sequential is not None:
        beside = _beside(artifact)
        return Accuracy(artifact, result, None, beside, original=original, before=evaluations[beside])
    for other in index.of("evaluate"):
        baseline = evaluations.get(other.place)
        if not baseline or baseline.qformat != BASELINE or baseline.engine != result.engine:
            continue
        if _same_prompts(baseline, result):
            return Accuracy(artifact, result, None, other.place, original=original, before=baseline)
    missing = "no 16-bit baseline answered the same questions on the same engine"
    return Accuracy(artifact, result, None, None, missing, original)


def _same_prompts(baseline: EvalResult, result: EvalResult) -> bool:
    same = ("model", "task", "num_fewshot", "limit", "prompts_sha256")
    return all(getattr(baseline, name) == getattr(result, name) for name in same)
