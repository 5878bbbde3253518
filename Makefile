# Everything happens in .venv; nothing is installed anywhere else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("{}.{}".format(*sys.version_info[:2]))' 2>/dev/null)
# Another Python makes another environment.
STAMP := $(VENV)/.installed-$(VERSION)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo demo-full try test quick test-no-torch test-slow check docs bench bundle validate verifier fuzz crash mutation protos clean

# A Python outside the range is told so before anything is downloaded.
IN_RANGE = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "this needs Python 3.11 to 3.13, and $(PYTHON) is {}.{}: make PYTHON=/usr/bin/python3".format(*v))'

$(STAMP): pyproject.toml constraints.txt
	@$(IN_RANGE)
	@echo "setting up $(VENV): the pinned packages of constraints.txt (a few minutes, about 2 GB; 5 GB with CUDA)"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[agent,coordinator,dev,oracles]'
	touch $(STAMP)

demo: $(STAMP)  ## three hospitals, one coordinator, the main job, end to end; results in demo-out/
	$(BIN)/python -m deploy.demo --out demo-out

demo-full: $(STAMP)  ## the same with every mechanism
	$(BIN)/python -m deploy.demo --full --out demo-out

PORT ?= 11112
try: $(STAMP)  ## the demo; then a coordinator and a hospital go on running, to be tried in a browser, until Ctrl-C
	@$(BIN)/python -m deploy.demo --serve --port $(PORT) --out demo-out

# One worker more than processors: many tests wait for a process that they started. The longest files come first, as
# tests/conftest.py sorts them, and not those with the most tests (--no-loadscope-reorder).
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
test: $(STAMP)  ## every test but the slow ones; a file's tests stay in one process, which shares what they set up
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=60 --durations-min=5

quick: $(STAMP)  ## the tests of the rooms that differ from the branch main; not of what imports them
	$(BIN)/python -m tests.quick

NO_TORCH := .venv-no-torch
$(NO_TORCH)/.installed-$(VERSION): pyproject.toml constraints.txt
	@$(IN_RANGE)
	$(PYTHON) -m venv --clear $(NO_TORCH)
	$(NO_TORCH)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[coordinator,dev]'
	@! $(NO_TORCH)/bin/python -c 'import torch' 2>/dev/null || { echo "torch came along: the coordinator must do without"; exit 1; }
	touch $(NO_TORCH)/.installed-$(VERSION)

test-no-torch: $(NO_TORCH)/.installed-$(VERSION)  ## the coordinator's side as it is installed, with PYTHON=python3.13 or another; what needs an agent skips
	$(NO_TORCH)/bin/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/coordinator tests/policies tests/protos policies protos

test-slow: $(STAMP)  ## the long forms
	$(BIN)/python -m pytest -m slow --hypothesis-profile=roaming

check: $(STAMP) docs  ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p policies -p protos -p agent -p coordinator -p deploy.demo -p deploy.bundle -p deploy.reproduction -p deploy.phantoms -p deploy.docs.reference -m deploy.docs.conf -m deploy.docs.site -m deploy.verifier -m deploy.validate
	$(BIN)/lint-imports
	$(BIN)/deptry --no-ansi agent coordinator policies protos
	$(BIN)/python -m tests.unused_code

# Nothing is built anew where no page has changed; where one has, all are, so that a link to what is gone is found too.
PAGES := $(shell find deploy/docs policies/README.md protos/README.md -name __pycache__ -prune -o -print)
build/docs/.whole: $(STAMP) $(PAGES)
	rm -rf build/docs
	$(BIN)/python -m deploy.docs.site build/docs
	touch $@

docs: build/docs/.whole  ## the documentation as a site, build/docs/index.html; a dead link or anchor is an error

bench: $(STAMP)  ## ratios against named peers
	$(BIN)/python -m tests.benchmarks clustering
	$(BIN)/python -m tests.benchmarks style_alignment
	$(BIN)/python -m tests.benchmarks ksalsa
	$(BIN)/python -m tests.benchmarks attacks
	$(BIN)/python -m tests.benchmarks dp_engine
	$(BIN)/python -m tests.benchmarks dp_audit
	$(BIN)/python -m tests.benchmarks privimage
	$(BIN)/python -m tests.benchmarks verifier
	$(BIN)/python -m tests.benchmarks vetting
	$(BIN)/python -m tests.benchmarks brain_mask
	$(BIN)/python -m tests.benchmarks hull
	$(BIN)/python -m tests.benchmarks volume_gan
	$(BIN)/python -m tests.benchmarks faces
	$(BIN)/python -m tests.benchmarks distill
	$(BIN)/python -m tests.benchmarks ledger
	$(BIN)/python -m tests.benchmarks console
	$(BIN)/python -m tests.benchmarks transport
	$(BIN)/python -m tests.benchmarks rounds
	$(BIN)/python -m tests.benchmarks ingest
	$(BIN)/python -m tests.benchmarks federated

verifier: $(STAMP)  ## lazaret-verify as one file for auditors
	$(BIN)/python -m deploy.verifier build/lazaret-verify.pyz

bundle: $(STAMP)  ## offline installation, SIDE=agent or SIDE=coordinator, signed with KEY=FILE of the publisher
	$(BIN)/python -m deploy.bundle make $(SIDE) --key $(KEY) --out build

validate: $(STAMP)  ## units, container files, compose and chart, each by its own command or schema
	$(BIN)/python -m deploy.validate

fuzz: $(STAMP)  ## every parser, 90 seconds each
	$(BIN)/python -m pip install --quiet 'atheris>=3,<4'
	$(BIN)/python -m tests.fuzz --seconds 90

crash: $(STAMP)  ## 100,000 power losses, and a kill at every system call
	$(BIN)/python -m tests.crash power --crashes 100000 --jobs 2
	$(BIN)/python -m tests.crash kill

mutation: $(STAMP)  ## every mutant of the fold and the review must die
	$(BIN)/python -m tests.mutation

protos: $(STAMP)  ## regenerate the committed gRPC code; a test compares
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/v1/gateway.proto

clean:
	rm -rf $(VENV) $(NO_TORCH) demo-out .demo build *.egg-info
