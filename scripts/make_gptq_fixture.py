"""Write tests/unit/checkpoint/gptq: linears that AutoGPTQ packed, with the weights that its own layer computes with.

    python -m venv /tmp/gptq && /tmp/gptq/bin/pip install torch numpy==1.26.4 transformers==4.57.3 safetensors
    /tmp/gptq/bin/pip install --no-deps auto-gptq==0.7.1
    /tmp/gptq/bin/python scripts/make_gptq_fixture.py

The package itself needs CUDA to be imported; its layer in plain PyTorch does not, so its file is loaded alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "tests/unit/checkpoint/gptq"
OUTPUTS, INPUTS, GROUP = 32, 64, 32


def main() -> None:
    """Write one file with symmetric weights, and one with zero points."""
    file = importlib.metadata.distribution("auto-gptq").locate_file("auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
    spec = importlib.util.spec_from_file_location("qlinear", str(file))
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch.manual_seed(3)
    for name, points in (("symmetric", (8, 9)), ("zero_points", (1, 16))):
        scales = torch.rand(OUTPUTS, INPUTS // GROUP).half().float() / 10 + 0.0625
        scales, zeros = scales.half().float(), torch.randint(*points, scales.shape).float()
        codes = torch.randint(0, 16, (OUTPUTS, INPUTS // GROUP, GROUP))
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).reshape(OUTPUTS, INPUTS)
        packed = library.QuantLinear(4, GROUP, INPUTS, OUTPUTS, False, use_cuda_fp16=False, weight_dtype=torch.float32)
        packed.pack(linear, scales.clone(), zeros.clone(), None)
        computed = packed(torch.eye(INPUTS)).detach().T.contiguous()
        assert torch.allclose(computed, linear.weight, atol=1e-3)
        tensors = {f"linear.{leaf}": getattr(packed, leaf) for leaf in ("qweight", "qzeros", "g_idx")}
        save_file(tensors | {"linear.scales": packed.scales.half(), "computed": computed}, OUT / f"{name}.safetensors")


if __name__ == "__main__":
    main()
