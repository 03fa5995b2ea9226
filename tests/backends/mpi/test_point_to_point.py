"""Receives from any rank, which only MPI has."""

import pytest
import torch

from axonmpi import CollectiveMismatchError

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.mpi]


def test_receives_from_any_rank_match_in_the_order_of_their_calls(group) -> None:
    """Each sender's messages arrive in order; one of another size leaves the next alone."""
    others = range(1, group.size)
    if group.rank:
        for number, elements in enumerate((2, 1, 2)):
            group.send(torch.full((elements,), 10 * number + group.rank), 0, tag=4)
        group.barrier()
        return
    arrived: dict[int, list[int]] = {rank: [] for rank in others}
    tensors = [torch.zeros(2, dtype=torch.int64) for _ in range(3 * len(others))]
    works = [group.backend.irecv(tensor, None, tag=4) for tensor in tensors]
    works[-1].done()  # asks for the others', too
    refused: list[str] = []
    for work, tensor in zip(works, tensors, strict=True):
        try:
            arrived[work.result()].append(int(tensor[0]))
        except CollectiveMismatchError as error:
            refused.append(str(error))
    assert len(refused) == len(others)
    assert all("expected 16 bytes" in text for text in refused)
    assert arrived == {rank: [rank, 20 + rank] for rank in others}
    group.barrier()


def test_a_large_message_goes_out_while_one_from_any_rank_is_awaited(group) -> None:
    """Both wait for their own message to go first; also to oneself."""
    large, received = torch.full((3_000_000,), group.rank), torch.zeros(3_000_000, dtype=torch.int64)
    for distance in (0, 1):
        work = group.backend.irecv(received, None, tag=distance)
        group.isend(large, (group.rank + distance) % group.size, tag=distance).wait(60.0)
        source = (group.rank - distance) % group.size
        assert (work.result(), int(received[0])) == (source, source)
