"""What the tests of GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch, fresh_servers: None) -> Iterator[None]:
    """As whoever wants the same bits asks torch for them; the workers have it from here."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
