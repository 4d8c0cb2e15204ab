"""The group `tuning`: whether options that make an engine faster are set without being asked for."""

from __future__ import annotations

from typing import Literal

from pipelines.settings.base import Group


class TuningSettings(Group):
    """Options for speed that nobody gives.

    Attributes:
        name: recommended sets what NVIDIA's guides advise for a TensorRT engine, wherever it fits; plain leaves the
            defaults of trtllm-build and the server. The CPU engine has nothing to set.
    """

    name: Literal["recommended", "plain"]
