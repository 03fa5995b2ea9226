"""Parameters of a unit that is not gathered: for optimizers, and not for layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..wrapping.partial import mark_state

__all__ = ["GuardedParameters", "ScatteredParameterError", "guard"]


class ScatteredParameterError(ValueError):
    """A parameter was used for computing while its values were spread over the ranks."""


class GuardedParameters(dict[str, Any]):
    """The parameters of a module, of which a forward may read those that are gathered only.

    Args:
        parameters: The module's parameters.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.unit_of: dict[str, Any] = {}
        self.names: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        unit = self.unit_of.get(name)
        if unit is not None and not unit.active and not unit.shown:
            is_whole = unit.run.shows_in_backward(unit)
            if not is_whole and unit.run.depth:
                raise ScatteredParameterError(_message(unit, self.names[name]))
        return super().__getitem__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a copy would have this rank's parts, and no way to gather them."""
        raise TypeError(
            "a sharded module cannot be copied or pickled: load the wrapper's .full_state_dict() into a module "
            "that is not wrapped, or save that"
        )


def guard(module: nn.Module, attribute: str, unit: Any, name: str) -> None:
    """Make reading a parameter in a forward an error while its unit is not gathered; local."""
    if not isinstance(module._parameters, GuardedParameters):
        object.__setattr__(module, "_parameters", GuardedParameters(module._parameters))
        module.register_forward_pre_hook(_check_gathered)
        mark_state(module)
    parameters: Any = module._parameters
    parameters.unit_of[attribute] = unit
    parameters.names[attribute] = name


def _check_gathered(module: nn.Module, _args: object) -> None:
    parameters: Any = module._parameters
    for attribute, unit in parameters.unit_of.items():
        if unit.active or unit.shown or unit.module is module or unit.run.shows_wholes:
            continue
        if not unit.run.shows_in_backward(unit):
            raise ScatteredParameterError(_message(unit, parameters.names[attribute]))


def _message(unit: Any, name: str) -> str:
    where = f"unit {unit.name!r}" if unit.name else "the outermost unit"
    return (
        f"parameter {name!r} belongs to {where} and was used outside of that unit's forward, while its values are "
        "spread over the ranks. Call the wrapped model (or the unit), put the modules that use the parameter into "
        "one unit with units=..., or use it within `with fsdp.full_parameters():` "
        "and torch.no_grad()"
    )
