# make build | train | test | test-fla | test-gpu | test-emulated | bench | ctest | archs | wheel | wheels | docs | lint | format | clean
#
# test-gpu, after test, checks and times the CUDA kernels on this machine's GPU, in some minutes.
# test-emulated runs the CUDA kernels without a GPU, on the emulator of tests/emulator; it needs a CUDA
# toolkit, and an extension built with TORCH_CUDA_ARCH_LIST=9.0a+PTX.
# wheel builds a wheel for TORCH and PYTHON in an environment of its own, checks it in another, and leaves it in dist/;
# wheels does for each of TORCHES.
# test-fla runs the tests beside FLA and transformers again, with the oldest of them that are supported.
#
# PYTHON=  interpreter for .venv; default: the first working one of 3.13, 3.12, 3.11
# TORCH=   torch to build against, one pip requirement; changing PYTHON or TORCH rebuilds
# TORCHES=  versions of torch for wheels; default: the newest of each minor version that is supported
# FLA=, TRANSFORMERS=  versions for test-fla
# TRAIN_ARGS=, PYTEST_ARGS=, BENCH_ARGS=, GPU_ARGS=  passed on
PYTHON ?=
TORCH ?= torch==2.11.0
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
FLA ?= 0.5.2
TRANSFORMERS ?= 4.55.4
TRAIN_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

py := .venv/bin/python
pip := $(py) -m pip --disable-pip-version-check
checksum = $(shell printf '%s' '$(1)' | cksum | cut -d ' ' -f 1)
venv_stamp := .venv/.python-$(call checksum,$(PYTHON))
deps_stamp := .venv/.deps-$(call checksum,$(PYTHON) $(TORCH))
fla_stamp := .venv/fla/.done-$(call checksum,$(PYTHON) $(TORCH) $(FLA) $(TRANSFORMERS))
docs_stamp := .venv/.docs-$(call checksum,$(PYTHON))
built_stamp := .venv/.built-$(call checksum,$(PYTHON) $(TORCH))
sources_in = $(shell find $(1) -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
cpp_files := $(call sources_in,csrc tests/cpp examples)
emulator_files := $(call sources_in,tests/emulator)

.PHONY: build train test test-fla test-gpu test-emulated bench ctest archs wheel wheels docs lint format clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

build: $(built_stamp)

train: $(built_stamp)
	@$(py) -m gla_ext.train $(TRAIN_ARGS)

test: $(built_stamp)
	@OMP_NUM_THREADS=1 $(py) -m pytest -n 2 $(PYTEST_ARGS)

test-fla: $(fla_stamp)
	@OMP_NUM_THREADS=1 .venv/fla/bin/python -m pytest -n 2 tests/test_fla*.py tests/test_hf*.py $(PYTEST_ARGS)

test-emulated: $(built_stamp)
	@OMP_NUM_THREADS=1 $(py) tests/emulator/run.py -m pytest -p emulated -n 2 \
		$(or $(PYTEST_ARGS),-m sanitizer)

test-gpu: $(built_stamp)
	@$(py) benchmarks/check_gpu.py $(GPU_ARGS)

bench: $(built_stamp)
	@$(py) benchmarks/bench_cpu.py $(BENCH_ARGS)

ctest: $(deps_stamp)
	@.venv/bin/cmake -S . -B build -DPython3_EXECUTABLE=$(CURDIR)/$(py)
	@.venv/bin/cmake --build build --parallel $$(nproc)
	@.venv/bin/ctest --test-dir build --output-on-failure

# The CUDA sources alone, for every generation of GPUs; a register spill fails. Needs nvcc, no GPU.
archs: $(deps_stamp)
	@for arch in 8.0 9.0a 10.0; do \
		FORCE_CUDA=1 GLA_EXT_WERROR_SPILLS=1 TORCH_CUDA_ARCH_LIST=$$arch \
			$(py) setup.py --quiet build_ext --cuda-only || exit 1; \
	done

wheel:
	@python=$$(.ci/preflight $(PYTHON)) && "$$python" .ci/build_wheel.py '$(TORCH)'

wheels:
	@for torch in $(TORCHES); do $(MAKE) wheel TORCH="torch==$$torch" || exit 1; done

# The pages of docs/ as a site, .build/site/index.html. Needs neither torch nor the extension.
docs: $(docs_stamp)
	@NO_MKDOCS_2_WARNING=1 $(py) -m mkdocs build --quiet --strict

lint: $(deps_stamp)
	@.venv/bin/ruff check .
	@.venv/bin/clang-format --dry-run -Werror $(cpp_files) $(emulator_files)

format: $(deps_stamp)
	@.venv/bin/ruff check --fix .
	@.venv/bin/clang-format -i $(cpp_files) $(emulator_files)

# Leaves .venv, which took the downloads.
clean:
	rm -rf build .build dist *.egg-info gla_ext/_C.*.so gla_ext/_build_info.py .venv/.built-*

$(venv_stamp):
	@python=$$(.ci/preflight $(PYTHON)) && echo "Making .venv with $$python" && \
		"$$python" -m venv --clear .venv
	@touch $@

# What pyproject.toml asks for to build, train, test and lint, and the torch to build against.
$(deps_stamp): $(venv_stamp) pyproject.toml
	@rm -f .venv/.deps-* .venv/.built-*
	@echo 'Installing $(TORCH) and the other dependencies into .venv'
	@$(py) -c 'import itertools, tomllib; \
		p = tomllib.load(open("pyproject.toml", "rb")); \
		extras = p["project"]["optional-dependencies"]; \
		del extras["docs"]; \
		names = [*p["build-system"]["requires"], *itertools.chain(*extras.values())]; \
		print(*(n for n in names if not n.startswith("gla_ext")), sep="\n")' > .venv/requirements.txt
	@$(pip) install '$(TORCH)' -r .venv/requirements.txt
	@touch $@

# A second environment that sees the first, but for what is installed over it.
$(fla_stamp): $(built_stamp)
	@$(py) -m venv --clear .venv/fla
	@$(py) -c 'import sysconfig; \
		print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> "$$(.venv/fla/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth"
	@.venv/fla/bin/python -m pip --disable-pip-version-check install --quiet \
		'transformers==$(TRANSFORMERS)' 'flash-linear-attention==$(FLA)' 'fla-core==$(FLA)'
	@touch $@

$(docs_stamp): $(venv_stamp) pyproject.toml
	@rm -f .venv/.docs-*
	@$(py) -c 'import tomllib; \
		p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*p["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv/docs.txt
	@$(pip) install --quiet -r .venv/docs.txt
	@touch $@

$(built_stamp): $(deps_stamp) $(cpp_files) setup.py gla_ext/_version.py
	@rm -f .venv/.built-*
	@echo 'Building the extension; the first time takes some minutes on two cores'
	@$(pip) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
