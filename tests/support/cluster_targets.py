"""A deployment on two nodes with eight GPUs each, as `make scripts` sees it."""

from pathlib import Path

from pipelines.deploy.cluster import ScriptTarget
from pipelines.deploy.config import ClusterSettings

SLURM = ClusterSettings(kind="slurm", partition="gpu", env={"NCCL_DEBUG": "INFO"})
MPI = ClusterSettings(kind="mpi", hosts=("gpu1", "gpu2"))
CONTAINER = ClusterSettings(kind="slurm", image="nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3")


def target(folder: Path, *, repository: Path | None = None, cwd: Path = Path("/home/user/project")) -> ScriptTarget:
    """Return a target with Llama 3.1 70B in FP8 on 16 ranks."""
    return ScriptTarget(
        label="llama_3_1_70b-fp8",
        world_size=16,
        num_nodes=2,
        words=("engine=tensorrt_llm", "model=llama_3_1_70b", "build.tp_size=16", "triton.num_nodes=2"),
        workers=8,
        build_gpus=8,
        repository=repository,
        folder=folder,
        cwd=cwd,
        python="python3",
        store=Path("/home/user/project/artifacts"),
    )
