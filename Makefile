# Every target does its own set-up on a fresh machine: Python 3.10+, a C++17 compiler and make are all it needs.
# Set-up runs once, and again when the build or the pinned versions change.
#   make demo    train on the embedded digits, pack, run natively at every width; then what bits buy on this CPU
#   make test    the tests; `make thorough` those that take seconds, `make slow` the long ones, `make extras-test` those
#                that need optional packages
#   make check   lint, format, types
#   make native-test   the C++ tests of the reader; `make sanitize` the engine under sanitizers against the oracle
#   make arm-test   the engine for 64-bit ARM, cross-compiled and emulated, against the oracle
#   make emulate-test   AVX-512, AVX-VNNI and AMX kernels in software, against the oracle
#   make fuzz    fuzzes both readers, MINUTES=10 each
#   make docs    the documentation site, in build/site; `make coverage` which lines the tests reach
#   make networks   public networks through convert, training, pack and the engine (docs/networks.md)
#   make bench   a joint training step against a plain one; the engine against other engines (docs/results.md)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
FOLDERS := format plan kernels run emulate program include/anyprec
SOURCES := $(foreach folder,$(FOLDERS),$(wildcard native/$(folder)/*.cpp native/$(folder)/*.h native/$(folder)/*.inl))
CPP := $(SOURCES) $(wildcard native/tests/*.cpp native/tests/*.h native/fuzz/*.cpp bench/*.cpp)
# An editable install remembers which folders were packages: a new one needs it renewed.
PACKAGES := $(wildcard src/anyprec/*/__init__.py src/anyprec/*/*/__init__.py)

# Four workers with one thread each, for two cores: much of the time is waiting for servers and processes. A worker
# that dies, of a crash or because a test took longer than its limit, ends the run: xdist would start it anew, and may
# then wait for ever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --max-worker-restart=0 --color=no

.PHONY: setup demo test thorough slow extras-test check format docs coverage networks bench native-test sanitize \
	arm-test emulate-test fuzz clean

setup: $(READY)

# torch comes first and alone, at the one version of constraints.txt: left to the resolver, an open range in some
# other package may bring in gigabytes of GPU libraries.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(SOURCES) $(PACKAGES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation -e '.[train,dev]'
	touch $@

# The picture is drawn where Matplotlib is installed. Asked when the recipe runs, after set-up.
PICTURE = $(shell $(BIN)/python -c 'import matplotlib' 2>/dev/null && echo --picture runs/demo/digits.png)

demo: $(READY)
	$(BIN)/anyprec train digits --out runs/demo --overwrite
	$(BIN)/anyprec calibrate runs/demo --widths 3,5-7
	$(BIN)/anyprec evaluate runs/demo --widths 1-8,32 --save
	$(BIN)/anyprec pack runs/demo --float --out runs/demo/digits.apm
	$(BIN)/anyprec run runs/demo/digits.apm --dataset digits $(PICTURE)
	@printf '\nWhat bits buy on this machine: a VGG for CIFAR-10 that comes with anyprec (118 million multiply-adds)\n'
	$(BIN)/anyprec info
	$(BIN)/anyprec bench cifar10-vgg --bits 1,2,4,8 --rivals none --rounds 15

# The list at the end names what was skipped, and why. Plain asserts: rewriting those of all files costs every worker 16
# seconds; what failed runs once more with values shown.
test: $(READY)
	$(PYTEST) -rs --assert=plain || { $(PYTEST) --lf; exit 1; }

# Whole commands, trainings and servers: continuous integration runs them after the tests.
thorough: $(READY)
	$(PYTEST) -m 'thorough and not slow' -rs --assert=plain || { $(PYTEST) -m 'thorough and not slow' --lf; exit 1; }

slow: $(READY)
	ANYPREC_TEST_LIMIT=14400 $(PYTEST) -m slow -o faulthandler_timeout=3600

# Optional packages, and the tests that `make test` skips without them: every file that asks for one of them. With a
# browser (chromium, chromium-driver) and nginx installed, the tests of the server's page and proxy run, too.
EXTRAS := onnx|onnxruntime|openvino|timm|safetensors|sklearn|kubernetes_validate|selenium
EXTRAS_TESTS = $(shell grep -rlE 'importorskip."($(EXTRAS))|has_ray|\.missing|NGINX' tests --include='test_*.py')

$(VENV)/.extras: pyproject.toml constraints.txt | $(READY) $(VENV)/.networks
	$(PIP) --no-build-isolation -e '.[train,dev,bench,ray]'
	$(PIP) scikit-learn kubernetes-validate safetensors
	touch $@

extras-test: $(READY) $(VENV)/.extras
	$(PYTEST) -m 'not slow' -rs $(EXTRAS_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --color=no -m slow -rs tests/test_ray.py tests/serve/ray

# tests/typed: the public names as a user has them.
check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src tests/typed/user_code.py
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

$(VENV)/.docs: pyproject.toml constraints.txt | $(READY)
	$(PIP) mkdocs-material 'mkdocstrings[python]'
	touch $@

# A broken link or anchor fails. Material prints a note about its own future, which is switched off.
docs: $(READY) $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

coverage: $(READY)
	$(PYTEST) -m 'not slow' --cov=anyprec --cov-report=term --cov-report=html:build/coverage

# Packages that public networks come from. They want torchvision, of which there may be no build for this torch: only
# its Python files are used (tests/networks/torchvision_operators.py), so nothing it depends on is installed.
$(VENV)/.networks: constraints.txt | $(READY)
	$(PIP) --no-deps torchvision timm pytorchcv segmentation-models-pytorch transformers tokenizers
	$(PIP) huggingface_hub safetensors pyyaml regex requests tqdm packaging filelock
	touch $@

networks: $(READY) $(VENV)/.networks
	OMP_NUM_THREADS=1 $(BIN)/python tests/networks/wall.py

bench: $(READY)
	$(PIP) -e '.[train,dev,bench]' --no-build-isolation
	$(BIN)/python bench/train_step.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/engine.py --isa avx2

# The engine without Python, in build folders of its own
NATIVE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DANYPREC_PYTHON=OFF -S .
MINUTES ?= 10

build/native/fuzz_reader: $(READY) $(wildcard native/fuzz/* native/tests/*)
	$(NATIVE) -B build/native -DANYPREC_TESTS=ON -DANYPREC_FUZZ=ON
	$(BIN)/cmake --build build/native
	rm -rf build/native/corpus
	$(BIN)/python -m tarfile -e native/fuzz/corpus.tar.xz build/native
	touch $@

native-test: build/native/fuzz_reader
	build/native/test_reader
	build/native/test_amx
	build/native/fuzz_reader build/native/corpus tests/format/corpus

sanitize: $(READY)
	$(NATIVE) -B build/sanitize -DANYPREC_TESTS=ON -DANYPREC_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	build/sanitize/test_reader
	build/sanitize/test_amx
	build/sanitize/bench_kernels check
	$(BIN)/python tests/run/sanitize.py build/sanitize/anyprec-run

# Installs nothing; where the cross compiler or the emulator is missing, it names the package.
arm-test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/run/arm.py build/arm

# The same for AVX-512, AVX-VNNI and AMX on a CPU without them.
emulate-test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/run/emulate.py build/emulate

fuzz: build/native/fuzz_reader
	mkdir -p build/native/found
	build/native/fuzz_reader --minutes $(MINUTES) --keep build/native/found build/native/corpus tests/format/corpus
	$(BIN)/python tests/format/fuzz_reader.py --minutes $(MINUTES) --keep build/fuzz-findings

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
