"""Settings of trtllm-build from options by name, wherever their settings are."""

from typing import Any

from pipelines.engines.tensorrt_llm.config import BuildSettings


def of_options(**options: Any) -> BuildSettings:
    """Return the settings that give these options: own keys, and `build.trtllm` for the others."""
    own = {name: value for name, value in options.items() if name in BuildSettings.model_fields}
    return BuildSettings(**own, trtllm={name: value for name, value in options.items() if name not in own})
