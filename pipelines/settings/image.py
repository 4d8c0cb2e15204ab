"""The group `image`: how `make image` builds a container image and `make shell` runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipelines.settings.base import Group

UserId = Annotated[int, Field(ge=1, le=2**31 - 2)]
"""Never 0, because the image must not run as root."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([._:/-]+[a-z0-9]+)*$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]

OLD_DRAFT_WORD = (1, 3, 0, 3)
"""1.3.0rc3 rejects `decoding_type: Draft_Target`; of llm_args.py@0004396 it is the only word for a draft model.

Which release candidate after rc3 changed it is unknown; all of them count as changed.
"""


class ImageSettings(Group):
    """One image of two: the CPU engine's, or NVIDIA's Triton container with this project on top.

    A third, NVIDIA's release of TensorRT-LLM, runs what is made for the LLM API, and nothing is built on it.

    Attributes:
        tool: that builds and runs the image; auto is docker, else podman.
        name: of the image, with the registry it is pushed to, without a tag.
        tag: None is the version and the flavour: 0.1.0-gpu.
        base_cpu: what the CPU image is built on.
        base_gpu: what the GPU image is built on; the tag fixes TensorRT-LLM's version.
        base_llm_api: NVIDIA's container with `trtllm-serve`, which runs what engine=tensorrt_llm_llmapi makes; its tag
            also decides how a draft model is called in the arguments.
        digest: of that base, so that a tag that moves changes nothing.
        uid: of the user inside; owns the folders it writes to.
        gid: its group.
        torch_index: package index with torch without CUDA for the CPU image; None is pip's default index, whose torch
            includes CUDA (some gigabytes that the CPU image does not need).
        pip_config: a pip.conf (a private index with its password); a secret of one build step, stored in no layer.
        dev: whether to install the tools of the tests as well, for `make test-gpu` in the shell.
        no_cache: whether to build every step again.
        ipc_host: whether to share the host's /dev/shm instead of a separate one of `shm_size`.
        shm_size: of /dev/shm; NCCL and Triton's python backend exchange tensors there.
        network: `host` makes a server in the shell reachable on this machine's loopback.
    """

    tool: Literal["auto", "docker", "podman"] = "auto"
    name: Name = "trtllm-pipelines"
    tag: Tag | None = None
    base_cpu: str = "docker.io/library/python:3.11-slim-bookworm"
    base_gpu: str = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    base_llm_api: str = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20"
    digest: Digest | None = None
    uid: UserId = 1000
    gid: UserId = 1000
    torch_index: str | None = None
    pip_config: Path | None = None
    dev: bool = False
    no_cache: bool = False
    ipc_host: bool = False
    shm_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*[kmg]$")] = "8g"
    network: Literal["host", "bridge"] = "host"

    @field_validator("base_cpu", "base_gpu", "base_llm_api")
    @classmethod
    def _has_a_tag(cls, base: str) -> str:
        """Require a tag: without one the builder uses `latest`, which changes over time."""
        if "@" in base:
            raise ValueError(f"'{base}' carries a digest: give it as image.digest=sha256:...")
        if ":" not in base.rsplit("/", 1)[-1] or base.endswith(":latest"):
            raise ValueError(f"'{base}' names no version: give it with its tag, such as 26.07-trtllm-python-py3")
        return base

    @property
    def draft_word(self) -> Literal["DraftTarget", "Draft_Target"]:
        """Return what this TensorRT-LLM calls a draft model; a tag without its version counts as a newer one."""
        found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", self.base_llm_api.rpartition(":")[2])
        numbers = tuple(int(part or 10**6) for part in found.groups()) if found else (10**6,)
        return "DraftTarget" if numbers <= OLD_DRAFT_WORD else "Draft_Target"

    @field_validator("pip_config")
    @classmethod
    def _is_there(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"'{path}' is not a file: give a pip.conf, or null")
        return path.absolute() if path else None
