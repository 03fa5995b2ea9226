"""CleanRL: PPO that plays an Atari game in all ranks and sums the gradients in one buffer."""

from others.public.program import Program

PROGRAMS = {
    "cleanrl": Program(
        repository="vwxyzjn/cleanrl",
        command="-m cleanrl.ppo_atari_multigpu --backend gloo --no-cuda --env-id ale_py:BreakoutNoFrameskip-v4 "
        "--local-num-envs 2 --num-steps 32 --total-timesteps 2560",
        packages=("gymnasium==0.29.1", "ale-py==0.10.1", "opencv-python-headless", "tyro", "rich", "tensorboard"),
        results=r"(?:action\.sum\(\): (\d+), iteration: (\d+), agent\.actor\.weight\.sum\(\): (-?[\d.]+(?:e-\d+)?)"
        r"|global_step=(\d+), episodic_return=\[([\d.]+))",
        compared="weights and actions of 20 iterations, 320 steps of the optimizer; returns of the game",
    ),
}
