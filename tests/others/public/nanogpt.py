"""nanoGPT: a small GPT on DDP, with gradient accumulation."""

from others.public.program import Program

TEXT = (
    "import random; random.seed(0); words = 'the cat sat on a mat and saw one bird fly'.split(); "
    "print(' '.join(random.choices(words, k=40000)))"
)
PROGRAMS = {
    "nanogpt": Program(
        repository="karpathy/nanoGPT",
        command="train.py config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32 "
        "--max_iters=200 --lr_decay_iters=200 --log_interval=1 --eval_iters=2 --eval_interval=50 --batch_size=8 "
        "--block_size=64 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --gradient_accumulation_steps=4",
        prepare=(
            f'python -c "{TEXT}" > data/shakespeare_char/input.txt',
            "python data/shakespeare_char/prepare.py",
        ),
        packages=("requests",),
        changes=(  # its DDP is for GPUs alone
            ("train.py", "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
            ("train.py", "DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        ),
        results=r"(?:iter \d+: loss ([\d.]+)|train loss ([\d.]+), val loss ([\d.]+))",
        compared="201 losses and 5 evaluations",
    ),
}
