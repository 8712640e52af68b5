# Two commands do everything on a fresh machine, set-up included: `make train` and `make test`.
# ARGS goes to the command: make train ARGS="strategy=ring_fp16 data=stdlib_text model=gpt"; make test ARGS="-k ring -x"
# Another torch has an environment of its own: make test TORCH=2.9.0

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(addprefix -torch-,$(TORCH))
ARGS ?=
both := -m strategy=ddp,ring_int8

py := $(VENV)/bin/python
trains := $(VENV)/.trains
installed := $(VENV)/.installed
documents := $(VENV)/.documents
kernels := $(VENV)/.kernels

# Modules are compiled when they are first imported, once: most of what pip installs never is.
unexport PYTHONDONTWRITEBYTECODE
pip := -m pip install --disable-pip-version-check --no-compile

# What pip is at, on one line that changes; and all that it said if it fails.
define one_line
{ said = said $$0 "\n"; failed = $$0 == "FAILED" }
screen && /^(Collecting|Building|Installing) / { printf "\r\033[K%s", substr($$0, 1, 78); fflush() }
END { if (screen) printf "\r\033[K"; if (failed) { printf "%s", said; exit 1 } }
endef
export one_line

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train demo test test-all nightly mutants lint format types docs bench gpu clean launchers

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

train: $(trains) $(kernels)  ## train on real data, 2 processes: over the ring in 8 bits, with ddp beside it
	"$(VENV)/bin/ringstrategy-train" $(or $(ARGS),$(both))

demo: $(trains)  ## as root: the same training with ddp and ring_int8 on two hosts joined by 100 Mbit/s
	"$(py)" -m benchmarks demo $(ARGS)

test: $(installed) $(kernels)  ## run the quick tests, in 6 minutes on 2 cores: each law has one
	"$(py)" -m pytest -m "not slow and not nightly" -n 4 --dist loadfile $(ARGS)

test-all: $(installed) $(kernels) launchers  ## run the slow tests too, in 15 minutes; ends with those that could not run
	"$(py)" -m pytest -m "not nightly" -n 4 --dist loadfile -rs $(ARGS)

nightly: $(installed) $(kernels)  ## run what takes an hour or draws at random: campaigns, soak, fuzz, faults, throughput
	"$(py)" -m pytest -m nightly -rs $(ARGS)

mutants: $(installed) $(kernels)  ## plant small faults one by one: the quick tests must catch each; ARGS="-k ring" for some
	"$(py)" tests/mutants $(ARGS)

lint: $(installed)  ## ruff: rules and format
	"$(py)" -m ruff check .
	"$(py)" -m ruff format --check .

format: $(installed)  ## let ruff mend what it can
	"$(py)" -m ruff check --fix .
	"$(py)" -m ruff format .

types: $(installed)  ## mypy
	"$(py)" -m mypy

docs: $(documents)  ## the pages of docs/ as a site, in site/; a broken link is an error
	"$(py)" -m mkdocs build --strict $(ARGS)

bench: $(trains)  ## each benchmark once, small, 10 minutes; as root on throttled links, else over loopback
	"$(py)" -m benchmarks campaign --short $(ARGS)

gpu: $(installed)  ## on a machine with a GPU, 20 minutes: all that no other can show; ARGS=--dry: small, without one
	"$(py)" -m benchmarks gpu $(ARGS)

clean:  ## remove the environment, builds and outputs
	rm -rf "$(VENV)" build dist site outputs multirun lightning_logs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what training needs is installed; what tests, lint and types need, which contains it; what the pages need.
# A stamp holds the checkout it was made for: an environment moved or copied with its folder is installed again.
ifneq ($(shell cat "$(trains)" 2>/dev/null),$(CURDIR))
.PHONY: $(trains)
endif
ifneq ($(shell cat "$(installed)" 2>/dev/null),$(CURDIR))
.PHONY: $(installed)
endif
ifneq ($(shell cat "$(documents)" 2>/dev/null),$(CURDIR))
.PHONY: $(documents)
endif

$(trains): extra := app
$(installed): extra := dev
$(installed): contains := $(trains)
$(documents): extra := docs
$(trains) $(installed) $(documents): $(py) pyproject.toml constraints.txt
	@sed -e '' $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton/d') constraints.txt > "$(VENV)/constraints.txt"
	@echo "Installing ringstrategy and what it needs in $(VENV)"
	@{ "$(py)" $(pip) -c "$(VENV)/constraints.txt" -e ".[$(extra)]" 2>&1 || echo FAILED; } | \
	    awk -v screen="$$(test -t 2 && echo 1)" "$$one_line"
	@for stamp in $(if $(contains),"$(contains)") "$@"; do printf '%s\n' "$(CURDIR)" > "$$stamp"; done

# Training and tests would compile them too, but while somebody waits.
$(kernels): $(wildcard ringstrategy/kernels/*.py)
	"$(py)" -m ringstrategy.app.compile
	@touch "$@"

# Ray, Spark and Slurm's are large, and not everywhere: without one, its tests are skipped.
launchers: $(installed)
	@for extra in ray spark slurm; do \
	    "$(py)" $(pip) --quiet -c "$(VENV)/constraints.txt" -e ".[$$extra]" || \
	        echo "the extra \"$$extra\" cannot be installed here: its tests are skipped" >&2; \
	done

$(py):
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no $(PYTHON) here: say which Python to use, make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "ringstrategy needs Python 3.10 or newer, and $(PYTHON) is $$("$(PYTHON)" -V 2>&1): make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear "$(VENV)"
