"""What a rank does in a pipeline, one frozen step at a time (without torch).

    F2.3        forward of stage 2 for micro-batch 3
    B2.3        its backward, whole; or in two halves:
    I2.3        the gradient of the stage's input, which the stage before waits for
    W2.3        the gradient of its weights, which nobody waits for
    SF2.3>4     send forward: what stage 2 has made for micro-batch 3, to stage 4
    RF4.3<2     receive forward: the same message, at stage 4
    SB4.3>2     send backward: the gradient of what stage 4 has received, to stage 2
    RB2.3<4     receive backward: the same message, at stage 2

A `Schedule` is a list of these for each rank, and where each stage lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "ActionKind", "ComputeLists", "Datum", "Links", "Schedule", "chain", "parse_action"]

Datum = tuple[bool, int, int]
"""What a compute action makes: the output (True) or the input gradient (False) of a stage, for a micro-batch."""


class ActionKind(Enum):
    """What an action does; the value is how its short form begins.

    Attributes:
        is_compute: Whether it computes; the others are transfers.
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


_COUNTERPARTS = {
    ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    Attributes:
        kind: What is done.
        stage: The stage that does it.
        micro_batch: For which micro-batch, counted from 0.
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
        if self.peer is None or self.kind not in _COUNTERPARTS:
            raise ValueError(f"expected a transfer with a peer, got {self}")
        return Action(_COUNTERPARTS[self.kind], self.peer, self.micro_batch, self.stage)

    @property
    def makes(self) -> Datum | None:
        """What other actions may need of this one; None for a weight gradient and for transfers."""
        if self.kind is ActionKind.FORWARD:
            return True, self.stage, self.micro_batch
        if self.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            return False, self.stage, self.micro_batch
        return None

    @property
    def carries(self) -> Datum | None:
        """What a transfer moves; None for an action that computes."""
        if self.peer is None:
            return None
        forward = self.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
        return forward, self.stage if self.kind.is_send else self.peer, self.micro_batch


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


@dataclass(frozen=True)
class Schedule:
    """Which rank does what, in which order.

    Attributes:
        name: For titles and messages.
        placement: [stages] the rank that each stage lives on.
        num_microbatches: Micro-batches in one step.
        actions: [ranks] what each rank does, in order.
        edges: Pairs of stages, the lower one first, between which activations go forward and gradients back; those
            between stages that do not follow each other are skip connections. None given means the chain.
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
        """Return the stages that live on a rank, in the order of data."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return any(action.kind is ActionKind.BACKWARD_WEIGHT for actions in self.actions for action in actions)


ComputeLists = tuple[tuple[Action, ...], ...]
"""[ranks] what each rank computes, in order, without transfers."""


class Links:
    """Who feeds whom: the edges of a pipeline, looked up by stage.

    Attributes:
        sources: [stages] the stages that feed each stage, in order.
        targets: [stages] the stages that each stage feeds, in order.
    """

    def __init__(self, num_stages: int, edges: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(edges)
        self.sources: Sequence[list[int]] = [[] for _ in range(num_stages)]
        self.targets: Sequence[list[int]] = [[] for _ in range(num_stages)]
        for source, target in ordered:
            self.sources[target].append(source)
            self.targets[source].append(target)

    def needs(self, action: Action) -> list[Datum]:
        """Return what has to be there before an action can compute."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            return [(True, source, micro_batch) for source in self.sources[stage]]
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return [(False, stage, micro_batch)]
        return [(True, stage, micro_batch), *((False, target, micro_batch) for target in self.targets[stage])]

    def receivers(self, action: Action) -> list[int]:
        """Return the stages that wait for what a compute action makes; none for a weight gradient."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return []
        return (self.targets if action.kind is ActionKind.FORWARD else self.sources)[action.stage]
