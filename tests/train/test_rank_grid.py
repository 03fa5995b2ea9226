"""The grid of ranks, and the table of their shards and memory."""

import re

import pytest
import torch
from helpers.compare import refused
from torch.nn import functional as F

from axonmpi.testing import run_ranks
from axonmpi.train import GPT, Config, Trainer
from axonmpi.train.parallel_model import ModelMemory
from axonmpi.train.rank_grid import RankGrid, check_nodes, plan_schedule
from axonmpi.train.report.memory_table import RankMemory, bytes_of_position, memory_table
from axonmpi.utils.text import aligned, in_ranges


def test_the_last_axis_are_neighbours():
    config = Config().replace(dp=2, pp=2, tp=2)
    places = [RankGrid.of(config, 8, rank) for rank in range(8)]
    found = [(place.replica, place.position) for place in places]
    assert found == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert [places[0].ranks_at(position) for position in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert places[0].shape == {"dp": 2, "pp": 2, "cp": 1, "tp": 2}
    assert RankGrid.of(Config().replace(tp=2), 12, 0).dp == 6
    blocks = [RankGrid.of(Config().replace(cp=2), 4, rank) for rank in range(4)]
    assert [(place.dp, place.replica) for place in blocks] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert blocks[0].ranks_at(0) == [0, 1, 2, 3]


def test_replicas_that_cannot_be_sharded_within_nodes_are_an_error_on_every_rank(monkeypatch):
    config = Config().replace(fsdp="hybrid", tp=2)
    grid = RankGrid.of(config, 8, 0)
    check_nodes(grid, [0, 0, 0, 0, 1, 1, 1, 1])
    check_nodes(grid, [0] * 8)
    message = r"got \[3, 1\] for ranks 0, 2, 4, 6: start the job with as many ranks"
    refused(ValueError, (lambda: check_nodes(grid, [0] * 5 + [1] * 3), message))

    def start(world):
        refused(ValueError, (lambda: Trainer(config, world), "fsdp: hybrid needs as many replicas on each node"))

    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "5")
    run_ranks(8, start)


SIX = "6 ranks: take for example dp x tp x pp = "


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"dp": 2, "tp": 2}, 6, f"dp x tp x pp = 2 x 2 x 1 = 4, but there are {SIX}3 x 2 x 1 or "),
        ({"tp": 4}, 6, f"tp x pp = 4 x 1 = 4, which does not divide the {SIX}3 x 2 x 1 or "),
        ({"tp": 4}, 2, "tp x pp = 4 x 1 = 4, but there are 2 ranks: take for example dp x tp x pp = 1 x 2"),
        ({"tp": 2}, 1, "but there is 1 rank: take for example dp x tp x pp = 1 x 1 x 1, or start a multiple"),
        ({"pp": 4, "dp": 2}, 1, "or start 8 ranks, as mpirun -n 8 does"),
        (
            {"dp": 8},
            4,
            "dp x tp x pp = 8 x 1 x 1 = 8, but there are 4 ranks: take for example dp x tp x pp = 4 x 1",
        ),
        ({"dp": 2, "tp": 2, "micro_batches": 4, "global_batch": 12}, 6, "but there are 6 ranks: take for example"),
        ({"dp": 3}, 7, "dp x tp x pp = 3 x 1 x 1 = 3, but there are 7 ranks: start 3 ranks"),  # nothing fits seven
    ],
)
def test_a_wrong_product_is_answered_with_valid_ones(settings, ranks, message):
    config = Config().replace(**{"global_batch": 24, "layers": 4, "heads": 4, **settings})
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        RankGrid.of(config, ranks, 0)
    suggestions = re.findall(r"(\d+) x (\d+) x (\d+)", str(caught.value).partition("take for example")[2])
    assert len(set(suggestions)) == len(suggestions)
    for dp, tp, pp in (map(int, suggestion) for suggestion in suggestions):
        grid = RankGrid.of(config.replace(dp=dp, tp=tp, pp=pp), ranks, 0)
        assert (grid.shape, config.run.global_batch % dp) == ({"dp": dp, "pp": pp, "cp": 1, "tp": tp}, 0)
        plan_schedule(config, grid)  # enough sequences for the micro-batches


def shown(config, ranks):
    """Return the lines of the table that rank 0 shows."""
    return run_ranks(ranks, lambda world: Trainer(config, world).opening.splitlines())[0][2:7]


@pytest.mark.not_over_double("is about memory that the CPUs of a node share")
def test_the_table_says_which_rank_has_what(tiny):
    config = tiny.replace(layers=3, width=32, heads=2, pp=2, tp=2, fsdp="full", sequence_parallel=True)
    mesh, header, first, second, note = shown(config, 8)
    assert mesh == (
        "mesh: dp 2 x pp 2 x cp 1 x tp 2 = 8 ranks, rank = (dp x 2 + pp) x 2 + tp; "
        "parameters sharded along dp (full); sequence parallel"
    )
    sizes = ["weights", "gradients", "optimizer", "activations*", "all*"]
    assert re.split(r"  +", header.strip()) == ["pp", "ranks", "what each has", "parameters", *sizes]
    block, words = 12 * 32**2 + 2 * 32, 256 * 32
    halves = [(2 * block + words) // 4 + 2 * 32 // 2, (block + words + 32) // 4]
    told = [["0", "0-1 4-5", "1/2 of embedding, blocks 0 to 1"], ["1", "2-3 6-7", "1/2 of block 2, output layer"]]
    for row, half, start in zip((first, second), halves, told, strict=True):
        cells = re.split(r"  +", row.strip())
        assert cells[:3] == start
        parameters, *memory = (float(text.replace(",", "")) for text in cells[3:])
        assert parameters == pytest.approx(half, rel=0.02)
        *divided, _activations, together = memory
        shards = [1, 1 + 2, 2]  # gradients: a shard, and whole ones
        assert divided == pytest.approx([4 * parameters / 1024 * count for count in shards], rel=0.02)
        assert together == pytest.approx(sum(memory) - together, abs=0.3)
    assert note == (
        "weights to all: memory in KiB that a rank is expected to need; * estimated, "
        "with micro-batches of 1 sequence"
    )


def test_what_is_shown_without_any_division(tiny):
    mesh, _, row, note = shown(tiny, 2)
    assert mesh == "mesh: dp 2 x pp 1 x cp 1 x tp 1 = 2 ranks"
    assert re.split(r"  +", row.strip())[:4] == ["0", "0-1", "all layers", "7,216"]
    assert note.endswith("* estimated, with 4 sequences")


def test_what_lies_in_files_is_said():
    rank = RankMemory(0, "all layers", ModelMemory(4, 16, 16, 32), 0)
    for offload, offloaded in (("full", "parameters, gradients and optimizer state"), ("params", "parameters")):
        config = Config().replace(fsdp="full", cpu_offload=offload)
        mesh = memory_table(config, RankGrid.of(config, 1, 0), None, [rank]).splitlines()[0]
        assert mesh.endswith(f"along dp (full); {offloaded} offloaded")


def test_many_ranks_are_shown_in_few_rows():
    config = Config().replace(dp=2, pp=16, tp=2, layers=16, fsdp="full")
    model = ModelMemory(2_000_000_000, 8 << 30, 8 << 30, 16 << 30)
    places = [RankGrid.of(config, 64, rank) for rank in range(64)]
    memory = [RankMemory(place.position, f"1/2 of block {place.position}", model, 3 << 29) for place in places]
    table = memory_table(config, places[5], None, memory).splitlines()
    assert (len(table), max(map(len, table)) <= 120) == (3 + 8, True)
    sizes = ["2,000,000,000", "8.0", "8.0", "16.0", "1.5", "33.5"]
    assert [*table[2].split()[:3], *table[2].split()[-6:]] == ["0", "0-1", "32-33", *sizes]
    assert (table[8].split(), table[9].split()[:3]) == (["..."] * 9, ["15", "30-31", "62-63"])
    assert table[10].startswith("weights to all: memory in GiB")


def test_ranges_and_columns():
    assert in_ranges([0, 1, 2, 5, 8, 9], most=4) == "0-2 5 8-9"
    assert in_ranges(range(0, 20, 2), most=4) == "0 2 4 ... 18"
    assert aligned([["a", "bb"], ["ccc", "d"]], left=[0]) == ["a    bb", "ccc   d"]


@pytest.mark.parametrize(
    ("norm", "positions", "dtype"),
    [  # every two of these together
        ("rmsnorm", "rotary", "float32"),
        ("rmsnorm", "learned", "bfloat16"),
        ("layernorm", "rotary", "bfloat16"),
        ("layernorm", "learned", "float32"),
    ],
)
def test_activations_are_estimated_well(norm, positions, dtype):
    """Compared with what autograd really keeps."""
    config = Config().replace(width=64, layers=1, heads=4, norm=norm, positions=positions, dtype=dtype)
    model = GPT(config.model)
    tokens = torch.randint(256, (3, config.model.sequence_length), generator=torch.Generator().manual_seed(1))
    weights = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept = {}

    def keep(tensor):
        if tensor.shape not in weights and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor  # which keeps the memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    estimated = sum(bytes_of_position(config)) * tokens.numel()
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(estimated, rel=0.1)
