"""Folders that peers make of a bundled model, each in an environment of its own, of pinned packages.

Nothing is downloaded but packages. build/peers keeps environments and folders.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from pipelines.settings.model import BUNDLED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers"
SOURCE = BUNDLED / "models" / "tiny_llama"
TORCH = "torch==2.13.0"
PEERS: dict[str, tuple[str, ...]] = {
    "auto_round": (TORCH, "auto-round==0.16.1", "gptqmodel==7.6.0"),  # whose linears it takes for auto_awq
    "gptqmodel": (TORCH, "gptqmodel==7.6.0", "transformers==5.14.1"),
    "llmcompressor": (TORCH, "llmcompressor==0.14.0.1"),
    "quanto": (TORCH, "optimum-quanto==0.2.7", "transformers==5.14.1"),
    "torchao": (TORCH, "torchao==0.18.0", "transformers==5.14.1"),
}


@dataclass(frozen=True)
class Row:
    """A folder that a peer makes.

    Attributes:
        words: of its program.
        quant: as which it is taken over, with its settings; empty: it is refused.
        refusal: what the refusal says.
    """

    peer: str
    words: tuple[str, ...] = ()
    quant: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def name(self) -> str:
        return "-".join((self.peer, *self.words))


GROUPS = ("quant=int4_gptq", "quant.group_size=32")
ROWS = [
    Row("auto_round", ("auto_gptq",), GROUPS),
    Row("auto_round", ("auto_round",), GROUPS),
    Row("auto_round", ("auto_awq",), GROUPS),
    Row("gptqmodel", ("symmetric",), GROUPS),
    Row("gptqmodel", ("zero_points",), GROUPS),
    Row("modelopt", ("FP8_DEFAULT",), ("quant=fp8",)),
    Row("modelopt", ("INT4_AWQ",), ("quant=int4_awq", "quant.group_size=128")),
    Row("modelopt", ("NVFP4_DEFAULT",), ("quant=nvfp4",)),
    Row("llmcompressor", ("FP8",), ("quant=fp8",)),
    Row("llmcompressor", ("W4A16",), ("quant=int4_gptq", "quant.group_size=128")),
    Row("llmcompressor", ("FP8_DYNAMIC",), refusal="strategy='channel'"),
    Row("quanto", refusal="quant_method='quanto'"),
    Row("torchao", refusal="quant_method='torchao'"),
]


def main() -> None:
    """Make the environments that are missing. A peer that cannot be installed fails its own tests."""
    for peer in PEERS:
        try:
            _install(peer)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{peer} is not installed: {error}\n")


def _python(peer: str) -> Path:
    """Return a peer's own Python; ModelOpt is a part of this project's."""
    return FOLDER / f"{peer}-venv" / "bin" / "python" if peer in PEERS else Path(sys.executable)


def _install(peer: str) -> None:
    """Make an environment; the list of its packages, written last, says that it is whole."""
    folder, packages = FOLDER / f"{peer}-venv", "\n".join(PEERS[peer])
    listed = folder / "packages.txt"
    if listed.is_file() and listed.read_text(encoding="utf-8") == packages:
        return
    sys.stdout.write(f"Installing {', '.join(PEERS[peer])} into {folder} ...\n")
    venv.create(folder, clear=True, with_pip=True)
    pip = [_python(peer), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PEERS[peer]], check=True)
    listed.write_text(packages, encoding="utf-8")


def made(row: Row) -> Path:
    """Return the folder of a row, made by its peer if it is missing."""
    final = FOLDER / "folders" / row.name
    if not final.is_dir():
        draft = final.with_name(f"{row.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        program = Path(__file__).parent / "programs" / f"with_{row.peer}.py"
        command = [_python(row.peer), program, SOURCE, draft, *row.words]
        subprocess.run(command, check=True, cwd=FOLDER, timeout=900, env=_environment())
        draft.rename(final)
    return final


def _environment() -> dict[str, str]:
    """Return this environment without its Python's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # GPTQModel takes half of the cores by itself, and needs two
    return kept | {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
