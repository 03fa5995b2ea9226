"""The page's table of rules is that of the code, over all functions of torch that can be overridden."""

import re
import warnings

import pytest
import torch
from helpers import REPOSITORY
from torch.overrides import get_testing_overrides

from axonmpi.domain.domain_tensor import RULES

PAGE = (REPOSITORY / "docs" / "domain.md").read_text()
PINS = (REPOSITORY / "constraints.txt").read_text().split()
FAMILIES = {
    "element by element": "elementwise",
    "convolutions and pools": "windows",
    "resampling and other pools": "resampling",
    "norms": "norms",
    "reductions": "reductions",
    "losses and distances": "losses",
    "dropout": "dropout",
    "products": "products",
    "attention": "attention",
    "along whole dimensions": "along",
    "shapes": "shapes",
    "pieces": "pieces",
    "indices": "indices",
}
PREFIX = re.compile(r"^(special|linalg|fft)_")
HIDDEN = re.compile(r"^_|_$|^(unsafe_|native_)|_with_indices$|_copy$")
FACTS = {"facts"}
"""Questions about a tensor, which the page does not list."""


def names_by_family() -> dict[str, list[str]]:
    """Return functions with a rule, by the file of the rule, without operators, methods in place and doubles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated ones
        overridable = get_testing_overrides()
    found: dict[str, set[str]] = {family: set() for family in (*FAMILIES.values(), *FACTS)}
    for function in overridable:
        if function in RULES:
            module = getattr(RULES[function], "func", RULES[function]).__module__
            found[module.rpartition(".")[2]].add(PREFIX.sub(r"", function.__name__))
    return {family: sorted(name for name in names if not HIDDEN.search(name)) for family, names in found.items()}


def table() -> str:
    names = names_by_family()
    cells = {title: ", ".join(f"`{name}`" for name in names[family]) for title, family in FAMILIES.items()}
    return "\n".join(["| family | functions |", "| --- | --- |", *(f"| {one} | {cells[one]} |" for one in cells)])


@pytest.mark.skipif(
    f"torch=={torch.__version__.partition('+')[0]}" not in PINS, reason="torches differ in their functions"
)
def test_the_table_of_functions_is_that_of_the_code() -> None:
    assert table() in PAGE, table()


def test_layers_that_people_cut_have_a_rule() -> None:
    names = {name for names in names_by_family().values() for name in names}
    needed = (
        "conv2d conv_transpose3d batch_norm group_norm layer_norm interpolate max_pool3d gelu cat pad einsum linear"
    )
    assert set(needed.split()) <= names
    assert torch.linalg.inv not in RULES
