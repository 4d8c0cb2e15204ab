"""Guides that answers must follow: formats, structured outputs, calls of tools, and one schema made of several."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from pipelines.serving.openai import strict_json
from pipelines.serving.openai.errors import ApiError, shortened, unsupported

Json = dict[str, Any]
Guide = tuple[str, str]
"""Kind and text, as TensorRT-LLM takes them."""
ANY_OBJECT: Guide = ("json", "")
MAX_CHOICES = 1024
MAX_CALLS = 16
"""Calls in one guided answer, so that a model that does not end its list is ended."""
SPECIAL_IN_REGEX = re.compile(r"[\\.+*?()|\[\]{}^$#&~\-]")


class StrictModel(BaseModel):
    """Part of a request: what it does not know is refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(StrictModel):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class ResponseFormat(StrictModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    value: Json | None = None
    """The schema, where Hugging Face's InferenceClient puts it: beside json_object."""

    @property
    def schema_(self) -> Json | None:
        """The JSON schema of answers; None for plain text.

        Raises:
            ApiError: 400, there is a schema without its type, or the other way round.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400, "'response_format' of type json_schema needs json_schema, and nothing else.",
                param="response_format",
            )  # fmt: skip
        if self.value is not None and self.type != "json_object":
            raise unsupported("response_format.value", self.value, "It belongs to the type json_object.")
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else self.value
        return {"type": "object"} if schema is None else schema

    def guide(self) -> Guide | None:
        """Return TensorRT-LLM's guide; None for plain text."""
        schema = self.schema_
        if schema is None:
            return None
        return ANY_OBJECT if schema == {"type": "object"} else ("json_schema", json.dumps(schema))


WHOLE = "structured_outputs"


class StructuredOutputs(StrictModel):
    """`structured_outputs`, as vLLM has it: one of the first five."""

    json_: str | Json | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Json | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def guide(self, param: str = WHOLE) -> Guide:
        """Return TensorRT-LLM's guide.

        Raises:
            ApiError: 400, there is none or more than one, it is empty, or a part of it is not supported.
        """
        for name, instead in NOT_HERE.items():
            if value := getattr(self, name):
                raise unsupported(f"{param}.{name}", value, instead)
        guides = [
            *([_schema_text(self.json_, param, _part(param, "json"))] if self.json_ is not None else []),
            *([("regex", self.regex)] if self.regex is not None else []),
            *([("regex", _one_of(self.choice, param, _part(param, "choice")))] if self.choice is not None else []),
            *([("ebnf_grammar", self.grammar)] if self.grammar is not None else []),
            *([ANY_OBJECT] if self.json_object else []),
        ]
        if len(guides) != 1 or (guides[0] != ANY_OBJECT and not guides[0][1]):
            several = "takes exactly one of json, regex, choice, grammar and json_object, and not an empty one"
            message = f"'{param}' {several if param == WHOLE else 'is empty'}."
            raise ApiError(400, message, param=param)
        return guides[0]


NOT_HERE = {
    "structural_tag": "Use tools, or json.",
    "disable_any_whitespace": "Leave it out: JSON has no white space beyond one space after ',' and ':' on the CPU.",
    "whitespace_pattern": 'Put "x-guidance": {"whitespace_pattern": ...} into the schema (llguidance).',
    "disable_additional_properties": 'Put "additionalProperties": false into the schema.',
}
"""Part of `structured_outputs` -> what to do instead."""


def _part(param: str, name: str) -> str:
    """Return a guide's name: 'structured_outputs.json' or 'guided_json'."""
    return f"{param}.{name}" if param == WHOLE else param


def _schema_text(value: str | Json, param: str, name: str) -> Guide:
    schema = strict_json.parse(value, f"'{name}'", param) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise ApiError(400, f"'{name}' is no JSON schema: it must be an object.", param=param)
    return "json_schema", json.dumps(schema)


def _one_of(texts: Sequence[str], param: str, name: str) -> str:
    """Return the regular expression of a choice between texts."""
    if not texts or len(texts) > MAX_CHOICES or not all(texts):
        raise ApiError(400, f"'{name}' takes 1 to {MAX_CHOICES} texts that are not empty.", param=param)
    escaped = [SPECIAL_IN_REGEX.sub(r"\\\g<0>", text) for text in texts]
    return "|".join(f"(?:{text})" for text in escaped)


def call_schema(functions: Sequence[Json], *, several: bool = False) -> Json:
    """Return the schema of a call of one of these functions: an object of `name` and `arguments`.

    Raises:
        ApiError: 400, naming what their parameters refer to and this cannot be kept.
    """
    place = "/items" if several else ""
    if len(functions) == 1:
        call = _call(functions[0], place)
    else:
        call = {"anyOf": [_call(function, f"{place}/anyOf/{at}") for at, function in enumerate(functions)]}
    return {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": call} if several else call


def call_or_answer(functions: Sequence[Json], answer: Json) -> Json:
    """Return the schema of a call of one of the functions or an answer in a format.

    No text is both: a call has exactly `name` and `arguments`, and an answer may not have one of the two.

    Raises:
        ApiError: 400, the format itself has both.
    """
    calls = [_call(function, f"/anyOf/{at}") for at, function in enumerate(functions)]
    place, whose = f"/anyOf/{len(calls)}", "the schema of response_format"
    top = _followed(answer)
    properties = top.get("properties")
    own = properties if isinstance(properties, dict) else {}
    if not top.keys() & {"anyOf", "oneOf", "allOf", "$ref"} and top.get("additionalProperties") is False:
        left_out = None if "arguments" not in own or "name" not in own else "both"
    else:
        left_out = next((name for name in ("arguments", "name") if name not in own), "both")
    if left_out == "both":
        raise unsupported("response_format", list(own), "With tools, its schema may not have both 'name' and"
                          " 'arguments', as a call of a tool has.")  # fmt: skip
    if left_out is None:
        return {"anyOf": [*calls, embedded(answer, place, whose, "response_format")]}
    inner = embedded(answer, f"{place}/allOf/0", whose, "response_format")
    return {"anyOf": [*calls, {"allOf": [inner, {"properties": {left_out: False}}]}]}


def _call(function: Json, place: str) -> Json:
    """Return the schema of a call of one function, which will lie at a place of a larger one."""
    name = function["name"]
    whose = f"the parameters of tool '{shortened(name)}'"
    parameters = embedded(function.get("parameters") or {}, f"{place}/properties/arguments", whose, "tools")
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise unsupported("tools", {"name": name, "type": kind}, "The parameters of a tool are of type object.")
    if "$ref" not in parameters:  # llguidance allows no siblings of `$ref` in recursive schemas
        parameters["type"] = "object"
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems",
       "unevaluatedItems", "unevaluatedProperties", "contentSchema")  # fmt: skip
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
DYNAMIC = ("$dynamicRef", "$recursiveRef")


def embedded(schema: Json, place: str, whose: str, param: str) -> Json:
    """Return a copy of a schema that can lie inside another one: pointers into it lead to its place there.

    `$ref` is a pointer only where a schema stands: not in `const`, `enum` or `default`, nor as a property's name.

    Args:
        schema: whole.
        place: where it will lie, as a JSON pointer.
        whose: the schema is, for errors.
        param: of the request, for errors.

    Raises:
        ApiError: 400, naming a reference that leads out of the schema or to nothing.
    """
    root: Json = json.loads(json.dumps(schema))
    own_id = root.pop("$id", None)
    root.pop("$schema", None)
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for name in ("$anchor", "$dynamicAnchor", *(["$id"] if str(node.get("$id", "")).startswith("#") else [])):
            node.pop(name, None)
        waiting += _parts(node)
        for name in ("$id", *DYNAMIC):
            if isinstance(node.get(name), str):
                raise _refused(whose, param, name, node[name], "Refer to parts of it by '#/$defs/NAME'.")
        if "$ref" in node:
            pointer = _pointer(node["$ref"], own_id, whose, param)
            waiting.append(_target(root, pointer, whose, param))
            node["$ref"] = f"#{place}{pointer}"
    return root


def _parts(node: Json) -> Iterator[Any]:
    yield from (node[name] for name in ONE if name in node)
    for name in SEVERAL:
        if isinstance(node.get(name), list):
            yield from node[name]
    for name in NAMED:
        if isinstance(node.get(name), dict):
            yield from node[name].values()


LEFT_OUT = ("contains", "dependentRequired", "dependentSchemas", "if", "multipleOf", "not", "uniqueItems")
"""Keywords that xgrammar 0.1.32, which TensorRT-LLM 1.2.1 pins, leaves out of a schema without a word."""
BOUNDS = (
    "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "pattern",
)  # fmt: skip
"""Keywords that it leaves out where no type is stated."""
CHOICES = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
BESIDE_CHOICES = (*BOUNDS, "additionalProperties", "items", "prefixItems", "properties", "required")
"""Keywords that it leaves out beside one of `CHOICES`."""


def left_out_by_xgrammar(schema: Json) -> str | None:
    """Return a keyword of a schema that xgrammar leaves out, for a message; None if there is none."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if word := next(_left_out(node), None):
                return word
            waiting += _parts(node)
    return None


def _left_out(node: Json) -> Iterator[str]:
    choice = next((name for name in CHOICES if name in node), None)
    form = next((name for name in ("pattern", "format") if name in node), None)
    for word, value in node.items():
        if not _binds(word, value):
            continue
        if word in LEFT_OUT or (word == "allOf" and isinstance(value, list) and len(value) > 1):
            yield f"'{word}'"
        elif choice and word in BESIDE_CHOICES:
            yield f"'{word}' beside '{choice}'"
        elif word in BOUNDS and "type" not in node:
            yield f"'{word}' without 'type'"
        elif form and word in ("minLength", "maxLength"):
            yield f"'{word}' beside '{form}'"


def _binds(word: str, value: Any) -> bool:
    """Return whether a keyword with this value excludes anything."""
    if word in ("uniqueItems", "minItems", "minLength", "minProperties"):
        return bool(value)
    return value is not True and value not in ({}, [])


def _pointer(reference: object, own_id: object, whose: str, param: str) -> str:
    """Return a reference as the pointer in it, still percent-encoded."""
    text = reference if isinstance(reference, str) else "?"
    if isinstance(own_id, str):
        text = text.removeprefix(own_id.rstrip("#"))
    pointer = text.removeprefix("#")
    if pointer and (not text.startswith("#") or not pointer.startswith("/")):
        raise _refused(whose, param, "$ref", reference, "References lead to places in the same schema, '#/...', only.")
    return pointer


def _target(root: Json, pointer: str, whose: str, param: str) -> Any:
    node: Any = root
    for word in unquote(pointer).split("/")[1:]:
        key = word.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            raise _refused(whose, param, "$ref", f"#{pointer}", "It leads to nothing.")
    return node


def _refused(whose: str, param: str, name: str, value: object, instead: str) -> ApiError:
    message = f"'{name}' = {shortened(repr(value))} in {whose} is not supported here. {instead}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _followed(schema: Json) -> Json:
    """Return the schema that a reference at the top leads to, as pydantic writes recursive classes."""
    node: Any = schema
    for _ in range(8):
        pointer = node.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            break
        node = _target(schema, pointer[1:], "the schema of response_format", "response_format")
        if not isinstance(node, dict):
            return {}
    return node if isinstance(node, dict) else {}
