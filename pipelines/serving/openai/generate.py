"""Triton's generate endpoints: the fields of requests, checked before Triton sees them, and the responses.

Triton's own parser accepts any shape and nesting, some of which crash 2.51. This service forwards one text and a few
scalars or short flat lists, of the types in the model's configuration.
"""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from pipelines.serving.openai.answers import event
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.errors import SHOWN_VALUE, ApiError, shortened
from pipelines.serving.openai.inputs import InputTensor

Json = dict[str, Any]
MODELS = ("ensemble", "tensorrt_llm_bls")
PROMPT = "text_input"
PARAMETERS = "parameters"
ID, LONGEST_ID = "id", 128
MAX_VALUES = 1024
MAX_FIELDS_LENGTH = 65_536  # characters of all fields but the prompt
AT_MOST = {"beam_width": 128, "num_return_sequences": 128}
"""Fields that multiply the work and the answer."""
LOGITS = ("return_context_logits", "return_generation_logits")
"""Fields that add the vocabulary's size in numbers to the answer, for every token."""
RANGES = {"INT32": (-(2**31), 2**31 - 1), "INT64": (-(2**63), 2**63 - 1), "UINT64": (0, 2**64 - 1)}


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a model that a request can set.

    Attributes:
        datatype: BYTES, BOOL, FP32, INT32, INT64 or UINT64.
        length: of its list; -1 is any.
    """

    datatype: str
    length: int


@dataclass(frozen=True, slots=True)
class Fields:
    """The model inputs of a request to a generate endpoint.

    Attributes:
        id: the client's, by which `stop` can end the request; empty without one.
    """

    inputs: list[InputTensor]
    id: str = ""


def read_fields(repository: Path) -> dict[str, dict[str, Field]]:
    """Read the inputs of the client-facing models: model -> name of the input -> its type.

    Inputs with several dimensions (images, prompt tables, adapters' weights) are left out.
    """
    fields = {}
    for name in MODELS:
        file = repository / name / "config.pbtxt"
        if file.is_file():
            config = text_format.Parse(file.read_text(), ModelConfig(), allow_unknown_field=True)
            fields[name] = {entry.name: field for entry in config.input if (field := _field(entry)) is not None}
    return fields


def _field(entry: Any) -> Field | None:
    datatype = DataType.Name(entry.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
    supported = datatype in RANGES or datatype in ("BYTES", "BOOL", "FP32")
    return Field(datatype, entry.dims[0]) if supported and len(entry.dims) == 1 else None


def with_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Put the entries of `parameters`, where Triton's generate endpoints take fields as well, beside the others.

    A null field counts as unset.

    Raises:
        ApiError: 400, it is no object, or a field is given twice.
    """
    more = body.get(PARAMETERS)
    if not isinstance(more, dict | None):
        raise ApiError(400, f"'{PARAMETERS}' = {SHOWN_VALUE.repr(more)} is not an object.", param=PARAMETERS)
    for name in more.keys() & body.keys() if more else ():
        raise ApiError(400, f"'{shortened(name)}' is given twice, once in '{PARAMETERS}'.", param=shortened(name))
    fields = {name: value for name, value in body.items() if name != PARAMETERS} | (more or {})
    return {name: value for name, value in fields.items() if value is not None}


def request_id(body: Mapping[str, Any]) -> str:
    """Return the client's id of a request, by which `stop` can end it; empty without one.

    Raises:
        ApiError: 400, it is no text, or too long.
    """
    own = body.get(ID)
    if own is not None and not (isinstance(own, str) and len(own) <= LONGEST_ID):
        raise ApiError(
            400, f"'{ID}' = {SHOWN_VALUE.repr(own)} is not a text of up to {LONGEST_ID} characters.", param=ID
        )
    return own or ""


def to_tensors(fields: Mapping[str, Field], values: Mapping[str, Any]) -> list[InputTensor]:
    """Convert the fields of a request to tensors.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    made = [_tensor(name, value, fields) for name, value in values.items()]
    if sum(len(str(value)) for tensor in made if tensor.name != PROMPT for value in tensor.values) > MAX_FIELDS_LENGTH:
        raise ApiError(400, f"The fields beside '{PROMPT}' have more than {MAX_FIELDS_LENGTH:,} characters.")
    return made


def _tensor(name: str, value: object, fields: Mapping[str, Field]) -> InputTensor:
    field = fields.get(name)
    if field is None or name in LOGITS:
        raise ApiError(400, f"'{shortened(name)}' is not a field that can be set here.", param=shortened(name))
    values = value if isinstance(value, list) else [value]
    if field.length not in (-1, len(values)) or not 1 <= len(values) <= MAX_VALUES:
        allowed = f"1 to {MAX_VALUES} values" if field.length == -1 else f"{field.length} value"
        raise ApiError(400, f"'{name}' has {len(values)} values; it takes {allowed}.", param=name)
    return InputTensor(name, field.datatype, tuple(_value(name, field.datatype, entry) for entry in values))


def _value(name: str, datatype: str, value: Any) -> int | float | bool | str:
    if not _fits(datatype, value):
        kinds = {"BYTES": "text", "BOOL": "true or false", "FP32": "a number"}
        expected = kinds.get(datatype, f"an integer of type {datatype}")
        raise ApiError(400, f"'{name}' = {SHOWN_VALUE.repr(value)} is not {expected}.", param=name)
    if name in AT_MOST and value > AT_MOST[name]:
        raise ApiError(400, f"'{name}' = {value} is more than {AT_MOST[name]}.", param=name)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"'{name}' contains half of a surrogate pair: text must be valid Unicode.",
                           param=name) from None  # fmt: skip
    return value  # type: ignore[no-any-return]


def _fits(datatype: str, value: object) -> bool:
    if datatype == "BYTES":
        return isinstance(value, str)
    if datatype == "BOOL":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if datatype == "FP32":
        return abs(value) < 2**127  # NaN is not, and an integer may be larger than any float
    low, high = RANGES[datatype]
    return isinstance(value, int) and low <= value <= high


async def answers(backend: Backend, name: str, fields: Fields) -> AsyncIterator[Json]:
    """Yield the responses of a model in the form of Triton's generate endpoints."""
    own = {"id": fields.id} if fields.id else {}
    async with aclosing(backend.stream(name, fields.inputs, request_id=fields.id)) as results:  # type: ignore[type-var]
        async for result in results:
            yield own | _answer(result)


async def generate_events(responses: AsyncIterator[Json]) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed response; an error after the first one ends it and is then raised."""
    begun = False
    async with aclosing(responses):  # type: ignore[type-var]
        try:
            async for response in responses:
                yield event(response)
                begun = True
        except ApiError as error:
            if begun:
                yield event({"error": error.message})
            raise


async def only_answer(responses: AsyncIterator[Json]) -> Json:
    """Return the one response of a request that does not stream.

    Raises:
        ApiError: 400, there are several, or none.
    """
    collected: list[Json] = []
    async with aclosing(responses):  # type: ignore[type-var]
        async for response in responses:
            collected.append(response)
            if len(collected) == 2:
                break
    if len(collected) != 1:
        counted = "several responses" if collected else "no response"
        several = "stream=true or num_return_sequences above 1"
        raise ApiError(400, f"The model gave {counted}; use generate_stream for a request with {several}.")
    return collected[0]


def _answer(result: Any) -> Json:
    response = result.get_response()
    made: Json = {"model_name": response.model_name, "model_version": response.model_version}
    for output in response.outputs:
        array = result.as_numpy(output.name)
        values = [] if array is None else [_plain(value) for value in array.reshape(-1).tolist()]
        made[output.name] = values[0] if len(values) == 1 else values
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
