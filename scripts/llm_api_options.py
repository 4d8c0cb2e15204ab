"""Write the table of TensorRT-LLM's LLM API options of one version, read from NVIDIA's sources without running them.

    python -m scripts.llm_api_options 1.3.0rc3 COMMIT FOLDER [SOURCE]

FOLDER holds `tensorrt_llm/llmapi/llm_args.py` of that commit, with the files of the classes it imports (LoraConfig,
TelemetryConfig) beside it. Where `tests/unittest/api_stability/references/llm.yaml` (as `llm.yaml`) or
`tensorrt_llm/usage/llm_args_golden_manifest.json` of the same commit lie there too, the table gets the names that only
the former has, and must have those of the latter. A row has a type ("int|null"), and a default, choices, bounds and a
status where there are any; "group<word>.name" is an option that only this kind of a group has. SOURCE says where the
declarations were read, if not in a tree of that commit.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parent.parent / "pipelines" / "engines" / "tensorrt_llm" / "llm_api_options"
ROOT = "TorchLlmArgs"
SOURCE = "NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py and the classes it imports (facts, no code)"
PLAIN = {name: name for name in ("int", "float", "bool", "str", "null")} | {"dict": "map", "Path": "str"}
BOUNDED = {
    "PositiveInt": ("int", {"more_than": 0}),
    "NonNegativeInt": ("int", {"least": 0}),
    "NonNegativeFloat": ("float", {"least": 0}),
}
BOUNDS = {"gt": "more_than", "ge": "least", "lt": "less_than", "le": "most"}
CHECKED = {"kv_cache_config.dtype": ["auto", "float16", "bfloat16", "float32", "fp8", "nvfp4"]}
"""Choices that a validator checks, not the annotation; the manifest has them too."""
ALWAYS_VALIDATED: dict[str, dict[str, Any]] = {
    "kv_cache_config.max_attention_window": {"filled": True},
    **{
        f"speculative_config<{each}>.max_draft_len": {"type": "int", "required": True, "more_than": 0}
        for each in ("DraftTarget", "Draft_Target", "Eagle", "Eagle3", "NGram", "SA")
    },
}
"""What validators of every version check."""
VALIDATED: dict[str, dict[str, Any]] = {
    **{key: {"type": "group"} for key in ("attention_dp_config", "sparse_attention_config", "speculative_config")},
    "batch_wait_timeout_ms": {"least": 0},
    "batch_wait_timeout_iters": {"least": 0},
    "batch_wait_max_tokens_ratio": {"least": 0, "most": 1},
    "cuda_graph_config.max_batch_size": {"least": 0},
    "kv_cache_config.free_gpu_memory_fraction": {"least": 0, "most": 1},
    "kv_cache_config.max_attention_window": {"more_than": 0},
    "kv_cache_config.max_gpu_total_bytes": {"least": 0},
    "kv_cache_config.max_util_for_resume": {"least": 0, "most": 1},
    "nvfp4_gemm_config.allowed_backends": {"choices": ["cutlass", "cublaslt", "cutedsl", "cuda_core"]},
    "ray_placement_config.per_worker_gpu_share": {"more_than": 0, "most": 1},
    "speculative_config.acceptance_length_threshold": {"least": 0},
    "speculative_config.acceptance_window": {"least": 0},
    "speculative_config<MTP>.num_nextn_predict_layers": {"more_than": 0},
    "speculative_config<NGram>.max_matching_ngram_size": {"required": True, "more_than": 0},
    "stream_interval": {"more_than": 0},
    "torch_compile_config.capture_num_tokens": {"more_than": 0},
    "torch_compile_config.max_num_streams": {"more_than": 0},
}
"""What validators check; bounds of these two versions are in no declaration."""
BEFORE_BOUNDS = ("1.2.1", "1.3.0rc3")
SINCE_BOUNDS = {"speculative_config<MTP>.max_draft_len": {"more_than": 0}}
"""What validators of later versions check, although the declaration says otherwise."""
ADDED = {"1.4": {"kv_cache_config.dtype": ["fp8_ds_mla"]}}
NOT_PYTORCH = ("Medusa", "Lookahead")
"""Decoding types of TensorRT engines, which the PyTorch backend refuses."""
TYPES = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
}
"""Groups whose options depend on one of them, in sources where a function, not the annotation, chooses the class."""


class Sources:
    """Classes and aliases of a folder of Python files."""

    def __init__(self, folder: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        self.dispatch: dict[str, str] = {}
        for path in sorted(folder.glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                    self.dispatch |= _dispatch(node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.aliases[node.targets[0].id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    self.aliases[node.target.id] = node.value

    def members(self, name: str) -> list[str] | None:
        """Return the values of an enumeration, or the names of one whose values are numbers; None for other names."""
        if name not in self.classes or not any("Enum" in ast.unparse(base) for base in self.classes[name].bases):
            return None
        pairs = [
            (each.targets[0].id, each.value.value)
            for each in self.classes[name].body
            if isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Name)
            and isinstance(each.value, ast.Constant)
        ]
        return [value if isinstance(value, str) else label.lower() for label, value in pairs]

    def derives(self, name: str, base: str) -> bool:
        """Return whether a class is another one, or derived from it."""
        bases = [ast.unparse(each) for each in self.classes[name].bases] if name in self.classes else []
        return name == base or any(self.derives(each, base) for each in bases)

    def fields(self, name: str) -> dict[str, tuple[ast.expr, ast.expr | None]]:
        """Return the annotation and the default of every field of a class, its bases' first."""
        fields: dict[str, tuple[ast.expr, ast.expr | None]] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                fields |= self.fields(base.id)
        for each in self.classes[name].body:
            if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                continue
            if not each.target.id.startswith("_") and "ClassVar" not in ast.unparse(each.annotation):
                fields[each.target.id] = each.annotation, each.value
        return fields


def _dispatch(node: ast.ClassDef) -> dict[str, str]:
    """Return word -> class of a `config_classes` mapping in a method."""
    return {
        ast.literal_eval(key): value.id
        for each in ast.walk(node)
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "config_classes"
        for key, value in zip(each.value.keys, each.value.values, strict=True)  # type: ignore[attr-defined]
        if key is not None
    }


class Kind:
    """What an annotation allows: kinds of values, choices, bounds, and classes with options of their own."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.choices: list[Any] = []
        self.bounds: dict[str, float] = {}
        self.groups: list[str] = []

    @property
    def text(self) -> str:
        """The kinds as the table writes them."""
        return "|".join(dict.fromkeys(self.kinds))


def kind_of(sources: Sources, node: ast.expr) -> Kind:
    """Read an annotation."""
    kind = Kind()
    _read(sources, node, kind)
    return kind


def _read(sources: Sources, node: ast.expr, kind: Kind) -> None:
    if isinstance(node, ast.Subscript):
        _read_parts(sources, node, kind)
        return
    if isinstance(node, ast.BinOp):
        _read(sources, node.left, kind)
        _read(sources, node.right, kind)
        return
    name = "null" if isinstance(node, ast.Constant) and node.value is None else ast.unparse(node)
    if name in BOUNDED:
        kind.kinds.append(BOUNDED[name][0])
        kind.bounds |= BOUNDED[name][1]
    elif members := sources.members(name):
        kind.kinds.append("str")
        kind.choices += members
    elif name in sources.classes:
        kind.kinds.append("group")
        kind.groups.append(name)
    elif name in sources.aliases:
        _read(sources, sources.aliases[name], kind)
    else:
        kind.kinds.append(PLAIN.get(name, "any"))


def _read_parts(sources: Sources, node: ast.Subscript, kind: Kind) -> None:
    name, inner = ast.unparse(node.value), node.slice
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if name in ("Optional", "Union", "Annotated"):
        for part in parts if name == "Union" else parts[:1]:
            _read(sources, part, kind)
        kind.kinds += ["null"] if name == "Optional" else []
    elif name == "Literal":
        values = [ast.literal_eval(part) for part in parts]
        kind.choices += values
        kind.kinds += [type(value).__name__ for value in values]
    elif name.lower() in ("list", "set", "tuple"):
        inside = kind_of(sources, parts[0])
        kind.kinds.append(f"list[{inside.text}]")
        kind.choices += inside.choices
        kind.bounds |= inside.bounds
    else:
        kind.kinds.append("map")


def rows(sources: Sources, name: str, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the row of every option of a class, with those of the groups in it."""
    for field, (annotation, default) in sources.fields(name).items():
        kind, path = kind_of(sources, annotation), f"{prefix}{field}"
        row: dict[str, Any] = {"type": kind.text}
        settings = _settings(default)
        value = _value(sources, default, settings)
        if value is ...:
            row["required"] = True
        elif value is not None:
            row["default"] = value
        if choices := settings.get("choices") or CHECKED.get(path) or kind.choices:
            row["choices"] = list(dict.fromkeys(choices))
        row |= kind.bounds | {ours: settings[theirs] for theirs, ours in BOUNDS.items() if theirs in settings}
        if "status" in settings:
            row["status"] = settings["status"]
        yield path, row
        if "aliases" in settings:
            for other in settings["aliases"]:
                yield f"{prefix}{other}", {"type": kind.text}
        yield from _inside(sources, field, path, kind, row)


def _inside(sources: Sources, field: str, path: str, kind: Kind, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a group; of one with several classes, by the word that chooses it."""
    word = TYPES.get(field)
    if word is None or len(kind.groups) == 1:
        inside: dict[str, Any] = {}
        for name, own in (pair for group in kind.groups for pair in rows(sources, group, f"{path}.")):
            known = inside.setdefault(name, own)
            if "choices" in own:  # a mode that names the class has another value in each
                known["choices"] = list(dict.fromkeys([*known["choices"], *own["choices"]]))
        yield from inside.items()
        return
    row["by"] = word
    kinds: dict[str, dict[str, Any]] = {}
    for group in kind.groups:
        words = {each: named for each, named in sources.dispatch.items() if sources.derives(named, group)}
        named = sources.fields(group).get(word)
        words = words or (dict.fromkeys(kind_of(sources, named[0]).choices, group) if named else {})
        kinds |= {each: dict(rows(sources, own)) for each, own in words.items() if each not in NOT_PYTORCH}
    row["choices"] = list(kinds)
    first = next(iter(kinds.values()))
    shared = {name: own for name, own in first.items() if all(each.get(name) == own for each in kinds.values())}
    yield from ((f"{path}.{name}", own) for name, own in shared.items())
    for each, options in kinds.items():
        yield from ((f"{path}<{each}>.{name}", own) for name, own in options.items() if name not in {word, *shared})


def _settings(default: ast.expr | None) -> dict[str, Any]:
    """Return the keywords of a `Field(...)` that can be read."""
    if not isinstance(default, ast.Call):
        return {}
    settings: dict[str, Any] = {"factory": False}
    for each in default.keywords:
        if each.arg == "validation_alias" and isinstance(each.value, ast.Call):
            settings["aliases"] = [ast.literal_eval(part) for part in each.value.args[1:]]
        elif each.arg == "default_factory":
            settings["factory"] = True
        elif each.arg not in (None, "default"):
            try:
                settings[each.arg] = ast.literal_eval(each.value)
            except ValueError:
                continue
    return settings


def _value(sources: Sources, default: ast.expr | None, settings: dict[str, Any]) -> Any:
    """Return a default; `...` where the option must be given, None where there is none or it is made by a function."""
    if default is None:
        return ...
    if isinstance(default, ast.Call):
        if settings.get("factory"):
            return None
        defaults = [each.value for each in default.keywords if each.arg == "default"] or default.args[:1]
        if not defaults:
            return ...
        default = defaults[0]
    if isinstance(default, ast.Attribute) and sources.members(ast.unparse(default.value)):
        owner = sources.classes[ast.unparse(default.value)]
        named = next(e for e in owner.body if isinstance(e, ast.Assign) and ast.unparse(e.targets[0]) == default.attr)
        value = ast.literal_eval(named.value)
        return value if isinstance(value, str) else default.attr.lower()
    try:
        return eval(compile(ast.Expression(default), "default", "eval"), {"__builtins__": {}})  # constants only
    except (NameError, TypeError):
        return None


def of_the_contract(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the parameters of `LLM(...)` by NVIDIA's reference: the program takes some that the class lacks."""
    path = folder / "llm.yaml"
    named = yaml.safe_load(path.read_text())["methods"]["__init__"]["parameters"] if path.is_file() else {}
    return {name: {"type": "any", "status": each["status"]} for name, each in named.items()}


def missing(folder: Path, options: dict[str, Any]) -> list[str]:
    """List names in NVIDIA's manifest that the table lacks."""
    plain = {path.partition("<")[0] + path.partition(">")[2] for path in options}
    words = {f"{path}.{row['by']}" for path, row in options.items() if "by" in row}
    path = folder / "llm_args_golden_manifest.json"
    named = json.loads(path.read_text())[ROOT] if path.is_file() else []
    return [each["path"] for each in named if each["path"] not in plain | words]


def _validate(options: dict[str, dict[str, Any]], version: str) -> None:
    of_this = VALIDATED if version in BEFORE_BOUNDS else SINCE_BOUNDS
    for path, more in (*ALWAYS_VALIDATED.items(), *of_this.items()):
        shared, word = re.sub("<.*>", "", path), re.search("<(.*)>", path)
        row = options.get(path, options.get(shared))
        if row is not None and (word is None or word[1] in options[path.partition("<")[0]]["choices"]):
            options[path] = row | more


def main(version: str, commit: str, folder: str, source: str = SOURCE) -> int:
    """Write the table of one version."""
    own = dict(rows(Sources(Path(folder)), ROOT))
    options = own | {name: row for name, row in of_the_contract(Path(folder)).items() if name not in own}
    _validate(options, version)
    for path, choices in ADDED.get(version, {}).items():
        options[path]["choices"] = [*options[path]["choices"], *choices]
    lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(row)}" for path, row in options.items())
    head = f' "version": {json.dumps(version)},\n "commit": {json.dumps(commit)},\n "source": {json.dumps(source)},\n'
    OUT.mkdir(exist_ok=True)
    (OUT / f"{version}.json").write_text(f'{{\n{head} "options": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    lacking = missing(Path(folder), options)
    print(f"{len(options)} options of {version}; in NVIDIA's manifest, but not here: {lacking or 'none'}")  # noqa: T201
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
