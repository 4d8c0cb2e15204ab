"""GPTQModel in four bits, with GPTQ's search and with or without zero points."""

from typing import Any

import torch
from common import OUT, SOURCE, TEXTS, WORDS, save_weights
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig


def main() -> None:
    settings = QuantizeConfig(bits=4, group_size=32, desc_act=False, sym="symmetric" in WORDS)
    model = GPTQModel.load(SOURCE, settings, device="cpu", dtype=torch.float32)
    model.quantize(TEXTS, batch_size=4, backend=BACKEND.TORCH)
    model.save(OUT)
    save_weights(GPTQModel.load(OUT, backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model, unpacked)


def unpacked(linear: Any) -> Any:
    """Return the weight of a linear, whose scales it multiplies in float16 itself."""
    linear.scales = linear.scales.float()
    return linear.dequantize_weight().T


if __name__ == "__main__":
    main()
