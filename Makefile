# Every target sets up what it needs in .venv; the second call finds it there.  `make demo ARGS="--help"`.
PYTHON ?= python3
# `make test TORCH=` leaves torch out: the tests of torch tensors are then skipped and listed.
TORCH ?= torch==2.13.0
PIP = -m pip install -qq --disable-pip-version-check
PY = .venv/bin/python
PY065 = .venv-numba065/bin/python
PYCUDA = .venv-cuda/bin/python
PYTEST = -m pytest -n 2

.PHONY: demo test test-main test-numba065 sim ptx bench families lint pyright clean

demo: .venv/demo.stamp
	@.venv/bin/kvcompile demo $(ARGS)

# The main suite runs last, so that its closing line is the run's.
test: lint test-numba065 ptx sim test-main

test-main: .venv/test.stamp
	$(PY) $(PYTEST) $(ARGS)

test-numba065: .venv-numba065/test.stamp
	$(PY065) $(PYTEST) tests/test_kernels.py

# Every CUDA kernel in Numba's simulator, which has to be chosen before Numba is imported.
sim: .venv-cuda/test.stamp
	NUMBA_ENABLE_CUDASIM=1 $(PYCUDA) $(PYTEST) tests/test_cuda_sim.py tests/test_cuda_sim_pack.py

# Every CUDA kernel compiled and assembled for four GPUs; none has to be there.
ptx: .venv-cuda/test.stamp
	$(PYCUDA) $(PYTEST) tests/test_ptx.py

bench: .venv/demo.stamp
	@$(PY) -m bench.bench_build $(ARGS)

# docs/families.md: every model in every deployment, proved and moved.
families: .venv/demo.stamp
	@.venv/bin/kvcompile families --lines tests/data/families.txt --write docs/families.md

lint: .venv/test.stamp
	.venv/bin/ruff check -q .
	.venv/bin/mypy

# Not part of `make test`: its Node.js is a download of 200 MB.
pyright: .venv/test.stamp
	@$(PY) $(PIP) 'pyright[nodejs]'
	.venv/bin/pyright --pythonpath $(PY)

clean:
	rm -rf .venv .venv-numba065 .venv-cuda build *.egg-info .*_cache .hypothesis

.venv/demo.stamp: pyproject.toml setup.cfg tools/system.py
	@$(PYTHON) tools/system.py
	@echo "setting up .venv (the first time only)"
	@$(PYTHON) -m venv .venv
	@$(PY) $(PIP) -e './[mooncake,cli]'
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
