"""The check of torch's version."""

import pytest
import torch
from helpers.compare import refused

from axonmpi.utils.torch_internals import needs_torch


@pytest.mark.parametrize(
    ("version", "needed"), [("2.9.1+cu128", "2.11"), ("2.10.0a0+git1234", "2.11"), ("1.13.1", "2.7")]
)
def test_an_older_torch_is_refused_by_name(monkeypatch, version: str, needed: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    message = rf"^a toaster needs torch {needed} or newer, got torch {version[:4]}.*: update torch"
    refused(RuntimeError, (lambda: needs_torch(needed, "a toaster"), message))


@pytest.mark.parametrize(
    ("version", "needed"), [("2.11.0a0+nv26.1", "2.11"), ("2.13.0+cpu", "2.9"), ("3.0.0", "2.11")]
)
def test_the_same_or_a_newer_torch_is_taken(monkeypatch, version: str, needed: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    needs_torch(needed, "a toaster")
