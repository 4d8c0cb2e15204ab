"""The groups `eval`, the questions and how lost accuracy is judged, and `fidelity`, the texts that both models read."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelines.domain.errors import masked
from pipelines.settings.base import HOST, PORT, Group, HubName, Positive, Ranks, Revision
from pipelines.settings.model import BUNDLED, ModelSettings

URL = re.compile(rf"(https?|grpc)://{HOST}({PORT})?(/[^\s?#]*)?")
TaskName = Annotated[str, Field(pattern=r"^[\w.()-]+$")]
REAL_TEXTS = ("prose", "dialogue", "code", "languages")
SHIPPED_TEXTS = {"bundled": BUNDLED / "corpus.jsonl"} | {
    name: BUNDLED / "texts" / "fidelity" / f"{name}.jsonl" for name in REAL_TEXTS
}
"""Texts that ship with the project, by name."""

TOKENS_ALONE, TOKENS_AMONG_OTHERS = 32_768, 4_096
"""Predicted tokens where none are given: of `make fidelity`, and as a part of other commands."""


class EvalSettings(Group):
    """What the accuracy is measured on.

    Attributes:
        task: the questions: mini_mmlu and mini_answers ship with the project; others are tasks, groups or tags of
            lm-eval, with data from the Hub or a local copy. `auto` is mini_mmlu for a bundled model; for any other,
            mmlu and fidelity, or fidelity alone where mmlu cannot be had.
        num_fewshot: answered examples before each question; null is the task's own number.
        limit: questions of each subject at most; null is all.
        metric: what makes an answer right, in lm-eval's words: a metric, or "metric,filter"; it must be 0 or 1 for each
            question. null is the first one of the task.
        guided: make the model follow the JSON schema of each question (guided decoding); json_validity alone has
            schemas.
        apply_chat_template: put every prompt into the tokenizer's chat template, as instruct models expect.
        fewshot_as_multiturn: each worked example is a turn of the chat of its own; false puts them all into the user's
            one message; null is true. Without a chat template, or without examples, it is refused.
        system_instruction: stands before the task's own description, in a chat as the message of the system.
        dataset: data set of the Hub, org/name; null for a task that ships with the project.
        revision: branch, tag or commit of that data set.
        dataset_path: local copy of the data set's folder, instead of the Hub.
        baseline: what the accuracy is compared with: `build` evaluates the 16-bit engine of the same model as well,
            `hugging_face` the model as Transformers computes it in float32, before any conversion; `reference` shows
            NVIDIA's published accuracies beside it, of other questions, so that there is no verdict; `skip` nothing.
        baseline_tp_size: tensor parallel ranks of the baseline, which needs more memory; null is build.tp_size.
        margin_points: loss that is not acceptable, in percentage points of all questions; GO needs a smaller one.
        false_go: highest probability of GO although the loss is the margin or more (and of NO-GO although it is not).
        sequential: ask both models in random order, and stop as soon as the verdict is known; null does so for tasks of
            2,000 questions or more, and where max_questions is given. It needs baseline=build.
        max_questions: questions at most, where asking may stop early; null is all.
        judged_together: models that stand in one table; where asking may stop early, it goes on until the verdict holds
            among so many.
        fidelity: compare predictions with the 16-bit model's in `evaluate` too, as `all` and `compare` do.
        url: OpenAI-compatible server that runs already, http://host:8000/v1, or a Triton one, grpc://host:8001; nothing
            is built then.
        model: name of the model on that server; null is the only one that it lists, or `ensemble` on Triton.
        concurrency: requests that the server is sent at a time.
        timeout_s: longest wait for one response, seconds.
        path: file with questions of the user's own, for eval=local: .csv, .tsv, .jsonl or .parquet.
        name: of those questions in results, where "(own)" follows; null is the file's.
        question_column: column of the question; null recognizes the usual names, as for the other columns.
        choices_column: column with a list of choices; without one, columns A, B, ... or option_1, option_2, ...
        answer_column: column of the right choice.
        subject_column: column that divides the questions; not needed.
        answers: what an answer is: letter, index0 (from 0), index1 (from 1) or text; null recognizes it.
    """

    task: TaskName
    num_fewshot: Annotated[int, Field(ge=0, le=64)] | None = None
    limit: Positive | None = None
    metric: str | None = None
    guided: bool = False
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    system_instruction: Annotated[str, Field(min_length=1)] | None = None
    dataset: HubName | None = None
    revision: Revision | None = "main"
    dataset_path: Path | None = None
    baseline: Literal["build", "hugging_face", "reference", "skip"] = "build"
    baseline_tp_size: Ranks | None = None
    margin_points: Annotated[float, Field(gt=0, le=50)] = 1.0
    false_go: Annotated[float, Field(ge=0.001, le=0.2)] = 0.05
    sequential: bool | None = None
    max_questions: Positive | None = None
    judged_together: Annotated[int, Field(ge=1, le=1000)] = 1
    fidelity: bool = False
    url: str | None = None
    model: str | None = None
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    timeout_s: Annotated[float, Field(gt=0)] = 300
    path: Path | None = None
    name: Annotated[TaskName, Field(max_length=80)] | None = None  # a bound in the pattern takes 18 ms to compile
    question_column: str | None = None
    choices_column: str | None = None
    answer_column: str | None = None
    subject_column: str | None = None
    answers: Literal["letter", "index0", "index1", "text"] | None = None

    @model_validator(mode="after")
    def _has_questions_and_server(self) -> Self:
        own = ("path", "name", "question_column", "choices_column", "answer_column", "subject_column", "answers")
        set_names = [name for name in own if getattr(self, name) is not None]
        if self.task != "local" and set_names:
            raise ValueError(f"has {set_names[0]} with task={self.task}: it is for questions of your own, eval=local")
        if self.task == "local" and self.path is None:
            raise ValueError("has task=local without path: give eval.path=questions.csv")
        if self.task == "local" and self.num_fewshot:
            raise ValueError(f"has num_fewshot={self.num_fewshot} with task=local, which has no worked examples")
        if self.url is None and self.model is not None:
            raise ValueError(f"has model={self.model} without url: it is for a server that already runs")
        if self.url is not None and not URL.fullmatch(self.url):
            url = masked(re.sub("^.*@", "***@", self.url))
            raise ValueError(f"has url='{url}'; give http://host:port/v1, or grpc://host:port of a Triton server")
        return self

    @model_validator(mode="after")
    def _has_two_engines(self) -> Self:
        """Refuse what needs the 16-bit engine beside the compressed one where that is not built."""
        most = f"max_questions={self.max_questions}"
        if self.max_questions is not None and self.sequential is False:
            raise ValueError(f"has {most} with sequential=false; eval.limit asks the first questions of each subject")
        if self.url is None and self.baseline == "build":
            return self
        beside = f"baseline={self.baseline}" if self.url is None else f"url={self.url}"
        needs = {name: getattr(self, name) for name in ("sequential", "max_questions", "fidelity", "baseline_tp_size")}
        if name := next((name for name, value in needs.items() if value), None):
            setting = f"{name}={str(needs[name]).lower()}"
            raise ValueError(f"has {setting} with {beside}; it needs the 16-bit engine, made here with baseline=build")
        return self

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        """Refuse to say how worked examples are put into turns where there are none."""
        if self.fewshot_as_multiturn is not None:
            setting = f"has fewshot_as_multiturn={str(self.fewshot_as_multiturn).lower()}"
            if not self.apply_chat_template:
                raise ValueError(f"{setting} without apply_chat_template=true: there are no turns")
            if self.num_fewshot == 0:
                raise ValueError(f"{setting} with num_fewshot=0: there are no worked examples")
        return self

    @property
    def own_name(self) -> str:
        """Name of the user's own questions in results."""
        assert self.path is not None  # with eval=local
        return self.name or re.sub(r"[^\w.-]+", "_", self.path.stem)[:80] or "questions"

    @property
    def is_auto(self) -> bool:
        """Whether the questions are still to be found, or, in a plan, there are none."""
        return self.task == "auto"

    def for_model(self, model: ModelSettings) -> Self:
        """Return the settings with the questions that `auto` stands for with a bundled model; others need the Hub."""
        if not self.is_auto or not model.is_bundled:
            return self
        seen = model.folder is not None and model.folder.name == "tiny_llava"
        return self.model_copy(update={"task": "mini_pictures", "num_fewshot": 0} if seen else {"task": "mini_mmlu"})

    def as_mmlu(self) -> Self:
        """Return the settings with what `auto` stands for with any other model, as far as its data can be had."""
        data = {"dataset": self.dataset or "cais/mmlu", "revision": self.revision or "main"}
        return self.model_copy(update={"task": "mmlu", **data}).with_fidelity()

    def with_fidelity(self) -> Self:
        """Return the settings with fidelity in `evaluate`, if the 16-bit engine is there to compare with."""
        return self.model_copy(update={"fidelity": self.url is None and self.baseline == "build"})

    @property
    def multiturn(self) -> bool:
        """Whether each worked example is a turn of its own; lm-eval's default where a template is applied."""
        return self.apply_chat_template and self.fewshot_as_multiturn is not False

    @property
    def asks_triton(self) -> bool:
        """Whether the server is asked over Triton's gRPC."""
        return self.url is not None and self.url.startswith("grpc://")


class FidelitySettings(Group):
    """Texts and tokens of the comparison with the 16-bit model.

    Attributes:
        texts: texts to read. `prose`, `dialogue`, `code` and `languages` are real text that ships with the project,
            `bundled` is about the bundled models' synthetic domain, `calibration` is the text of calibration=..., left
            out beside shipped text where it ships too. null is `bundled` and `calibration` for a bundled model, and
            the five others for any other model.
        path: a text of yours to read as well: a file (.txt, .jsonl, .json, .csv, .parquet) or a folder of such files.
        column: field of a row that holds the text, in a file with rows.
        tokens: tokens to predict, shared evenly by the texts; null is 32,768, and 4,096 within `all`,
            `compare` and `evaluate`.
        window: tokens that are read together, the first of which is not predicted.
        prompts: beginnings of the texts that both continue greedily.
        new_tokens: most tokens of such a continuation.
        top_logprobs: tokens whose log probabilities a server (eval.url) is asked for at each position; vLLM gives 20
            unless told otherwise, the service here at most 20. Without a server it has no effect.
        by_layer: compare the outputs of all blocks and the weights of all linears as well.
        reference_path: folder of another Hugging Face model to compare with in 16 bit, with the same tokenizer; null
            is the model itself.
    """

    texts: tuple[Literal["bundled", "prose", "dialogue", "code", "languages", "calibration"], ...] | None = None
    path: Path | None = None
    column: str = "text"
    tokens: Positive | None = None
    window: Annotated[int, Field(ge=2, le=2**20)] = 512
    prompts: Positive = 16
    new_tokens: Positive = 64
    top_logprobs: Annotated[int, Field(ge=1, le=2**20)] = 20
    by_layer: bool = False
    reference_path: Path | None = None

    @property
    def shipped(self) -> dict[str, Path]:
        """The texts to read that ship with the project, by name."""
        return {name: SHIPPED_TEXTS[name] for name in self.texts or () if name in SHIPPED_TEXTS}

    def for_model(self, model: ModelSettings) -> Self:
        """Return the settings with the texts that null stands for."""
        chosen = ("bundled", "calibration") if model.is_bundled else (*REAL_TEXTS, "calibration")
        return self.model_copy(update={"texts": chosen}) if self.texts is None else self

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.texts == () and self.path is None:
            raise ValueError("has no text: give fidelity.texts=[prose,code], or a file with fidelity.path=...")
        if self.path is None and self.column != type(self).model_fields["column"].default:
            raise ValueError(f"column='{self.column}' has no effect without a file: add fidelity.path=...")
        return self
