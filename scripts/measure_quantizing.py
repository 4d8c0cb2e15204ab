"""Measure quantizing beside what else does the same, on random weights: `python -m scripts.measure_quantizing`.

    --layers 1 --texts 32            a small run; by default 2 layers of Llama 3.2 1B and the 128 texts of real_text
    --width 1024                     half of its widths: ModelOpt's GPTQ takes 20 minutes for one layer of Llama 3.2 1B
    --only int4_awq,gptqmodel        only some comparisons
    --bundled tiny_llama             GPTQ of a bundled model instead of random weights; says also how far the model with
                                     each side's weights is from the original: the mean KL divergence of the next token
                                     in nats, in float32, on the last 64 texts of its corpus, which neither side read
    --f32                            ModelOpt's flow multiplies in float32 too, as this project does where the processor
                                     has no bfloat16, in which a product takes four times as long
    --gptqmodel PYTHON               interpreter that has GPTQModel; else it is installed for the run (5.7 GB from PyPI)

Each side works in a process of its own, with two threads, one after the other, `--rounds` times. Prints seconds,
processor time and memory of both as medians, and the ratio of the processor times. Compared are:
  int4_rtn   of 322 million parameters (1,024 x 20) with the least that it takes: reading the weights, rounding them in
             groups, packing and writing them, in 20 lines of PyTorch
  fp8, int8_sq, int4_awq, w4a8_awq, int4_gptq
             with ModelOpt's own flow (examples/llm_ptq/hf_ptq.py): the whole model in memory, mtq.quantize with the
             same configuration, texts and batches, export_hf_checkpoint; and whether the files of both have the same
             tensors
  gptqmodel  int4_gptq with GPTQModel 7.7, plain GPTQ without reordering of columns
All layers have the same shape, so fewer of them change the time, but not the memory that working layer by layer takes.
The vocabulary is smaller by the same factor, so that embedding and head have the share that they have in the whole
model, with whose size memory is compared. Everything lies in a folder in build/, which is removed at the end.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.settings.model import BUNDLED
from scripts.measure_streaming import ROOT, SHAPES, make_model

THREADS, HELD_OUT = 2, 64
LAYERS, VOCABULARY = SHAPES["llama_1b"]["num_hidden_layers"], SHAPES["llama_1b"]["vocab_size"]
LLAMA_322M = {
    **SHAPES["llama_8b"], "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "head_dim": 64,
    "num_key_value_heads": 16, "intermediate_size": 2816, "vocab_size": 32_000, "max_position_embeddings": 2048,
}  # fmt: skip
WITH_MODELOPT = ("fp8", "int8_sq", "int4_awq", "w4a8_awq", "int4_gptq")
GPTQMODEL = "gptqmodel==7.7.0"
GPTQMODEL_FLOW = """
import json, os, sys, time
from pathlib import Path
os.cpu_count = lambda: 4  # with two processors 7.7 ends: "requests 2 workers but parent 'cpu' only has 1"
import torch
torch.set_num_threads(int(sys.argv[4]))
from gptqmodel import GPTQModel, QuantizeConfig

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

imports, began, cpu = peak(), time.monotonic(), time.process_time()
config = QuantizeConfig(bits=4, group_size=128, desc_act=False, act_group_aware=False, sym=True, device="cpu")
model = GPTQModel.load(sys.argv[1], config)
ids = [{"input_ids": each, "attention_mask": [1] * len(each)} for each in json.loads(Path(sys.argv[3]).read_text())]
model.quantize(ids, batch_size=8)
model.save(sys.argv[2])
print(json.dumps({"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu, "memory": peak() - imports}))
"""
"""Runs in an environment without this project."""


def peak() -> int:
    """Return the most resident memory that this process had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def ours(model: Path, out: Path, qformat: str, texts: int) -> None:
    """Quantize as this project does."""
    from pipelines.compress.quantizing import quantize

    layout: Any = "tensorrt_llm" if qformat == "int4_rtn" else "hugging_face"
    quantize(model, out, *_asked(model, qformat, texts), device="cpu", layout=layout)


def by_modelopt(model: Path, out: Path, qformat: str, texts: int) -> None:
    """Quantize as ModelOpt's example does."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.utils.dataset_utils import create_forward_loop
    from transformers import AutoModelForCausalLM

    from pipelines.compress.model_folder import look_at
    from pipelines.compress.recipes import modelopt_config

    spec = _asked(model, qformat, texts)[0]
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    config: Any = modelopt_config(spec, look_at(model).shape.family, lambda name: getattr(mtq, name))
    if qformat == "int4_gptq":  # this project has its own, for which ModelOpt only finds scales
        config["algorithm"] = {"method": "gptq", "layerwise": {"enable": True}}
    loop = create_forward_loop(dataloader=[{"input_ids": batch} for batch in batches(model, qformat, texts)])
    with torch.no_grad():
        export_hf_checkpoint(mtq.quantize(whole, config, loop), dtype=torch.bfloat16, export_dir=out)


def by_modelopt_f32(model: Path, out: Path, qformat: str, texts: int) -> None:
    """Do the same with products in float32 where the processor has no bfloat16."""
    from pipelines.compress.contexts import f32_products

    with f32_products():
        by_modelopt(model, out, qformat, texts)


def least(model: Path, out: Path, _qformat: str, _texts: int) -> None:
    """Read the weights, round the linears of the layers to INT4 in groups of 128, pack and write them."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    written: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                weight = file.get_tensor(name)
                if "_proj" not in name:
                    written[name] = weight
                    continue
                groups = weight.float().reshape(weight.shape[0], -1, 128)
                scale = groups.abs().amax(2, keepdim=True) / 7
                codes = (groups / scale).round_().clamp_(-8, 7).to(torch.int8).reshape(weight.shape)
                written[name] = (codes[0::2] & 15) | (codes[1::2] << 4)
                written[f"{name}_scale"] = scale[:, :, 0].to(weight.dtype)
    out.mkdir(parents=True)
    save_file(written, out / "model.safetensors")


SIDES: dict[str, Callable[[Path, Path, str, int], None]] = {
    "ours": ours, "modelopt": by_modelopt, "modelopt_f32": by_modelopt_f32, "least": least,
}  # fmt: skip


def _asked(model: Path, qformat: str, texts: int) -> tuple[Any, Any, Any]:
    """Return the arguments of `quantize`: the format, the texts, and how many."""
    from pipelines.compress.config import SHIPPED, CalibrationSettings, QuantSettings
    from pipelines.compress.specs import QuantSpec
    from pipelines.compress.texts import load_texts
    from pipelines.domain.formats import QFormat

    spec = QuantSpec(QuantSettings(qformat=QFormat(qformat)))
    source = "bundled" if model.is_relative_to(BUNDLED) else "real_text"
    return spec, load_texts(SHIPPED[source]), CalibrationSettings(size=texts)


def batches(model: Path, qformat: str, texts: int) -> Sequence[Any]:
    """Return the batches that this project calibrates on."""
    from pipelines.compress.calibration import make_batches
    from pipelines.compress.loading import load_tokenizer
    from pipelines.compress.model_folder import look_at

    spec, lines, calibration = _asked(model, qformat, texts)
    tokenizer = load_tokenizer(look_at(model))
    return make_batches(lines, tokenizer, calibration, calibration.sequences_for(spec.quant.qformat)).batches


def be(side: str, model: Path, out: Path, qformat: str, texts: int) -> None:
    """Be the process of a side: import what it needs, quantize, and print what that took."""
    import torch

    torch.set_num_threads(THREADS)
    if side != "least":
        import transformers  # noqa: F401

        import pipelines.compress.by_modelopt  # noqa: F401
    imports, began, cpu = peak(), time.monotonic(), time.process_time()
    SIDES[side](model, out, qformat, texts)
    took = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu, "memory": peak() - imports}
    sys.stdout.write(f"\n{json.dumps(took)}\n")


def measure(words: Sequence[str | Path], out: Path) -> dict[str, float]:
    """Run the process of a side, whose output folder is new."""
    shutil.rmtree(out, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_WAIT_POLICY"] = "passive"  # else waiting counts as work, the more the busier the machine is
    folder = ROOT if "-m" in words else out.parent  # GPTQModel writes logs to where it runs
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-5:]) or f"exit code {done.returncode}")
    took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return took


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return all tensors of a folder."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_tensors(one: Path, other: Path) -> str:
    """Say how many tensors of two folders are equal to the bit."""
    import torch

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    ours, theirs = tensors_of(one), tensors_of(other)
    equal = sum(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours.keys() & theirs.keys())
    return f"{equal} of {len(ours.keys() | theirs.keys())} tensors equal"


def divergences(model: Path, folders: Sequence[Path]) -> list[float]:
    """Return the mean KL divergence of the next token, from a model to it with the weights of each INT4 folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelines.compress.config import SHIPPED

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lines = SHIPPED["bundled"].read_text().splitlines()[-HELD_OUT:]
    ids = [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[:, :512] for line in lines]

    def predictions() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([whole(each).logits[0].log_softmax(dim=1) for each in ids])

    expected = predictions()
    linears = {name: each for name, each in whole.model.layers.named_modules() if isinstance(each, torch.nn.Linear)}
    found = []
    for folder in folders:
        weights = int4_weights(folder, [f"model.layers.{name}" for name in linears])
        for linear, weight in zip(linears.values(), weights, strict=True):
            linear.weight.data = torch.from_numpy(weight)
        found.append(float((expected.exp() * (expected - predictions())).sum(dim=1).mean()))
    return found


def int4_weights(folder: Path, names: Sequence[str]) -> list[Any]:
    """Return what the codes and scales of linears stand for, float32 [O, I]."""
    import numpy as np

    from pipelines.checkpoint.declarations import packing_of, quantization_of
    from pipelines.checkpoint.packings import decode_int4
    from pipelines.checkpoint.read import scale_groups

    packing = packing_of(quantization_of(folder, json.loads((folder / "config.json").read_text())) or {})
    tensors = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in tensors_of(folder).items()
    }
    weights = []
    for name in names:
        if packing != "modelopt":
            linear = decode_int4(tensors, name, packing)
            assert (linear.points == 8).all(), "symmetric"
            weights.append(scale_groups(linear.codes, linear.scales))
            continue
        packed = tensors[f"{name}.weight"]
        codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1]).astype(np.int8)
        weights.append(scale_groups((codes ^ 8) - 8, tensors[f"{name}.weight_scale"]))
    return weights


def compare(other: str, qformat: str, model: Path, options: argparse.Namespace) -> None:
    """Measure both sides in turn and print a line."""
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    whole = sum(path.stat().st_size for path in model.glob("*.safetensors")) * max(1, LAYERS / layers)
    folders = {side: options.work / f"out_{side}" for side in ("ours", other)}
    took: dict[str, list[dict[str, float]]] = {side: [] for side in folders}
    for _ in range(options.rounds):
        for side, out in folders.items():
            if side == "gptqmodel":
                ids = options.work / "ids.json"
                rows = [row for batch in batches(model, qformat, options.texts) for row in batch.tolist()]
                ids.write_text(json.dumps(rows))
                words = [options.gptqmodel, "-c", GPTQMODEL_FLOW, model, out, ids, THREADS]
            else:
                words = [sys.executable, "-m", "scripts.measure_quantizing", "--be", side, model, out, qformat]
                words += ["--texts", options.texts]
            took[side].append(measure(words, out))

    def median(side: str, what: str) -> float:
        return statistics.median(each[what] for each in took[side])

    def shown(side: str) -> str:
        times = f"{median(side, 'seconds'):.1f} s, {median(side, 'cpu'):.1f} s of processor time"
        return f"{times}, {median(side, 'memory') / 2**20:,.0f} MiB"

    equal = f"; {same_tensors(*folders.values())}" if other.startswith("modelopt") else ""
    ratio = median(other, "cpu") / median("ours", "cpu")
    if options.bundled:
        more = "mean KL from the original {:.5f} and {:.5f}".format(*divergences(model, list(folders.values())))
    else:
        more = f"memory of ours {median('ours', 'memory') / whole:.2f} of the model's {whole / 2**20:,.0f} MiB"
    name = f"{qformat}, {layers} layers {config['hidden_size']} wide"
    say(f"{name}: ours {shown('ours')}; {other} {shown(other)}; {other} : ours {ratio:.2f}; {more}{equal}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def installed(folder: Path) -> Path:
    """Install GPTQModel into an environment of its own, and return its interpreter.

    Raises:
        RuntimeError: pip failed; with what it said last.
    """
    # without its own pip and setuptools, which are as old as Python and cannot build it
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = next(iter((folder / "lib").glob("python*"))) / "site-packages"
    # its build reads what is installed here; what it needs in another version it gets itself
    (packages / "beside.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    words = [str(python), "-m", "pip", "install", "-q", "--no-build-isolation", GPTQMODEL]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError("\n".join(done.stdout.splitlines()[-3:]))
    return python


def main() -> None:
    """Make the models, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048, help="hidden size, a multiple of 256")
    parser.add_argument("--bundled", choices=("tiny_llama", "tiny_qwen", "tiny_gemma"))
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(("int4_rtn", *WITH_MODELOPT, "gptqmodel")))
    parser.add_argument("--f32", action="store_true")
    parser.add_argument("--gptqmodel", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quantizing", help="folder that is removed")
    parser.add_argument("--be", nargs=4, metavar=("SIDE", "MODEL", "OUT", "FORMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        side, model, out, qformat = options.be
        be(side, Path(model), Path(out), qformat, options.texts)
        return
    options.work = options.work.absolute() / str(os.getpid())
    chosen = options.only.split(",")
    if options.bundled:
        chosen = [each for each in chosen if each in ("int4_gptq", "gptqmodel")]
    say(f"{THREADS} threads; {options.texts} texts, AWQ at most 32; memory is above that of the imports")
    try:
        if "int4_rtn" in chosen:
            model = options.work / "llama_322m"
            make_model(model, LLAMA_322M)
            compare("least", "int4_rtn", model, options)
            shutil.rmtree(model)
        model = BUNDLED / "models" / options.bundled if options.bundled else options.work / "llama_1b"
        if not options.bundled and {*WITH_MODELOPT, "gptqmodel"}.intersection(chosen):
            heads = {"num_attention_heads": options.width // 64, "num_key_value_heads": options.width // 256}
            widths = {"hidden_size": options.width, "intermediate_size": 4 * options.width, **heads}
            widths |= {"num_hidden_layers": options.layers, "vocab_size": VOCABULARY * options.layers // LAYERS}
            make_model(model, SHAPES["llama_1b"] | widths)
        for qformat in filter(chosen.__contains__, WITH_MODELOPT):
            compare("modelopt_f32" if options.f32 else "modelopt", qformat, model, options)
        if "gptqmodel" in chosen:
            try:
                options.gptqmodel = options.gptqmodel or installed(options.work / "environment")
                compare("gptqmodel", "int4_gptq", model, options)
            except RuntimeError as error:
                say(f"GPTQModel was not measured: {error}")
    finally:
        shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
