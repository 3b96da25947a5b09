# `make demo` and `make test` each do all their own set-up on a bare Debian 12 or 13 (root, git, make).
# Packages come from Debian and PyPI only.

SHELL := /bin/bash
PYTHON ?= /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
PREFIX ?= /usr
DESTDIR ?=
# Files of tests run side by side, each of them in one process.
JOBS ?= 2
# What `make install` gives to pip: the tree itself, or a wheel of it that was made before.
WHEEL ?= .
LIB := $(PREFIX)/lib/dsecd
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends

# What the product runs with, and what builds it.
RUN_PACKAGES := crun golang-github-containers-common skopeo mmdebstrap btrfs-progs zstd xz-utils iproute2 nftables openssh-client
BUILD_PACKAGES := gcc libc6-dev make pkg-config python3-venv python3-dev libffi-dev libseccomp-dev libsystemd-dev
# What the tests run against: real parts, too.
TEST_PACKAGES := runc umoci docker-registry erofs-utils busybox-static socat attr procps openssh-server sshfs libasan8 libubsan1
BENCH_PACKAGES := podman bubblewrap
# Virtual machines.
VM_PACKAGES := qemu-system-x86 qemu-utils e2fsprogs

.DEFAULT_GOAL := help
.PHONY: help setup packages vm-packages cgroups native venv demo demo-fncall demo-rollout test test-lab bench lint install uninstall clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: packages vm-packages cgroups native venv ## Install packages, build the native parts, make the venv (repeatable)

packages:
	@need="$(RUN_PACKAGES) $(BUILD_PACKAGES) $(TEST_PACKAGES) $(EXTRA_PACKAGES)"; \
	absent=$$(for p in $$need; do \
	    [ "$$(dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null)" = installed ] || echo $$p; done); \
	if [ -n "$$absent" ]; then echo "setup: installing" $$absent; \
	    apt-get -qq update && $(APT) install $$absent >/dev/null; fi

# QEMU 7 crashes its guests where there is no KVM: Debian 12 gets a newer one, from its backports.
vm-packages: packages
	@need=$$(for p in $(VM_PACKAGES); do \
	    have=$$(dpkg-query -W -f='$${Version} $${db:Status-Status}' $$p 2>/dev/null); \
	    case "$$p/$$have" in \
	        qemu-*" installed") dpkg --compare-versions "$${have% *}" ge 1:8 || echo $$p;; \
	        *" installed") ;; \
	        *) echo $$p;; esac; done); \
	if [ -n "$$need" ]; then echo "setup: installing" $$need; \
	    mkdir -p build && $(PYTHON) -m dsecd.vmm.apt build/apt $$need; fi

# crun refuses a hybrid host whose cgroup2 mount has controllers: mount those as v1, where they belong there.
cgroups:
	@if [ -e /sys/fs/cgroup/unified/cgroup.controllers ]; then \
	    for c in $$(cat /sys/fs/cgroup/unified/cgroup.controllers); do \
	        mkdir -p /sys/fs/cgroup/$$c && mount -t cgroup -o $$c cgroup /sys/fs/cgroup/$$c \
	            && echo "setup: moved the cgroup controller $$c to v1"; done; fi

native:
	@$(MAKE) -s -C native all

venv: $(VENV)/.done
$(VENV)/.done: pyproject.toml setup.py native/libdsec.c native/libdsec.h native/libdsec_build.py
	@echo "setup: Python packages"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check 'setuptools>=68' wheel cffi
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[systemd,dev]'
	@touch $@

demo: setup ## 16 sandboxes fix seeded faults of a real project; last line is JSON
	@$(BIN)/python -m tests.demo.main

demo-rollout: setup ## 16 rollouts of mini-swe-agent survive their trainer; last line is JSON
	@$(BIN)/python -m tests.demo.rollout

demo-fncall: setup ## The HumanEval problems, judged by calls; last line is JSON
	@$(BIN)/python -m tests.demo.fncall

test: setup ## Unit and functional tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/unit tests/functional

test-lab: ## Tests that need systemd, cgroup v2, AppArmor: in a VM
	@$(PYTHON) tests/lab/run.py

bench: EXTRA_PACKAGES := $(BENCH_PACKAGES)
bench: setup ## Benchmarks against peers (NAME=exec|create|density|layers|files|api|images|boot|memory|fncall|rollout|fleet; all without)
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null \
	    || $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[bench]'
	@$(BIN)/python -m tests.bench.main $(NAME)

lint: setup ## ruff, mypy, import arrows
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

install: native ## Install for systemd: PREFIX=/usr
	install -d $(DESTDIR)$(LIB) $(DESTDIR)$(PREFIX)/bin $(DESTDIR)/etc/dsecd
	install -m 0711 build/native/dsec-agent $(DESTDIR)$(LIB)/dsec-agent
	install -m 0755 build/native/dsec-launch $(DESTDIR)$(LIB)/dsec-launch
	test -x $(DESTDIR)$(LIB)/venv/bin/python || $(PYTHON) -m venv $(DESTDIR)$(LIB)/venv
	$(DESTDIR)$(LIB)/venv/bin/pip install -q 'setuptools>=68' wheel cffi
	$(DESTDIR)$(LIB)/venv/bin/pip install -q --no-build-isolation '$(WHEEL)[systemd]'
	ln -sf $(LIB)/venv/bin/dsecd $(LIB)/venv/bin/dsecctl $(DESTDIR)$(PREFIX)/bin/
	for unit in systemd/*.service systemd/*.socket systemd/*.slice; do \
	    sed 's|@LIB@|$(LIB)|g; s|@BIN@|$(PREFIX)/bin|g' $$unit \
	    | install -D -m 0644 /dev/stdin $(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/}; done
	install -D -m 0644 systemd/dsecd.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/dsecd.conf
	install -D -m 0644 systemd/dsecd.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/dsecd.conf
	install -D -m 0644 systemd/dsec-sandbox.apparmor $(DESTDIR)/etc/apparmor.d/dsec-sandbox
	set -o pipefail; test -e $(DESTDIR)/etc/dsecd/dsecd.toml || $(DESTDIR)$(LIB)/venv/bin/dsecd --print-config \
	    | sed 's/^\([a-z]\)/# \1/' > $(DESTDIR)/etc/dsecd/dsecd.toml
	if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then \
	    systemd-sysusers dsecd.conf; systemd-tmpfiles --create dsecd.conf; systemctl daemon-reload; \
	    if command -v apparmor_parser >/dev/null && [ -d /sys/kernel/security/apparmor ]; then \
	        apparmor_parser -r /etc/apparmor.d/dsec-sandbox; fi; fi

uninstall: ## Remove what install put there; state below /var/lib/dsecd stays
	-systemctl disable --now dsecd-drain.service dsecd.service dsecd.socket dsecd-sandboxes.service dsecd-images.service
	rm -rf $(LIB) $(PREFIX)/bin/dsecd $(PREFIX)/bin/dsecctl /etc/apparmor.d/dsec-sandbox
	rm -f $(addprefix $(PREFIX)/lib/systemd/system/,$(notdir $(wildcard systemd/*.service systemd/*.socket systemd/*.slice)))
	rm -f $(PREFIX)/lib/sysusers.d/dsecd.conf $(PREFIX)/lib/tmpfiles.d/dsecd.conf

clean: ## Remove what was built here
	rm -rf build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -o -name '*.so' -not -path './.venv/*' | xargs rm -rf
