"""torch.distributed over MPI where the ranks are on two nodes."""

from __future__ import annotations

import pytest
from helpers.over_gloo import equals_gloo_on_nodes


@pytest.mark.slow
def test_a_stock_program_gives_what_it_gives_over_gloo(nodes, tmp_path) -> None:
    equals_gloo_on_nodes(nodes, (2, 1), ["ddp", "fsdp2_and_dcp", "functional"], tmp_path)


START = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("axonmpi", timeout=timedelta(seconds=5))
rank, tensor = dist.get_rank(), torch.ones(2)
dist.all_reduce(tensor)
assert tensor.sum() == 4
"""


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("if rank == 1: raise KeyError('no such thing')\ndist.all_reduce(tensor)", "KeyError: 'no such thing'"),
        ("dist.all_reduce(torch.ones(2 + rank))", r"rank 1: all_reduce\(float32 \[3\], SUM\)"),
        ("if rank: time.sleep(60)\ndist.all_reduce(tensor)", "was not complete after 5 s: another rank"),
    ],
    ids=["a rank raises", "mismatch", "time-out"],
)
def test_a_job_that_cannot_go_on_ends_with_the_cause(nodes, program, cause) -> None:
    with pytest.raises(AssertionError, match=cause) as ended:
        nodes.run((1, 1), "-c", START + program, timeout=45)
    assert "exit code" in str(ended.value)
