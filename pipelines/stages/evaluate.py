"""Evaluate: an engine in, its accuracy on each question out."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.answer_cache import AnswerLog, AskedEngine
from eval.config import EvalSettings
from eval.perplexity import PerplexityResult
from eval.results import BASELINE, RESULT, EvalResult, write_hub
from eval.spec import EvalSpec
from eval.verdict import Criteria, too_few
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options, options_of_scores
from pipelines.engines.port import ScoringSession
from pipelines.engines.registry import LLM_API, describe, open_engine
from pipelines.host.machine import library_versions
from pipelines.serving.config import ServingSettings
from pipelines.stages.benchmark import trtllm_serve
from pipelines.store.manifest import read_manifest
from pipelines.store.store import fingerprint

if TYPE_CHECKING:
    from eval.server import OpenAiServer

SERVED_ELSEWHERE = "served"
"""Format of an evaluation of a server, whose format is not known, in results."""
REFERENCE = "hugging_face"
"""Format of an evaluation of the model itself, in results."""


def accuracy_headline(facts: Mapping[str, Any]) -> str:
    """Show the accuracy or perplexity of an evaluation; see `Stage.headline`."""
    if "word_perplexity" in facts:
        return f"perplexity {facts['word_perplexity']:.4g} per word of {count(facts['documents'], 'text')}"
    return f"{100 * facts['accuracy']:.2f} % of {count(facts['questions'], 'question')}"


def baseline_of(evaluated: Mapping[str, Path], variant: str) -> Path | None:
    """Return the result to compare with.

    It is the one in Transformers if there is one, else the 16-bit baseline's: of an evaluation of its own, of the same
    one where both were asked in turns, and for the uncompressed model its own.

    Args:
        evaluated: folders of a run's evaluations by the id of their node.
        variant: compression that the run evaluated.

    Returns:
        a file; None if the baseline was skipped.
    """
    in_turns = evaluated["evaluate"] / BASELINE
    if in_turns.is_file():
        return in_turns
    own = evaluated["evaluate"] if variant == QFormat.NONE else None
    folder = evaluated.get("reference", evaluated.get("baseline.evaluate", own))
    return None if folder is None else folder / RESULT


@dataclass(frozen=True)
class Evaluate:
    """Engine folder, tokenizer folder and questions in, `evaluation.json` out.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        warns: whether to say if the questions are too few for a verdict, because the plan did not know their number.
    """

    engine: str
    options: EngineOptions | None
    eval: EvalSettings
    model: str
    variant: str
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    warns: bool = False
    name = "evaluate"
    version = "5"
    measures = False
    writes = "accuracy"
    headline = staticmethod(accuracy_headline)

    def identity(self) -> dict[str, Any]:
        """Return task and arithmetic, and the labels, because they appear in the result."""
        return {
            "engine": self.engine,
            **options_of_scores(self.options),
            **_questions_of(self.eval),
            "model": self.model,
            "variant": self.variant,
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Load the engine and ask it every question."""
        spec = _engine_spec(self.eval, inputs, self.engine, inputs["engine"])
        with open_engine(self.engine, **all_options(self.options)).open(inputs["engine"]) as session:
            return _evaluated(self, session, spec, inputs, out_dir, progress, self.variant, self.engine)


KEY = 16
"""Hex digits of an engine's content and arithmetic in the name of the folder with its answers."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSequentially(Evaluate):
    """Two engine folders, their tokenizer and questions in, `evaluation.json` and `baseline.json` out.

    The two engines are asked in turns until the verdict on the loss is known. Answers are stored by the engine's
    content, so that a stopped run resumes, and the 16-bit engine answers each question once for all formats.
    """

    answers: Path
    version = "sequential 4"

    def identity(self) -> dict[str, Any]:
        """Return what decides when to stop as well; with what power to go on does not."""
        stop = self.eval.model_dump(include={"max_questions", "margin_points", "false_go", "judged_together"})
        return {**Evaluate.identity(self), "sequential": stop}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Ask both engines in turns."""
        from eval.harness import ask_in_turns, load_questions, write_lm_eval  # imports lm-eval

        folders = inputs["engine"], inputs["baseline"]
        questions = load_questions(_engine_spec(self.eval, inputs, self.engine, *folders), inputs["model"])
        criteria = Criteria.of(self.eval)
        most = min(questions.count, self.eval.max_questions or questions.count)
        if self.warns and (few := too_few(most, criteria, stops=True)):
            progress.note(f"warning: {few}")
        both = ask_in_turns(
            self._side(QFormat.NONE, inputs["baseline"], inputs),
            self._side(self.variant, inputs["engine"], inputs),
            inputs["model"],
            questions,
            criteria,
            progress,
            model=self.model,
            engine=self.engine,
            most=most,
            together=self.eval.judged_together,
        )
        both.baseline.save(out_dir / BASELINE)
        write_lm_eval(both.raw, both.result, out_dir)
        return {**_kept(both.result, self.eval, out_dir), "of": questions.count}

    def _side(self, variant: str, folder: Path, inputs: Mapping[str, Path]) -> AskedEngine:
        """Return one of the two, with the file of its answers: token ids in, scores or token ids out."""
        content = {
            "engine": self.engine,
            **options_of_scores(self.options),
            "libraries": library_versions(self.libraries),
            "content": read_manifest(folder)["digest"],
        }
        if "vision_engine" in inputs:
            content["vision"] = read_manifest(inputs["vision_engine"])["digest"]
        engine = open_engine(self.engine, **all_options(self.options))
        log = self.answers / fingerprint(content)[:KEY] / "answers.jsonl"
        return AskedEngine(variant, lambda: engine.open(folder), log)


@dataclass(frozen=True)
class EvaluateReference:
    """Hugging Face folder and questions in, `evaluation.json` of the model as Transformers computes it out.

    Attributes:
        max_length: tokens that the engine takes, so that both see the same prompts; None is the model's own limit.
        device: where it is computed, "cpu" or "cuda".
        warns: see `Evaluate`.
    """

    eval: EvalSettings
    model: str
    max_length: int | None
    device: str
    warns: bool = False
    name = "reference"
    version = "3"
    measures = False
    writes = "accuracy"
    headline = staticmethod(accuracy_headline)
    libraries: tuple[str, ...] = ("torch", "transformers", "lm-eval", "tokenizers")
    needs: tuple[str, ...] = ("torch", "transformers", "lm_eval")

    def identity(self) -> dict[str, Any]:
        """Return task, limit and device, and the label, because it appears in the result."""
        return {**_questions_of(self.eval), "model": self.model, "max_length": self.max_length, "device": self.device}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Load the model and ask it every question."""
        from pipelines.compress.loading import ReferenceModel

        model = ReferenceModel(inputs["model"], self.device)
        spec = _spec_of(self.eval, inputs["dataset"], self.max_length or model.max_position_embeddings)
        return _evaluated(self, model, spec, inputs, out_dir, progress, REFERENCE, "transformers")


@dataclass(frozen=True)
class EvaluateServed:
    """A server that runs already, the model's tokenizer and questions in, `evaluation.json` out.

    Never cached, because the server may change. Its answers are kept beside the runs until the result is written, so
    that a stopped run resumes.

    Attributes:
        eval: task, shots, limit, and where the server is.
        max_length: longest prompt and output that the server takes, as far as known; None is the model's own limit.
        answers: folder for answers of unfinished runs.
        max_prompt: longest prompt of a task that is made as long as the engine allows; None for other tasks.
    """

    eval: EvalSettings
    model: str
    max_length: int | None
    answers: Path
    max_prompt: int | None = None
    name = "served"
    version = "1"
    measures = True
    warns = False
    writes = "accuracy"
    headline = staticmethod(accuracy_headline)
    libraries: tuple[str, ...] = ("transformers", "lm-eval", "tokenizers")

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the packages; a Triton server is asked with its own client."""
        triton = ("tritonclient",) if self.eval.asks_triton else ()
        return ("transformers", "lm_eval", *triton)

    def identity(self) -> dict[str, Any]:
        """Return task, server and limit, and the label, because it appears in the result."""
        server = {"url": self.eval.url, "served_model": self.eval.model}
        longest = {"max_length": self.max_length, **({"max_prompt": self.max_prompt} if self.max_prompt else {})}
        return {**_questions_of(self.eval), **server, "model": self.model, **longest}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Ask the server every question that it did not answer before."""
        return self._ask(self.eval, self.identity(), inputs, out_dir, progress, (SERVED_ELSEWHERE, "server"))

    def _ask(
        self,
        settings: EvalSettings,
        identity: Mapping[str, Any],
        inputs: Mapping[str, Path],
        out_dir: Path,
        progress: Progress,
        labels: tuple[str, str],
    ) -> dict[str, Any]:
        server = server_of(settings, identity, self.answers / f"{self.model}-{self.eval.task}", progress)
        # The server computes the last token of a choice too, which an engine only predicts, and one more.
        positions = json.loads((inputs["model"] / "config.json").read_text())["max_position_embeddings"]
        longest = (self.max_length or int(positions)) - 2
        spec = _spec_of(self.eval, inputs["dataset"], longest, self.max_prompt)
        facts = _evaluated(self, server, spec, inputs, out_dir, progress, *labels)
        server.answers.remove()
        return facts


@dataclass(frozen=True, kw_only=True)
class EvaluateByTrtllmServe(EvaluateServed):
    """Repository of the LLM API, tokenizer and questions in, `evaluation.json` out; trtllm-serve runs meanwhile."""

    serving: ServingSettings
    logs: Path
    variant: str
    warns: bool = False
    name = "evaluate"
    version = "trtllm-serve 1"
    measures = False
    libraries: tuple[str, ...] = (*LLM_API.run_libraries, *EvaluateServed.libraries)

    def identity(self) -> dict[str, Any]:
        """Return task and limits, and the labels, because they appear in the result; its address is not its model."""
        fields = {name: value for name, value in super().identity().items() if name not in ("url", "served_model")}
        return {**fields, "engine": LLM_API.name, "variant": self.variant}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Start the server and ask it every question that this repository did not answer before."""
        identity = {**self.identity(), "content": read_manifest(inputs["repository"])["digest"]}
        with trtllm_serve(inputs["repository"], self.serving, self.logs, progress) as server:
            settings, labels = self.eval.model_copy(update={"url": server.url}), (self.variant, LLM_API.name)
            try:
                return self._ask(settings, identity, inputs, out_dir, progress, labels)
            except UserError:
                server.check(wait_s=1)  # of one that ended, the reason counts
                raise


def server_of(settings: EvalSettings, identity: Mapping[str, Any], place: Path, progress: Progress) -> "OpenAiServer":
    """Return the client of the server that runs already, with what it answered before in a run that was stopped.

    Args:
        settings: the server's address, and how it is asked.
        identity: of the stage; other questions have another file of answers.
        place: beginning of that file's path.
        progress: shows a note if there are answers.
    """
    from eval.server import OpenAiServer, TritonGrpc

    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    answers = AnswerLog(place.with_name(f"{place.name}-{digest}.jsonl"))
    if len(answers):
        progress.note(f"{len(answers):,} answers of a run that was stopped are taken from {answers.path}")
    client = TritonGrpc if settings.asks_triton else OpenAiServer
    server = client(
        str(settings.url), settings.model or "", answers, settings.concurrency, timeout_s=settings.timeout_s
    )
    server.choose_model()
    return server


def _evaluated(
    stage: Evaluate | EvaluateReference | EvaluateServed,
    session: ScoringSession,
    spec: EvalSpec,
    inputs: Mapping[str, Path],
    out_dir: Path,
    progress: Progress,
    qformat: str,
    engine: str,
) -> dict[str, Any]:
    from eval.harness import evaluate  # imports lm-eval

    criteria = Criteria.of(stage.eval) if stage.warns else None
    labels = {"model": stage.model, "qformat": qformat, "engine": engine}
    result = evaluate(session, inputs["model"], spec, progress, export_to=out_dir, criteria=criteria, **labels)
    return _kept(result, stage.eval, out_dir)


def _engine_spec(settings: EvalSettings, inputs: Mapping[str, Path], engine: str, *folders: Path) -> EvalSpec:
    """Return what is asked of built engines, in prompts that each of them takes."""
    limits = [json.loads((folder / "config.json").read_text())["build_config"] for folder in folders]
    longest = min(
        longest_scored(engine, each["max_seq_len"], each["max_num_tokens"], each.get("max_draft_len") or 0)
        for each in limits
    )
    spec = _spec_of(settings, inputs["dataset"], longest, min(each["max_input_len"] for each in limits))
    return spec.model_copy(update={"vision": inputs.get("vision_engine")})


def _spec_of(settings: EvalSettings, dataset: Path, max_length: int, max_prompt: int | None = None) -> EvalSpec:
    return EvalSpec(**{**dict(settings), "dataset_path": dataset}, max_length=max_length, max_prompt=max_prompt)


def _questions_of(settings: EvalSettings) -> dict[str, Any]:
    """Return the settings that decide which questions are asked and what makes an answer right."""
    roles = "question", "choices", "answer", "subject"
    own = {role: getattr(settings, f"{role}_column") for role in roles} | {"answers": settings.answers}
    metric = {} if settings.metric is None else {"metric": settings.metric}
    guided = {"guided": "compact"} if settings.guided else {}  # how the guide spaces JSON changes answers
    # with all special tokens that the folder names, as in the service; `<think>` and `[THINK]` are no part of an answer
    chat = {
        "apply_chat_template": "folder",
        "reasoning": "left out, [THINK] too",
        "fewshot_as_multiturn": settings.multiturn,
    }
    system = {} if settings.system_instruction is None else {"system_instruction": settings.system_instruction}
    return {
        **settings.model_dump(include={"task", "num_fewshot", "limit"}),
        **metric,
        **guided,
        **(chat if settings.apply_chat_template else {}),
        **system,
        **({} if settings.path is None else {"own": {"name": settings.own_name, **own}}),
    }


def _kept(result: EvalResult | PerplexityResult, settings: EvalSettings, out_dir: Path) -> dict[str, Any]:
    """Write a result, for the Hub too if all questions of a data set there were asked; return its figures."""
    if isinstance(result, PerplexityResult):
        result.save(out_dir / result.FILE)
        return {"word_perplexity": result.word_perplexity, "documents": result.documents}
    result.save(out_dir / RESULT)
    stopped = result.sequential is not None and result.questions < result.sequential.available
    if settings.dataset is not None and result.limit is None and not stopped:
        write_hub(result, settings.dataset, settings.revision, out_dir)
    return {
        "accuracy": result.overall.accuracy,
        "stderr": result.overall.stderr,
        "questions": result.overall.questions,
        "truncated": result.truncated,
    }


def longest_scored(engine: str, max_seq_len: int, max_num_tokens: int, drafts: int = 0) -> int:
    """Return the tokens that a prompt and its answer may have; some runtimes compute a prompt in one iteration."""
    longest = max_seq_len - drafts
    return longest if describe(engine).chunks_scored_prompts else min(longest, max_num_tokens)
