"""Models that are larger than the memory a process may have, and models that no rank ever holds."""

import re
import sys
from pathlib import Path

import pytest
from helpers.limits import limit

from axonmpi.testing import launch

ONE_STEP = """
import ctypes, resource, sys
from pathlib import Path
import torch
from torch import nn
import axonmpi as ax

MIB = 1 << 20
LIMIT = 16 * MIB
ctypes.CDLL(None).mallopt(-3, MIB)  # large blocks go back to the system when they are freed: no model needs them
world = ax.init_process_group()
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])  # 6 units of 4 MiB
    warm = nn.Linear(8, 8)
warm = ax.FSDP(warm)  # what torch and MPI allocate once is there before the limit is set
warm(torch.randn(1, 8)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()

data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
limit = int(data.split()[1]) * 1024 + LIMIT
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.zeros(LIMIT // 4 + MIB)
except RuntimeError:
    print("the limit holds")

fsdp = ax.FSDP(model, cpu_offload=ax.CPUOffload.FULL, offload_folder=sys.argv[1])
optimizer = torch.optim.AdamW(fsdp.parameters(), lr=1e-5)
inputs = torch.randn(2, 1024, generator=torch.Generator().manual_seed(world.rank))
losses = []
for _ in range(2):
    optimizer.zero_grad()
    loss = fsdp(inputs).square().mean()
    loss.backward()
    optimizer.step()
    ax.all_reduce_mean(loss := loss.detach())
    losses.append(loss.item())
stats = fsdp.memory_stats()
assert stats.total_memory_bytes > 2 * LIMIT, stats
assert losses[1] < losses[0], losses
print(f"rank {world.rank}: trained {stats.total_memory_bytes // MIB} MiB")
ax.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits what Linux counts as data")
def test_a_model_larger_than_the_memory_trains_from_files(tmp_path: Path) -> None:
    """Each of 2 ranks has 48 MiB of parameters, gradients and state, and may have 16 that are not in files."""
    program, files = tmp_path / "one_step.py", tmp_path / "files"
    program.write_text(ONE_STEP)
    job = launch(2, str(program), str(files), timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stdout + job.stderr
    assert len(re.findall(r"the limit holds|rank \d: trained 4\d MiB", job.stdout)) == 4
    assert not files.exists()


def test_a_model_that_no_rank_ever_holds() -> None:
    """What two ranks need for 50 million parameters: 768 MiB, and a unit's gradients on each rank."""
    script = Path(__file__).parent / "billion.py"
    job = launch(
        2, str(script), "--width", "1024", "--layers", "4", timeout=limit(120), env={"OMP_NUM_THREADS": "1"}
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.startswith("50,")
    most, before, theory = map(float, re.findall(r"([\d.]+) (?:GiB|of them|in theory)", job.stdout))
    assert most - before < theory + 2 * 2 * 0.05 + 0.1
