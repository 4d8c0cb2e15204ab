"""Golden copies of what is generated: a person reads the diff before `make golden` makes it the new truth."""

from pathlib import Path

import pytest

from tests.support.engine_folders import write_engine, write_llm_folder, write_tokenizer
from tests.support.golden import check_difference, check_folder, contents
from triton_repo import write
from triton_repo.config import TritonSettings
from triton_repo.parameters import ImageSpec, RepositorySpec
from triton_repo.write import write_repository

GOLDEN = Path(__file__).parent
SPECS = {
    "openvino": RepositorySpec("openvino", "tiny_llama", "fp8", options={"inference_precision": "f32"}),
    "tensorrt_llm": RepositorySpec("tensorrt_llm", "llama_3_8b", "fp8", enable_chunked_context=True, tp_size=2),
    "llmapi": RepositorySpec("llmapi", "llama_3_8b", "fp8"),
    "images": RepositorySpec("tensorrt_llm", "llava", "fp8", images=ImageSpec("llava", "/models/llava-1.5-7b-hf", 1)),
    "draft_target": RepositorySpec("tensorrt_llm", "llama_3_8b", "fp8", num_draft_tokens=4),
}

IN_FULL = ("tensorrt_llm", "llmapi")
"""Of the others, what differs from the first."""


def generated(tmp_path: Path, flavour: str) -> dict[str, str]:
    """Every text of a repository that we write ourselves, by relative name."""
    spec = SPECS[flavour]
    model = write_tokenizer(tmp_path / "model")
    settings, draft = TritonSettings(), None
    if spec.flavour == "llmapi":
        engine = write_llm_folder(tmp_path / "engine")
    else:
        engine = write_engine(tmp_path / "engine", spec.flavour, tp_size=spec.tp_size)
    if flavour == "draft_target":
        engine, draft = write_engine(tmp_path / "engine", max_draft_len=4), write_engine(tmp_path / "draft")
        settings = TritonSettings(kv_cache_free_gpu_mem_fraction=0.45, retention_tokens=512)
    repo = tmp_path / "repo"
    write_repository(
        repo,
        engine_dir=engine,
        tokenizer_dir=model,
        settings=settings,
        spec=spec,
        made_from={"build": "0"},
        draft_dir=draft,
    )
    ours = [*repo.glob("*/config.pbtxt"), *repo.glob("*/1/model.yaml"), repo / "repository.json"]
    return {str(path.relative_to(repo)): path.read_text() for path in ours}


@pytest.mark.parametrize("flavour", SPECS)
def test_the_repository_is_the_golden_one(flavour, tmp_path, monkeypatch, request):
    monkeypatch.setattr(write, "SOURCES", tmp_path)  # the models' code is not what is looked at here
    for name in ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"):
        (tmp_path / name).mkdir()
    found, rewrite = generated(tmp_path, flavour), request.config.getoption("--rewrite-golden")
    if flavour in IN_FULL:
        check_folder(found, GOLDEN / flavour, rewrite=rewrite)
        return
    base = contents(GOLDEN / IN_FULL[0])
    if "tensorrt_llm_draft/config.pbtxt" in found:
        base["tensorrt_llm_draft/config.pbtxt"] = base["tensorrt_llm/config.pbtxt"]
    check_difference(found, base, GOLDEN / f"{flavour}.diff", rewrite=rewrite)
