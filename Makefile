# make quickstart: train a small GPT and read text from it, about a minute on two cores, no network, no account
# make check:      ruff, mypy and the quick tests, for every minute
# make test:       ruff, mypy and every test, for every commit
# make test-faults part=kills|damage|input|disk|hostile|sweep|pairs: at length, up to two hours each (docs/reliability.md)
# make audit:      known vulnerabilities of what is installed
# make setup:      .venv alone
# Each sets .venv up first. Needed: Python 3.11 to 3.14 (PYTHON=/path/to/python names another one than python3).

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$python && break; done)
RUN := runs/quickstart

.PHONY: quickstart check test test-faults audit setup lint
setup: .venv/setup

.venv/setup: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed: make PYTHON=/path/to/python3.13"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/setup-test: .venv/setup
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

quickstart: .venv/setup
	@.venv/bin/python train.py experiment=quickstart out_dir=$(RUN)
	@echo
	@.venv/bin/python sample.py run=$(RUN) start='The ' num_samples=1 max_new_tokens=300 stream=true
	@echo
	@echo "The loss curve is $(RUN)/curve.png. Next, after: source .venv/bin/activate"
	@echo "  python sample.py run=$(RUN) start='A class ' temperature=0.5"
	@echo "  python train.py experiment=quickstart qk_norm=lp qk_norm.p=3"
	@echo "  python train.py model=nano_cpu qk_norm=rms data.fold=4   # Tiny Shakespeare"
	@echo "  python train.py dry_run=true                             # what the full-size run would cost"

lint: .venv/setup-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

check: lint
	.venv/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not browser and not slurm and not gpu"

test: lint
	.venv/bin/python -m pytest -n 2 --dist worksteal

FAULTS_kills := tests/test_faults.py tests/test_ddp.py tests/test_wandb.py -k kill
FAULTS_damage := tests/test_damage.py
FAULTS_input := tests/test_fuzz.py tests/test_bad_input.py tests/test_sample.py tests/test_plans.py \
	-k "(bad or words or overrides or yaml or environment or prompt or sweep_file) and not composes"
FAULTS_disk := tests/test_disk.py tests/test_checkpoint.py
FAULTS_hostile := tests/test_hostile.py tests/test_checkpoint.py
FAULTS_sweep := tests/test_sweeps.py -k kills
FAULTS_pairs := tests/test_train.py tests/test_cuda.py tests/test_audit.py tests/test_gpt.py tests/test_equivalence.py \
	tests/test_qk_norm_contract.py tests/test_diagnostics.py -k "every_layout or honest or equivalence or gpt or diagnostics"

test-faults: .venv/setup-test
	@$(if $(FAULTS_$(part)),,echo "make test-faults part=kills|damage|input|disk|hostile|sweep|pairs"; exit 2)
	NANOQK_FAULTS=full timeout 7200 .venv/bin/python -m pytest -rP --no-header $(FAULTS_$(part))

audit: .venv/setup-test
	.venv/bin/python -m pip freeze --exclude-editable > .venv/installed.txt
	.venv/bin/python -m pip install --quiet pip-audit
	@echo 'PyYAML==5.3' > .venv/vulnerable.txt  # CVE-2020-1747: an index that knows nothing of it would find nothing at all
	@! .venv/bin/python -m pip_audit --requirement .venv/vulnerable.txt --no-deps --disable-pip > /dev/null 2>&1 || \
		{ echo "error: nothing was audited: the package index has no vulnerability data"; exit 1; }
	.venv/bin/python -m pip_audit --requirement .venv/installed.txt --no-deps --disable-pip
