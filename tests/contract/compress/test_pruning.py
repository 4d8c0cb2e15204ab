"""A pruned model is an ordinary smaller one: Transformers computes with it the original without what was removed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

from pipelines.compress.config import CalibrationSettings  # noqa: E402
from pipelines.compress.pruning import prune_model  # noqa: E402
from pipelines.compress.texts import load_texts  # noqa: E402
from pipelines.domain.errors import UserError  # noqa: E402
from pipelines.domain.model_shape import ModelShape  # noqa: E402
from pipelines.domain.progress import PARTIAL  # noqa: E402
from pipelines.host.files import MANIFEST  # noqa: E402
from pipelines.settings.model import BUNDLED  # noqa: E402
from tests.support import small_models  # noqa: E402
from tests.support.specs import pruned_to  # noqa: E402
from tests.support.stops import Stops  # noqa: E402

CALIBRATION = CalibrationSettings(size=6, seq_len=64, batch_size=2)
TEXTS = [text for _, text in zip(range(12), load_texts(BUNDLED / "corpus.jsonl"), strict=False)]
WIDTH = {
    "llama": pruned_to("width", mlp=512, heads=2),
    "gemma": pruned_to("width", mlp=384, heads=3),
    "granite": pruned_to("width", mlp=256, heads=2),
    "mistral": pruned_to("width", mlp=256, heads=2, kv_heads=1),
    "qwen2": pruned_to("width", mlp=512, heads=2, kv_heads=1),
    "qwen": pruned_to("width", mlp=300, heads=1, kv_heads=1),
}
KEPT = {"llama": 3, "gemma": 2, "granite": 1, "mistral": 1, "qwen2": 3, "qwen": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family that is pruned."""
    root = tmp_path_factory.mktemp("models")
    return {kind: small_models.model_of(root / kind, kind) for kind in WIDTH}


def loaded(folder: Path) -> Any:
    """Load a folder as its users do; nothing may be missing, left over or of another shape."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: Any) -> Any:
    ids = torch.arange(40)[None] * 7 % 1500
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def without(model: Any, importance: list[Any], heads: list[list[int]]) -> None:
    """Zero what reads the removed channels and heads of each layer."""
    for layer, channels, kept in zip(model.model.layers, importance, heads, strict=True):
        down, out = layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight
        with torch.no_grad():
            down *= channels
            out *= torch.tensor([n in kept for n in range(4)]).repeat_interleave(out.shape[1] // 4)


def channels_kept(before: Path, after: Path, layer: int) -> Any:
    """Find which channels of a layer are left, by the columns of the written weights: bool [I]."""
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    whole, left = (load_file(folder / "model.safetensors")[name] for folder in (before, after))
    columns = {tuple(column.tolist()) for column in left.float().T}
    found = torch.tensor([tuple(column.tolist()) in columns for column in whole.float().T])
    assert int(found.sum()) == left.shape[1]
    return found


@pytest.mark.parametrize("family", WIDTH)
def test_a_narrower_model_computes_the_original_without_what_was_removed(family, models, tmp_path) -> None:
    """Removing a channel or head is the same as zeroing the weights that read it."""
    spec, original = WIDTH[family], models[family]
    facts = prune_model(original, tmp_path / "out", spec, TEXTS, CALIBRATION)
    pruned, whole = loaded(tmp_path / "out"), loaded(original)
    config = pruned.config
    assert (config.intermediate_size, config.num_attention_heads) == (spec.mlp, spec.heads)
    assert config.head_dim == whole.config.head_dim
    layers = range(config.num_hidden_layers)
    without(whole, [channels_kept(original, tmp_path / "out", n) for n in layers], facts["kept_heads"])
    assert torch.allclose(logits(pruned), logits(whole), atol=2e-4)
    counted = sum(weight.numel() for weight in pruned.parameters())
    assert facts["parameters_after"] == counted < facts["parameters_before"]
    assert ModelShape.from_hf_config(json.loads((tmp_path / "out/config.json").read_text())).num_params <= counted
    assert not (tmp_path / "out" / PARTIAL).exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in original.iterdir() if path.name != MANIFEST
    }
    json.dumps(facts)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in ("llama", "gemma") else [pytest.mark.thorough]) for each in KEPT],
)
def test_a_shallower_model_computes_the_original_without_the_layers(family, models, tmp_path) -> None:
    kept = KEPT[family]
    facts = prune_model(models[family], tmp_path / "out", pruned_to("depth", layers=kept), TEXTS, CALIBRATION)
    pruned, whole = loaded(tmp_path / "out"), loaded(models[family])
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == kept
    stay = [layer for number, layer in enumerate(whole.model.layers) if number not in facts["dropped"]]
    whole.model.layers, whole.config.num_hidden_layers = torch.nn.ModuleList(stay), kept
    assert torch.allclose(logits(pruned), logits(whole), atol=1e-5)
    assert len(facts["losses"]) == len(facts["dropped"]) == 4 - kept
    assert facts["parameters_after"] == sum(weight.numel() for weight in pruned.parameters())


def test_what_stays_has_the_largest_activation_times_weight(models, tmp_path) -> None:
    """The judge is a whole model in float32, watched in one piece."""
    prune_model(models["llama"], tmp_path / "out", pruned_to("width", mlp=256), TEXTS, CALIBRATION)
    whole, seen = loaded(models["llama"]), dict[int, list[Any]]()
    for number, layer in enumerate(whole.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, given, n=number: seen.setdefault(n, []).append(given))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["llama"])
    with torch.no_grad():
        for text in TEXTS[: CALIBRATION.size]:
            whole(torch.tensor([tokenizer(text)["input_ids"][: CALIBRATION.seq_len]]))
    for number, layer in enumerate(whole.model.layers):
        rows = torch.cat([given[0].flatten(0, 1) for given in seen[number]])
        score = rows.square().mean(dim=0).sqrt() * layer.mlp.down_proj.weight.norm(dim=0)
        best = torch.zeros(768, dtype=torch.bool)
        best[score.topk(256).indices] = True
        agree = (best & channels_kept(models["llama"], tmp_path / "out", number)).sum()
        assert agree >= 252  # scores in bfloat16 swap a few at the bound


def test_the_layer_whose_absence_costs_least_goes(models, tmp_path) -> None:
    """Every layer is left out of a whole model by hand; the dropped one is the best choice."""
    facts = prune_model(models["llama"], tmp_path / "out", pruned_to("depth", layers=3), TEXTS, CALIBRATION)
    tokenizer, losses = transformers.AutoTokenizer.from_pretrained(models["llama"]), {}
    for left_out in range(4):
        whole = loaded(models["llama"])
        whole.model.layers = torch.nn.ModuleList(m for n, m in enumerate(whole.model.layers) if n != left_out)
        whole.config.num_hidden_layers, total, count = 3, 0.0, 0
        for text in TEXTS[: CALIBRATION.size]:
            ids = torch.tensor([tokenizer(text)["input_ids"][: CALIBRATION.seq_len]])
            with torch.no_grad():
                total += float(whole(ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        losses[left_out] = total / count
    assert facts["dropped"] == [min(losses, key=lambda number: losses[number])]
    assert facts["losses"][0] == pytest.approx(min(losses.values()), rel=0.02)
    assert facts["losses"][0] > facts["loss_before"]


@pytest.mark.parametrize(
    ("spec", "title"), [(WIDTH["llama"], "pruning width"), (pruned_to("depth", layers=1), "dropping")]
)
def test_a_stopped_run_goes_on_to_the_same_bytes(spec, title, models, tmp_path) -> None:
    """Stopped after two layers, or within the search for the second layer to drop."""
    stops, again = Stops(title, 5 if spec.layers else 2), Stops(title, -1)
    with pytest.raises(KeyboardInterrupt):
        prune_model(models["llama"], tmp_path / "out", spec, TEXTS, CALIBRATION, progress=stops)
    facts = prune_model(models["llama"], tmp_path / "out", spec, TEXTS, CALIBRATION, progress=again)
    assert "continuing a run that was stopped" in again.notes[0]
    assert facts == prune_model(models["llama"], tmp_path / "once", spec, TEXTS, CALIBRATION)
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("spec", [WIDTH["llama"], pruned_to("depth", layers=2)], ids=["width", "depth"])
def test_a_model_in_several_files_has_an_index_of_what_is_left(spec, models, tmp_path) -> None:
    original = models["llama"]
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="2MB")
    for file in original.glob("*token*.json"):
        shutil.copy(file, tmp_path / "shards")
    before = (tmp_path / "shards/model.safetensors.index.json").read_text()
    prune_model(tmp_path / "shards", tmp_path / "out", spec, TEXTS, CALIBRATION)
    prune_model(original, tmp_path / "single", spec, TEXTS, CALIBRATION)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "single")))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    stored = {name: file.name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == stored
    weights = [value for file in (tmp_path / "out").glob("*.safetensors") for value in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights)
    assert (tmp_path / "shards/model.safetensors.index.json").read_text() == before  # it was linked, not shared


def test_the_original_folder_is_not_touched(models, tmp_path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    prune_model(tmp_path / "model", tmp_path / "out", WIDTH["llama"], TEXTS, CALIBRATION)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


@pytest.mark.parametrize(
    ("family", "spec", "message"),
    [
        ("llama", pruned_to("width", mlp=768), "prune.mlp=768 removes nothing: the model has 768 MLP channels"),
        ("llama", pruned_to("width", heads=3), "prune.heads=3 with 2 KV heads .* prune.heads=2"),
        ("llama", pruned_to("width", heads=3, kv_heads=1), r"prune.heads=3 with 1 KV heads .* prune.heads=1\|2"),
        ("llama", pruned_to("width", heads=2, kv_heads=3), "prune.kv_heads=3 is more than the model's 2"),
        ("gemma", pruned_to("depth", layers=5), "prune.layers=5 removes nothing: the model has 4 layers"),
    ],
)
def test_sizes_that_do_not_work_are_refused_before_anything_is_written(family, spec, message, models, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        prune_model(models[family], tmp_path / "out", spec, TEXTS, CALIBRATION)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "name"), [("mixtral", "Mixtral"), ("phi3", "Phi-3"), ("gemma3", "Gemma 3")])
def test_other_families_are_refused(kind, name, tmp_path) -> None:
    model = small_models.write_random(tmp_path / "model", kind)
    with pytest.raises(UserError, match=f"prune=width does not prune {name}.*Llama, Gemma, Granite, Mistral, Qwen2"):
        prune_model(model, tmp_path / "out", pruned_to("width", mlp=64), TEXTS, CALIBRATION)
