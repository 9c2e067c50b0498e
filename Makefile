# Every target sets up what it needs in .venv; the second call finds it there.  `make demo ARGS="--help"`.
PYTHON ?= python3
# `make test TORCH=` leaves torch out: the tests of torch tensors are then skipped and listed.
TORCH ?= torch==2.13.0
PIP = -m pip install -qq --disable-pip-version-check
PY = .venv/bin/python
PY065 = .venv-numba065/bin/python
PYCUDA = .venv-cuda/bin/python
PYTEST = -m pytest -n 2

.PHONY: demo test test-main test-numba065 sim ptx bench families soak mutants lint pyright test-vllm bench-vllm clean

demo: .venv/demo.stamp
	@.venv/bin/kvcompile demo $(ARGS)

# The main suite runs last, so that its closing line is the run's.
test: lint test-numba065 ptx sim test-main

test-main: .venv/test.stamp
	$(PY) $(PYTEST) $(ARGS)

# The oldest Numba that is supported: what runs compiled code, nothing else.
KERNEL_TESTS = $(addprefix tests/test_,jit.py sort.py descriptors.py cases.py chunks.py)
test-numba065: .venv-numba065/test.stamp
	$(PY065) $(PYTEST) $(KERNEL_TESTS) -k "not torch"

# Every CUDA kernel in Numba's simulator, which has to be chosen before Numba is imported.
sim: .venv-cuda/test.stamp
	NUMBA_ENABLE_CUDASIM=1 $(PYCUDA) $(PYTEST) tests/test_cuda_sim*.py

# Every CUDA kernel compiled and assembled for four GPUs; none has to be there.
ptx: .venv-cuda/test.stamp
	$(PYCUDA) $(PYTEST) tests/test_ptx.py

# All figures of docs/performance.md; `make bench ARGS="build small --compare old.json"` for some of them.
bench: .venv/bench.stamp
	@$(PY) -m bench --picture docs/performance.svg $(ARGS)

# docs/families.md: every model in every deployment, proved and moved.
families: .venv/demo.stamp
	@.venv/bin/kvcompile families --lines tests/data/families.txt --write docs/families.md

# The long part of the tests, with figures: `make soak ARGS=faults` for one of its parts.
soak: .venv/test.stamp
	@GLOG_minloglevel=3 $(PY) tools/soak.py $(ARGS)

# Named faults, planted one at a time in a copy: prints killed and survived.
mutants: .venv/test.stamp
	@$(PY) tools/mutants.py $(ARGS)

lint: .venv/test.stamp
	.venv/bin/ruff check -q .
	.venv/bin/mypy

# Not part of `make test`: its Node.js is a download of 200 MB.
pyright: .venv/test.stamp
	@$(PY) $(PIP) 'pyright[nodejs]'
	.venv/bin/pyright --pythonpath $(PY)

# vLLM's own tests with the builder installed, then ours against the real vLLM (docs/vllm.md). Python >= 3.11, no GPU.
# The one deselected test patches vLLM's inner function group_concurrent_contiguous, which the builder does not call.
VLLM = 0.33.0
VLLM_UNIT = tests/v1/kv_connector/unit
VLLM_TESTS = $(addprefix $(VLLM_UNIT)/test_mooncake_connector,.py _hma.py _hybrid_mamba.py)
VLLM_DESELECT = $(VLLM_UNIT)/test_mooncake_connector_hybrid_mamba.py::test_build_transfer_params_uses_non_overlapping_physical_pages
PYVLLM = .venv-vllm/bin/python

test-vllm: .venv-vllm/test.stamp
	cd .venv-vllm/upstream && PYTHONPATH=.:$(CURDIR)/tests/vllm ../bin/python -m pytest -q -p stand_in -p installed \
	  -p no:cacheprovider -p no:hypothesispytest -W ignore --rootdir=. --confcutdir=$(VLLM_UNIT) $(VLLM_TESTS) --deselect $(VLLM_DESELECT)
	$(PYVLLM) -m pytest -p no:cacheprovider -W ignore -n 2 tests/vllm $(ARGS)

bench-vllm: .venv-vllm/test.stamp
	@$(PYVLLM) -m bench.bench_vllm $(ARGS)

.venv-vllm/test.stamp: tests/vllm/requirements.txt tests/vllm/opt-125m.json pyproject.toml setup.cfg
	@echo "setting up .venv-vllm: vLLM $(VLLM) without its CUDA dependencies (the first time only, about 1.5 GB)"
	@$(PYTHON) tools/system.py
	@$(PYTHON) -m venv .venv-vllm
	@$(PYVLLM) $(PIP) -r tests/vllm/requirements.txt
	@$(PYVLLM) $(PIP) --no-deps vllm==$(VLLM)
	@VLLM_VERSION_OVERRIDE=$(VLLM) VLLM_TARGET_DEVICE=empty $(PYVLLM) -m pip download -qq --disable-pip-version-check \
	  --no-deps --no-build-isolation --no-binary vllm -d .venv-vllm/sdist vllm==$(VLLM)
	@mkdir -p .venv-vllm/upstream/facebook/opt-125m
	@tar -xzf .venv-vllm/sdist/vllm-$(VLLM).tar.gz -C .venv-vllm/upstream --strip-components=1 vllm-$(VLLM)/tests
	@cp tests/vllm/opt-125m.json .venv-vllm/upstream/facebook/opt-125m/config.json
	@printf '[pytest]\n' > .venv-vllm/upstream/pytest.ini
	@$(PYVLLM) $(PIP) --no-deps -e ./
	@touch $@

clean:
	rm -rf .venv .venv-numba065 .venv-cuda .venv-vllm build *.egg-info .*_cache .hypothesis

.venv/demo.stamp: pyproject.toml setup.cfg tools/system.py
	@$(PYTHON) tools/system.py
	@echo "setting up .venv (the first time only)"
	@$(PYTHON) -m venv .venv
	@$(PY) $(PIP) -e './[mooncake,cli]'
	@touch $@

.venv/bench.stamp: .venv/demo.stamp
	@$(PY) $(PIP) -e './[mooncake,cli,bench]'
	@touch $@

.venv/test.stamp: .venv/demo.stamp
	@echo "adding the test tools and $(or $(TORCH),no torch) to .venv (the first time only)"
	@$(PY) $(PIP) -e './[mooncake,cli,dev]' $(TORCH)
	@touch $@

.venv-numba065/test.stamp: pyproject.toml setup.cfg
	@echo "setting up .venv-numba065 (the first time only)"
	@$(PYTHON) tools/system.py
	@$(PYTHON) -m venv .venv-numba065
	@$(PY065) $(PIP) -e './[test]' numba==0.65.0
	@touch $@

.venv-cuda/test.stamp: pyproject.toml setup.cfg
	@echo "setting up .venv-cuda: Numba's compiler for GPUs, to check kernels without one (the first time only)"
	@$(PYTHON) tools/system.py
	@$(PYTHON) -m venv .venv-cuda
	@$(PYCUDA) $(PIP) -e './[cuda-check]'
	@touch $@
