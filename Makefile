# make [TARGET] [VARIABLE=VALUE ...]
#
# build          set up VENV and build the extension there; what `make` alone does
# train          train a byte-level language model on Python's own source and sample from it
# test           run the tests, but for those marked slow
# test-all       run all of them
# test-cpus      run `test` three times, as on other processors: with MKL_CBWR=COMPATIBLE, with
#                ATEN_CPU_CAPABILITY=avx2 and with ATEN_CPU_CAPABILITY=default
# test-fla       run those beside FLA and transformers again, with the versions FLA and TRANSFORMERS
# test-vllm      run the tests in the real vLLM on this CPU, with an environment and a build of their
#                own in VENV-vllm; needs Python 3.12, 7 GB and some minutes
# test-gpu       check and time the CUDA kernels on this machine's GPU, in some minutes; after `test`
# sanitize       run the tests of the CPU operators with the address and undefined behaviour
#                sanitizers, in a build of its own
# fuzz           give damaged requests and files to what reads them, MINUTES for each file of
#                tests/fuzz
# test-emulated  run the CUDA kernels on the GPU in software of tests/emulator; needs a CUDA toolkit
#                and an extension built with TORCH_CUDA_ARCH_LIST=9.0a+PTX
# bench          time the operators on this CPU and write benchmarks/results/RESULTS_CPU.md
# ctest          build the C++ library in build/ and run its tests
# archs          compile the CUDA sources alone for every generation of GPUs, where a register spill
#                fails; needs nvcc, no GPU
# wheel          build a wheel for TORCH and PYTHON in an environment of its own, check it in another,
#                and leave it in dist/
# wheels         the same for each of TORCHES and PYTHONS, and an index of dist/; what several wheels
#                have in common is compiled once
# docs           make the pages of docs/ a site, .build/site/index.html; needs no torch, no extension
# lint           check the style of Python, C++ and CUDA, and the workflows
# format         fix what `lint` finds, where ruff and clang-format can
# clean          delete what was built, but for VENV, which took the downloads
# help           print this
#
# VENV=          folder of the virtual environment that make sets up, .venv by default
# PYTHON=        interpreter to set it up with; by default that of the environment there, or the
#                first that works of 3.13, 3.12, 3.11
# TORCH=         torch to build against, one pip requirement; a new PYTHON or TORCH builds anew
# FORCE_CUDA=    1 builds the CUDA kernels without a GPU too, 0 builds for the CPU alone; by default
#                they are built for the GPU of this machine. A build is kept as it was asked for
#                until another is asked for
# TORCHES=       versions of torch for `wheels`, the newest of each minor version supported
# PYTHONS=       interpreters for `wheels`
# FLA=           version of flash-linear-attention for `test-fla`
# TRANSFORMERS=  version of transformers for `test-fla`
# MINUTES=       of `fuzz`, 10 by default
# NPROC=         processes of `train` on this machine, one a GPU; by default one
# TRAIN_ARGS=    arguments for `train`, such as --help
# PYTEST_ARGS=   arguments for pytest in `sanitize` and the targets whose names begin with `test`,
#                but `test-gpu`
# BENCH_ARGS=    arguments for `bench`, such as --help
# GPU_ARGS=      arguments for `test-gpu`, such as --help

VENV ?= .venv
PYTHON ?=
TORCH ?= torch==2.11.0
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?= python3.11 python3.12 python3.13
FORCE_CUDA ?=
FLA ?= 0.5.2
TRANSFORMERS ?= 4.55.4
MINUTES ?= 10
NPROC ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

py := $(VENV)/bin/python
pip := $(py) -m pip --disable-pip-version-check
checksum = $(shell printf '%s' '$(1)' | cksum | cut -d ' ' -f 1)
# Of PYTHON; without it, of the environment that is there.
python := $(if $(PYTHON),$(call checksum,$(PYTHON)),$(or \
	$(patsubst $(VENV)/.python-%,%,$(wildcard $(VENV)/.python-[0-9]*)),$(call checksum,)))
# What the environment asks of setup.py; else what it asked at the last build.
cuda := $(or $(strip $(foreach name,FORCE_CUDA TORCH_CUDA_ARCH_LIST GLA_EXT_CUDA_ARCHS,\
	$(if $($(name)),$(name)='$($(name))'))),$(shell cat .build/cuda 2>/dev/null))
venv_stamp := $(VENV)/.python-$(python)
deps_stamp := $(VENV)/.deps-$(call checksum,$(python) $(TORCH))
fla_stamp := $(VENV)/fla/.done-$(call checksum,$(python) $(TORCH) $(FLA) $(TRANSFORMERS))
vllm_stamp := $(VENV)-vllm/.done
docs_stamp := $(VENV)/.docs-$(python)
built_stamp := .build/.built-$(call checksum,$(VENV) $(python) $(TORCH) $(subst ','\'',$(cuda)))
sources_in = $(shell find $(1) -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
cpp_files := $(call sources_in,csrc tests/cpp examples)
emulator_files := $(call sources_in,tests/emulator)

.PHONY: build train test test-all test-cpus test-fla test-vllm test-gpu sanitize fuzz test-emulated bench \
	ctest archs wheel wheels docs lint format clean help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

build: $(built_stamp)

train: $(built_stamp)
	@$(if $(NPROC),$(VENV)/bin/torchrun --nproc-per-node $(NPROC),$(py)) -m gla_ext.train $(TRAIN_ARGS)

test: $(built_stamp)
	@OMP_NUM_THREADS=1 $(py) -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

test-all: $(built_stamp)
	@OMP_NUM_THREADS=1 $(py) -m pytest -n 2 $(PYTEST_ARGS)

# A cache of inductor's each: it gives one setting the code that it made under another.
test-cpus: $(built_stamp)
	@for setting in MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default; do \
		echo "$$setting" && env $$setting TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.build/inductor/$$setting \
			$(MAKE) test || exit 1; \
	done

test-fla: $(fla_stamp)
	@OMP_NUM_THREADS=1 $(VENV)/fla/bin/python -m pytest -n 2 tests/fla tests/hf $(PYTEST_ARGS)

# gla_ext is installed there, not linked: gla_ext/_C here is built for another torch.
test-vllm: $(vllm_stamp)
	@FORCE_CUDA=0 $(VENV)-vllm/bin/pip install --quiet --no-build-isolation --no-deps .
	@OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest --confcutdir tests/vllm tests/vllm $(PYTEST_ARGS)

test-emulated: $(built_stamp)
	@OMP_NUM_THREADS=1 $(py) tests/emulator/run.py -m pytest -p emulated -n 2 \
		$(or $(PYTEST_ARGS),-m sanitizer)

# Python itself is not built with the sanitizers, so their library comes first. It has blocks left
# at its end: that is no error of ours.
sanitize: $(deps_stamp)
	@FORCE_CUDA=0 GLA_EXT_SANITIZE=1 $(py) setup.py --quiet build --build-lib .build/sanitized
	@LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2 \
		PYTHONPATH=.build/sanitized $(VENV)/bin/pytest -n 2 -m "not slow" \
		$(or $(PYTEST_ARGS),tests/operators tests/modules tests/steps)

# The inputs of a run are others than those of the run before.
fuzz: $(built_stamp)
	@for file in tests/fuzz/test_*.py; do \
		end=$$(($$(date +%s) + 60 * $(MINUTES))); \
		while [ $$(date +%s) -lt $$end ]; do \
			HYPOTHESIS_PROFILE=thorough OMP_NUM_THREADS=1 $(py) -m pytest -q $$file $(PYTEST_ARGS) || exit 1; \
		done; \
	done

test-gpu: $(built_stamp)
	@$(py) benchmarks/check_gpu.py $(GPU_ARGS)

bench: $(built_stamp)
	@$(py) benchmarks/bench_cpu.py $(BENCH_ARGS)

ctest: $(deps_stamp)
	@$(VENV)/bin/cmake -S . -B build -DPython3_EXECUTABLE=$(abspath $(py))
	@$(VENV)/bin/cmake --build build --parallel $$(nproc)
	@$(VENV)/bin/ctest --test-dir build --output-on-failure

archs: $(deps_stamp)
	@for arch in 8.0 9.0a 10.0 12.0; do \
		FORCE_CUDA=1 GLA_EXT_WERROR_SPILLS=1 TORCH_CUDA_ARCH_LIST=$$arch \
			$(py) setup.py --quiet build_ext --cuda-only || exit 1; \
	done

wheel:
	@python=$$(.ci/preflight $(PYTHON)) && "$$python" .ci/build_wheel.py '$(TORCH)'

wheels:
	@pythons=$$(for python in $(PYTHONS); do .ci/preflight $$python || exit 1; done) && \
		set -- $$pythons && "$$1" .ci/build_wheel.py $(TORCHES:%=torch==%) --pythons "$$@"

docs: $(docs_stamp)
	@NO_MKDOCS_2_WARNING=1 $(py) -m mkdocs build --quiet --strict

lint: $(deps_stamp)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(cpp_files) $(emulator_files)
	@$(VENV)/bin/zizmor --offline --quiet .github

format: $(deps_stamp)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/clang-format -i $(cpp_files) $(emulator_files)

clean:
	rm -rf build .build dist *.egg-info gla_ext/_C.*.so gla_ext/_build_info.py

# The lines at the top of this file.
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# .python-* marks a folder as make's own, from before anything is installed there.
$(venv_stamp):
	@if [ -n "$$(ls -A '$(VENV)/' 2>/dev/null)" ] && ! ls '$(VENV)'/.python-* >/dev/null 2>&1; then \
		echo "$(VENV) was not made by this Makefile, which would clear it:" \
			"choose another folder, as in 'make VENV=.venv-gla', or remove it." >&2; exit 1; \
	fi
	@python=$$(.ci/preflight $(PYTHON)) && echo "Making $(VENV) with $$python" && \
		mkdir -p '$(VENV)' && find '$(VENV)/' -mindepth 1 -delete && \
		touch '$(VENV)/.python-unfinished' && "$$python" -m venv '$(VENV)' && \
		mv '$(VENV)/.python-unfinished' $@

# What pyproject.toml asks for to build, train, test and lint, and the torch to build against.
$(deps_stamp): $(venv_stamp) pyproject.toml
	@rm -f $(VENV)/.deps-*
	@echo 'Installing $(TORCH) and the other dependencies into $(VENV)'
	@$(py) -c 'import itertools, tomllib; \
		p = tomllib.load(open("pyproject.toml", "rb")); \
		extras = p["project"]["optional-dependencies"]; \
		del extras["docs"]; \
		names = [*p["build-system"]["requires"], *itertools.chain(*extras.values())]; \
		print(*(n for n in names if not n.startswith("gla_ext")), sep="\n")' > $(VENV)/requirements.txt
	@$(pip) install '$(TORCH)' -r $(VENV)/requirements.txt
	@touch $@

# A second environment that sees the first, but for what is installed over it.
$(fla_stamp): $(built_stamp)
	@$(py) -m venv --clear $(VENV)/fla
	@$(py) -c 'import sysconfig; \
		print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> "$$($(VENV)/fla/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth"
	@$(VENV)/fla/bin/python -m pip --disable-pip-version-check install --quiet \
		'transformers==$(TRANSFORMERS)' 'flash-linear-attention==$(FLA)' 'fla-core==$(FLA)' \
		'datasets<4.1'  # newer ones need another huggingface_hub than transformers 4
	@touch $@

$(vllm_stamp): tests/vllm/requirements.txt
	@python=$$(.ci/preflight $(or $(PYTHON),python3.12)) && "$$python" -m venv --clear $(VENV)-vllm
	@$(VENV)-vllm/bin/pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

$(docs_stamp): $(venv_stamp) pyproject.toml
	@rm -f $(VENV)/.docs-*
	@$(py) -c 'import tomllib; \
		p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*p["project"]["optional-dependencies"]["docs"], sep="\n")' > $(VENV)/docs.txt
	@$(pip) install --quiet -r $(VENV)/docs.txt
	@touch $@

# One stamp for all environments, as there is one gla_ext/_C that the last of them has built.
$(built_stamp): $(deps_stamp) $(cpp_files) setup.py gla_ext/_version.py
	@mkdir -p .build && rm -f .build/.built-* .build/failed
	@for_gpu="$(cuda)"; if [ -z "$$for_gpu" ]; then \
		if $(py) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
		then for_gpu=GLA_EXT_CUDA_ARCHS=native; \
		else for_gpu=FORCE_CUDA=0 && echo 'No GPU here: building for the CPU alone. FORCE_CUDA=1 make builds for both.'; fi; fi; \
	{ eval "env $$for_gpu $(pip) install --verbose --no-build-isolation --no-deps --editable ." 2>&1 || \
		touch .build/failed; } | tee .build/build.log | sed -nu \
		-e 's/^ *\(gla_ext: .*\)/\1/p' -e 's|^ *\(\[[0-9/]*\]\) .* -c .*/\(csrc/[^ ]*\) -o .*|\1 \2|p'
	@if [ -e .build/failed ]; then cat .build/build.log >&2; exit 1; fi
	@echo "$(cuda)" > .build/cuda
	@touch $@
