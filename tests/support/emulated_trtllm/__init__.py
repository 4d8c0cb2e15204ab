"""An emulated machine with NVIDIA GPUs and TensorRT-LLM, as far as engine builds need one; for tests only.

`trtllm-build` and `nvidia-smi` are found through PATH, the installed packages through PYTHONPATH, both set by a test.
The engines carry `"emulated": true` and are text. `import tensorrt_llm` fails, because running engines is not emulated.
"""

import os
import sys
from pathlib import Path

from tests.conftest import ROOT

BIN = Path(__file__).parent / "bin"
H100 = "NVIDIA H100 80GB HBM3,9.0,81559"
A100 = "NVIDIA A100-SXM4-80GB,8.0,81920"
B200 = "NVIDIA B200,10.0,183359"


def environment(
    folder: Path, *, gpus: tuple[str, ...] = (H100, H100), tensorrt_llm: str = "1.2.1", tensorrt: str = "10.14.1.48"
) -> dict[str, str]:
    """Return environment variables that put a process on the emulated machine.

    Args:
        folder: where the emulated packages are written.
        gpus: "name,compute capability,MiB" of each GPU.
        tensorrt_llm: installed version of TensorRT-LLM.
        tensorrt: installed version of TensorRT.
    """
    site = folder / f"site-{tensorrt_llm}-{tensorrt}"
    for name, version in (("tensorrt_llm", tensorrt_llm), ("tensorrt", tensorrt)):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / "tensorrt_llm").mkdir(exist_ok=True)
    (site / "tensorrt_llm" / "__init__.py").write_text('raise ImportError("tensorrt_llm is emulated")\n')
    return {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
        "EMULATED_PYTHON": sys.executable,
        "EMULATED_GPUS": ";".join(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus)))),
    }
