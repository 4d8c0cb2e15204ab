"""An emulated trtllm-serve: NVIDIA's options, option tables and request fields judge what it is given.

Its answers have no meaning.

The options are facts from NVIDIA's sources (tests/support/trtllm_serve_options.json).
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from pipelines.engines.tensorrt_llm.llm_api import complaints
from tests.support.stub_openai import StubOpenAi, serving

CLI = json.loads((Path(__file__).parents[1] / "trtllm_serve_options.json").read_text())


class Server(StubOpenAi):
    """Answers completions whose fields trtllm-serve knows; with EMULATED_ANSWERS=3 it ends after three of them."""

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(self.sent) >= int(os.environ.get("EMULATED_ANSWERS", "1000000")):
            sys.stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered\n")
            sys.stderr.flush()
            os._exit(1)
        self.refuses = tuple(set(body) - set(CLI["completions"])) if path == "/v1/completions" else ()
        await super()._answer(path, body, writer)


def parsed(words: list[str], version: str) -> dict[str, str]:
    """Read a command line as trtllm-serve does: its options are NVIDIA's, and their values of the right kind."""
    proxy = words[0] == "disaggregated"
    options = CLI[version]["disaggregated" if proxy else "serve"]
    rest, values = words[1:], {} if proxy else {"model": words[0]}
    while rest:
        name = rest.pop(0)
        assert name in options, f"{version} has no option {name}"
        values[name] = rest.pop(0) if options[name] != "flag" else ""
        if options[name] == "int":
            int(values[name])
    return values


def main() -> None:
    version = os.environ.get("EMULATED_LLM_API", "1.3.0rc3")
    asked = parsed(sys.argv[1:], version)
    options = yaml.safe_load(Path(asked["--extra_llm_api_options"]).read_text())
    assert os.environ["TRTLLM_NO_USAGE_STATS"] == "1"
    for each in complaints(options, version, ""):
        sys.exit(f"ValidationError: {each.fault}")
    if not (Path(asked["model"]) / "config.json").is_file():
        sys.exit(f"ValueError: {asked['model']} has no config.json")
    with serving(Server(models=(Path(asked["model"]).name,)), port=int(asked["--port"])):
        time.sleep(3600)


if __name__ == "__main__":
    main()
