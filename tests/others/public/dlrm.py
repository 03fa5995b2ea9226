"""DLRM: embedding tables on the ranks in turn, joined by an all-to-all, beside layers on DDP."""

from others.public.program import Program

MODEL = (
    "dlrm_s_pytorch.py --dist-backend=gloo --arch-sparse-feature-size=32 --arch-mlp-bot=13-128-32 "
    "--arch-mlp-top=128-64-1 --data-size=1920 --mini-batch-size=64 --nepochs=3 --num-indices-per-lookup=4 "
    "--loss-function=bce --round-targets=True --learning-rate=0.3 --test-freq=30 --arch-embedding-size="
)


def program(alltoall: str, sizes: str, ranks: int = 2, tolerance: float = 0.0) -> Program:
    """Return DLRM with one of its all-to-alls and tables of these sizes, of which the first ranks have one more."""
    return Program(
        repository="facebookresearch/dlrm",
        command=MODEL + sizes,
        packages=("scikit-learn", "tensorboard"),
        results=r"(?:loss (\d\.\d+)|accuracy (\d+\.\d+) %, best (\d+\.\d+))",
        compared="90 losses and 3 evaluations",
        env={"DLRM_ALLTOALL_IMPL": alltoall},
        ranks=ranks,
        tolerance=tolerance,
    )


PROGRAMS = {
    "dlrm-alltoall": program("alltoall", "500-400-300-200-100"),
    "dlrm-scatter": program("scatter", "500-400-300-200-100"),
    "dlrm-scatter-list": program("scatter_list", "500-400-300-200-100"),
    # A sum of four gradients has more than one order; losses have 6 digits after the point.
    "dlrm-4-ranks": program("alltoall", "500-400-300-200-100-50", ranks=4, tolerance=1e-5),
}
