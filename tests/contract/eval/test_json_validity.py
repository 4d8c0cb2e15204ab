"""JSON validity: what counts as valid, that guided answers are, and that each guided question is kept by its schema."""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import openvino as ov
import pytest

from eval.adapter import load_tokenizer
from eval.answer_cache import AnswerLog, CachedSession
from eval.harness import EvalResult, EvalSpec, evaluate
from eval.tasks.load import JSON_VALIDITY_ANSWER_TOKENS, SCHEMAS, judge_json, load_json_validity
from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.port import BuildLimits, Generation, JsonGuide, SamplingParams, Session
from pipelines.settings.model import BUNDLED
from tests.support.specs import quant_spec

MODEL = BUNDLED / "models" / "tiny_gemma"
DOC = {"schema": json.dumps(SCHEMAS["integer"])}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    quantize(MODEL, root / "checkpoint", quant_spec(QFormat.NONE), (), CalibrationSettings())
    limits = BuildLimits(max_batch_size=4, max_input_len=512, max_seq_len=1024, max_num_tokens=512)
    OpenVinoEngine().build(root / "checkpoint", limits, root / "engine", SilentProgress())
    return root / "engine"


@pytest.fixture
def session(engine: Path) -> Iterator[Session]:
    with OpenVinoEngine().open(engine) as opened:
        yield opened


def ask(session: Any, **settings: Any) -> EvalResult:
    spec = EvalSpec(task="json_validity", **{"max_length": 1024, "num_fewshot": 0, "limit": 1, **settings})
    found = evaluate(session, MODEL, spec, SilentProgress(), model="m", qformat="none", engine="any")
    assert isinstance(found, EvalResult)
    return found


@pytest.mark.parametrize(
    ("text", "follows", "is_json"),
    [
        ('{"answer": "x", "letters": 3}', 1, 1),
        (' \n{"letters":40,"answer":""}\n', 1, 1),
        ('{"answer": "x", "letters": 41}', 0, 1),
        ('{"answer": "x"}', 0, 1),
        ('{"answer": "x", "letters": 3, "more": 1}', 0, 1),
        ('{"answer": "x", "letters": NaN}', 0, 0),
        ('{"answer": "x", "letters": 3} and so on', 0, 0),
        ('{"answer": "x", "letters"', 0, 0),
        ("[" * 100_000, 0, 0),
        ("", 0, 0),
    ],
)
def test_valid_is_what_a_program_can_read(text: str, follows: int, is_json: int) -> None:
    assert judge_json(DOC, [text]) == {"follows_schema": follows, "is_json": is_json}


def test_the_schemas_are_schemas_and_the_questions_stay_the_same() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    spec = EvalSpec(task="json_validity", max_length=9, num_fewshot=0)
    first, again = (
        {name: [doc["prompt"] for doc in task.test_docs()] for name, task in load_json_validity(spec)["tasks"].items()}
        for _ in range(2)
    )
    assert first == again
    assert {len(set(prompts)) for prompts in first.values()} == {25}
    assert len(first) == len(SCHEMAS) == 12


@pytest.mark.thorough
def test_what_the_engine_finishes_under_guidance_is_valid(session: Session) -> None:
    """Without guidance the bundled model writes no JSON at all; cut answers are not valid."""
    guided, free = ask(session, guided=True), ask(session, guided=False)
    tokenizer = load_tokenizer(MODEL)
    assert [record.correct for record in free.records] == [False] * 12
    assert any(record.correct for record in guided.records)
    for record in guided.records:
        written = len(tokenizer.encode(str(record.choice), add_special_tokens=False))
        assert record.correct or written > JSON_VALIDITY_ANSWER_TOKENS * 0.9, record
    assert guided.metric == "follows_schema,none"


def test_the_engine_stops_where_the_schema_is_complete(session: Session) -> None:
    schema = json.dumps({"enum": ["maple"]})
    asked = SamplingParams(100, frozenset({1}), guide=JsonGuide(schema, MODEL))
    for found in session.generate([[5, 6], [7]], asked, SilentProgress()):
        assert load_tokenizer(MODEL).decode(found.token_ids).strip() == '"maple"'
        assert found.finish_reason == "stop"
    (cut,) = session.generate([[5, 6]], SamplingParams(2, guide=JsonGuide(schema, MODEL)), SilentProgress())
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length")


def test_a_schema_that_is_none_is_refused(session: Session) -> None:
    asked = SamplingParams(4, guide=JsonGuide('{"type": "tree"}', MODEL))
    with pytest.raises(UserError, match="tree"):
        session.generate([[5]], asked, SilentProgress())


class Counting:
    """Answers with the schema, and counts."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def loglikelihood(self, pairs: Sequence[Any], progress: Progress) -> list[tuple[float, bool]]:
        raise AssertionError("nothing is scored")

    def generate(
        self, prompts: Sequence[Sequence[int]], limits: SamplingParams, progress: Progress
    ) -> list[Generation]:
        self.asked += [limits.guide.schema if limits.guide else None] * len(prompts)
        return [Generation([len(self.asked)], "stop") for _ in prompts]


def test_an_answer_is_kept_for_its_schema(tmp_path: Path) -> None:
    engine = Counting()
    for _ in range(2):
        with CachedSession(lambda: nullcontext(engine), AnswerLog(tmp_path / "kept")) as kept:  # type: ignore[arg-type]
            for guide in (None, JsonGuide("{}", MODEL), JsonGuide("[]", MODEL)):
                kept.generate([[1]], SamplingParams(4, guide=guide), SilentProgress())
    assert engine.asked == [None, "{}", "[]"]


def test_worked_examples_are_refused() -> None:
    with pytest.raises(UserError, match=r"eval\.num_fewshot=2 has no effect on eval\.task='json_validity'"):
        load_json_validity(EvalSpec(task="json_validity", max_length=9, num_fewshot=2))


def test_scoring_and_guiding_share_one_compiled_graph(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compiled = ov.Core.compile_model

    def counted(core: ov.Core, *given: Any) -> ov.CompiledModel:
        made.append("graph")
        return compiled(core, *given)

    monkeypatch.setattr(ov.Core, "compile_model", counted)
    with session as fresh:
        pass  # ends what other tests have opened
    fresh.loglikelihood([([5, 6], [7])], SilentProgress())
    asked = SamplingParams(4, guide=JsonGuide('{"enum": ["maple"]}', MODEL))
    fresh.generate([[5, 6]], asked, SilentProgress())
    assert made == ["graph"]
