"""`ScatteredParameterError`, and the check that a parameter is read inside its unit only, while it is gathered.

Three mistakes are refused: a forward reads a parameter whose unit is not gathered, which optimizers may do; a
parameter is added after wrapping; backward makes a graph of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..wrapping.shard_tensors import mark_state
from .unit import Unit


class ScatteredParameterError(ValueError):
    """A parameter was used for computing while its values were spread over the ranks."""


class GuardedParameters(dict[str, Any]):
    """The parameters of a module, of which a forward may read gathered ones only.

    Args:
        parameters: The module's parameters.
        may_read: Returns True if parameters of a unit that is not gathered may be read. Its second argument is True
            if a module is about to compute with them.

    Attributes:
        guarded: Unit and name of each sharded parameter, by the module's name for it.
    """

    def __init__(self, parameters: dict[str, Any], may_read: Callable[[Unit, bool], bool]) -> None:
        super().__init__(parameters)
        self.guarded: dict[str, tuple[Unit, str]] = {}
        self._may_read = may_read

    def __getitem__(self, name: str) -> Any:
        if name in self.guarded:
            self.check(name, computes=False)
        return super().__getitem__(name)

    def check(self, attribute: str, *, computes: bool) -> None:
        """Raise if a parameter must not be read now; in backward, gather its unit instead, which is collective.

        Args:
            attribute: The module's name for it.
            computes: True if the module is about to compute.

        Raises:
            ScatteredParameterError: It belongs to a unit that is not gathered.
        """
        unit, name = self.guarded[attribute]
        if unit.shows_full or self._may_read(unit, computes):
            return
        owner = f"unit {unit.name!r}" if unit.name else "the outermost unit"
        raise ScatteredParameterError(
            f"parameter {name!r} belongs to {owner} and was used outside of that unit's forward, while its values "
            "are spread over the ranks. Call the wrapped model (or the unit), call another method of the model "
            "after fsdp.register_forward_method(name), put the modules that use the parameter into one unit with "
            "units=..., or use it within `with fsdp.full_parameters():` and torch.no_grad()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a copy would have this rank's shards, and no way to gather them."""
        raise TypeError(
            "a sharded module cannot be copied or pickled: load the wrapper's .full_state_dict() into a module "
            "that is not wrapped, or save that"
        )


def guard(unit: Unit, may_read: Callable[[Unit, bool], bool]) -> None:
    """Make reading a unit's parameters in a forward an error while it is not gathered; local."""
    for parameter in unit.parameters:
        for module, attribute in parameter.owners:
            if not isinstance(module._parameters, GuardedParameters):
                object.__setattr__(module, "_parameters", GuardedParameters(module._parameters, may_read))
                module.register_forward_pre_hook(_check_gathered)
                mark_state(module)
            guarded: Any = module._parameters
            guarded.guarded[attribute] = unit, parameter.name


def _check_gathered(module: nn.Module, _args: object) -> None:
    parameters: Any = module._parameters
    for attribute, (unit, _) in parameters.guarded.items():
        if unit.module is not module:
            parameters.check(attribute, computes=True)


class Members:
    """The modules and parameters that a model had at wrapping.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # its hooks lead here
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._note_modules(model)

    def _note_modules(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._seen = self._ids()

    def _ids(self) -> list[int]:
        modules = [module for reference in self._modules if (module := reference()) is not None]
        own = [members for module in modules for members in (module._modules, module._parameters)]
        return [id(member) for members in own for member in members.values()]

    def check(self) -> None:
        """Raise if the model has a parameter that it did not have at wrapping; local.

        Raises:
            ValueError: Names the parameter.
        """
        model = self._model()
        if model is None or self._ids() == self._seen:
            return
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._parameters:
                raise ValueError(
                    f"parameter {name!r} was added after wrapping: it is not sharded, and its gradient would stay "
                    "each rank's own. Change the model before it is wrapped"
                )
        self._note_modules(model)  # such as an activation that was exchanged


def check_graph_of_gradients(units: Iterable[Unit], *, accumulates: bool) -> None:
    """Refuse a backward that makes a graph of its gradients, if a backward through it would be wrong; local.

    Args:
        units: The units of the model.
        accumulates: True if gradients go into `p.grad`, and False for `torch.autograd.grad`.

    Raises:
        ValueError: Names the remedy.
    """
    if accumulates:
        raise ValueError(
            "backward(create_graph=True): p.grad would have no graph, as it is an average over ranks; use "
            "torch.autograd.grad(..., inputs, create_graph=True), and backward() for the loss that is made of it"
        )
    if any(unit.lent is not None for unit in units):
        raise ValueError(
            "create_graph=True: units take turns in the memory that they are gathered in, so a backward "
            "through gradients would not find their parameters; ShardingStrategy.SHARD_GRAD_OP keeps them"
        )
