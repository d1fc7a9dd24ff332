# Busbar: the commands of the README.  `make help` lists them.
SHELL := /bin/bash
PY := .venv/bin/python
.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

.PHONY: venv
venv: ## virtual environment from the hashed lock file
	@python3 tools/bootstrap.py

.PHONY: demo
demo: venv ## the main job: a cluster on this machine, a model trained, served, seen (CLUSTER=current REGISTRY=... for your own cluster)
	@$(PY) -m examples.demo $(if $(CLUSTER),--cluster $(CLUSTER)) $(if $(REGISTRY),--registry $(REGISTRY))

.PHONY: test
test: ## every test tier, each with its time budget
	@python3 tools/tiers.py

.PHONY: test-setup test-unit test-apiserver test-engines test-portal test-postgres test-e2e
test-setup: ## what the tests need: packages, compiled Kubernetes parts, images
	@python3 tools/tiers.py setup
test-unit: ## the fast tests: no server, no torch
	@$(PY) tools/tiers.py unit
test-apiserver: ## against a real kube-apiserver and etcd
	@$(PY) tools/tiers.py apiserver
test-engines: ## training and serving engines (torch)
	@$(PY) tools/tiers.py engines
test-portal: ## the portal in a real Chromium
	@$(PY) tools/tiers.py portal
test-postgres: ## the database on a real PostgreSQL
	@$(PY) tools/tiers.py postgres
test-e2e: ## real node, real pods, the installed chart
	@$(PY) tools/tiers.py e2e

.PHONY: check
check: ## ruff, mypy strict, import contracts, generated files up to date
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy -p busbar
	@$(PY) -m mypy tests tools examples benchmarks
	@.venv/bin/lint-imports --no-cache
	@$(PY) -m tools.generate --check

.PHONY: generate
generate: ## write every generated file (CRDs, chart schema, OpenAPI, CLI reference)
	@$(PY) -m tools.generate

.PHONY: lock
lock: ## resolve the lock files anew from pyproject.toml
	@.venv/bin/uv pip compile -q --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --extra dev pyproject.toml -o requirements.lock
	@$(PY) -m busbar.local.images lock

.PHONY: up down status
up: venv ## start (or update) the one-machine cluster
	@.venv/bin/busbar up
down: ## stop it and remove everything it made on this machine, keeping people's data
	@.venv/bin/busbar down
status: ## what runs, what it uses, where the logs are
	@.venv/bin/busbar status
