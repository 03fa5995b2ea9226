"""HydraGNN: graph networks for materials on DDP, an example with data that it makes."""

import sys

from others.public.program import Program

# Both packages have no wheels on PyPI.
SCATTER = '''"""Functions of torch_scatter and pyg_lib, on torch's own operations."""

import torch
import torch_geometric.nn
from torch_geometric.utils import scatter


def scatter_add(src, index, dim):
    return scatter(src, index, dim, reduce="sum")


def radius_graph(x, r, batch=None, loop=False, max_num_neighbors=32, **_):
    near = torch.cdist(x, x) <= r
    if batch is not None:
        near &= batch[:, None] == batch
    if not loop:
        near.fill_diagonal_(False)
    target, source = (near & (near.cumsum(1) <= max_num_neighbors)).nonzero().T
    return torch.stack([source, target])


torch_geometric.nn.radius_graph = radius_graph
'''
PACKAGES = (
    "torch_geometric",
    "ase",
    "scikit-learn",
    "tensorboard",
    "matscipy",
    "vesin",
    "e3nn==0.5.1",
    "torch-ema",
)
PROGRAMS = {
    "hydragnn": Program(
        repository="ORNL/HydraGNN",
        command="LennardJones.py --mpnn_type EGNN --batch_size 16",
        prepare=(
            "cp examples/LennardJones/* .",  # beside the package, which need not be installed then
            f"{sys.executable} LennardJones.py --preonly",  # its data are random; this Python has MPI
        ),
        files={"torch_scatter.py": SCATTER},
        packages=PACKAGES,
        changes=(
            ("examples/LennardJones/LJ.json", '"num_epoch": 25', '"num_epoch": 5'),  # a shorter run
            (  # the example uses the module, and nothing imports it
                "examples/LennardJones/LennardJones.py",
                "import hydragnn\n",
                "import hydragnn\nimport hydragnn.utils.input_config_parsing\n",
            ),
        ),
        results=r"Epoch: \d+, Train Loss: ([\d.]+), Val Loss: ([\d.]+), Test Loss: ([\d.]+)",
        compared="losses of training, validation and test of 5 epochs",
    ),
}
