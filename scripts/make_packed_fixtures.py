"""Write tests/unit/checkpoint/{awq,compressed_tensors}: linears that these libraries packed, and their weights.

    python -m venv /tmp/packed && /tmp/packed/bin/pip install torch transformers==4.51.3 safetensors pydantic loguru
    /tmp/packed/bin/pip install --no-deps autoawq==0.2.9 compressed-tensors==0.20.0
    /tmp/packed/bin/python scripts/make_packed_fixtures.py

AutoAWQ packs with its own layer and unpacks with its own function for CPUs; compressed-tensors does both itself.
AutoAWQ's package imports kernels for GPUs, its files of layer and unpacking do not, so these are loaded alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "tests/unit/checkpoint"
OUTPUTS, INPUTS, GROUP = 32, 64, 32


def main() -> None:
    """Write one file for each packing and kind of zero points."""
    torch.manual_seed(5)
    weight, scales, zeros = drawn(1, 16)
    write("awq/zero_points", awq(weight, scales, zeros))
    for name, points in (("symmetric", (8, 9)), ("zero_points", (1, 16))):
        weight, scales, zeros = drawn(*points)
        write(f"compressed_tensors/{name}", compressed(weight, scales, zeros - 8, symmetric=name == "symmetric"))
    write("compressed_tensors/fp8", in_fp8(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5))))


def drawn(low: int, high: int) -> tuple[Any, Any, Any]:
    """Return a weight [O, I] of 4-bit codes, its scales and its zero points [O, G]."""
    scales = (torch.rand(OUTPUTS, INPUTS // GROUP) / 10 + 0.0625).half().float()
    zeros = torch.randint(low, high, scales.shape).float()
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS // GROUP, GROUP))
    return ((codes - zeros[..., None]) * scales[..., None]).reshape(OUTPUTS, INPUTS), scales, zeros


def awq(weight: Any, scales: Any, zeros: Any) -> dict[str, Any]:
    """Pack and unpack with AutoAWQ."""
    unpacking = _loaded("awq.utils.packing_utils", "awq/utils/packing_utils.py")
    sys.modules["awq.utils.module"] = types.ModuleType("awq.utils.module")
    sys.modules["awq.utils.module"].try_import = lambda _: (None, "")  # type: ignore[attr-defined]
    sys.modules["awq.utils.utils"] = types.ModuleType("awq.utils.utils")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    layer = _loaded("awq.modules.linear.gemm", "awq/modules/linear/gemm.py")
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weight
    packed = layer.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    computed = unpacking.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T.contiguous()
    assert torch.allclose(computed.float(), weight, atol=1e-3)
    return {"computed": computed.float(), **{name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}}


def compressed(weight: Any, scales: Any, zeros: Any, *, symmetric: bool) -> dict[str, Any]:
    """Compress and decompress with compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    tensors = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    packed = Compressor.compress(tensors, scheme)
    computed = Compressor.decompress(packed, scheme)["weight"]
    assert torch.allclose(computed, weight, atol=1e-5)
    return {"computed": computed, **packed}


def in_fp8(weight: Any) -> dict[str, Any]:
    """Compress and decompress with compressed-tensors, with one scale for the weight."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=arguments)
    tensors = {
        "weight": weight,
        "weight_scale": (weight.abs().max() / 448).reshape(1),
        "input_scale": torch.ones(1) / 7,
    }
    packed = Compressor.compress(tensors, scheme)
    computed = Compressor.decompress(packed, scheme)["weight"]
    assert torch.allclose(computed, weight, rtol=1 / 16, atol=1e-2)
    return {"computed": computed, **packed}


def write(name: str, tensors: dict[str, Any]) -> None:
    """Write a file of the linear `linear`."""
    (OUT / name).parent.mkdir(exist_ok=True)
    named = {key if key == "computed" else f"linear.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(named, OUT / f"{name}.safetensors")


def _loaded(name: str, file: str) -> Any:
    path = importlib.metadata.distribution("autoawq").locate_file(file)
    spec = importlib.util.spec_from_file_location(name, str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
