"""The watchdog's view of the connections to other nodes: loss of a rank, of its node, or of the network.

A lost connection alone does not end a job: the network of the connections may fail while that of MPI works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..launch.node_links import Link, LinkState, links
from ..utils.text import name_ranks
from .waits import RankState

LOST_SECONDS = 1.0
"""Time for which a connection must have been lost before the job may be ended."""


class NodeMonitor:
    """This rank's connections to other nodes.

    Args:
        host: Name of this node.
        say: Function that prints a text.
    """

    def __init__(self, host: str, say: Callable[[str], None]) -> None:
        self._host = host
        self._say = say
        self._links = list(links())
        self._lost: dict[Link, float] = {}

    def open(self) -> list[Link]:
        """Return the open connections; local."""
        return [link for link in self._links if link.state is LinkState.OPEN]

    def look(self, passed: float) -> None:
        """Look at all connections, and print each loss at once: Open MPI may end this rank next; local.

        Args:
            passed: Seconds since the look before.
        """
        for link in self._links:
            if link in self._lost:
                self._lost[link] += passed
            elif link.look() not in (LinkState.OPEN, LinkState.LEFT):
                self._lost[link] = 0.0
                if not link.said:  # else the other node has printed it
                    self._say(f"axonmpi: {self._cause(link)}")

    def reason_to_end(self, states: Mapping[int, RankState]) -> str:
        """Return the reason to end the job, if all ranks wait and a connection is lost; local, up to a second.

        Args:
            states: States of all ranks of this node.

        Returns:
            The reason; empty without one.
        """
        lost = [link for link, seconds in self._lost.items() if seconds >= LOST_SECONDS]
        waiting = {rank: state for rank, state in states.items() if state.waits}
        if not lost or not waiting or not all(rank in waiting or each.is_lost for rank, each in states.items()):
            return ""
        link = lost[0]
        if link.state is LinkState.LOST and link.answers():
            self._say(f"axonmpi: node {link.peer.host} answers again, and the job goes on")
            self._links.remove(link)
            del self._lost[link]
            return ""
        first = waiting[min(waiting)]
        where = "at the end of the program" if first.is_ending else f"in {first.operation}"
        return f"{self._cause(link)} while {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} {where}"

    def tell(self, cause: str) -> None:
        """Send the other nodes the reason for which this node ends the job; local."""
        for link in self.open():
            link.say(cause)

    def _cause(self, link: Link) -> str:
        peer = link.peer
        if link.said:
            return f"node {peer.host} ({peer.ranks}) has ended the job ({link.said})"
        if link.state is LinkState.ENDED:
            return f"rank {peer.rank} on {peer.host} has ended, or was ended, before the end of its program"
        return f"the link from node {self._host} to node {peer.host} ({peer.ranks}) is lost"
