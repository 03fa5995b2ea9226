"""Private names of torch that this package uses, and the check of torch's version; tested on torch 2.7 to 2.14."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as _eval_frame
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import Node

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

compiled_functions = torch._C._nn
"""The module of those functions of `torch.nn.functional` that are compiled."""

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention on the CPU, and the logarithm of each query's sum of exponentials (0 if a mask hides all keys)."""

flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its gradients of queries, keys and values, by the result and logarithms of all keys, of which these are some."""

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which functions treat subclasses of Tensor as Tensor itself."""

TRANSFORMS = "torch._functorch"
"""The package of `torch.func` and `torch.vmap`."""

transform_level = torch._C._functorch.maybe_current_level
"""Return the number of transforms of `torch.func` that are being computed, None without any."""


@cache
def written_out(function: Any) -> Callable[..., Any]:
    """Return a function of torch that is written in Python, without its first question whether others override it.

    Its statements run with a subclass of Tensor as with a Tensor; functions that it calls may be overridden.
    """
    questions = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(questions, lambda *args: False)
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def needs_torch(version: str, feature: str) -> None:
    """Refuse a feature that an older torch lacks; local.

    Args:
        version: The first version of torch that has what the feature needs, such as "2.11".
        feature: The feature, as the message names it.

    Raises:
        RuntimeError: torch is older.
    """
    needed, have = ([int(part) for part in text.split(".")[:2]] for text in (version, torch.__version__))
    if have < needed:
        raise RuntimeError(
            f"{feature} needs torch {version} or newer, got torch {torch.__version__}: update torch, or do without"
        )


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs now; local."""
    Variable._execution_engine.queue_callback(callback)


def assert_later(condition: Tensor, message: str) -> None:
    """Check a condition on the device, asynchronously: it fails if the condition is false; local.

    Args:
        condition: [] bool.
        message: Text that the device prints.
    """
    torch._assert_async(condition, message)


def backward_number() -> int:
    """Return the number of the backward that the calling thread runs, -1 if it runs none; local."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Return True if the calling thread runs a backward; local."""
    return backward_number() != -1


def engine_runs(node: Node) -> bool:
    """Return True if the backward that runs now will execute a node; local.

    Raises:
        RuntimeError: No backward runs, or it is a `torch.autograd.grad` that was asked for this very leaf.
    """
    return bool(torch._C._will_engine_execute_node(node))


def next_sequence_number() -> int:
    """Return the number that the next node of autograd's graph in this thread will have; local."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Node) -> int:
    """Return the number of a node of autograd's graph, which grows in the order in which nodes are made; local."""
    return int(node._sequence_nr())


def set_version(tensor: Tensor, version: int) -> None:
    """Set the number by which autograd notices that a tensor it has saved was changed; local."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def hooks_on(parameter: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks on a parameter's gradient, and those that run after it was accumulated; local."""
    return [*(parameter._backward_hooks or {}).values()], [*(parameter._post_accumulate_grad_hooks or {}).values()]


def scale_all(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply tensors by a number, in place; local."""
    torch._foreach_mul_([*tensors], factor)


def skip_in_compile(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that compiled code calls by a break of its graph; costs nothing in calls.

    torch.compile looks neither into it nor into the functions that it calls.
    """
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function.__dict__["_torchdynamo_disable"] = True  # read by callers that are being traced
    return function


def outside_compile(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that torch.compile shall not trace.

    `torch.compiler.disable` is the public form, which imports the whole compiler at once and not at the first call.
    """
    outside: Callable[_Arguments, _Result] = _disable_dynamo(function)
    return outside
