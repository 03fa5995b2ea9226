"""torch's own examples on several ranks: DDP, FSDP2, tensor and sequence parallelism, and FSDP2 with both.

All but imagenet's demand GPUs at their beginning, and most print no losses.
"""

from others.public.program import Program
from others.public.timm import TORCHVISION, WITHOUT_OPERATORS

HAS_GPUS = "return has_gpu and gpu_count >= min_gpus"
ENOUGH = "return True"
NO_ACCELERATOR = "    torch.accelerator.set_device_index(rank)\n"
CURRENT = "torch.accelerator.current_accelerator()"
CPU = 'torch.device("cpu")'

SERIES = "distributed/ddp-tutorial-series/multigpu_torchrun.py"
DDP = "distributed/ddp/example.py"
GPT = "distributed/minGPT-ddp/mingpt/"
FSDP2 = "distributed/FSDP2/example.py"
PARALLEL = "distributed/tensor_parallelism/"
IMAGENET = "imagenet/main.py"


def _parallel(name: str, title: str, ranks: int, steps: int) -> Program:
    script = f"{PARALLEL}{name}_example.py"
    module = "sharded_model" if name == "fsdp_tp" else "tp_model" if name == "tensor_parallel" else "sp_model"
    return Program(
        repository="pytorch/examples",
        command=script,
        ranks=ranks,
        changes=(
            # A GPU for each rank is checked, and asked for.
            (f"{PARALLEL}log_utils.py", HAS_GPUS, ENOUGH),
            (script, f"{CURRENT}.type", '"cpu"'),
            # 10 steps are few for a small model.
            (script, " = 10\n", f" = {steps}\n"),
            # The weights are random.
            (script, "logger = get_logger()\n", "logger = get_logger()\ntorch.manual_seed(0)\n"),
            # Gradients add up from step to step, since no step sets them to zero; nothing is printed of them.
            (
                script,
                "    optimizer.step()\n",
                (
                    f"    total = torch.nn.utils.get_total_norm(p.grad for p in {module}.parameters())\n"
                    "    total = total.full_tensor().item()\n    optimizer.step()\n"
                ),
            ),
            (
                script,
                f'logger, f"{title} iter',
                f'logger, f"loss {{output.sum().item()}} gradients {{total}}; {title} iter',
            ),
            # torch's DTensor knows no sharding of the CPU's attention; each rank has heads of its own.
            (
                f"{PARALLEL}llama2_model.py",
                "output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)",
                (
                    "local = [x.to_local() for x in (xq, xk, xv)]\n        output = xq.from_local("
                    "F.scaled_dot_product_attention(*local, is_causal=True), xq.device_mesh, xq.placements)"
                ),
            ),
        ),
        results=r"loss ([-\d.e+]+) gradients ([-\d.e+]+)",
        compared=f"{steps} losses and norms of the gradients",
    )


def _fsdp2(options: str, prepare: tuple[str, ...] = ()) -> Program:
    return Program(
        repository="pytorch/examples",
        command=f"{FSDP2} {options}".strip(),
        prepare=prepare,
        changes=(
            # A GPU for each rank is checked; torch takes no device_id of a CPU.
            (FSDP2, HAS_GPUS, ENOUGH),
            (FSDP2, "backend=backend, device_id=device", "backend=backend"),
            # Its layers are on the device "meta" first, and would begin as memory happens to be.
            (
                "distributed/FSDP2/model.py",
                "        self.norm.reset_parameters()\n",
                (
                    "        self.norm.reset_parameters()\n"
                    "        for layer in self.layers:\n            layer.reset_parameters()\n"
                ),
            ),
            # Nothing is printed; 10 steps are few.
            (FSDP2, "in range(10)", "in range(40)"),
            (
                FSDP2,
                "        loss.backward()\n",
                "        loss.backward()\n        print(f'loss {rank} {loss.item()}')\n",
            ),
            (FSDP2, "        torch.nn.utils.clip_grad", "        norm = torch.nn.utils.clip_grad"),
            (
                FSDP2,
                "        optim.step()\n",
                "        optim.step()\n        print(f'norm {rank} {norm.full_tensor().item()}')\n",
            ),
        ),
        results=r"(?:loss|norm) \d ([-\d.e+]+)",
        compared="losses of two ranks and norms of the gradients, 40 steps",
    )


PROGRAMS = {
    "examples-multigpu-torchrun": Program(
        repository="pytorch/examples",
        command=f"{SERIES} 10 5",
        changes=(
            # It is for GPUs alone.
            (SERIES, '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
            (SERIES, ".to(self.gpu_id)", '.to("cpu")'),
            (SERIES, ", device_ids=[self.gpu_id]", ""),
            # Its weights and data are random.
            (SERIES, "    ddp_setup()\n", "    ddp_setup()\n    torch.manual_seed(int(os.environ['RANK']))\n"),
            # The cross entropy of its one class is 0 always, and so are the gradients.
            (SERIES, "F.cross_entropy", "F.mse_loss"),
            # Nothing is printed of the losses.
            (SERIES, "loss.backward()\n", "loss.backward()\n        print(f'loss {self.gpu_id} {loss.item()}')\n"),
        ),
        results=r"loss \d ([\d.e-]+)",
        compared="losses of two ranks, 320 steps",
    ),
    "examples-ddp": Program(
        repository="pytorch/examples",
        command=DDP,
        changes=(
            # It is for GPUs alone.
            (DDP, HAS_GPUS, ENOUGH),
            (DDP, "    " + NO_ACCELERATOR, ""),
            (DDP, CURRENT, CPU),
            (DDP, ".to(rank)", ""),
            (DDP, ", device_ids=[rank]", ""),
            # It is one step with random values, and prints nothing of it.
            (DDP, "    model = ToyModel()", "    torch.manual_seed(rank)\n    model = ToyModel()"),
            (
                DDP,
                "    loss_fn(outputs, labels).backward()\n    optimizer.step()\n",
                (
                    "    for _ in range(50):\n        outputs = ddp_model(torch.randn(20, 10))\n"
                    "        optimizer.zero_grad()\n"
                    "        loss = loss_fn(outputs, labels)\n        loss.backward()\n        optimizer.step()\n"
                    "        print(f'loss {rank} {loss.item()}')\n"
                ),
            ),
        ),
        results=r"loss \d ([\d.e-]+)",
        compared="losses of two ranks, 50 steps",
    ),
    "examples-mingpt": Program(
        repository="pytorch/examples",
        command=f"{GPT}main.py data_config.path={GPT}data/input.txt "
        "data_config.truncate=0.002 data_config.block_size=32 "
        "gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=64 trainer_config.max_epochs=6 "
        "trainer_config.batch_size=64 trainer_config.data_loader_workers=1 trainer_config.use_amp=false "
        "optimizer_config.learning_rate=0.003",
        # Without their dependencies, which limit the versions of packages that are here.
        packages=(
            *("--no-deps", "boto3", "botocore", "s3transfer", "jmespath"),
            *("hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3"),
        ),
        changes=(
            # It is for GPUs alone.
            (f"{GPT}main.py", HAS_GPUS, ENOUGH),
            (f"{GPT}main.py", NO_ACCELERATOR, ""),
            (f"{GPT}main.py", CURRENT, CPU),
            (f"{GPT}trainer.py", CURRENT, CPU),
            (f"{GPT}trainer.py", ".to(self.local_rank)", ".to(self.device)"),
            (f"{GPT}trainer.py", ", device_ids=[self.local_rank]", ""),
            # The weights and the split of the data are random.
            (f"{GPT}main.py", "    ddp_setup()\n\n", "    ddp_setup()\n    torch.manual_seed(0)\n\n"),
            # One step of 100 is printed.
            (f"{GPT}trainer.py", "if iter % 100 == 0", "if iter % 4 == 0"),
        ),
        results=r"\[RANK\d\] Epoch \d+ \| Iter \d+ \| \w+ Loss ([\d.]+)",
        compared="losses of two ranks in training and evaluation, every fourth of 96 steps",
    ),
    "examples-imagenet": Program(
        repository="pytorch/examples",
        command=f"{IMAGENET} --dummy --no-accel --dist-url env:// --dist-backend gloo --seed 1 --epochs 1 "
        "-a shufflenet_v2_x0_5 -b 4 -j 1 -p 1",
        packages=(TORCHVISION,),
        prepare=(WITHOUT_OPERATORS,),
        changes=(
            # An epoch of all images is 10^15 operations.
            (IMAGENET, "FakeData(1281167,", "FakeData(80,"),
            (IMAGENET, "FakeData(50000,", "FakeData(18,"),
            # Its DDP is for GPUs alone.
            (
                IMAGENET,
                "        print('using CPU, this will be slow')\n",
                "        model = torch.nn.parallel.DistributedDataParallel(model)\n",
            ),
        ),
        results=r"(?:Loss ([\d.e+-]+) \(([\d.e+-]+)\)\s+Acc@1\s+([\d.]+)| \* Acc@1 ([\d.]+) Acc@5 ([\d.]+))",
        compared="losses and accuracies of two ranks in 10 steps, and an evaluation",
    ),
    "examples-fsdp2": _fsdp2(""),
    "examples-fsdp2-options": _fsdp2(
        "--explicit-prefetching --mixed-precision --dcp-api",
        # A run of its own saves the checkpoint that all variants load.
        prepare=(f"torchrun --standalone --nproc-per-node 2 {FSDP2} --mixed-precision --dcp-api",),
    ),
    "examples-tensor-parallel": _parallel("tensor_parallel", "Tensor Parallel", ranks=2, steps=100),
    "examples-sequence-parallel": _parallel("sequence_parallel", "Sequence Parallel", ranks=2, steps=100),
    "examples-fsdp-tp": _parallel("fsdp_tp", "2D", ranks=4, steps=10),
}
