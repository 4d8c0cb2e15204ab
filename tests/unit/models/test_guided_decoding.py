"""Guided decoding: whatever the model's logits are, the answer follows the guide; jsonschema and re are the judges."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.generation_request import GenerationRequest, Guide, Guides, ModelLimits
from pipelines.engines.openvino.request_inputs import read_requests
from pipelines.engines.openvino.stateful import TokenChooser
from pipelines.settings.model import BUNDLED

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["tree", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "legs", "parts"],
    "additionalProperties": False,
}
ENDS = {"tiny_gemma": 1, "tiny_llama": 1767}
SIZES = {"tiny_gemma": 1920, "tiny_llama": 1792}


@pytest.fixture(scope="module", params=list(ENDS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def guides(model: str) -> Guides:
    return Guides(BUNDLED / "models" / model, SIZES[model])


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "models/tiny_gemma/tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer_config\.json is not valid JSON: "):
        Guides(tmp_path, SIZES["tiny_gemma"])


def answer(guide: Guide, model: str, seed: int, *, end_id: int | None = None, most: int = 400) -> tuple[str, bool]:
    """The answer of a model with random logits, and whether it ended by itself."""
    end = ENDS[model] if end_id is None else end_id
    request = GenerationRequest(prompt=np.array([5]), max_tokens=most, end_id=end, guide=guide)
    chooser, random = TokenChooser(request, 0), np.random.default_rng(seed)
    tokens: list[int] = []
    tokenizer = Tokenizer.from_file(str(BUNDLED / "models" / model / "tokenizer.json"))
    while len(tokens) < most:
        logits = random.normal(size=SIZES[model]).astype(np.float32)
        logits[end] += 3
        token, log_prob = chooser.choose(logits)
        assert log_prob <= 0
        if token == end:
            return tokenizer.decode(tokens), True
        tokens.append(token)
        if chooser.complete:
            return tokenizer.decode(tokens), True
    return tokenizer.decode(tokens), False


@pytest.mark.parametrize("seed", range(8))
def test_answers_fit_the_schema(guides: Guides, model: str, seed: int) -> None:
    text, ended = answer(guides.read("json_schema", json.dumps(SCHEMA)), model, seed)
    assert ended
    jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object_is_json(guides: Guides, model: str) -> None:
    """Random strings may be long, so not every answer ends; those that do are objects."""
    found = [answer(guides.read("json", ""), model, seed) for seed in range(12)]
    whole = [json.loads(text) for text, ended in found if ended]
    assert whole
    assert all(isinstance(each, dict) for each in whole)


@pytest.mark.parametrize("seed", range(4))
def test_answers_match_the_regular_expression(guides: Guides, model: str, seed: int) -> None:
    text, ended = answer(guides.read("regex", r"(cat|dog)s? [0-9]{2,4}"), model, seed)
    assert ended
    assert re.fullmatch(r"(cat|dog)s? [0-9]{2,4}", text.strip())


@pytest.mark.parametrize("grammar", ['root ::= "yes " [0-9] | "no"', 'start: "yes " /[0-9]/ | "no"'])
def test_grammars_are_gbnf_or_lark(guides: Guides, model: str, grammar: str) -> None:
    found = {answer(guides.read("ebnf_grammar", grammar), model, seed) for seed in range(12)}
    assert all(ended and re.fullmatch(r"yes [0-9]|no", text.strip()) for text, ended in found)
    assert len(found) > 1


def test_the_end_token_of_a_request_may_be_another_one(guides: Guides, model: str) -> None:
    """Token 7 ends the answers here; where the guide allows no end it cannot come."""
    text, ended = answer(guides.read("json_schema", json.dumps(SCHEMA)), model, 3, end_id=7)
    assert ended
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("own", "least", "most"),
    [
        ({}, 0, 1),
        ({"x-guidance": {"whitespace_flexible": True}}, 2, 80),
        ({"x-guidance": {"whitespace_flexible": False}}, 0, 0),
    ],
    ids=["usual", "flexible", "none"],
)
def test_whitespace_cannot_go_on_for_ever(
    guides: Guides, model: str, own: dict[str, Any], least: int, most: int
) -> None:
    """A model that always prefers white space gets one space at most, unless the schema wants more."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "models" / model / "tokenizer.json"))
    white = [token for token in range(tokenizer.get_vocab_size()) if not tokenizer.decode([token]).strip()]
    guide = guides.read("json_schema", json.dumps(SCHEMA | own))
    request = GenerationRequest(prompt=np.array([5]), max_tokens=900, end_id=ENDS[model], guide=guide)
    chooser, tokens = TokenChooser(request, 0), []
    random = np.random.default_rng(1)
    while not chooser.complete and len(tokens) < 900:
        logits = random.normal(size=SIZES[model]).astype(np.float32)
        logits[white] += 30
        tokens.append(chooser.choose(logits)[0])
    text = tokenizer.decode(tokens)
    assert chooser.complete
    outside = re.sub(r'"[^"]*"', "", text)
    longest = max(map(len, re.findall(r"\s+", outside)), default=0)
    assert least <= longest <= most, text


def test_an_answer_that_llguidance_gives_up_is_an_error_and_not_complete(guides: Guides, model: str) -> None:
    with pytest.raises(ValueError, match=r"guided decoding: parser error: Too many items \(limit 50000"):
        answer(guides.read("ebnf_grammar", 'start: "a" start'), model, 0)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "xml",
            "<a/>",
            "guided_decoding_guide_type='xml' is unknown. It is one of json, json_schema, regex, ebnf_grammar",
        ),
        ("json_schema", "", "json_schema came without a guided_decoding_guide"),
        ("json_schema", "{", r"guided_decoding_guide='\{' is not a valid json_schema"),
        ("json_schema", '{"type": 5}', "type must be a string or array of strings"),
        ("json_schema", '{"not": {"type": "object"}}', r'Unimplemented keys: \["not"\]'),
        ("json_schema", '{"type": "object", "minProperties": 3, "maxProperties": 1}', "minProperties > maxProperties"),
        ("json_schema", '{"allOf":[' * 4000 + "{}" + "]}" * 4000, "recursion limit"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("ebnf_grammar", "root ::= missing", "missing"),
        (
            "regex",
            "[a-z&&[0-9]]",
            r"'\[a-z&&\[0-9\]\]' is not a valid regex: guided decoding: the guide allows no next token$",
        ),
        (
            "ebnf_grammar",
            "start: A\nA: /a/ & /b/",
            r"& /b/' is not a valid ebnf_grammar: .* the guide allows no next token$",
        ),
    ],
)
def test_broken_guides_are_named(guides: Guides, kind: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        guides.read(kind, text)


def read(limits: ModelLimits, **inputs: Any) -> GenerationRequest:
    words = {name: np.array([[value.encode()]], dtype=object) for name, value in inputs.items()}
    ids = {"input_ids": np.array([[1, 2]]), "request_output_len": np.array([[4]])}
    return read_requests({**ids, **words}, limits)[0]


def test_requests_bring_their_guide(guides: Guides, model: str) -> None:
    limits = ModelLimits(vocab_size=SIZES[model], guides=guides, max_beam_width=2)
    assert read(limits).guide is None
    found = read(limits, guided_decoding_guide_type="regex", guided_decoding_guide="a+")
    assert found.guide is not None
    assert found.needs_logits
    with pytest.raises(UserError, match="guided_decoding_guide_type='' is unknown"):
        read(limits, guided_decoding_guide="a+")


def test_a_model_without_guides_says_how_to_get_them() -> None:
    with pytest.raises(UserError, match=r"type='regex' was sent to a model without .*guided=llguidance"):
        read(ModelLimits(vocab_size=9), guided_decoding_guide_type="regex", guided_decoding_guide="a+")


def test_a_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"'{tmp_path}' has no tokenizer\.json.*backend=llguidance needs it"):
        Guides(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{tmp_path}/tokenizer\.json is not a tokenizer"):
        Guides(tmp_path, 10)
