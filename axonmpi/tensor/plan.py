"""Plans: styles for the modules of a model.

    plan = {
        "embedding": "vocab",                        patterns of module names, as in file names;
        "blocks.*.attention.qkv": "column:3",        `*` stands for anything, dots included
        "blocks.*.attention": "divide:num_heads",
        "blocks.*.attention.out": "row",
        "blocks.*.norm?": "sequence",                each has a style, or a list of styles
    }

A style is a small frozen dataclass with a short form. This file names and reads styles and finds their modules;
apply_styles.py applies them. A pattern that matches nothing is an error: a model that is cut in part is wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

from torch import nn

from ..utils.arguments import check_flags


@dataclass(frozen=True)
class Style:
    """An instruction for a module in a plan; see the subclasses.

    Raises:
        TypeError: A value is of another type than its attribute.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                check_flags(**{field.name: value})
            elif field.type == "tuple[str, ...]" and isinstance(value, str):
                raise TypeError(f"{field.name}: expected a tuple of names, got {value!r}")
            elif isinstance(field.type, str) and field.type.startswith("int") and isinstance(value, bool | float):
                raise TypeError(f"{field.name}: expected an integer, got {value!r}")


@dataclass(frozen=True)
class Column(Style):
    """A linear layer with sharded outputs; `"column"`, `"column:3"`, `"column:gather"`, `"column:heads=2"`.

    Attributes:
        parts: Number of matrices of the same size in the layer, each of which is sharded, such as queries, keys and
            values; or their sizes.
        heads: Heads in the outputs, or in each part of them, none of which is cut. None: the cut may be between any
            two outputs.
        shared: With fewer heads than ranks, several ranks share a head, as for grouped keys and values;
            `"column:heads=2,shared"`.
        gather_output: All ranks get all outputs.
    """

    parts: int | tuple[int, ...] = 1
    heads: int | None = None
    shared: bool = False
    gather_output: bool = False


@dataclass(frozen=True)
class Row(Style):
    """A linear layer with sharded inputs, the outputs of a column layer; `"row"`."""


@dataclass(frozen=True)
class Vocabulary(Style):
    """An embedding, or a linear layer for logits, with sharded rows; `"vocab"`, `"vocab:parallel"`.

    The vocabulary need not divide by the ranks. With sequence parallelism an embedding returns a slice of the
    sequence, unless the plan has a `"split"`; logits are of the full sequence.

    Attributes:
        gather_output: All ranks get all logits; else each gets its own, for `parallel_cross_entropy`.
    """

    gather_output: bool = True


@dataclass(frozen=True)
class SequenceNorm(Style):
    """A norm that computes on a slice of the sequence with sequence parallelism; `"sequence"`."""


@dataclass(frozen=True)
class Summed(Style):
    """A module with replicated parameters and a sharded input, such as a norm of each head; `"sum"`.

    The gradients of a rank are of its shard of the input, so they are summed over the ranks.
    """


@dataclass(frozen=True)
class Dropout(Style):
    """An `nn.Dropout` outside of divided layers; `"dropout"`, `"dropout:whole"`.

    The dropped elements depend neither on the number of ranks nor on sequence parallelism.

    Attributes:
        whole: It computes on the full sequence also with sequence parallelism, as after an embedding.
    """

    whole: bool = False


@dataclass(frozen=True)
class Region(Style):
    """A module whose input enters once for all of its column layers; `"region"`, `"region:shared"`.

    With sequence parallelism its first floating-point tensor is gathered, and its column layers do not gather
    theirs: for an attention that takes its shapes from its input.

    Attributes:
        shared: Also without sequence parallelism the gradient of that tensor is summed once, and not by each column
            layer; all of them get the tensor, or a function of it.
    """

    shared: bool = False


@dataclass(frozen=True)
class Split(Style):
    """The first module that gets a slice of the sequence with sequence parallelism; `"split"`."""


@dataclass(frozen=True)
class Join(Style):
    """The last module that gets a slice of the sequence: its output is gathered; `"join"`."""


@dataclass(frozen=True)
class HeadDropout(Style):
    """A module that applies dropout to attention weights; `"head_dropout:12"`.

    Each head's mask is the same wherever the head is, so it does not depend on the number of ranks.

    Attributes:
        heads: Number of heads on all ranks together.
    """

    heads: int


@dataclass(frozen=True)
class Divide(Style):
    """A module with attributes that count divided features; `"divide:num_heads"`, `"divide:num_heads,width"`.

    Attributes:
        names: The attributes.
        shared: A number smaller than that of the ranks becomes 1, as for heads that several ranks have;
            `"divide_shared:num_kv_heads"`.
    """

    names: tuple[str, ...]
    shared: bool = False


@dataclass(frozen=True)
class Assign(Style):
    """A module with an attribute that gets another value when the model is divided; no short form.

    Attributes:
        name: The attribute.
        value: Its new value.
    """

    name: str
    value: int


@dataclass(frozen=True)
class Tied(Style):
    """A module that holds a parameter of a divided layer, but does not compute with it; `"tied"`."""


Plan = Mapping[str, Style | str | Sequence[Style | str]]
"""Styles by patterns of module names."""


# ---- short forms ------------------------------------------------------------------------------------------------


def _column(options: Sequence[str]) -> Style:
    parts, heads = 1, None
    for option in options:
        if option.startswith("heads="):
            heads = _number(option.removeprefix("heads="))
        elif option not in ("gather", "shared"):
            parts = _number(option)
    return Column(parts, heads, "shared" in options, "gather" in options)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _head_dropout(options: Sequence[str]) -> Style:
    if len(options) != 1:
        raise ValueError("expected the number of heads after the colon, as in 'head_dropout:12'")
    return HeadDropout(_number(options[0]))


def _divide(options: Sequence[str]) -> Divide:
    if not options or not all(name.isidentifier() for name in options):
        raise ValueError(f"expected names of attributes after the colon, got {','.join(options)!r}")
    return Divide(tuple(options))


_SHORT_FORMS: dict[str, Mapping[str, Style] | Callable[[Sequence[str]], Style]] = {
    "column": _column,
    "row": {"": Row()},
    "vocab": {"": Vocabulary(), "parallel": Vocabulary(gather_output=False)},
    "sequence": {"": SequenceNorm()},
    "sum": {"": Summed()},
    "dropout": {"": Dropout(), "whole": Dropout(whole=True)},
    "region": {"": Region(), "shared": Region(shared=True)},
    "split": {"": Split()},
    "join": {"": Join()},
    "head_dropout": _head_dropout,
    "divide": _divide,
    "divide_shared": lambda options: replace(_divide(options), shared=True),
    "tied": {"": Tied()},
}
"""By the word before the colon: styles by the text after it, or a function of the comma-separated options."""


def read_style(style: Style | str) -> Style:
    """Return a style from its short form; local.

    Args:
        style: A short form such as `"column"` or `"divide:num_heads"`; a style is returned as it is.

    Raises:
        TypeError: It is neither.
        ValueError: There is no such style, or it has no such options.
    """
    if isinstance(style, Style):
        return style
    if not isinstance(style, str):
        raise TypeError(f"expected a style or its short form such as 'column', got {style!r}")
    word, _, rest = style.partition(":")
    if word not in _SHORT_FORMS:
        raise ValueError(f"expected one of the styles {', '.join(_SHORT_FORMS)}, got {style!r}")
    known = _SHORT_FORMS[word]
    try:
        if callable(known):
            return known(rest.split(",") if rest else [])
        if rest not in known:
            others = " or ".join(repr(option) for option in known if option)
            raise ValueError(f"expected nothing{f' or {others}' if others else ''} after the colon, got {rest!r}")
        return known[rest]
    except ValueError as error:
        raise ValueError(f"style {style!r}: {error}") from None


# ---- finding modules --------------------------------------------------------------------------------------------


def find_modules(plan: Plan, model: nn.Module) -> dict[str, tuple[Style, ...]]:
    """Return the styles of each module that the plan names; local.

    Args:
        plan: Styles by patterns.
        model: Patterns are matched with the names of its submodules.

    Returns:
        Styles by name, in the model's order; a module with several names has its first one.

    Raises:
        TypeError: The plan is no mapping of strings to styles.
        ValueError: A pattern matches nothing, or a style does not exist; all mistakes in one message.
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan: expected a mapping of name patterns to styles, got {type(plan).__name__}")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, dict[Style, None]] = {module: {} for module in modules.values()}
    mistakes = []
    for pattern, value in plan.items():
        try:
            styles = _styles(pattern, value)
            for name in _matches(pattern, list(modules)):
                found[modules[name]].update(dict.fromkeys(styles))
        except ValueError as error:
            mistakes.append(f"plan[{pattern!r}]: {error}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return {name: tuple(found[module]) for name, module in model.named_modules() if found.get(module)}


def _styles(pattern: object, value: Style | str | Sequence[Style | str]) -> list[Style]:
    if not isinstance(pattern, str):
        raise TypeError(f"plan: expected name patterns as keys, got {pattern!r}")
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    try:
        return [read_style(one) for one in values]
    except TypeError as error:
        raise TypeError(f"plan[{pattern!r}]: {error}") from None


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4)
        known = f"near it are {', '.join(near)}" if near else f"the model has {', '.join(names[:8]) or 'none'}"
        raise ValueError(f"no submodule has such a name; {known}")
    return matching
