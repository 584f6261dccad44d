"""Every test starts from the same environment, whatever the developer's shell has set."""

from __future__ import annotations

import os
import signal

import pytest

# huggingface_hub asks the network for a list of agents unless this is set before it is imported.
os.environ["DO_NOT_TRACK"] = "1"

# A shell starts background jobs with SIGINT ignored, and their children inherit that: Ctrl-C tests would test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)

KEPT = {"GLM5DEPLOY_TEST_DATA"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GLM5DEPLOY_", "HF_")) and name not in KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
