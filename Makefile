# Any key=value after a target is an override of the configuration: make build quant=fp8 build.max_batch_size=64
# PYTHON=python3 uses an environment you have (a container) instead of making .venv.

VENV := .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
RUN = @$(PYTHON) -m pipelines --from-make

.DEFAULT_GOAL := help

## Run (add key=value to override any setting)
.PHONY: all build evaluate repository serve benchmark report calibrate compare simulate sweep nightly size doctor plan config verify
all: $(READY) ## Everything: engine, accuracy, Triton repository, server, benchmark, report
	$(RUN) $@
build: $(READY) ## Model -> quantized TensorRT-LLM checkpoint -> engine
	$(RUN) $@
evaluate: $(READY) ## Build, then accuracy beside the 16-bit baseline
	$(RUN) $@
repository: $(READY) ## Engine -> Triton model repository, a folder that can be copied
	$(RUN) $@
serve: $(READY) ## tritonserver in the foreground; Ctrl-C drains it
	$(RUN) $@
benchmark: $(READY) ## Serve and measure TTFT, ITL, E2E and throughput; benchmark.url=host:8001 for a server elsewhere
	$(RUN) $@
report: $(READY) ## Markdown and one HTML file from what was made and measured
	$(RUN) $@
calibrate: $(READY) ## Fit the model to a benchmark (ours, AIPerf, genai-perf, trtllm-bench): make calibrate sizing.measured=FILE
	$(RUN) $@
compare: $(READY) ## Formats side by side: make compare quant=none,fp8,int8_sq,int4_awq
	$(RUN) $@
simulate: $(READY) ## Static batching against in-flight, in ticks; in seconds with hardware=h100_sxm model=llama_3_8b
	$(RUN) $@
sweep: $(READY) ## Evaluate several settings: make sweep quant=fp8,int4_awq [hydra/launcher=joblib|slurm]
	$(RUN) $@
nightly: $(READY) ## A matrix measured every night; its history, and what got worse: make nightly nightly=gpu
	$(RUN) $@
size: $(READY) ## How many GPUs, servers and dollars for a load within limits: make size sizing.average_rate=5
	$(RUN) $@
doctor: $(READY) ## What this machine has, and what will work on it; doctor.format=json for programs
	$(RUN) $@
plan: $(READY) ## What would run, what is cached and why; writes nothing
	$(RUN) $@
config: $(READY) ## Print the resolved configuration
	$(RUN) $@
verify: $(READY) ## Read a checkpoint back and check every tensor
	$(RUN) $@

## Containers and clusters
.PHONY: image shell manifests scripts
image: $(READY) ## Container image with docker or podman: make image engine=tensorrt_llm
	$(RUN) $@
shell: $(READY) ## A shell in that image; checkout, store, runs and the Hub's cache are shared
	$(RUN) $@
manifests: $(READY) ## Kubernetes manifests (Kustomize) for a finished repository
	$(RUN) $@
scripts: $(READY) ## Scripts that build and serve over several nodes: make scripts cluster=slurm engine=tensorrt_llm
	$(RUN) $@

## Develop
.PHONY: setup test test-gpu test-modelopt check golden zoo clean help
setup: $(READY) ## Make the virtual environment (every other target does it by itself)

test: check ## Everything that needs no GPU, end to end
	@scripts/test_packages.sh
	$(PYTHON) -m pytest tests --ignore=tests/gpu --ignore=tests/gpu_trtllm --numprocesses=2 --dist=loadfile

test-gpu: $(READY) ## The tests that need a GPU; fails if it ran none
	$(PYTHON) -m tests.gpu_lane

test-modelopt: ## Compression tests with ModelOpt 0.37.0, the version TensorRT-LLM 1.2.1 pins
	@scripts/test_modelopt_037.sh

check: $(READY) ## ruff, mypy, import contracts, links in the docs
	$(PYTHON) -m ruff check pipelines eval triton_repo tests scripts docker
	$(PYTHON) -m ruff format --check pipelines eval triton_repo tests scripts docker
	$(PYTHON) -m mypy
	$(dir $(PYTHON))lint-imports
	$(PYTHON) -m tests.docs_links

golden: $(READY) ## Rewrite the golden files; read the diff
	$(PYTHON) -m pytest tests/golden --rewrite-golden

zoo: $(READY) ## Make the bundled models and questions again (about an hour)
	$(PYTHON) -m scripts.zoo
	$(PYTHON) -m eval.tasks.generate

clean: ## Remove caches and logs of runs; never the artifacts
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find pipelines eval triton_repo tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## This text
	@awk 'BEGIN {FS = ":.*## "} /^## / {printf "\n%s\n", substr($$0, 4)} \
	  /^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Making $(VENV) (once, some minutes) ..."
	@python3 -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,serve,report,size,sweep,dev]'
	@touch $@

# A target that does not exist: name the nearest one.
%:
	@python3 -c 'import difflib, re, sys; names = re.findall(r"^([a-z][a-z-]*):.*## ", open("Makefile").read(), re.M); \
	near = difflib.get_close_matches("$@", names, 1, 0.5); \
	sys.exit("make: \"$@\" is not a target here." + (f" Did you mean \"make {near[0]}\"?" if near else " `make` lists them."))'
