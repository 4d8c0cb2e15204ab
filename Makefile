# Any key=value after a target is an override of the configuration: make build quant=fp8 build.max_batch_size=64
# PYTHON=python3 uses an environment you have (a container) instead of making .venv.

VENV := .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
# The first for which all packages exist: numpy 1 has no wheels for 3.13.
SYSTEM_PYTHON = $(or $(shell for each in python3 python3.12 python3.11; do \
  $$each -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$each && break; done),\
  $(error python3 is $(shell python3 --version 2>&1), and there is no python3.12 or python3.11. Install Python 3.11 or 3.12 with its venv module))
# Before there is an environment, the system's Python is enough for help and for refusing words.
ANY_PYTHON = $(if $(wildcard $(PYTHON)),$(PYTHON),$(SYSTEM_PYTHON))

.DEFAULT_GOAL := help
COMMANDS := all build evaluate fidelity diagnose compare sweep smallest stage verify repository serve benchmark report plan size simulate calibrate \
  doctor config init prune nightly image shell manifests scripts migrate
TARGETS := setup setup-edge test test-all test-under-load torture test-gpu test-real test-peers test-modelopt check golden zoo clean help
# Three on two processors, because servers and campaigns often wait.
# Files in their own order: those with few tests, which xdist would start last, are among the longest.
WHOLE := tests --ignore=tests/gpu --ignore=tests/gpu_trtllm --ignore=tests/real --ignore=tests/peers --numprocesses=3 --dist=loadfile --no-loadscope-reorder
ONCE_MORE := --reruns=1 -rR --max-worker-restart=0
# Commands that tests start would otherwise compile the sources each time, where the environment forbids to keep bytecode.
test test-all test-under-load: export PYTHONDONTWRITEBYTECODE :=
INSIDE := $(VENV)/.ready packages
# Words that are no target of the development part below: one command, or something to refuse.
# "make help build" is the help of build, not help and then a build.
WORDS := $(filter-out $(if $(word 2,$(MAKECMDGOALS)),$(filter-out help,$(TARGETS)),$(TARGETS)) $(INSIDE),$(MAKECMDGOALS))

# Of these nothing or little is imported: 40 % of the sources of packages.
RARE := databricks|fontTools|mlflow|mypy|networkx|nltk|openai|pip|pygments|sklearn|sympy/physics|torch/_inductor|torch/testing|transformers/models

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Making $(VENV) (once, some minutes) ..."
	@$(SYSTEM_PYTHON) -m venv $(VENV)
# pip of Python 3.11's venv takes three times as long to resolve versions.
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'pip>=25' || echo 'Continuing with the installed pip.'
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[cpu,serve,report,size,sweep,dev]'
# pip compiles one file after the other, and what is rarely imported too; files for another Python do not compile, with pip neither
	@$(VENV)/bin/python -W ignore -m compileall -qq -j 0 -x 'site-packages/(.*/tests?|$(RARE))/' $(VENV)/lib || true
	@touch $@

ifeq ($(filter-out $(COMMANDS),$(WORDS))$(word 2,$(WORDS)),)

.PHONY: $(COMMANDS)
$(COMMANDS): $(READY)
	@MAKE_PID=$$PPID $(PYTHON) -m pipelines --from-make $@

## Develop
.PHONY: packages setup setup-edge test test-all test-under-load torture test-gpu test-real test-peers test-modelopt check golden zoo clean help
setup: $(READY) ## Make the virtual environment (every other target does it by itself)

setup-edge: ## Make .venv-edge with TensorRT Edge-LLM's exporter, for engine=tensorrt_edge
	@SYSTEM_PYTHON=$(SYSTEM_PYTHON) scripts/setup_edge.sh

test: check ## What holds every promise, end to end on the real engine and server, in 16 minutes on two processors
	$(PYTHON) -m tests.contained $(PYTHON) -m pytest $(WHOLE) -m "not thorough" --hypothesis-profile=ci $(ONCE_MORE)

test-all: ## Everything that needs no GPU: half an hour, with Slurm and a browser where they can be installed
	@$(MAKE) --no-print-directory -j 2 packages check
	$(PYTHON) -m tests.contained $(PYTHON) -m pytest $(WHOLE) $(ONCE_MORE)

test-under-load: $(READY) packages ## All of them three times in a row, beside two busy processes; rounds=3
	$(PYTHON) -m tests.contained $(PYTHON) -m tests.under_load $(or $(rounds),3) $(WHOLE)

packages: $(READY)
	@scripts/test_packages.sh $(PYTHON)

torture: $(READY) ## Plant failures for half an hour and print what was survived; seed=1 minutes=30
	@$(PYTHON) -m tests.contained $(PYTHON) -m tests.torture $(if $(seed),--seed=$(seed)) $(if $(minutes),--minutes=$(minutes))

test-gpu: $(READY) ## The tests that need a GPU; fails if it ran none
	$(PYTHON) -m tests.gpu_lane

test-real: $(READY) ## A real model of packages through everything (half an hour); fails if it ran no test
	$(PYTHON) -m tests.lane real

test-peers: $(READY) ## Folders that other quantizers make, taken over; fails if it ran no test
	$(PYTHON) -m tests.lane peers

test-modelopt: ## Compression tests with ModelOpt 0.37.0, the version TensorRT-LLM 1.2.1 pins
	@SYSTEM_PYTHON=$(SYSTEM_PYTHON) scripts/test_modelopt_037.sh

check: $(READY) ## ruff, mypy, import contracts, links in the docs
	$(PYTHON) -m ruff check pipelines eval triton_repo tests scripts docker
	$(PYTHON) -m ruff format --check pipelines eval triton_repo tests scripts docker
	$(PYTHON) -m mypy
	$(dir $(PYTHON))lint-imports
	$(PYTHON) -m tests.docs_links

golden: $(READY) ## Rewrite the golden files; read the diff
	$(PYTHON) -m pytest tests/golden --rewrite-golden

zoo: $(READY) ## Make the bundled models and questions again (over an hour)
	$(PYTHON) -m scripts.zoo
	$(PYTHON) -m scripts.bundled_tasks

clean: ## Remove caches and logs of runs; never the artifacts
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find pipelines eval triton_repo tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## This text
	@$(ANY_PYTHON) -m pipelines --help
	@awk 'BEGIN {FS = ":.*## "} /^## / {printf "\n%s\n", substr($$0, 4)} \
	  /^[a-z][a-z-]*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

else

# An unknown word, or two commands: nothing but the program runs, which refuses them and says what may have been meant.
# (`make config build` are two words that it takes.)
.PHONY: words
words: $(if $(filter config,$(firstword $(WORDS))),$(READY))
	@MAKE_TARGETS='$(TARGETS)' $(ANY_PYTHON) -m pipelines --from-make $(foreach word,$(WORDS),'$(subst ','\'',$(word))')
%: words
	@:
$(MAKEFILE_LIST) pyproject.toml constraints.txt: ;

endif
