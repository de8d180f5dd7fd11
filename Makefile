# The recipes of the course. Needs make and Python 3.11 or newer with venv; all else goes to .venv.

PYTHON ?= python3
TORCH_INDEX ?=
DATA ?= embedded
KILLS ?=
DAMAGES ?=
ONLY ?=
ALL ?=
NIGHTLY ?=
NODES ?=
RUN ?=
TORCH ?=

# make test TORCH=2.11.0 has an environment of its own, with that version of torch.
ENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(ENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	-c $(if $(TORCH),$(ENV)/)constraints.txt
# In a container one is often root; Jupyter then wants to be told that this is meant.
AS_ROOT = $(shell [ "$$(id -u)" -eq 0 ] && echo --allow-root)
NEWEST_RUN = $(dir $(shell ls -t runs/*/metrics.jsonl 2>/dev/null | head -n 1))

.PHONY: help install lab job report test bench gpu notebooks lint solutions nbval hub chaos

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(ENV)/ready ## install the course into .venv, and nothing else

lab: $(ENV)/ready ## open the course in JupyterLab
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/notebooks/start.ipynb $(AS_ROOT)

job: $(ENV)/ready ## run the main job on this machine and write its report; DATA=FOLDER trains on your text
	@[ "$(DATA)" = embedded ] || [ -e "$(DATA)" ] || \
		$(BIN)/python scripts/prepare_data.py --data "$(DATA)"  # a known name: fetch it, once
	bash sbatch/ddp.sbatch --data "$(DATA)"

report: $(ENV)/ready ## write a run's report.html again: the newest run, or RUN=runs/ddp-001
	$(BIN)/python scripts/report.py "$(or $(RUN),$(NEWEST_RUN))"

test: lint $(ENV)/ready-frameworks ## lint, and run the tests whose inputs changed; ALL=1, NIGHTLY=1; ONLY=pipeline or ONLY=fast; TORCH=2.11.0
	@# nbval is for notebooks, and each worker would take seconds to import it.
	$(BIN)/python -m pytest -p no:nbval -n auto --maxprocesses 4 --dist loadgroup \
		$(if $(ONLY),--only "$(ONLY)") \
		$(if $(NIGHTLY),--nightly,$(if $(ALL),,--changed))

nbval: $(ENV)/ready-dev ## run the solutions and compare their outputs, as CI does; ONLY=ddp: one of them
	MANYHANDS_LOCAL=1 MANYHANDS_RULES=nccl PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
		-p nbval.plugin -p pytest_timeout --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=300 solutions/*$(ONLY)*.ipynb

hub: $(ENV)/ready-hub ## a class on a real JupyterHub, in a real browser; NIGHTLY=1 or ONLY=ddp: all notebooks, or one; needs root, node and Chromium
	$(BIN)/python tests/hub.py $(if $(NIGHTLY)$(ONLY),--tour "$(ONLY)")

chaos: $(ENV)/ready-dev ## damage checkpoints, kill ranks, nodes and Slurm: 50 times, or DAMAGES=5 KILLS=3; nothing is lost
	$(BIN)/python tests/damage.py $(if $(DAMAGES),--damages "$(DAMAGES)")
	$(BIN)/python tests/chaos.py $(if $(KILLS),--kills "$(KILLS)")

bench: $(ENV)/ready ## measure this machine into bench.json; ONLY=name measures one thing
	$(BIN)/python scripts/bench.py $(if $(ONLY),--only "$(ONLY)") \
		$(if $(filter-out embedded,$(DATA)),--data "$(DATA)")

gpu: $(ENV)/ready ## measure on 1 to 8 GPUs what no CPU can show, in ten minutes; ONLY=name: a part
	$(BIN)/python scripts/gpu.py $(if $(ONLY),--only "$(ONLY)")

solutions: $(ENV)/ready-dev ## run every lesson's solution and its job, in Slurm or here, for one table
	$(BIN)/python scripts/run_solutions.py --only "$(ONLY)" --nodes "$(or $(NODES),0)"

notebooks: $(ENV)/ready-dev ## build the notebooks and the course map from solutions/*.py
	$(BIN)/python scripts/build_notebooks.py $(if $(ONLY),--only "$(ONLY)")

lint: $(ENV)/ready-dev ## check the style of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(ENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Many Hands needs Python 3.11 or newer, as in: make PYTHON=python3.12 lab" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(ENV) || { \
		echo "Python's venv is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@# Older versions of torch want an older setuptools than the one that is pinned.
	$(if $(TORCH),sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$(TORCH)/' constraints.txt \
		> $(ENV)/constraints.txt)
	$(INSTALL) -e .
	@mkdir -p $(ENV)/etc/jupyter/labconfig
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},' \
		'"@jupyterlab/notebook-extension:tracker": {"codeCellConfig":' \
		'{"lineNumbers": false, "lineWrap": true}}}' \
		> $(ENV)/etc/jupyter/labconfig/default_setting_overrides.json
	@touch $@

$(ENV)/ready-dev: $(ENV)/ready
	$(INSTALL) -e '.[dev]'
	@touch $@

# Lightning and Accelerate, for scripts/train_lightning.py and scripts/train_accelerate.py.
$(ENV)/ready-frameworks: $(ENV)/ready
	$(INSTALL) -e '.[frameworks]'
	@touch $@

# JupyterHub and its proxy, in the course's environment: see sbatch/hub/README.md.
$(ENV)/ready-hub: $(ENV)/ready-dev
	$(INSTALL) -e '.[dev,hub,browser]'
	npm install --no-audit --no-fund --prefix $(ENV)/hub configurable-http-proxy@5
	@touch $@
