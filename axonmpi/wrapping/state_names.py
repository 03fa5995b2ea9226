"""Keys of a wrapper's state dict, which are those of the wrapped module.

    wrapper.state_dict()         {"0.weight": ...}           and not "module.0.weight"
    wrapper.load_state_dict()    takes both, and reports errors with the first
    wrapper.named_parameters()   "0.weight", ...             and so named_buffers()

So checkpoints, and choices of parameters by name, are the same for wrapped and plain modules. `named_modules()` has
torch's paths, which begin with the wrapper itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

_PREFIX = "module."


class Wrapper(nn.Module):
    """A wrapper of a module, `module`, whose state dicts have the wrapped module's keys."""

    def __init__(self) -> None:
        super().__init__()
        module: Any = self
        module.register_state_dict_post_hook(_strip_prefix)
        module.register_load_state_dict_pre_hook(_add_prefix)
        module.register_load_state_dict_post_hook(_tidy_report)

    @classmethod
    def check_module(cls, module: object, why: str) -> None:
        """Raise unless a module can be wrapped; local.

        Args:
            module: The module.
            why: End of the message of the ValueError.

        Raises:
            TypeError: The argument is no module.
            ValueError: The module, or a submodule, is wrapped already.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        for name, part in module.named_modules():
            if isinstance(part, cls):
                raise ValueError(f"module: {name or 'it'} is wrapped in {cls.__name__} already{why}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names of the wrapped module; local."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under the names of the wrapped module; local."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def register_forward_method(self, name: str) -> None:
        """Add a method of the module that computes, as `forward` does, to the wrapper; local, on all ranks.

        `wrapper.encode(x)` then calls `module.encode(x)` with the parameters and gradients of a forward. The same
        as torch's `register_fsdp_forward_method`.

        Args:
            name: Name of the method, such as "encode" or "generate".

        Raises:
            TypeError: The module has no such method.
            ValueError: The wrapper has another attribute of that name.
        """
        if not isinstance(name, str) or not callable(getattr(self.module, name, None)):
            kind = type(self.module).__name__
            raise TypeError(f"name: expected the name of a method of the wrapped {kind}, got {name!r}")
        if hasattr(type(self), name):
            raise ValueError(f"name: expected another name than {name!r}, which {type(self).__name__} has itself")
        self._forward_methods = {*self.__dict__.get("_forward_methods", ()), name}

    # torch.func.functional_call reads and replaces parameters and buffers as attributes.

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_forward_methods", ()):
            return partial(self.call_method, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self._modules.get("module")
            if inner is None or not any(name in own for own in (inner._modules, inner._parameters, inner._buffers)):
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner: Any = self._modules.get("module") if isinstance(value, Tensor) else None
        if inner is not None and name in inner._parameters:
            inner._parameters[name] = value
        elif inner is not None and name in inner._buffers:
            inner._buffers[name] = value
        else:
            super().__setattr__(name, value)


def _strip_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, _local: object) -> None:
    inner = prefix + _PREFIX
    _rename(state, {key: prefix + key[len(inner) :] for key in state if key.startswith(inner)})
    # The versions of modules are kept under both names, for the plain module and for a wrapped one.
    versions = getattr(state, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(inner)]:
        versions[(prefix + key[len(inner) :]).removesuffix(".")] = versions[key]


def _add_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    own_keys = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    if not _has_prefix(wrapper, own_keys):
        _rename(state, {prefix + key: prefix + _PREFIX + key for key in own_keys})
    versions = getattr(state, "_metadata", {})
    for key in [key for key in versions if not f"{key}.".startswith(_PREFIX)]:
        versions.setdefault((_PREFIX + key).removesuffix("."), versions[key])
    wrapper.__dict__["_load_report"] = prefix, rest[-1]


def _has_prefix(wrapper: nn.Module, keys: Sequence[str]) -> bool:
    """Return True if more keys are known as they are than with the prefix; a submodule may be called "module"."""
    # By nn.Module's methods, as the wrapper's own leave the prefix out.
    parameters, buffers = nn.Module.named_parameters(wrapper), nn.Module.named_buffers(wrapper)
    names = {name for name, _ in [*parameters, *buffers]}
    return sum(key in names for key in keys) > sum(_PREFIX + key in names for key in keys)


def _tidy_report(wrapper: nn.Module, incompatible: Any) -> None:
    prefix, errors = wrapper.__dict__.pop("_load_report")
    inner = prefix + _PREFIX
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [prefix + key[len(inner) :] if key.startswith(inner) else key for key in keys]
    errors[:] = [error.replace(f" {inner}", f" {prefix}") for error in errors]


def _rename(state: dict[str, Any], new_names: Mapping[str, str]) -> None:
    """Rename entries in place, in their order; an old name may be the new name of another entry."""
    values = {old: state.pop(old) for old in new_names}
    for old, new in new_names.items():
        state[new] = values[old]
