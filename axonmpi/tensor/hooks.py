"""Hooks on the modules of a model, which shard and gather its sequence without a change to its code.

    input of the first block ── split ──> slice of the sequence ── blocks ── join ──> output of the last norm
                                                 │
                             attention: gathered before, reduced and divided after

Hooks run before and after the forward of modules. Dropout of attention weights happens inside functions of torch,
without a module: while a module runs, `head_dropout` replaces these calls, on this thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..groups.process_group import ProcessGroup
from .layers.attention import attention_weights
from .layers.dropout import ShardedDropout
from .regions import join_sequence


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to a module's first floating-point input, positional or keyword; local.

    Args:
        module: The module.
        change: Returns the tensor in place of the input, such as this rank's slice of the sequence.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, value in enumerate(args):
            if _is_hidden(value):
                return (*args[:index], change(value), *args[index + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_hidden(value):
                return args, {**kwargs, name: change(value)}
        raise ValueError(
            f"{type(module).__name__}: expected a floating-point tensor as input, got none; 'split' and 'region' "
            "have to be somewhere else"
        )

    module.register_forward_pre_hook(before, with_kwargs=True)


def join_output(module: nn.Module, group: ProcessGroup, dim: int) -> None:
    """Join the slices of the sequence that a module returns; local.

    Args:
        module: Returns a tensor, or a tuple that begins with one.
        group: The ranks that have the slices.
        dim: Dimension of the sequence.
    """

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return join_sequence(output, group, dim)
        if not isinstance(output, tuple) or not isinstance(output[0], Tensor):
            raise TypeError(
                f"{type(module).__name__}: expected a tensor as output, or a tuple that begins with one, got "
                f"{type(output).__name__}; 'join' has to be somewhere else"
            )
        return join_sequence(output[0], group, dim), *output[1:]

    module.register_forward_hook(after)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# ---- dropout of attention weights -------------------------------------------------------------------------------


def head_dropout(module: nn.Module, group: ProcessGroup, heads: int, generator: torch.Generator | None) -> None:
    """Make dropout inside a module independent of the number of ranks: each head has its own mask; local.

    While the module's forward runs, on this thread only, it replaces `torch.nn.functional.dropout` of tensors with
    heads as dim 1 of 4, and dropout in `scaled_dot_product_attention`, which is then computed step by step.

    Args:
        module: An attention module with sharded heads.
        group: The ranks that share the heads.
        heads: Number of heads on all ranks together.
        generator: Source of random numbers; None means torch's default generator.
    """
    running: list[ExitStack] = []

    def before(module: nn.Module, args: Any) -> None:
        running.append(ExitStack())
        if module.training and _may_drop(module):
            running[-1].enter_context(_HeadDropoutMode(group, heads, generator))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop().close()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _may_drop(module: nn.Module) -> bool:
    """Return True if a module has dropout, or may have it in a form unknown here."""
    chances = [
        value for name, value in vars(module).items() if "dropout" in name and isinstance(value, int | float)
    ]
    chances += [child.p for child in module.children() if isinstance(child, nn.Dropout | ShardedDropout)]
    return not chances or any(chances)


class _HeadDropoutMode(TorchFunctionMode):
    def __init__(self, group: ProcessGroup, heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self._options = group, heads, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if input.dim() != 4 or not training or not p:
            return F.dropout(input, p, training, inplace)
        group, heads, generator = self._options
        return ShardedDropout(p, group, dim=1, blocks=heads, generator=generator)(input)  # type: ignore[no-any-return]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if not dropout_p:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
        weights, value = attention_weights(query, key, value, attn_mask, is_causal, **options)
        return self._dropout(weights, dropout_p) @ value
