"""TorchRec on the CPU: sharded embedding tables with FBGEMM's fused optimizer, and the project's own DLRM."""

from others.public.program import Program

# Of these versions only torchrec asks for others: for FBGEMM's build for GPUs, and for an older torchmetrics.
PACKAGES = (
    "--no-deps",
    "torchrec==1.8.0",
    "fbgemm-gpu-cpu==1.8.0",
    "tensordict==0.15.3",
    "pyvers<0.3",
    "cloudpickle",
    "importlib_metadata",
    "zipp",
    "pyre-extensions",
    "typing-inspect",
)
TRAIN = '''
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

DIM, BATCH, STEPS = 32, 64, 60
ROWS = [101, 202, 303, 404, 505]  # of each table: neither tables nor rows can be divided evenly


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{i}"])
            for i, rows in enumerate(ROWS)
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = torch.nn.Sequential(
            torch.nn.Linear(len(ROWS) * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, features):
        return self.over(self.tables(features).values()).squeeze(1)


def batch(generator):
    """Return bags of 0 to 5 rows of each table, and labels: whether an example has more than 12 rows."""
    lengths = torch.randint(0, 6, (len(ROWS), BATCH), generator=generator)
    indices = [
        torch.randint(0, rows, (int(n),), generator=generator) for rows, n in zip(ROWS, lengths.sum(1), strict=True)
    ]
    names = [f"f{i}" for i in range(len(ROWS))]
    features = KeyedJaggedTensor(names, torch.cat(indices), lengths=lengths.flatten())
    return features, (lengths.sum(0) > 12).float()


def train(name, shardings):
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 0.05})
    plan = construct_module_sharding_plan(
        model.tables,
        per_param_sharding=shardings,
        sharder=EmbeddingBagCollectionSharder(),
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan(plan={"tables": plan}))
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "over" in n], lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        features, labels = batch(generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        print(f"{name}, rank {dist.get_rank()}, step {step}: loss {loss.item():.9f}")


dist.init_process_group("gloo")
world, tables = dist.get_world_size(), range(len(ROWS))
train("table-wise", {f"t{i}": table_wise(rank=i % world) for i in tables})
train("column-wise", {f"t{i}": column_wise(ranks=[i % world, (i + 1) % world]) for i in tables})
train("row-wise", {f"t{i}": row_wise() for i in tables})
dist.destroy_process_group()
'''
SIZES = ",".join(str(50 * (i % 7 + 1) * (1 if i % 5 else 20)) for i in range(26))
PROGRAMS = {
    "torchrec": Program(
        command="train.py",
        files={"train.py": TRAIN},
        packages=PACKAGES,
        results=r"loss (\d\.\d{9})",
        compared="360 losses: of 2 ranks and 60 steps, table-wise, column-wise and row-wise",
    ),
    "torchrec-dlrm": Program(
        repository="facebookresearch/dlrm",
        command=f"torchrec_dlrm/dlrm_main.py --num_embeddings_per_feature={SIZES} --embedding_dim=16 "
        "--dense_arch_layer_sizes=64,16 --over_arch_layer_sizes=64,1 --batch_size=64 --epochs=1 "
        "--limit_train_batches=60 --limit_val_batches=4 --limit_test_batches=4 --validation_freq_within_epoch=4 "
        "--adagrad --learning_rate=0.01 --seed=1 --interaction_type=dcn --dcn_num_layers=2 --dcn_low_rank_dim=16",
        packages=PACKAGES,
        changes=(  # its --seed is for the data alone: two runs over gloo differ
            (
                "torchrec_dlrm/dlrm_main.py",
                "    dist.init_process_group(backend=backend)\n",
                "    dist.init_process_group(backend=backend)\n    torch.manual_seed(args.seed)\n",
            ),
        ),
        results=r"AUROC over \w+ set: (\d\.\d+)",
        compared="AUROC of 17 evaluations",
    ),
}
