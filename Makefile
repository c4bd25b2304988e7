# Everything a newcomer types: `make demo`, `make test`, `make check`. All in .venv, with the versions of constraints.txt.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
RUN := runs/demo
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1

.PHONY: demo install test test-slow check learning gpu-check clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

install: $(VENV)/.installed ## .venv with the package and its pinned dependencies

# torch first: other packages then find the requirement met and do not choose a build of their own
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[dev]"
	$(PIP) install -c constraints.txt --no-deps dashscope
	@touch $@

demo: $(VENV)/.installed ## train the tiny model on the demo data, consolidate it, and draw the pictures
	@test ! -d $(RUN) || mv -v $(RUN) $(RUN)-before-$$(date +%Y%m%d-%H%M%S)
	deepspeed --hostfile hostfiles/localhost qwen_edit_zero/train.py --ds ds_configs/zero2.json
	qwen-edit-zero consolidate $(RUN) runs/demo-consolidated --overwrite
	qwen-edit-zero report $(RUN)
	@echo
	@echo "Done. Look at:"
	@echo "  $(RUN)/contact_sheet.png    references, instruction, output and target of held-out pictures;"
	@echo "                                  rough after 450 steps: make learning trains until edits show"
	@echo "  $(RUN)/loss.png             the loss curve   ($(RUN)/metrics.jsonl: the numbers)"
	@echo "  $(RUN)/checkpoints/         resumable under any engine and number of ranks"
	@echo "  runs/demo-consolidated/        the model in diffusers layout: see README.md for how to load it"
	@echo "Type next:"
	@echo "  source $(VENV)/bin/activate"
	@echo "  torchrun --nproc_per_node 2 qwen_edit_zero/train.py --engine fsdp2 run.name=mine    # the same under FSDP2"
	@echo "  deepspeed --hostfile hostfiles/8node qwen_edit_zero/train.py recipes/full_finetune.yaml --ds ds_configs/zero2.json model.path=/models/Qwen-Image-Edit-2509 data.manifest=/data/train.jsonl"

test: $(VENV)/.installed-dev ## the test suite
	tools/install_system_packages.sh
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(VENV)/.installed-dev ## the tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not gpu"

check: $(VENV)/.installed-dev ## ruff, mypy (strict), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

learning: $(VENV)/.installed ## does the tiny model learn to edit? about 15 minutes
	$(BIN)/python benchmarks/learning/run.py

gpu-check: $(VENV)/.installed-dev ## the engines and LoRA of the full-size model on one GPU of 80 GB; 8 minutes
	$(BIN)/python benchmarks/gpu_check/run.py

clean: ## remove the virtual environment and caches, not the runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
