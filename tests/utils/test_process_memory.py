"""Memory that is available on the node, or in this process's control group."""

from pathlib import Path

from axonmpi.utils import process_memory
from axonmpi.utils.process_memory import available_memory


def test_the_least_limit_of_the_control_groups_counts(monkeypatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_memory() <= total
    files = {
        "/proc/self/cgroup": "0::/job/step\n",
        "/sys/fs/cgroup/job/step/memory.max": "max\n",
        "/sys/fs/cgroup/job/memory.max": "4096\n",
        "/sys/fs/cgroup/memory.max": "8192\n",
        "/proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 100 kB\n",
    }

    def read(path: Path, encoding: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(process_memory.Path, "read_text", read)
    assert available_memory() == 4096
    del files["/proc/self/cgroup"]
    assert available_memory() == 102400
