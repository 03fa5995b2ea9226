"""Tensor subclasses of shards, which refuse functions that need the full parameter, gradient or state.

    shard.norm()                               refused: it would be the norm of the shard
    torch.save(model.state_dict())             refused: the file could not be loaded as the model
    torch.save(optimizer.state_dict())         likewise

The errors name the remedy. Elementwise results, such as copies, are of the same subclass;
`tensor.as_subclass(torch.Tensor)` is an ordinary tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..across_ranks.sharded_parameters import axes_of, is_shown_as_slice
from ..utils.torch_internals import plain_tensors
from .elementwise import Scope, fits_elements, is_view, name_of, scope_of


class _Part(Tensor):
    """A tensor that refuses some functions.

    Attributes:
        refused: Plain names of the functions, see `name_of`.
        error: Class of the error.
        message: Text of the error.
    """

    refused: frozenset[str] = frozenset()
    error: type[Exception]
    message: str

    @classmethod
    def check(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if a function is refused; local."""
        if name_of(function) in cls.refused:
            raise cls.error(cls.message)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse some functions; results of the others that have the shape of an argument get its class."""
        kwargs = kwargs or {}
        cls.check(function, args, kwargs)
        with plain_tensors():
            result = function(*args, **kwargs)
            shapes = [given.shape for given in args if isinstance(given, cls)]
            is_part = name_of(function) != "as_subclass" and getattr(result, "shape", None) in shapes
            return _marked(result, args, cls) if is_part else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy; local."""
        copied: Tensor = memo.setdefault(id(self), self.detach().clone().as_subclass(type(self)))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travel as an ordinary tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class PartOfGradient(_Part):
    """Gradient of a rank's shard of a tensor-parallel layer."""

    refused = frozenset(
        {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"}
        | {"amp_foreach_non_finite_check_and_unscale"}
    )

    error = ValueError
    message = (
        "this rank has a part of the gradient, whose norm and infinities are not those of the other ranks' "
        "parts. Clip with fsdp.clip_grad_norm(max_norm), pipeline.clip_grad_norm(max_norm) or "
        "axonmpi.clip_grad_norm(model, max_norm), which return the norm of the whole, and with "
        "max_norm=math.inf only measure; scale losses with axonmpi.ShardedGradScaler. "
        "gradient.as_subclass(torch.Tensor) is the part as an ordinary tensor"
    )


class Shard(_Part):
    """A shard of a parameter or gradient, or an elementwise result of one: refuses all but elementwise functions.

    Attributes:
        is_shard: True; collectives that write into tensors refuse those.
    """

    is_shard = True

    @classmethod
    def check(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if a function is not elementwise; local."""
        super().check(function, args, kwargs)
        scope = scope_of(function)
        if scope is Scope.ELEMENTS:
            is_allowed = fits_elements(args, kwargs, Shard)
        elif scope is Scope.FLAT:
            is_allowed = args[1:] in ((), (-1,)) and not kwargs
        else:
            is_allowed = scope is not Scope.ALL
        if not is_allowed:
            raise ValueError(_needs_full(name_of(function)))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an elementwise function, and return its result as a shard; refuse others."""
        kwargs, scope, caller = kwargs or {}, scope_of(function), sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        ordinary = getattr(args[0], "ordinary", nn.Parameter) if args else nn.Parameter
        if module.startswith(_LIBRARY):  # its code knows that the tensor is a shard
            return ordinary.__torch_function__(function, types, args, kwargs)
        # Functions of torch.nn.init leave an empty tensor alone, so ranks with empty shards would raise no error.
        if scope is Scope.SHARD and module == nn.init.__name__:
            raise ValueError(_needs_full(caller.f_code.co_name))
        if scope is not Scope.SHARD or cls.refused:
            cls.check(function, args, kwargs)
        result = ordinary.__torch_function__(function, types, args, kwargs)
        if scope is Scope.SHARD and type(result) is Tensor and function == _GRADIENT:
            result.__class__ = Shard  # assigned by the user
        if scope not in (Scope.ELEMENTS, Scope.FLAT) or result is None:
            return result
        kind = Shard if issubclass(cls, nn.Parameter) else cls
        with plain_tensors():
            if isinstance(result, list | tuple):
                return type(result)(_marked(item, args, kind) for item in result)
            made = _marked(result, args, kind)
            if is_view(function):
                made.source = getattr(args[0], "source", args[0])
            return made


_LIBRARY = __name__.partition(".")[0] + "."
_tensor: Any = Tensor
_GRADIENT, _SET_DATA = _tensor.grad.__get__, _tensor.data.__set__


def _marked(result: Any, args: Sequence[Any], kind: type[Tensor]) -> Any:
    is_new = type(result) is Tensor and not any(result is given for given in args)
    return result.as_subclass(kind) if is_new else result


def _needs_full(name: str) -> str:
    return (
        f"{name} needs the full tensor, and this rank has a shard of it. Parameters: call it on all ranks within "
        "`with fsdp.full_parameters():`, or before the model is wrapped; a penalty on weights belongs into a "
        "module's forward, or is the optimizer's weight_decay; other methods than forward that compute take "
        "fsdp.register_forward_method(name); optimizers that need norms of parameters take "
        "shard_by='parameters'. Gradients: fsdp.clip_grad_norm(max_norm), pipeline.clip_grad_norm(max_norm) and "
        "axonmpi.clip_grad_norm(model, max_norm) return the norm of the full gradient, and with max_norm=math.inf "
        "only measure; axonmpi.ShardedGradScaler scales losses. tensor.as_subclass(torch.Tensor) is the shard as "
        "an ordinary tensor"
    )


class ShardOfParameter(Shard, nn.Parameter):
    """A rank's shard of a parameter, as modules and optimizers have it.

    Attributes:
        ordinary: The class in a step of torch's optimizers, and while the full parameter is gathered.
        is_split: True if a rank may have some of the elements, and not only all or none.
    """

    ordinary: type[nn.Parameter]
    is_split: bool

    @classmethod
    def check(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if a function is refused, or other memory is given to a parameter; local."""
        if function == _SET_DATA:
            _check_data(*args)
        else:
            super().check(function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy; local."""
        copied = nn.Parameter(self.as_subclass(Tensor).detach().clone(), self.requires_grad)
        copied.__dict__.update(self.__dict__)
        copied.__class__ = ShardOfParameter
        memo[id(self)] = copied
        return copied


def _check_data(parameter: Tensor, value: Any) -> None:
    """Raise unless the new data are a conversion of the same parameter, as in `Module.to()`; local."""
    source = getattr(value, "source", parameter)
    if not isinstance(value, Shard) or source is not parameter:
        raise ValueError(
            "parameter.data = ...: expected this rank's shard of the same parameter, as converting a module gives "
            f"it, got {'another parameter' if isinstance(value, Shard) else 'an ordinary tensor'}. Tie parameters "
            "before the model is wrapped; set values within `with fsdp.full_parameters():` or with copy_()"
        )


class PartOfState(_Part):
    """A rank's shard of a parameter, or of optimizer state for it, in a state dict."""

    refused = frozenset({"untyped_storage", "storage", "typed_storage"})  # writers of files call these

    error = TypeError
    message = (
        "this is a rank's part of a parameter, or of an optimizer's state for it, and a file of it could not "
        "be loaded as the model. Save what fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer) "
        "or, with tensor parallelism, axonmpi.tensor.full_state_dict(model) return; all ranks call them. For "
        "a file of each rank's own, value.as_subclass(torch.Tensor) is an ordinary tensor"
    )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse."""
        raise self.error(self.message)


class ShardOfState(PartOfState, Shard):
    """A shard in a state dict."""


def as_part_of_state(value: Tensor) -> Tensor:
    """Return a view of a tensor that refuses to be saved; local."""
    return value.as_subclass(ShardOfState if isinstance(value, Shard) else PartOfState)


def mark_state(module: nn.Module) -> None:
    """Let a module's state dict refuse to be saved if it has shards of the module's own parameters; local."""
    module.register_state_dict_post_hook(_mark_parts)
    module.register_load_state_dict_pre_hook(_unmark_parts)


def _mark_parts(module: nn.Module, state: dict[str, Any], prefix: str, _local: object) -> None:
    shards: Mapping[str, object] = getattr(module, "shards", {})
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        is_part = parameter is not None and (
            is_shown_as_slice(parameter) or (name in shards and axes_of(parameter))
        )
        # With keep_vars=True the value is the parameter itself.
        if is_part and value is not None and type(value) in (Tensor, Shard):
            state[prefix + name] = as_part_of_state(value)


def _unmark_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name in module._parameters:
        value = state.get(prefix + name)
        if isinstance(value, PartOfState):
            state[prefix + name] = value.as_subclass(Tensor)
