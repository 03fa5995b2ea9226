#!/bin/bash
# Trains on nodes with GPUs, one rank for each GPU:
#
#     sbatch slurm/gpu_nodes.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --partition=gpu --nodes=8 slurm/gpu_nodes.sh --steps 1000

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi
# Nodes.
#SBATCH --nodes=2
# GPUs of each node, and as many ranks. Each rank takes the GPU with its number on the node.
# Not --gpus-per-task: ranks that do not see each other's GPUs cannot copy from one to the other.
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
# Cores for each rank: a GPU needs one that tells it what to do, and some that prepare data.
#SBATCH --cpus-per-task=8
# Slurm ends the job after this time, as hours:minutes:seconds.
#SBATCH --time=00:30:00
# What the job prints: %x is its name, %j its number.
#SBATCH --output=%x-%j.out

# End at the first command that fails, and take a variable that is not set for a mistake.
set -euo pipefail

# Make Python, axonmpi and MPI available as on the login node. Slurm hands on the environment of the shell
# that called sbatch, so with everything loaded there these lines can stay as they are: comments.
# module load python openmpi cuda
# source "$HOME/venv/bin/activate"

# Let each rank use any core of the job, instead of binding it to a single one, where threads would queue up.
# The first is read by Open MPI 5, the second by Open MPI 4; MPICH binds nothing by itself.
export PRTE_MCA_hwloc_default_binding_policy=none
export OMPI_MCA_hwloc_base_binding_policy=none

# Where nodes have several networks and NCCL takes the wrong one, name the right one; INFO shows what it takes.
# export NCCL_SOCKET_IFNAME=ib0
# export NCCL_DEBUG=INFO

# Start the ranks: MPI finds them, NCCL moves what is on GPUs. --device cuda refuses to train on the CPU where a
# node has no GPU or no NCCL; `axonmpi doctor` in its place shows each rank's GPU.
# The job's number in the run's name keeps the files of an earlier run: axonmpi-runs/NAME.
mpirun -n "$SLURM_NTASKS" axonmpi train --device cuda --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
