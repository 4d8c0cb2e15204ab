"""Write tests/unit/checkpoint/gptq/{auto_round,gptqmodel}.safetensors, from folders that `make test-peers` made.

The first outputs of one linear, as its library wrote them, with the weights that this library computes with.
"""

from __future__ import annotations

from safetensors.torch import load_file, save_file

from tests.peers.prepare import FOLDER, ROOT

OUT = ROOT / "tests/unit/checkpoint/gptq"
LINEAR, OUTPUTS = "model.layers.0.self_attn.k_proj", 32
FOLDERS = {"auto_round": "auto_round-auto_gptq", "gptqmodel": "gptqmodel-zero_points"}


def main() -> None:
    """Outputs are columns of every tensor, eight to a word in the zero points."""
    for name, folder in FOLDERS.items():
        tensors = load_file(FOLDER / "folders" / folder / "model.safetensors")
        kept = {"qweight": OUTPUTS, "qzeros": OUTPUTS // 8, "scales": OUTPUTS}
        linear = {
            f"linear.{leaf}": tensors[f"{LINEAR}.{leaf}"][:, :columns].contiguous().clone()
            for leaf, columns in kept.items()
        }
        computed = (
            load_file(FOLDER / "folders" / folder / "dequantized.safetensors")[LINEAR][:OUTPUTS].contiguous().clone()
        )
        save_file(linear | {"computed": computed}, OUT / f"{name}.safetensors")


if __name__ == "__main__":
    main()
