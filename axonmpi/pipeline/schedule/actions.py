"""The actions of a pipeline's ranks, and a schedule as lists of them (without torch).

F2.3        forward of stage 2 for micro-batch 3
B2.3        its backward, whole; or in two halves:
I2.3        the gradient of the stage's input, which the stage before waits for
W2.3        the gradient of its weights, which no other stage waits for
SF2.3>4     send forward: the output of stage 2 for micro-batch 3, to stage 4
RF4.3<2     receive forward: the same message, at stage 4
SB4.3>2     send backward: the gradient of what stage 4 has received, to stage 2
RB2.3<4     receive backward: the same message, at stage 2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

Datum = tuple[bool, int, int]
"""The output (True) or the gradient of the input (False) of a stage, for a micro-batch."""


class ActionKind(Enum):
    """The kind of an action; its value is the start of the action's short form.

    Attributes:
        is_compute: Whether the action computes; the others are transfers.
        is_send: Whether it sends.
        is_receive: Whether it posts a receive.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"

    def __init__(self, letters: str) -> None:
        self.is_compute = len(letters) == 1
        self.is_send = letters[0] == "S"
        self.is_receive = letters[0] == "R"

    __hash__ = object.__hash__  # each member exists once, and hashing its name takes longer


@dataclass(frozen=True)
class Action:
    """One action of one rank.

    Attributes:
        kind: The kind.
        stage: The stage that acts.
        micro_batch: The micro-batch, counted from 0.
        peer: The stage at the other end of a transfer; None for an action that computes.
    """

    kind: ActionKind
    stage: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        arrow = "" if self.peer is None else f"{'>' if self.kind.is_send else '<'}{self.peer}"
        return f"{self.kind.value}{self.stage}.{self.micro_batch}{arrow}"

    def counterpart(self) -> Action:
        """Return the other side of a transfer: the receive of a send, the send of a receive.

        Raises:
            ValueError: The action computes.
        """
        if self.peer is None or self.kind.is_compute:
            raise ValueError(f"expected a transfer with a peer, got {self}")
        kind = ActionKind(("R" if self.kind.is_send else "S") + self.kind.value[1])
        return Action(kind, self.peer, self.micro_batch, self.stage)

    @property
    def line(self) -> tuple[int, int]:
        """The stage that sends and the stage that receives, of a transfer."""
        assert self.peer is not None
        return (self.stage, self.peer) if self.kind.is_send else (self.peer, self.stage)

    @property
    def makes(self) -> Datum | None:
        """The datum that the action makes; None for a weight gradient and for transfers."""
        if not self.kind.is_compute or self.kind is ActionKind.BACKWARD_WEIGHT:
            return None
        return self.kind is ActionKind.FORWARD, self.stage, self.micro_batch

    @property
    def carries(self) -> Datum | None:
        """The datum that a transfer moves; None for an action that computes."""
        if self.peer is None:
            return None
        return self.kind.value.endswith("F"), self.line[0], self.micro_batch


_PATTERN = re.compile(r"(SF|RF|SB|RB|F|B|I|W)(\d+)\.(\d+)(?:([<>])(\d+))?")


def parse_action(text: str) -> Action:
    """Read the short form of an action, `str(action)`.

    Raises:
        ValueError: The text is not the short form of an action.
    """
    match = _PATTERN.fullmatch(text)
    if match:
        kind, stage, micro_batch, arrow, peer = match.groups()
        action = Action(ActionKind(kind), int(stage), int(micro_batch), int(peer) if arrow else None)
        if str(action) == text and (action.peer is None) == action.kind.is_compute:
            return action
    raise ValueError(f"expected an action such as F2.3, B2.3, I2.3, W2.3, SF2.3>4 or RF4.3<2, got {text!r}")


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the edges of a pipeline in which each stage feeds the next one."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


ComputeLists = tuple[tuple[Action, ...], ...]
"""[ranks] the actions that each rank computes, in order, without transfers."""


def check_edges(edges: Sequence[tuple[int, int]], num_stages: int) -> None:
    """Raise unless edges are different pairs of stages, the lower one first.

    Raises:
        ValueError: Naming the first edge that is not.
    """
    for edge in edges:
        if not 0 <= edge[0] < edge[1] < num_stages or edges.count(edge) > 1:
            raise ValueError(
                f"edges: expected different pairs of stages from 0 to {num_stages - 1}, the lower one first, "
                f"got {edge} in {edges}"
            )


@dataclass(frozen=True)
class Schedule:
    """A list of actions for each rank, and the rank of each stage.

    Attributes:
        name: For titles and messages.
        placement: [stages] the rank of each stage.
        num_microbatches: Micro-batches in one step.
        actions: [ranks] the actions of each rank, in order.
        edges: Pairs of stages, the lower one first, between which activations go forward and gradients back;
            pairs of stages that do not follow each other are skip connections. None given means the chain.
    """

    name: str
    placement: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    edges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.edges:
            object.__setattr__(self, "edges", chain(self.num_stages))

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of data."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return any(action.kind is ActionKind.BACKWARD_WEIGHT for actions in self.actions for action in actions)

    # ---- dependencies -----------------------------------------------------------------------------------------

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """[stages] the stages that feed each stage, in order."""
        edges = sorted(self.edges)
        return tuple(tuple(s for s, target in edges if target == stage) for stage in range(self.num_stages))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """[stages] the stages that each stage feeds, in order."""
        edges = sorted(self.edges)
        return tuple(tuple(t for source, t in edges if source == stage) for stage in range(self.num_stages))

    def is_local(self, stage: int, other: int) -> bool:
        """Return True if two stages are on the same rank."""
        return self.placement[stage] == self.placement[other]

    def needs(self, action: Action) -> list[Datum]:
        """Return the data that an action computes with and that its own rank makes."""
        return [datum for datum in self._inputs(action) if self.is_local(datum[1], action.stage)]

    def receives(self, action: Action) -> list[Action]:
        """Return the receives of the data that an action computes with and that other ranks make."""
        return [
            Action(
                ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD, action.stage, micro_batch, maker
            )
            for forward, maker, micro_batch in self._inputs(action)
            if not self.is_local(maker, action.stage)
        ]

    def sends(self, action: Action) -> list[Action]:
        """Return the sends of the datum that an action makes to stages of other ranks."""
        if action.makes is None:
            return []
        forward, stage, micro_batch = action.makes
        kind = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
        receivers = (self.targets if forward else self.sources)[stage]
        return [Action(kind, stage, micro_batch, peer) for peer in receivers if not self.is_local(stage, peer)]

    def _inputs(self, action: Action) -> list[Datum]:
        """Return the data that an action computes with."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            return [(True, source, micro_batch) for source in self.sources[stage]]
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return [(False, stage, micro_batch)]
        return [(True, stage, micro_batch), *((False, target, micro_batch) for target in self.targets[stage])]
