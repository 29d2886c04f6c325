# Each target makes what it needs and repeats nothing that is done.
# Needed beforehand: Python >= 3.10, a C++ compiler and make. The CUDA compiler comes from PyPI with torch.
# Some of the tests: make test PYTEST="tests/test_relu.py".
PYTHON ?= python3
TORCH ?= torch==2.11.0
COMPILER ?= $(shell sed -n 's/^TOOLKIT = //p' lltm_ext/_version.py)

# What `make wheels` builds, each with the pythonX.Y on PATH: all of wheels.json except CUDA 12, whose compiler is not on PyPI.
# One of them: make wheels WHEELS=3.12-torch2.11.
WHEELS ?= $(shell sed -n '/"12\./d; s/.*"wheel": "\([^"]*\)".*/\1/p' tools/wheels.json)
PLATFORM ?= auto
# The torches that `make matrix` tries the portable wheel with.
MATRIX ?= 2.10 2.11 2.12 2.13 2.14 2.15

BIN := .venv/bin
TOOLS := .venv/.tools
LINT := .venv/.lint
INSTALLED := .venv/.installed
INSTALLED_WHEEL := .venv/.installed-wheel
# Two at a time, the tests of a file one after the other, and the files in the order of tests/conftest.py.
TEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# For make test-asan: libraries that must be loaded before Python's, and the tests of the ops.
SANITIZERS = $(foreach library,asan ubsan stdc++,$(shell c++ -print-file-name=lib$(library).so))
SANITIZED := $(patsubst %,tests/test_%.py,sanitizers no_storage written_tensors threads sigmoid relu round gemm \
  fake_quantize stochastic_round lltm_cell lltm lstm reset recurrence recurrent cells)
WHEEL := dist/.checked
WHEELHOUSE := wheelhouse
SOURCES := $(shell find src) $(wildcard lltm_ext/*.py lltm_ext/*/*.py lltm_ext/*/*.pyi tools/*.py *.py) MANIFEST.in

.PHONY: test test-all test-asan test-stream test-deterministic test-sanitizer fuzz soak demo docs bench wheel wheels index matrix lint

test: $(INSTALLED)
	@echo "== tests: all of them take about five minutes on two cores without a GPU"
	$(TEST) -m "not packaging and not compiles" --examples=450 --soak-seconds=5 $(PYTEST)
	@echo "Left out: the tests that compile or install. All tests, with the wheel for all GPUs: make test-all"

test-all: $(INSTALLED_WHEEL)
	$(TEST) $(PYTEST)

fuzz: $(INSTALLED)
	$(BIN)/pytest tests/fuzz --examples=10000 $(PYTEST)

# The CPU code, instrumented. Without leaks, because Python itself leaks; without tests that trace more than they call,
# or load cuDNN, which does not find its parts then: the sanitizer's dlopen does not look where the caller's RPATH says.
test-asan: $(INSTALLED)
	LLTM_EXT_CUDA=0 CXX=$(CURDIR)/tools/sanitized-c++ $(BIN)/python setup.py -q \
	  build_py --build-lib build/sanitized build_ext --build-lib build/sanitized --build-temp build/sanitized-objects
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH=$(CURDIR)/build/sanitized \
	  $(TEST) -k "not compile and not opcheck and not export and not on_cuda" $(or $(PYTEST),$(SANITIZED))

# Every test on a GPU, behind other work on a stream that is not the default one.
test-stream: $(INSTALLED)
	$(TEST) --pass side-stream $(PYTEST)

# Every test with deterministic algorithms, where new memory is filled with NaN.
test-deterministic: $(INSTALLED)
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(TEST) --pass deterministic $(PYTEST)

# Every op and algorithm in small sizes under compute-sanitizer, which comes with the CUDA toolkit, on a GPU. Not
# initcheck: it does not see what TMA writes. Where memory is NaN before it is written: test-deterministic.
test-sanitizer: $(INSTALLED)
	for tool in memcheck racecheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m lltm_ext selftest || exit 1; \
	done

soak: $(INSTALLED)
	$(BIN)/pytest tests/test_soak.py --soak-seconds=2000 -s $(PYTEST)

demo: $(INSTALLED)
	$(BIN)/python examples/char_lm.py

docs: $(INSTALLED)
	$(BIN)/pip install -q --group docs
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo build/docs/index.html

bench: $(INSTALLED)
	$(BIN)/python -c "import time, torch; start = time.perf_counter(); import lltm_ext; \
	  print(f'import lltm_ext: {1e3 * (time.perf_counter() - start):.0f} ms after import torch')"
	$(BIN)/python benchmarks/harness.py run

wheel: $(WHEEL)
	@ls dist/*

wheels: $(WHEELS:%=$(WHEELHOUSE)/.%)
	@$(MAKE) --no-print-directory index

index:
	$(PYTHON) tools/wheels.py publish $(WHEELHOUSE)

matrix: $(WHEELHOUSE)/.portable-torch2.11
	$(BIN)/python tools/matrix.py $(WHEELHOUSE)/*-py3-none-*.whl $(MATRIX)

lint: $(LINT)
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy
	find src include examples tests/emulation tools -name '*.h' -o -name '*.cpp' -o -name '*.cu*' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

$(TOOLS): pyproject.toml
	@echo "== .venv: torch and the CUDA compiler (the first time: some 3 GB to download)"
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH) $(COMPILER) --group build
	@touch $@

$(LINT): $(TOOLS)
	$(BIN)/pip install -q --group lint
	@touch $@

$(INSTALLED): $(TOOLS) $(SOURCES)
	@echo "== lltm_ext: compiling for this machine what is new, and installing (the first time: minutes)"
	env $$($(BIN)/python tools/here.py) $(BIN)/pip install -q --no-build-isolation ".[test,demo,bench]"
	@rm -f $(INSTALLED_WHEEL)
	@touch $@

$(INSTALLED_WHEEL): $(WHEEL)
	$(BIN)/pip install -q --force-reinstall --no-deps dist/*.whl
	$(BIN)/pip install -q "$$(echo ./dist/*.whl)[test,demo,bench]"
	@touch $(INSTALLED) $@

# In isolation, as for someone who installs the sdist: pip downloads torch and the compiler again, for the build only.
$(WHEEL): export TORCH_CUDA_ARCH_LIST ?= all
$(WHEEL): $(TOOLS) $(SOURCES)
	@echo "== dist: the sdist, and the wheel for all GPUs from it (docs/install.md says how long it takes)"
	rm -rf dist && $(BIN)/python setup.py -q sdist
	SOURCE_DATE_EPOCH=315532800 $(BIN)/pip wheel -q --no-deps -w dist dist/*.tar.gz
	$(BIN)/python tools/check_wheel.py dist/*.whl
	@touch $@

$(WHEELHOUSE)/.sdist: $(TOOLS) $(SOURCES)
	$(BIN)/pip install -q --group wheels
	rm -f $(WHEELHOUSE)/*.tar.gz && $(BIN)/python setup.py -q sdist --dist-dir $(WHEELHOUSE)
	@touch $@

$(WHEELHOUSE)/.%: export TORCH_CUDA_ARCH_LIST ?= all
$(WHEELHOUSE)/.%: $(WHEELHOUSE)/.sdist
	@echo "== wheelhouse: the wheel for Python and torch $* (two environments of some 5 GB, one after the other)"
	$(BIN)/python tools/wheels.py build $* --sdist $(WHEELHOUSE)/*.tar.gz --platform $(PLATFORM) \
	  --compiler $(COMPILER) --pytest="$(PYTEST)"
	@touch $@
