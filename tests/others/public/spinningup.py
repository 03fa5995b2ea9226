"""Spinning Up: PPO in PyTorch that averages gradients with mpi4py's Allreduce."""

from others.public.program import OVER_MPI4PY, Program

OF_TENSORFLOW = (
    "# Disable TF deprecation warnings.\n"
    "# Syntax from tf1 is not expected to be compatible with tf2.\n"
    "import tensorflow as tf\n"
    "tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)\n"
)
NAMES = ("ddpg", "ppo", "sac", "td3", "trpo", "vpg")
ALGORITHMS = "".join(f"from spinup.algos.tf1.{name}.{name} import {name} as {name}_tf1\n" for name in NAMES)
PROGRAMS = {
    "spinningup": Program(
        repository="openai/spinningup",
        command="-m spinup.algos.pytorch.ppo.ppo --env CartPole-v1 --cpu 1 --epochs 6 --steps 1000",
        packages=("gym==0.23.1", "pygame", "joblib", "scipy", "cloudpickle", "psutil", "tqdm"),
        changes=(
            # TensorFlow 1 has no package for this Python; the algorithms for PyTorch do not use it
            ("spinup/__init__.py", OF_TENSORFLOW, ""),
            ("spinup/__init__.py", ALGORITHMS, ""),
            ("spinup/utils/logx.py", "import tensorflow as tf\n", ""),
            # or the environment draws its seed from the system, and no two runs are the same
            ("spinup/algos/pytorch/ppo/ppo.py", "    env = env_fn()\n", "    env = env_fn()\n    env.seed(seed)\n"),
        ),
        results=r"\| +(?!Time)\w+ \| +(-?[\d.]+(?:e[+-]\d+)?) \|",
        compared="table of 6 epochs: returns, losses, entropy, steps until the early stop",
        variants=OVER_MPI4PY,
    ),
}
